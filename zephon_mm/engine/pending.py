"""A planned batch on its way: its jobs are counted down as tasks of a few of them end.

Imports: batch, errors, io, engine.{assembly, planner, schedule, tasks}. Used by:
engine.driver, planning.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zephon_mm.batch import PIXELS, VIDEO_PIXELS, Batch
from zephon_mm.engine.assembly import MARKS, Assembly, Text, pixels_name
from zephon_mm.engine.planner import Group
from zephon_mm.engine.schedule import TaskQueue
from zephon_mm.engine.tasks import (
    Failure,
    ImageJob,
    Job,
    Smaller,
    TextJob,
    materialize,
    poisoned_job,
)
from zephon_mm.errors import StaleIndexError
from zephon_mm.io import Dataset
from zephon_mm.packed import IndexedRecord, Piece, extents_of
from zephon_mm.packed import Sequence as PackedSequence
from zephon_mm.records import ImageSlot, SampleRef


class Pixels(NamedTuple):
    """Images `[first, first + images)` of an array; where in it, in bytes; their first mark."""

    name: str
    first: int
    images: int
    offset: int
    size: int
    marks: int


Arrays = Mapping[str, NDArray[Any]]
Target = Pixels | Text
"""What of a batch a job writes: the pixels of neighbouring images, or the tokens of a piece."""

PARTS_A_JOB = 16
"""Frames of a video that are decoded by one job: a job may decode from a key frame on again."""


class Gate:
    """A `threading.Event` that is set once, for a tenth of its cost."""

    def __init__(self) -> None:
        self._closed = threading.Lock()
        self._closed.acquire()

    def set(self) -> None:
        """Let everyone pass."""
        self._closed.release()

    def is_set(self) -> bool:
        """Whether nobody has to wait."""
        return not self._closed.locked()

    def wait(self) -> None:
        """Wait until it is set."""
        with self._closed:
            pass


class Pending:
    """A planned batch: ready when the last job of a worker for it has ended.

    It lets go of the records: freed here they are still in the caches, freed by the consumer they
    would cost it 0.4 ms a batch.
    """

    def __init__(
        self,
        group: Group,
        assembly: Assembly,
        arrays: Arrays,
        batch: Batch,
        num_jobs: int,
        tallied: Mapping[str, int],
    ) -> None:
        self.after = group.after
        self.assembly = assembly
        self.batch = batch
        self.counts = {
            "batches": 1,
            "downscaled": 0,
            "sequences": len(group.sequences),
            "images": len(assembly.media[PIXELS].slots),
            "frames": len(assembly.media[VIDEO_PIXELS].slots),
            "patches": sum(
                slot.patches for media in assembly.media.values() for slot in media.slots
            ),
            **tallied,
        }
        self.failures: dict[tuple[str, int], Failure] = {}
        self.error: BaseException | None = None
        self.ready = Gate()
        self._arrays = arrays
        self._jobs_left = num_jobs
        self._lock = threading.Lock()
        if not self._jobs_left:
            self.ready.set()
        assembly.release()

    def end(
        self, results: Sequence[tuple[Target, Any]], error: BaseException | None = None
    ) -> None:
        """Take the results of some jobs; the last make ready.

        A result is None where the worker wrote into the batch, a `Failure`, or what it would have
        written; that of an image that was downscaled is in a `Smaller`.
        """
        downscaled = 0
        for target, result in results:
            if isinstance(result, Smaller):
                downscaled, (result,) = downscaled + 1, result
            if isinstance(target, Text):
                if isinstance(result, Failure):
                    error = StaleIndexError(f"{result.message}; the index says that it is sound")
                elif result is not None:
                    self.assembly.write_text(self._arrays, target, result)
            elif isinstance(result, Failure):
                self.failures[target.name, target.first] = result
            elif result is not None:
                pixels, marks = result
                flat = self._arrays[target.name].reshape(-1)
                flat[target.offset : target.offset + pixels.size] = pixels.reshape(-1)
                self._arrays[MARKS][target.marks : target.marks + len(marks)] = marks
        with self._lock:
            self.counts["downscaled"] += downscaled
            self._jobs_left -= len(results)
            self.error = self.error or error
            last = self._jobs_left == 0
        if last:
            self.ready.set()

    def delivered(self) -> Batch:
        """Return the batch, with its defective images marked."""
        if not self.failures:
            return self.batch
        return self.assembly.invalidate(self.batch, self._arrays, sorted(self.failures))


class Decoding:
    """Groups the jobs of successive batches into tasks; it belongs to the driver.

    Args:
        queue: Where tasks are submitted.
        task_images: Images or frames of a task; a text counts for a quarter of one.
    """

    def __init__(self, queue: TaskQueue, task_images: int) -> None:
        self._queue = queue
        self._full = 4 * task_images
        self._jobs: list[Job] = []
        self._owners: list[tuple[Pending, Target]] = []  # whose job each is, and what of it
        self._weight = self._due = 0

    def add(
        self, pending: Pending, jobs: Sequence[tuple[Target, Job]], due: int, spare: int
    ) -> None:
        """Take the jobs of batch number `due`; submit the tasks that they fill.

        Each task wakes threads that the images have driven out of the caches, so tasks grow, up to
        fourfold, with the batches before this one that the consumer has yet to take, `spare`.
        """
        weight = sum(1 if isinstance(target, Text) else 4 * target.images for target, _ in jobs)
        fair = weight * spare // (2 * self._queue.workers)
        full = min(max(fair, self._full), 4 * self._full)
        for target, job in jobs:
            if not self._jobs:
                self._due = due
            self._jobs.append(job)
            self._owners.append((pending, target))
            self._weight += 1 if isinstance(target, Text) else 4 * target.images
            if self._weight >= full:
                self.flush()

    def flush(self) -> None:
        """Submit also what does not fill a task."""
        if not self._jobs:
            return
        future = self._queue.submit((self._due, 0), materialize, self._jobs, poisoned_job)
        future.add_done_callback(partial(_hand_out, self._owners))
        self._jobs, self._owners, self._weight = [], [], 0


def _hand_out(owners: Sequence[tuple[Pending, Target]], task: "Future[list[Any]]") -> None:
    """Give each batch the results of its jobs; it waits for nothing after an error."""
    error = CancelledError() if task.cancelled() else task.exception()
    results = [None] * len(owners) if error is not None else task.result()
    shares: dict[int, tuple[Pending, list[tuple[Target, Any]]]] = {}
    for (pending, target), result in zip(owners, results, strict=True):
        shares.setdefault(id(pending), (pending, []))[1].append((target, result))
    for pending, share in shares.values():
        pending.end(share, error)


def tally(sequences: Sequence[PackedSequence]) -> dict[str, int]:
    """Return documents, tokens and trained tokens, and those of each dataset (`report.shares`)."""
    counts = {"documents": 0, "tokens": 0, "trained_tokens": 0}
    sums: dict[int, list[int]] = {}
    for sequence in sequences:
        counts["documents"] += len(sequence.pieces)
        for piece in sequence.pieces:
            found = sums.setdefault(piece.record.ref.dataset, [0, 0, 0])
            found[0] += piece.start == 0
            found[1] += piece.num_tokens
            found[2] += piece.num_valid_tokens
    for number, (rows, tokens, trained) in sums.items():
        counts[f"dataset.{number}.rows"] = rows
        counts[f"dataset.{number}.tokens"] = tokens
        counts[f"dataset.{number}.trained_tokens"] = trained
        counts["tokens"] += tokens
        counts["trained_tokens"] += trained
    return counts


def sequence_keys(datasets: Sequence[Dataset], sequence: PackedSequence) -> tuple[str, ...]:
    """Return the names of the samples in a sequence, in order."""
    refs = [piece.record.ref for piece in sequence.pieces]
    return tuple(datasets[ref.dataset].key(ref.shard, ref.row) for ref in refs)


def jobs_of(
    assembly: Assembly,
    sequences: Sequence[PackedSequence],
    base: int,
    numbers: Sequence[int],
) -> list[tuple[Target, Job]]:
    """Return what the workers write, sample by sample: they read one again for all of its jobs.

    Args:
        assembly: Of the batch, its tokens filled.
        sequences: Its rows.
        base: The slab's offset in the arena; -1 for memory that the workers cannot reach.
        numbers: The sequences' global ones.
    """
    texts = iter(assembly.texts)
    firsts = {PIXELS: 0, VIDEO_PIXELS: 0}
    num_marks = 0
    jobs: list[tuple[Target, Job]] = []
    for sequence, number in zip(sequences, numbers, strict=True):
        for piece in sequence.pieces:
            record = piece.record
            if isinstance(record, IndexedRecord):
                text = next(texts)
                jobs.append((text, _text_job(assembly, text, piece, base)))
            for parts in together(piece.images()):
                slot, name = parts[0], pixels_name(parts[0])
                where = assembly.media[name].region(firsts[name], len(parts))
                target = Pixels(name, firsts[name], len(parts), *where, num_marks)
                job = _image_job(assembly, record.ref, slot, target, base, number)
                marks = slot.marks or parts[-1].marks  # of the view that shows the whole picture
                jobs.append((target, _marked(assembly, job, marks, target, base) if marks else job))
                firsts[name] += len(parts)
                num_marks += sum(marks)
    return jobs


def together(images: Iterable[ImageSlot]) -> Iterator[list[ImageSlot]]:
    """Yield the images that one job writes: the tiles of a picture, neighbouring frames."""
    parts: list[ImageSlot] = []
    for image in images:
        if parts and (image.part <= 0 or (image.video and len(parts) == PARTS_A_JOB)):
            yield parts
            parts = []
        parts.append(image)
    if parts:
        yield parts


def _image_job(
    assembly: Assembly, ref: SampleRef, slot: ImageSlot, target: Pixels, base: int, number: int
) -> ImageJob:
    field = assembly.layout.fields[target.name]
    offset = -1 if base < 0 else base + field.offset + target.offset
    shape = slot.shape if slot.part < 0 else (target.images, *slot.shape)
    more = (slot.media, max(slot.part, 0), target.size, slot.video, slot.grid, number)
    return ImageJob(ref, slot.blob, offset, shape, *more)


def _marked(
    assembly: Assembly, job: ImageJob, marks: tuple[int, ...], target: Pixels, base: int
) -> ImageJob:
    """Return the job of an image that has so many boxes and points: its document is read again."""
    field = assembly.layout.fields[MARKS]
    at = base + field.offset + target.marks * field.shape[1] * field.dtype.itemsize
    return job._replace(blob=None, marks=(*marks, at))


def _text_job(assembly: Assembly, text: Text, piece: Piece, base: int) -> TextJob:
    offsets = None
    if base >= 0:
        fields = [assembly.layout.fields[name] for name in assembly.fields]
        at = text.row * fields[0].shape[1] + text.start
        offsets = tuple(base + field.offset + at * field.dtype.itemsize for field in fields)
    record = piece.record
    extents = np.array(extents_of(record), dtype=np.int32).tobytes()
    tokens = record.num_tokens
    return TextJob(record.ref, piece.start, piece.stop, offsets, tokens, extents)
