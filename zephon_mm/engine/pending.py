"""A planned batch on its way: its decoding tasks are counted down.

Imports: batch, io, engine.planner, engine.tasks. Used by: engine.driver, pipeline.
"""

import math
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

from numpy.typing import NDArray

from zephon_mm.batch import Assembly, Batch
from zephon_mm.engine.planner import Group
from zephon_mm.engine.tasks import Failure, ImageJob
from zephon_mm.io import Dataset
from zephon_mm.records import Sequence as PackedSequence

Arrays = Mapping[str, NDArray[Any]]


class Pending:
    """A planned batch: complete but for its pixels, ready when its last task has ended."""

    def __init__(self, group: Group, assembly: Assembly, arrays: Arrays, batch: Batch) -> None:
        self.group = group
        self.assembly = assembly
        self.batch = batch
        self.failures: dict[int, Failure] = {}
        self.error: BaseException | None = None
        self.ready = threading.Event()
        self._arrays = arrays
        self._tasks_left = 1  # the driver itself, until it has submitted all tasks
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Count a task that is submitted."""
        with self._lock:
            self._tasks_left += 1

    def end(self, error: BaseException | None = None) -> None:
        """Count a task as ended; the last one makes the batch ready."""
        with self._lock:
            self._tasks_left -= 1
            self.error = self.error or error
            last = self._tasks_left == 0
        if last:
            self.ready.set()

    def take_results(self, first: int, task: "Future[list[Any]]") -> None:
        """Note the failures of a task, copy arrays that it returned, count it as ended."""
        if task.cancelled():
            self.end(CancelledError())
            return
        error = task.exception()
        if error is None:
            for number, result in enumerate(task.result(), start=first):
                if isinstance(result, Failure):
                    self.failures[number] = result
                elif result is not None:
                    self._arrays["pixel_values"][number] = result
        self.end(error)

    def delivered(self) -> Batch:
        """Return the batch, with its defective images marked."""
        if not self.failures:
            return self.batch
        return self.assembly.invalidate(self.batch, self._arrays, sorted(self.failures))


def sequence_keys(datasets: Sequence[Dataset], sequence: PackedSequence) -> tuple[str, ...]:
    """Return the names of the samples in a sequence, in order."""
    refs = [piece.record.ref for piece in sequence.pieces]
    return tuple(datasets[ref.dataset].row_name(ref.shard, ref.row) for ref in refs)


def image_jobs(
    assembly: Assembly, sequences: Sequence[PackedSequence], base: int
) -> list[ImageJob]:
    """Return where each image of a batch goes; `base` is the slab's offset in the arena, or -1."""
    field = assembly.layout.fields["pixel_values"]
    size = math.prod(field.shape[1:])
    refs = [
        piece.record.ref
        for sequence in sequences
        for piece in sequence.pieces
        for _ in piece.images()
    ]
    jobs = []
    for number, (ref, image) in enumerate(zip(refs, assembly.images, strict=True)):
        offset = -1 if base < 0 else base + field.offset + number * size
        jobs.append(ImageJob(ref, image.blob, offset, image.shape))
    return jobs
