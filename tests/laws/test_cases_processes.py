"""Known failures of other loaders (SHM-*, PRF-*): shared memory, processes, what things cost.

Nothing is timed. SHM-08, and PRF-01's figure at a million keys, are benchmarks:
`benchmarks/transport.py` and `benchmarks/keys.py`.
"""

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import psutil
import pytest
from numpy.typing import NDArray

from benchmarks.keys import one_pass
from tests.fixtures.memory import PROCESSOR, Recipe, digests, take
from tests.fixtures.nursery import Nursery
from tests.fixtures.rows import counted, write_rows
from tests.laws.test_pressure import Trainer
from zephon_mm.errors import ConfigError, WorkerLost
from zephon_mm.io import Dataset
from zephon_mm.processors.image import Change, unchanged
from zephon_mm.processors.siglip import SigLIPProcessor

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:a shuffle buffer of .* never fills"),
]


@pytest.fixture(autouse=True)
def _nobody_is_left() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


def workers() -> list[psutil.Process]:
    """The workers: grandchildren of this process, children of the zygote."""
    return [one for child in psutil.Process().children() for one in child.children()]


def expected_rows(recipe: Recipe, count: int) -> dict[int, str]:
    with recipe.build(microbatch=1) as pipeline:
        return digests(take(pipeline, count))


# SHM-01.


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """Rows of one image, 46 of which make a batch of 20 MB."""
    folder = tmp_path_factory.mktemp("large")
    noise = np.random.Generator(np.random.Philox(key=1))
    for number in range(4):
        pixels = noise.integers(0, 256, (40, 60, 3), dtype=np.uint8)
        PIL.Image.fromarray(pixels).save(folder / f"{number}.png")
    lines = (json.dumps({"image": f"{n % 4}.png", "text": f"{n} fox"}) for n in range(200))
    (folder / "rows.jsonl").write_text("\n".join(lines))
    data = Dataset.from_path("rows", folder / "rows.jsonl", cache_dir=folder / "cache")
    return Recipe(datasets=(data,), max_length=46 * 160, chunk_size=50, global_batch_size=1)


BIG = SigLIPProcessor(size=384, patch_size=32)  # 144 tokens and 432 KiB an image


def test_shm_01_a_budget_below_a_batch_names_both_sizes(large: Recipe) -> None:
    message = r"needs 2\d{7} bytes of shared memory, the budget is 8388608\. Set .*budget_bytes="
    with (
        large.build(processor=BIG, runner="thread", memory_budget_bytes=8 << 20) as pipeline,
        pytest.raises(ConfigError, match=message),
    ):
        take(pipeline, 1)


def test_shm_01_room_for_one_large_batch_is_enough_for_four_workers(
    large: Recipe, nursery: Nursery
) -> None:
    options: dict[str, Any] = {"processor": BIG, "workers": 4, "microbatch": 1}
    with large.build(**options, memory_budget_bytes=256 << 20, runner="thread") as pipeline:
        expected = digests(take(pipeline, 3))
    tight = options | {"memory_budget_bytes": 24 << 20, "runner": "process"}
    with nursery.launching(), large.build(**tight) as pipeline:
        found: dict[int, str] = {}
        for _, batch in zip(range(3), pipeline, strict=False):
            assert batch.pixel_values.nbytes > 19e6
            found |= digests([batch])
    assert found == expected


# SHM-02, SHM-04.


def shm_names(pids: list[int]) -> set[str]:
    """Return what processes have open or mapped in /dev/shm."""
    names = set()
    for pid in pids:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        names |= {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line}
        links = (os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir())
        names |= {link for link in links if link.startswith("/dev/shm/")}
    return names


def test_shm_02_what_a_killed_run_had_does_not_stand_in_the_way_of_the_next(
    recipe: Recipe, nursery: Nursery, tmp_path: Path
) -> None:
    killed = Trainer(recipe, tmp_path, "forever")
    assert shm_names([killed.process.pid, *killed.started]) == set()
    started = [psutil.Process(pid) for pid in killed.started]
    killed.process.kill()
    with nursery.launching(), recipe.build(runner="process", workers=2) as pipeline:
        assert digests(take(pipeline, 4)) == expected_rows(recipe, 4)
    assert psutil.wait_procs(started, timeout=20)[1] == []
    assert killed.end()[0] == -signal.SIGKILL


def test_shm_04_a_run_that_just_ends_in_the_middle_of_a_pass_leaves_nothing_and_says_nothing(
    recipe: Recipe, tmp_path: Path
) -> None:
    code, out, err = Trainer(recipe, tmp_path, "digests").end()
    assert (code, err) == (0, "")
    assert len(json.loads(out)) == 80


