"""Running: lifetimes, memory, errors where they belong, and nothing left behind."""

import gc
import itertools
import os
import signal
import sys
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.fixtures.memory import (
    PROCESSOR,
    MemoryReader,
    Recipe,
    dataset,
    digests,
    document_of,
    random_rows,
    take,
)
from tests.fixtures.tokenizers import byte_level_bpe
from zephon_mm.batch import Batch
from zephon_mm.engine import driver as driver_module
from zephon_mm.engine import tasks
from zephon_mm.errors import ConfigError, DataQualityError, RunnerError, SampleError
from zephon_mm.io import Dataset
from zephon_mm.packed import Sequence as PackedSequence
from zephon_mm.pipeline import Pipeline
from zephon_mm.processors.image import Change, unchanged
from zephon_mm.processors.siglip import SigLIPProcessor
from zephon_mm.records import Document, FileBlob, Image, RowBlob, Text

RUNNERS = ["inline", "thread"]
BATCH_BYTES = 2 * 64 * 28 + 16 * 3 * 32 * 32  # two rows of 64 tokens, 16 images


def threads() -> set[str]:
    return {t.name for t in threading.enumerate() if "zephon" in t.name}


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def broken_image(folder: Path, blob: FileBlob) -> FileBlob:
    """A PNG whose header is right and whose body is cut: measured, but it cannot be decoded."""
    path = folder / "cut.png"
    path.write_bytes(Path(blob.path).read_bytes()[:-100])
    return FileBlob(str(path), 0, path.stat().st_size)


def with_broken_image(recipe: Recipe, blobs: list[FileBlob], folder: Path) -> Recipe:
    rows = random_rows(1, 40, blobs)
    rows[11] = (Text("before"), Image(blobs[0]), Image(broken_image(folder, blobs[1])))
    return replace(recipe, datasets=(dataset("a", rows),), weights=(1.0,), shuffle=None)


# Lifetimes.


@pytest.mark.parametrize("runner", RUNNERS)
def test_nothing_is_left_after_closing(recipe: Recipe, runner: str) -> None:
    take(recipe.build(runner=runner), 60)  # opens every image file, which io keeps open
    gc.collect()
    before = descriptors()
    for count in (0, 1, 5):
        for _ in range(3):
            with recipe.build(runner=runner, workers=2) as pipeline:
                take(pipeline, count)
                assert "zephon_mm driver" in threads()
            assert threads() == set()
    gc.collect()
    assert descriptors() <= before


def test_an_unused_pipeline_starts_nothing(recipe: Recipe) -> None:
    with recipe.build() as pipeline:
        pipeline.checkpoint()
        pipeline.validate()
        assert threads() == set()


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_forgotten_pipeline_stops_its_threads(recipe: Recipe, runner: str) -> None:
    pipeline = recipe.build(runner=runner)
    take(pipeline, 2)
    gone = weakref.ref(pipeline)
    del pipeline
    gc.collect()
    assert gone() is None
    assert threads() == set()


def test_a_forgotten_pipeline_that_failed_stops_its_threads_too(
    recipe: Recipe, blobs: list[FileBlob], tmp_path: Path
) -> None:
    def fail() -> "weakref.ref[Pipeline]":
        bad = with_broken_image(recipe, blobs, tmp_path)
        pipeline = replace(bad, max_error_rate=0.0).build(microbatch=2)
        with pytest.raises(DataQualityError):
            take(pipeline, 40)
        return weakref.ref(pipeline)

    gone = fail()
    gc.collect()
    assert gone() is None
    assert threads() == set()


def test_a_pipeline_in_a_cycle_may_be_collected_by_its_own_thread(recipe: Recipe) -> None:
    armed, dropped, done = threading.Event(), threading.Event(), threading.Event()

    def collect(sequence: PackedSequence) -> PackedSequence:
        if armed.is_set() and not done.is_set():
            dropped.wait(30)
            gc.collect()
            done.set()
        return sequence

    pipeline = Pipeline(recipe.source()).options(
        runner="inline", memory_budget_bytes=64 << 20, prefetch_batches=100_000
    )
    pipeline.interleave(tokenizer=byte_level_bpe(), image_processor=PROCESSOR)
    pipeline.pack_flat(max_length=64).map_sequence(collect).batch(microbatch_size=1)
    cycle: list[Any] = [pipeline]
    cycle.append(cycle)
    take(pipeline, 1)
    (driver,) = (t for t in threading.enumerate() if t.name == "zephon_mm driver")
    gc.disable()
    try:
        armed.set()
        del pipeline, cycle
        dropped.set()
        assert done.wait(30)
    finally:
        gc.enable()
    driver.join(30)
    assert not driver.is_alive()


