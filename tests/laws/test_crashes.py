"""Whoever dies, hangs or fails, the batches are the same, or the run ends with an error that names.

Every pipeline here runs in worker processes; what it delivers is compared with the inline run.
"""

import os
import random
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from tests.fixtures.memory import (
    DEADLY,
    PROCESSOR,
    DeadlyProcessor,
    MemoryReader,
    Recipe,
    dataset,
    digests,
    document_of,
    random_rows,
    take,
)
from tests.fixtures.tokenizers import byte_level_bpe
from zephon_mm import Pipeline
from zephon_mm.engine import tasks
from zephon_mm.errors import RunnerError, SampleError, WorkerLost
from zephon_mm.io import Dataset
from zephon_mm.processors.image import Change, unchanged
from zephon_mm.processors.siglip import SigLIPProcessor
from zephon_mm.protocols import Sample
from zephon_mm.records import Document, FileBlob, Image, MediaShape, Text
from zephon_mm.work import StaticMixtureWorkSource, TokenEstimation

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("warm_workers"),
]
KILLS = 100
SMALL_TASKS: dict[str, Any] = {"runner": "process", "workers": 2, "task_images": 2, "task_rows": 2}


class BusyProcessor(SigLIPProcessor):
    """Decodes every image ten times, so that workers are rarely idle."""

    def write(self, encoded: bytes, out: NDArray[np.uint8], change: Change = unchanged) -> None:
        for _ in range(10):
            super().write(encoded, out, change)


class DeadlyMeasure(SigLIPProcessor):
    """Aborts on the header of an image that ends with `DEADLY`."""

    def measure(self, read: Callable[[int], bytes]) -> MediaShape:
        if read(-1).endswith(DEADLY):
            os.abort()
        return super().measure(read)


BUSY = BusyProcessor(size=32, patch_size=16)


class HangingProcessor(SigLIPProcessor):
    """Hangs on images that end with `DEADLY`; for good, or once if there is a marker to set."""

    marker: Path | None = None

    def write(self, encoded: bytes, out: NDArray[np.uint8], change: Change = unchanged) -> None:
        if encoded.endswith(DEADLY) and not (self.marker and self.marker.exists()):
            if self.marker:
                self.marker.touch()
            while True:
                signal.pause()
        super().write(encoded, out, change)