# SHM-06, SHM-07.

TOKENIZED_FIRST = """
import json, os, pathlib, pickle, sys
from tests.fixtures.memory import digests, take
from tests.fixtures.tokenizers import byte_level_bpe
before = len(os.listdir("/proc/self/task"))
byte_level_bpe().encode_batch(["the quick brown fox jumps"] * 5_000)
threads = len(os.listdir("/proc/self/task")) - before
recipe = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())
pipeline = recipe.build(runner="process", workers=2)
print(json.dumps([threads, digests(take(pipeline, 8))]))
"""


def test_shm_06_workers_start_after_a_threaded_use_of_the_tokenizer(
    recipe: Recipe, tmp_path: Path
) -> None:
    (tmp_path / "recipe").write_bytes(pickle.dumps(recipe))
    quiet = {name: os.environ[name] for name in os.environ if name != "TOKENIZERS_PARALLELISM"}
    done = subprocess.run(
        [sys.executable, "-c", TOKENIZED_FIRST, str(tmp_path / "recipe")],
        env={**quiet, "PYTHONPATH": str(ROOT), "RAYON_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    threads, found = json.loads(done.stdout)
    assert threads >= 2  # those of the tokenizer
    assert {int(number): row for number, row in found.items()} == expected_rows(recipe, 8)


class KilledWhileWriting(SigLIPProcessor):
    """Is killed when half of its first image is written; at every image without a marker."""

    marker: Path | None = None

    def write(self, encoded: bytes, out: NDArray[np.uint8], change: Change = unchanged) -> None:
        if self.marker is None or not self.marker.exists():
            if self.marker is not None:
                self.marker.touch()
            out[:, : out.shape[1] // 2] = 77
            os.kill(os.getpid(), signal.SIGKILL)
        super().write(encoded, out, change)


def test_shm_07_a_worker_that_is_killed_while_it_writes_a_block_changes_nothing(
    recipe: Recipe, nursery: Nursery, tmp_path: Path
) -> None:
    processor = KilledWhileWriting(size=PROCESSOR.size, patch_size=PROCESSOR.patch_size)
    processor.marker = tmp_path / "killed"
    options: dict[str, Any] = {"processor": processor, "runner": "process", "workers": 2}
    with nursery.launching(), recipe.build(**options) as pipeline:
        found = digests(take(pipeline, 20))
        assert pipeline.metrics()["worker_restarts"] == 1
        assert pipeline.metrics()["skipped"] == {}
    assert found == expected_rows(recipe, 20)


def test_shm_07_workers_that_are_always_killed_end_the_run_and_name_the_sample(
    recipe: Recipe, nursery: Nursery
) -> None:
    processor = KilledWhileWriting(size=PROCESSOR.size, patch_size=PROCESSOR.patch_size)
    with (
        nursery.launching(),
        recipe.build(processor=processor, runner="process", workers=2) as pipeline,
        pytest.raises(WorkerLost, match=r"^[ab]/m-\d/\d: .* ended by SIGKILL"),
    ):
        take(pipeline, 20)


# PRF-01, PRF-02, PRF-04.


def test_prf_01_workers_do_not_grow_with_the_keys_that_they_have_seen(tmp_path: Path) -> None:
    first, *_, last = one_pass(tmp_path, keys=20_000, workers=4, looks=10)
    assert last.keys == 20_000
    assert last.pss_bytes < 1.1 * first.pss_bytes


def test_prf_02_each_of_four_workers_has_one_native_thread(recipe: Recipe) -> None:
    with recipe.build(runner="process", workers=4, task_images=1, task_rows=1) as pipeline:
        batches = take(pipeline, 20)
        assert sum(len(batch.image_index) for batch in batches) > 10
        assert [one.num_threads() for one in workers()] == [1] * 4


def test_prf_04_the_first_batch_does_not_wait_for_a_full_shuffle_buffer(tmp_path: Path) -> None:
    recipe, reader, processor = counted(write_rows(tmp_path, 4_000))
    recipe = replace(recipe, shuffle=10_000, chunks_per_window=400, max_length=64)
    with recipe.build(processor=processor, microbatch=2, prefetch_batches=1) as pipeline:
        batch = take(pipeline, 1)[0]
        assert len(batch.keys) == 2
        assert reader.rows_read <= 4 * 4 * recipe.chunk_size  # a few chunks of each lane
        assert sum(processor.decoded.values()) <= 4 * len(batch.image_index)