def wait_until_main_waits() -> None:
    """Return when the main thread has stood at the same place of some `wait` for 50 looks."""
    main = threading.main_thread().ident
    places: list[tuple[str, int]] = [("", 0)]
    while len(places) < 50 or places[-1][0] != "wait":
        frame = sys._current_frames()[main]  # type: ignore[index]
        place = (frame.f_code.co_name, id(frame))
        places = [*places, place] if place == places[-1] else [place]
        threading.Event().wait(0.001)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("ahead", [1, 4])
def test_an_interrupt_while_waiting_loses_no_batch(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    with recipe.build(microbatch=2) as reference:
        expected = digests(take(reference, 6))
    caught = threading.Event()
    count = itertools.count()
    write = type(PROCESSOR).write

    def interrupt_once(self: Any, encoded: bytes, out: Any) -> None:
        if next(count) == 9 and threading.current_thread() is not threading.main_thread():
            wait_until_main_waits()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            caught.wait(30)
        write(self, encoded, out)

    monkeypatch.setattr(type(PROCESSOR), "write", interrupt_once)
    found: list[Batch] = []
    with recipe.build(microbatch=2, runner="thread", workers=1, prefetch_batches=ahead) as pipeline:
        batches = iter(pipeline)
        while len(found) < 6:
            try:
                found.append(next(batches))
            except KeyboardInterrupt:
                caught.set()
    assert caught.is_set()
    assert digests(found) == expected


def test_after_closing_next_and_iter_raise(recipe: Recipe) -> None:
    pipeline = recipe.build()
    batches = iter(pipeline)
    next(batches)
    pipeline.close()
    pipeline.close()
    for call in (lambda: next(batches), lambda: iter(pipeline), pipeline.checkpoint):
        with pytest.raises(RuntimeError, match="was closed; build another one"):
            call()


class Held(SigLIPProcessor):
    """Decodes nothing until it is let go."""

    go_on = threading.Event()

    def write(self, encoded: bytes, out: NDArray[np.uint8], change: Change = unchanged) -> None:
        self.go_on.wait(60)
        super().write(encoded, out, change)


@pytest.mark.parametrize(("workers", "why"), [(1, "consumer"), (64, "memory")])
def test_memory_is_waited_for_only_where_a_worker_has_no_task(
    recipe: Recipe, workers: int, why: str
) -> None:
    recipe = replace(recipe, chunk_size=64, chunks_per_window=1)  # a lane is measured at once
    rows, processor = recipe.lanes, Held(size=32, patch_size=16)
    little = {"memory_budget_bytes": rows * BATCH_BYTES, "processor": processor}
    Held.go_on.clear()
    with recipe.build(microbatch=rows, runner="thread", workers=workers, **little) as pipeline:
        batches = iter(pipeline)
        names = {"driver_wait_consumer_s", "driver_wait_memory_s"}
        deadline = time.monotonic() + 30
        while not (found := names & pipeline.metrics().keys()) and time.monotonic() < deadline:
            os.sched_yield()
        Held.go_on.set()
        next(batches)
    assert found == {f"driver_wait_{why}_s"}


def test_closing_wakes_a_consumer_that_waits_in_another_thread(recipe: Recipe) -> None:
    started, go_on = threading.Event(), threading.Event()

    def wait(document: Document) -> Document:
        started.set()
        go_on.wait(30)
        return document

    pipeline = recipe.build(fn=wait, runner="thread", workers=1)
    errors: list[BaseException] = []

    def consume() -> None:
        try:
            take(pipeline, 1)
        except RuntimeError as error:
            errors.append(error)
        except RunnerError as error:
            errors.append(error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    assert started.wait(30)
    closer = threading.Thread(target=pipeline.close)
    closer.start()
    go_on.set()
    closer.join(30)
    consumer.join(30)
    assert not consumer.is_alive()
    assert not closer.is_alive()
    assert len(errors) == 1


def test_a_second_live_iterator_is_refused_and_a_dropped_one_goes_on(recipe: Recipe) -> None:
    with recipe.build() as reference:
        expected = digests(take(reference, 6))
    with recipe.build() as pipeline:
        batches = iter(pipeline)
        found = [next(batches)]
        with pytest.raises(RuntimeError, match="being iterated already"):
            iter(pipeline)
        del batches
        for batch in pipeline:
            found.append(batch)
            if len(found) == 3:
                break
        found += take(pipeline, 3)
    assert digests(found) == expected


def test_a_forked_child_gets_an_error_not_a_hang(recipe: Recipe) -> None:
    with recipe.build() as pipeline:
        batches = iter(pipeline)
        next(batches)
        child = os.fork()
        if child == 0:
            try:
                next(batches)
            except RuntimeError as error:
                os._exit(0 if "fork" in str(error) else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        next(batches)


# Memory.


@pytest.mark.parametrize("runner", RUNNERS)
def test_batches_that_are_all_kept_are_right(recipe: Recipe, runner: str) -> None:
    with recipe.build(microbatch=2) as reference:
        expected = digests(take(reference, 30))
    budget = 4 * BATCH_BYTES
    with recipe.build(microbatch=2, runner=runner, memory_budget_bytes=budget) as pipeline:
        kept = take(pipeline, 30)
        assert pipeline.metrics()["batches_in_ordinary_memory"] > 0
    assert digests(kept) == expected


def test_batches_that_are_dropped_come_in_shared_memory(recipe: Recipe) -> None:
    with recipe.build(microbatch=2, memory_budget_bytes=6 * BATCH_BYTES) as pipeline:
        for _, batch in zip(range(30), pipeline, strict=False):
            del batch
        assert "batches_in_ordinary_memory" not in pipeline.metrics()


def test_slices_and_views_outlive_the_pipeline(recipe: Recipe) -> None:
    kept: list[torch.Tensor] = []
    copies: list[torch.Tensor] = []
    with recipe.build(microbatch=2, memory_budget_bytes=4 * BATCH_BYTES) as pipeline:
        for _, batch in zip(range(20), pipeline, strict=False):
            for part in (batch.pixel_values[1:, 0], batch.input_ids.view(-1)[3:9]):
                kept.append(part)
                copies.append(part.clone())
    del pipeline
    gc.collect()
    assert all(torch.equal(part, copy) for part, copy in zip(kept, copies, strict=True))


def test_a_budget_below_one_batch_is_an_error_that_names_it(recipe: Recipe) -> None:
    with (
        recipe.build(microbatch=4, memory_budget_bytes=4096) as pipeline,
        pytest.raises(ConfigError, match=r"the budget is 4096\. Set options\(memory_budget_bytes="),
    ):
        take(pipeline, 1)


# Errors.


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_users_exception_reaches_the_consumer_with_its_origin(
    recipe: Recipe, runner: str
) -> None:
    def divide(document: Document) -> Document:
        return document if document.key != "3" else 1 // 0  # type: ignore[return-value]

    with recipe.build(fn=divide, runner=runner) as pipeline:
        batches = iter(pipeline)
        with pytest.raises(ZeroDivisionError) as caught:
            for _ in batches:
                pass
        notes = "\n".join(caught.value.__notes__)
        assert "raised in .map(" in notes
        assert "divide" in notes
        assert any(f"while measuring sample {name}" in notes for name in ("a/m-", "b/m-"))
        assert any(entry.name == "divide" for entry in caught.traceback)
        with pytest.raises(RunnerError, match="stopped earlier: ZeroDivisionError"):
            next(batches)


def test_batches_before_an_error_are_delivered_and_stay_resumable(recipe: Recipe) -> None:
    with recipe.build() as reference:
        expected = digests(take(reference, 60))
    with recipe.build() as reference:
        row = take(reference, 5)[-1].keys[0][0].rpartition("/")[2]

    def fail(document: Document) -> Document:
        if document.key == row:
            raise ValueError("no")
        return document

    with recipe.build(fn=fail) as pipeline:
        found: list[Batch] = []
        with pytest.raises(ValueError, match="no"):
            found.extend(pipeline)
        state = pipeline.checkpoint()
    rows = digests(found)
    assert rows.items() <= expected.items()
    assert state["delivered"] == len(rows)


def test_a_sample_error_of_a_user_is_a_counted_skip(recipe: Recipe) -> None:
    def refuse(document: Document) -> Document:
        if document.key == "2":
            raise SampleError("rude", "it says a bad word")
        return document

    with replace(recipe, max_error_rate=1.0).build(fn=refuse) as pipeline:
        keys = [key for batch in take(pipeline, 60) for row in batch.keys for key in row]
        metrics = pipeline.metrics()
    assert keys
    assert not [key for key in keys if key.endswith("/2")]
    assert metrics["skipped"]["rude"] > 0
    assert "it says a bad word [rude]" in metrics["defects"][0]


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_broken_image_is_invalid_counted_and_named(
    recipe: Recipe, blobs: list[FileBlob], tmp_path: Path, runner: str
) -> None:
    bad = with_broken_image(recipe, blobs, tmp_path)
    with bad.build(microbatch=2, runner=runner) as pipeline:
        batches = take(pipeline, 20)
        metrics = pipeline.metrics()
    invalid = [
        (batch, row, first)
        for batch in batches
        for (row, first, _), valid in zip(
            batch.image_index.tolist(), batch.image_valid.tolist(), strict=True
        )
        if not valid
    ]
    for batch, row, first in invalid:
        document = batch.segment_ids[row] == batch.segment_ids[row, first]
        assert (batch.labels[row, document] == -100).all()
        assert "a/11" in batch.keys[row]
    for batch in batches:
        assert batch.pixel_values.flatten(1).any(1).tolist() == batch.image_valid.tolist()
    assert invalid
    assert sum(metrics["skipped"].values()) >= len(invalid)
    assert "a/m-1/4" in metrics["defects"][0]


def test_max_error_rate_zero_stops_at_the_first_broken_image_for_good(
    recipe: Recipe, blobs: list[FileBlob], tmp_path: Path
) -> None:
    strict = replace(with_broken_image(recipe, blobs, tmp_path), max_error_rate=0.0)
    with strict.build(microbatch=2) as pipeline:
        with pytest.raises(DataQualityError, match=r"1 of the first \d+ images.*a/m-1/4"):
            take(pipeline, 40)
        state = pipeline.checkpoint()
        for _ in range(3):
            with pytest.raises(RunnerError, match="stopped earlier: DataQualityError"):
                take(pipeline, 1)
        assert pipeline.checkpoint() == state


def test_a_rate_is_judged_after_enough_images(
    recipe: Recipe, blobs: list[FileBlob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "JUDGED_IMAGES", 200)
    bad = with_broken_image(recipe, blobs, tmp_path)
    seen: list[Batch] = []
    with (
        replace(bad, max_error_rate=0.001).build(microbatch=2) as pipeline,
        pytest.raises(DataQualityError, match=r"of the first 2\d\d images"),
    ):
        seen.extend(pipeline)
    assert sum(len(batch.image_valid) for batch in seen) > 150
    assert not all(batch.image_valid.all() for batch in seen)


class DyingReader(MemoryReader):
    """Its storage goes away after so many images were fetched."""

    fetches = 30

    def fetch(self, blob: RowBlob) -> bytes:
        self.fetches -= 1
        if self.fetches < 0:
            raise OSError("storage went away")
        return Path(blob.field).read_bytes()


@pytest.mark.parametrize("runner", RUNNERS)
def test_storage_that_goes_away_stops_the_run_and_names_the_sample(
    recipe: Recipe, blobs: list[FileBlob], runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "RETRY_DELAYS_S", (0.0, 0.0))
    reader = DyingReader([(Text("x"), Image(RowBlob(0, 0, blobs[1].path)))] * 50)
    dying = replace(recipe, datasets=(Dataset("a", reader, schema=document_of),), weights=(1.0,))
    with dying.build(runner=runner, workers=2) as pipeline:
        with pytest.raises(OSError, match="storage went away") as caught:
            take(pipeline, 100)
        assert any("sample a/m-" in note for note in caught.value.__notes__)
        assert pipeline.metrics()["skipped"] == {}


# CKP-17.
def test_all_samples_defective_is_an_error_whether_finite_or_not(recipe: Recipe) -> None:
    rows = [SampleError("bad_json", f"line {n}") for n in range(8)]
    for passes in (None, 1, 50):
        bad = replace(
            recipe,
            datasets=(dataset("a", rows),),
            weights=(1.0,),
            passes=passes,
            max_error_rate=1.0,
        )
        with bad.build() as pipeline, pytest.raises(DataQualityError, match="bad_json"):
            take(pipeline, 1)