class FlakyReader(MemoryReader):
    """Fails with OSError at the first two tries of each read, in every process."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._tries: dict[Any, int] = {}

    def read(
        self, shard: int, rows: Sequence[int], fields: Sequence[str] | None = None
    ) -> list[Sample | SampleError]:
        key = (shard, tuple(rows))
        self._tries[key] = self._tries.get(key, 0) + 1
        if self._tries[key] % 3:
            raise OSError("stale file handle")
        return super().read(shard, rows, fields)


def deadly_map(document: Document) -> Document:
    if document.segments[0] == Text("deadly"):
        os.abort()
    return document


def deadly_schema(sample: Sample) -> Document:
    return deadly_map(document_of(sample))


def workers() -> list[psutil.Process]:
    """The workers: grandchildren of this process, children of the zygote."""
    return [one for child in psutil.Process().children() for one in child.children()]


@pytest.fixture(autouse=True)
def _nobody_is_left() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


def mark_deadly(blob: FileBlob, folder: Path) -> FileBlob:
    """Return a copy of an image that ends with `DEADLY`: it decodes to the same pixels."""
    path = folder / "deadly.img"
    path.write_bytes(Path(blob.path).read_bytes() + DEADLY)
    return FileBlob(str(path), 0, path.stat().st_size)


def with_deadly_image(recipe: Recipe, blobs: list[FileBlob], folder: Path) -> Recipe:
    """One dataset "a"; its row 12, the fifth of shard 1, has three images, the second deadly."""
    rows = random_rows(1, 40, blobs)
    rows[12] = (Text("so"), Image(blobs[0]), Image(mark_deadly(blobs[1], folder)), Image(blobs[2]))
    return replace(recipe, datasets=(dataset("a", rows),), weights=(1.0,), shuffle=None)


# Killed from outside.


# SHM-07, as the next two.
def test_a_hundred_kills_under_load_change_nothing(recipe: Recipe) -> None:
    rng = random.Random(1)
    killed: set[int] = set()
    found: dict[int, str] = {}
    with recipe.build(microbatch=2, processor=BUSY, **SMALL_TASKS) as pipeline:
        for batch in pipeline:
            found |= digests([batch])
            alive = [one for one in workers() if one.pid not in killed]
            for victim in rng.sample(alive, min(len(alive), rng.choice([0, 1, 1, 2]))):
                killed.add(victim.pid)
                os.kill(victim.pid, signal.SIGKILL)
            if pipeline.metrics()["worker_restarts"] >= KILLS:
                break
        metrics = pipeline.metrics()
    assert KILLS <= metrics["worker_restarts"] <= len(killed)
    assert metrics["task_retries"] > 10
    assert metrics["skipped"] == {}
    with recipe.build(microbatch=1) as pipeline:
        assert digests(take(pipeline, len(found))) == found


def test_the_death_of_the_zygote_changes_nothing(recipe: Recipe) -> None:
    with recipe.build(microbatch=2, processor=BUSY, **SMALL_TASKS) as pipeline:
        found = digests(take(pipeline, 2))
        os.kill(workers()[0].ppid(), signal.SIGKILL)
        found |= digests(take(pipeline, 30))
    with recipe.build(microbatch=1) as pipeline:
        assert digests(take(pipeline, len(found))) == found


def test_a_sample_whose_workers_are_always_killed_ends_the_run_by_name(recipe: Recipe) -> None:
    def die(document: Document) -> Document:
        os.kill(os.getpid(), signal.SIGKILL)
        return document

    with (
        recipe.build(fn=die, runner="process", workers=2, task_rows=2) as pipeline,
        pytest.raises(WorkerLost, match=r"^[ab]/m-\d/\d: .* ended by SIGKILL"),
    ):
        take(pipeline, 1)


# Native crashes of a sample.


def test_an_image_that_crashes_is_invalid_alone_whatever_shares_its_task(
    recipe: Recipe, blobs: list[FileBlob], tmp_path: Path
) -> None:
    recipe = with_deadly_image(recipe, blobs, tmp_path)
    with recipe.build(microbatch=2) as pipeline:
        expected = take(pipeline, 30)
    sick = {
        n
        for b in expected
        for n, keys in zip(b.sequence_ids.tolist(), b.keys, strict=True)
        if "a/12" in keys
    }
    assert sick
    deadly = DeadlyProcessor(size=32, patch_size=16)
    found = []
    for count, images, rows in [(1, 100, 100), (2, 3, 4)]:
        options = {"runner": "process", "workers": count, "task_images": images, "task_rows": rows}
        with recipe.build(microbatch=2, processor=deadly, **options) as pipeline:
            batches = take(pipeline, 30)
            metrics = pipeline.metrics()
        found.append(digests(batches))
        assert sum(int((~b.image_valid).sum()) for b in batches) == len(sick)
        assert metrics["skipped"] == {"crashed_worker": len(sick)}
        assert metrics["defects"][0].startswith("a/m-1/5: a worker died by itself (exit code 3)")
    assert found[0] == found[1]
    healthy = digests(expected)
    assert {n for n in healthy if found[0][n] != healthy[n]} == sick


def test_a_sample_that_crashes_while_it_is_measured_is_skipped_and_named(
    blobs: list[FileBlob], tmp_path: Path
) -> None:
    rows = random_rows(1, 40, blobs)
    rows[12] = (Text("deadly"), Image(mark_deadly(blobs[0], tmp_path)))
    found = []
    for where, count, task_rows in [("schema", 1, 100), ("map", 2, 1), ("measure", 2, 3)]:
        schema = deadly_schema if where == "schema" else document_of
        fn = deadly_map if where == "map" else None
        kind = DeadlyMeasure if where == "measure" else SigLIPProcessor
        source = Dataset("a", MemoryReader(rows), schema=schema)
        recipe = Recipe(datasets=(source,), passes=2, stop="all_exhausted", global_batch_size=1)
        options = {"workers": count, "task_rows": task_rows, "runner": "process"}
        with recipe.build(fn=fn, processor=kind(size=32, patch_size=16), **options) as pipeline:
            batches = take(pipeline, 1000)
            metrics = pipeline.metrics()
        found.append(digests(batches))
        keys = {key for batch in batches for row in batch.keys for key in row}
        assert len(keys) == len(rows) - 1
        assert "a/12" not in keys
        assert metrics["skipped"] == {"crashed_worker": 2}
        assert metrics["defects"][0].startswith("a/m-1/5: a worker died by itself (SIGABRT)")
    assert found[0] == found[1] == found[2]


# Hangs.


def test_a_hang_is_ended_and_tried_again_and_changes_nothing(
    recipe: Recipe, blobs: list[FileBlob], tmp_path: Path
) -> None:
    recipe = with_deadly_image(recipe, blobs, tmp_path)
    with recipe.build(microbatch=2) as pipeline:
        expected = digests(take(pipeline, 20))
    processor = HangingProcessor(size=32, patch_size=16)
    processor.marker = tmp_path / "hung"
    options = {"runner": "process", "workers": 2, "task_timeout_s": 1.0}
    with recipe.build(microbatch=2, processor=processor, **options) as pipeline:
        assert digests(take(pipeline, 20)) == expected
        metrics = pipeline.metrics()
    assert metrics["worker_restarts"] == metrics["task_retries"] == 1
    assert metrics["skipped"] == {}


def test_a_sample_that_always_hangs_ends_the_run_with_its_name(
    recipe: Recipe, blobs: list[FileBlob], tmp_path: Path
) -> None:
    recipe = with_deadly_image(recipe, blobs, tmp_path)
    processor = HangingProcessor(size=32, patch_size=16)
    options = {"runner": "process", "workers": 2, "task_timeout_s": 0.4, "task_images": 16}
    with recipe.build(microbatch=2, processor=processor, **options) as pipeline:
        with pytest.raises(WorkerLost, match=r"^a/m-1/5: .* in 2 attempts; .* task_timeout_s"):
            take(pipeline, 100)
        assert pipeline.metrics()["skipped"] == {}


# Faults of the environment, and of the user.


def test_a_store_that_fails_for_a_while_on_one_rank_changes_nothing(
    blobs: list[FileBlob], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "RETRY_DELAYS_S", (0.0, 0.0, 0.0))
    rows = random_rows(1, 40, blobs)
    good = Recipe(datasets=(dataset("a", rows),))
    flaky = Recipe(datasets=(Dataset("a", FlakyReader(rows), schema=document_of),))
    with good.build() as pipeline:
        expected = digests(take(pipeline, 24))
    found: dict[int, str] = {}
    for rank, recipe in enumerate([good, flaky]):
        with recipe.build(dp=2, rank=rank, microbatch=2, runner="thread", workers=2) as pipeline:
            found |= digests(take(pipeline, 6))
            assert pipeline.metrics()["skipped"] == {}
    assert found == expected


def test_a_users_exception_names_its_line_its_operator_and_its_sample(recipe: Recipe) -> None:
    def divide(document: Document) -> Document:
        return document if document.key != "3" else 1 // 0  # type: ignore[return-value]

    with recipe.build(fn=divide, runner="process", workers=2) as pipeline:
        batches = iter(pipeline)
        with pytest.raises(ZeroDivisionError) as caught:
            for _ in batches:
                pass
        notes = "\n".join(caught.value.__notes__)
        assert re.search(r"raised in \.map\(.*divide\)", notes)
        assert re.search(r"while measuring sample [ab]/m-\d/3", notes)
        assert "in divide" in str(caught.value.__cause__)
        assert "1 // 0" in str(caught.value.__cause__)
        with pytest.raises(RunnerError, match="stopped earlier: ZeroDivisionError"):
            next(batches)


def test_a_crash_while_tokens_are_estimated_is_contained(recipe: Recipe) -> None:
    estimating = StaticMixtureWorkSource(
        recipe.datasets, {"a": 0.5, "b": 0.5}, seed=1, token_estimation=TokenEstimation(30)
    )
    pipeline = Pipeline(estimating).options(
        runner="process", workers=1, memory_budget_bytes=8 << 20, max_error_rate=1.0
    )
    pipeline.map(abort_on_rare).interleave(tokenizer=byte_level_bpe(), image_processor=PROCESSOR)
    pipeline.pack_flat(max_length=64).batch(microbatch_size=1)
    with pipeline:
        assert next(iter(pipeline)).keys


def abort_on_rare(document: Document) -> Document:
    if any(isinstance(s, Text) and s.text.startswith("3 ") for s in document.segments):
        os.abort()
    return document
