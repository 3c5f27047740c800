"""A planned batch on its way: its decoding tasks are counted down, the last one finishes it.

Imports: batch, engine.planner, engine.tasks. Used by: engine.driver.
"""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
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
    """A planned batch: counts its tasks down, then is finished by whoever ends the last one."""

    def __init__(self, group: Group, assembly: Assembly, tasks: int) -> None:
        self.group = group
        self.assembly = assembly
        self.failures: dict[int, Failure] = {}
        self.ready = threading.Event()
        self.batch: Batch | None = None
        self.error: BaseException | None = None
        self._left = tasks + 1  # the driver's own share, the tokens, counts as one
        self._lock = threading.Lock()

    def ended(self, finish: Callable[["Pending"], Batch], error: BaseException | None) -> None:
        """Count one task as ended; the last one finishes the batch."""
        with self._lock:
            self._left -= 1
            self.error = self.error or error
            last = self._left == 0
        if not last:
            return
        if self.error is None:
            try:
                self.batch = finish(self)
            except Exception as failed:  # noqa: BLE001  raised in the consumer, who waits for it
                self.error = failed
        self.ready.set()


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


def take_results(
    pending: Pending,
    arrays: Arrays,
    first: int,
    finish: Callable[[Pending], Batch],
    task: "Future[list[Any]]",
) -> None:
    """Note the failures of a task, copy arrays that it returned, count it as ended."""
    if task.cancelled():
        pending.ended(finish, CancelledError())
        return
    error = task.exception()
    if error is None:
        for number, result in enumerate(task.result(), start=first):
            if isinstance(result, Failure):
                pending.failures[number] = result
            elif result is not None:
                arrays["pixel_values"][number] = result
    pending.ended(finish, error)
