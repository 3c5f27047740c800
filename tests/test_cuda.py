"""What must hold on a CUDA machine; skipped where there is none."""

from pathlib import Path
from typing import Any

import pytest
import torch

from zephon_mm import Batch, Dataset, Pipeline
from zephon_mm.cli.demo_data import make_demo_data
from zephon_mm.processors import SigLIPProcessor
from zephon_mm.work import StaticMixtureWorkSource

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> list[Batch]:
    return take(tmp_path_factory.mktemp("demo"), "inline", 6)


def take(folder: Path, runner: str, count: int) -> list[Batch]:
    data = make_demo_data(folder)
    captions = Dataset.from_path("captions", data.captions, cache_dir=folder)
    pipeline = (
        Pipeline(StaticMixtureWorkSource([captions], {"captions": 1.0}, seed=1))
        .options(canonical_replicas=4, runner=runner, workers=4)
        .interleave(
            tokenizer=data.tokenizer, image_processor=SigLIPProcessor(size=64, patch_size=16)
        )
        .pack_flat(max_length=256)
        .batch(microbatch_size=2)
    )
    with pipeline:
        return [batch for _, batch in zip(range(count), pipeline, strict=False)]


@pytest.mark.parametrize("backend", ["torchvision", "pillow"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_normalising_on_the_device_gives_the_cpus_bits(backend: Any, dtype: torch.dtype) -> None:
    levels = torch.arange(256, dtype=torch.uint8).repeat(3).reshape(1, 3, 16, 16)
    processor = SigLIPProcessor(size=16, patch_size=16, backend=backend)
    there = processor.normalize(levels.cuda(), dtype).cpu()
    assert torch.equal(there, processor.normalize(levels, dtype))


@pytest.mark.parametrize("attention", ["varlen", "sdpa", "block"])
def test_to_training_on_the_device_equals_the_cpus(batches: list[Batch], attention: Any) -> None:
    for batch in batches:
        here = batch.to_training(dtype=torch.bfloat16, attention=attention)
        there = batch.to_training(device="cuda", dtype=torch.bfloat16, attention=attention)
        assert here.keys() == there.keys()
        for name, value in there.items():
            if isinstance(value, torch.Tensor):
                assert value.is_cuda
                assert torch.equal(value.cpu(), here[name])


def test_a_process_runner_beside_cuda_gives_the_same_rows(
    batches: list[Batch], tmp_path: Path
) -> None:
    torch.zeros(1).cuda()  # the context exists before the workers start
    rows = [batch.row_sha256() for batch in take(tmp_path, "process", len(batches))]
    assert rows == [batch.row_sha256() for batch in batches]
