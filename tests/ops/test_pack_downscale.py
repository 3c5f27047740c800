"""Documents that are too long get smaller images: as large as will fit, the same for everyone."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.memory import Recipe, dataset, digests, take
from tests.fixtures.tokenizers import byte_level_bpe
from zephon_mm import Pipeline
from zephon_mm.errors import ConfigError
from zephon_mm.ops.downscale import Downscale
from zephon_mm.ops.fit import NO_LIMIT, Room
from zephon_mm.ops.interleave import Interleave
from zephon_mm.ops.tokenizer import TextTokenizer
from zephon_mm.processors import NaFlexProcessor, SigLIPProcessor
from zephon_mm.processors.qwen import QwenVLProcessor
from zephon_mm.records import Blob, Document, FileBlob, Image, SampleRef, Text

NAFLEX = NaFlexProcessor(64, patch_size=4)
QWEN = QwenVLProcessor(4, 2, 2, 8 * 8 * 4, 8 * 8 * 60)
TOKENIZER = TextTokenizer.load(byte_level_bpe())
SIZES = [(30, 71), (64, 40), (5, 90), (200, 200)]


def encoded(size: tuple[int, int]) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(size[0]).integers(0, 256, (*size, 3), dtype=np.uint8)
    PIL.Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


PICTURES = [encoded(size) for size in SIZES]


class Pictures:
    """Blobs whose offset is the number of a picture."""

    def read(self, blob: Blob, size: int) -> bytes:
        assert isinstance(blob, FileBlob)
        return PICTURES[blob.offset][: size if size >= 0 else None]

    def use(self, blob: Blob, action: Callable[[BinaryIO], Any]) -> Any:
        raise NotImplementedError


def document(text: str, pictures: Sequence[int]) -> Document:
    images = [Image(FileBlob("/x", number, 1)) for number in pictures]
    return Document((*images, Text(text)))


@pytest.mark.parametrize("processor", [NAFLEX, QWEN])
@settings(max_examples=25)
@given(
    text=st.text(max_size=30),
    pictures=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    max_length=st.integers(8, 300),
    max_patches=st.integers(8, 400) | st.just(NO_LIMIT),
)
def test_images_are_as_large_as_fits(
    processor: Any, text: str, pictures: list[int], max_length: int, max_patches: int
) -> None:
    stage = Interleave(TOKENIZER, processor)
    room = Room(max_length, patches=max_patches)
    where, doc = SampleRef(0, 0, 0), document(text, pictures)
    whole = stage.measure(where, doc, Pictures())
    found = Downscale.of(stage, room).measure(where, doc, Pictures())

    class Version:  # measured at one step
        patch_size = processor.patch_size

        def __init__(self, step: int) -> None:
            self.step = step

        def measure(self, read: Any) -> Any:
            return processor.measure(read, self.step)

    versions = [
        Interleave(TOKENIZER, Version(step)).measure(where, doc, Pictures())
        for step in range(1, 65)
    ]
    fitting = [one for one in versions if not room.lacking(one)]
    expected = whole if not room.lacking(whole) or not fitting else fitting[-1]
    assert found.images == expected.images
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.trained_runs == expected.trained_runs


@pytest.fixture
def pipelines(tmp_path: Path) -> Any:
    """Return a maker of pipelines over documents of which some are too long."""
    blobs = []
    for number, data in enumerate(PICTURES):
        path = tmp_path / f"{number}.png"
        path.write_bytes(data)
        blobs.append(FileBlob(str(path), 0, len(data)))
    rows = [
        (*(Image(blobs[(row + k) % 4]) for k in range(row % 4)), Text(f"number {row} " * 3))
        for row in range(24)
    ]
    recipe = Recipe(datasets=(dataset("a", rows, cache_dir=tmp_path / "cache"),), passes=1)

    def build(overlong: str, index: str = "fill", **packing: Any) -> Pipeline:
        pipeline = Pipeline(recipe.source()).options(
            canonical_replicas=2, runner="inline", index=index
        )
        pipeline.interleave(tokenizer=byte_level_bpe(), image_processor=NAFLEX)
        pipeline.pack_flat(max_length=128, overlong=overlong, max_patches=120, **packing)
        return pipeline.batch(microbatch_size=1)

    return build


def test_every_document_is_delivered_with_pixels_of_the_size_that_was_planned(
    pipelines: Any,
) -> None:
    with pipelines("drop", "off") as pipeline:
        kept = {key for batch in take(pipeline, 99) for row in batch.keys for key in row}
    with pipelines("downscale", "off") as pipeline:
        batches = take(pipeline, 99)
        assert not pipeline.metrics()["skipped"]
    keys = {key for batch in batches for row in batch.keys for key in row}
    assert kept < keys
    assert len(keys) == 24
    for batch in batches:
        assert batch.image_valid.all()
        counts = batch.pixel_attention_mask.sum(dim=1)
        assert counts.tolist() == batch.spatial_shapes.prod(dim=1).tolist()
        assert counts.sum() <= 120


@pytest.mark.parametrize(
    "packing",
    [{}, {"algorithm": "knapsack"}, {"algorithm": "wrap"}, {"order": "keep"}, {"max_images": 2}],
)
@pytest.mark.parametrize("overlong", ["drop", "truncate", "split"])
def test_two_budgets_give_the_same_bytes_with_an_index(
    pipelines: Any, overlong: str, packing: dict[str, Any]
) -> None:
    expected: dict[int, str] = {}
    for index in ("off", "fill", "read"):
        with pipelines(overlong, index, **packing) as pipeline:
            batches = take(pipeline, 99)
        found = digests(batches)
        assert found == (expected or found)
        expected = found
        patches = [int(batch.spatial_shapes.prod(dim=1).sum()) for batch in batches]
        assert 0 < max(patches) <= 120


def test_the_same_bytes_with_an_index(pipelines: Any) -> None:
    with pipelines("downscale", "off") as pipeline:
        expected = digests(take(pipeline, 99))
    for _ in range(2):  # the first run fills it
        with pipelines("downscale") as pipeline:
            assert digests(take(pipeline, 99)) == expected


def test_the_share_of_patches_that_is_used_is_reported(pipelines: Any) -> None:
    with pipelines("downscale") as pipeline:
        batches = take(pipeline, 99)
        used = sum(int(batch.pixel_attention_mask.sum()) for batch in batches)
        assert pipeline.metrics()["vision_fill"] == used / (120 * len(batches)) > 0


@pytest.mark.parametrize("index", ["off", "fill", "read"])
def test_images_that_were_made_smaller_are_counted(pipelines: Any, index: str) -> None:
    if index == "read":
        with pipelines("downscale") as pipeline:
            take(pipeline, 99)
    full = {NAFLEX.measure(lambda n, p=p: p[: n if n >= 0 else None]).grid for p in PICTURES}
    with pipelines("downscale", index) as pipeline:
        grids = [g for batch in take(pipeline, 99) for g in batch.spatial_shapes.tolist()]
        smaller = sum(tuple(grid) not in full for grid in grids)
        assert pipeline.metrics()["downscaled"] == smaller > 0


def test_images_of_one_size_cannot_be_downscaled() -> None:
    stage = Interleave(TOKENIZER, SigLIPProcessor())
    with pytest.raises(ConfigError, match=r"overlong='downscale' needs .* SigLIPProcessor"):
        Downscale.of(stage, Room(9))


def test_limits_are_part_of_the_fingerprint(pipelines: Any) -> None:
    tokens = pipelines("downscale").fingerprint()["tokens"]
    assert tokens["downscale"] == [128, NO_LIMIT, 120]
    assert "downscale" not in pipelines("drop").fingerprint()["tokens"]
