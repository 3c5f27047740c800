"""A planned batch on its way: its images are counted down as tasks of a few of them end.

Imports: batch, io, engine.planner, engine.schedule, engine.tasks. Used by: engine.driver, pipeline.
"""

import math
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any

from numpy.typing import NDArray

from zephon_mm.batch import Assembly, Batch
from zephon_mm.engine.planner import Group
from zephon_mm.engine.schedule import TaskQueue
from zephon_mm.engine.tasks import Failure, ImageJob, materialize, poisoned_image
from zephon_mm.io import Dataset
from zephon_mm.records import Sequence as PackedSequence

Arrays = Mapping[str, NDArray[Any]]


class Pending:
    """A planned batch: complete but for its pixels, ready when its last image has ended.

    It lets go of the records: freed here they are still in the caches, freed by the consumer they
    would cost it 0.4 ms a batch.
    """

    def __init__(self, group: Group, assembly: Assembly, arrays: Arrays, batch: Batch) -> None:
        self.after = group.after
        self.assembly = assembly
        self.batch = batch
        self.counts = {
            "batches": 1,
            "sequences": len(group.sequences),
            "tokens": sum(sequence.num_tokens for sequence in group.sequences),
            "images": len(assembly.images),
            "documents": sum(len(sequence.pieces) for sequence in group.sequences),
        }
        self.failures: dict[int, Failure] = {}
        self.error: BaseException | None = None
        self.ready = threading.Event()
        self._arrays = arrays
        self._images_left = len(assembly.images)
        self._lock = threading.Lock()
        if not assembly.images:
            self.ready.set()
        assembly.release()

    def end(self, results: Sequence[tuple[int, Any]], error: BaseException | None = None) -> None:
        """Take the results of some images, as (number in the batch, result); the last make ready.

        A result is None where the worker wrote the pixels, a `Failure`, or the pixels.
        """
        for number, result in results:
            if isinstance(result, Failure):
                self.failures[number] = result
            elif result is not None:
                self._arrays["pixel_values"][number] = result
        with self._lock:
            self._images_left -= len(results)
            self.error = self.error or error
            last = self._images_left == 0
        if last:
            self.ready.set()

    def delivered(self) -> Batch:
        """Return the batch, with its defective images marked."""
        if not self.failures:
            return self.batch
        return self.assembly.invalidate(self.batch, self._arrays, sorted(self.failures))


class Decoding:
    """Groups the images of successive batches into tasks; it belongs to the driver.

    Args:
        queue: Where tasks are submitted.
        task_images: Images of a task.
    """

    def __init__(self, queue: TaskQueue, task_images: int) -> None:
        self._queue = queue
        self._task_images = task_images
        self._jobs: list[ImageJob] = []
        self._owners: list[tuple[Pending, int]] = []  # whose image each job is, and its number
        self._due = 0

    def add(self, pending: Pending, jobs: Sequence[ImageJob], due: int) -> None:
        """Take the images of batch number `due`; submit the tasks that they fill."""
        if not self._jobs:
            self._due = due
        self._jobs += jobs
        self._owners += [(pending, number) for number in range(len(jobs))]
        while len(self._jobs) >= self._task_images:
            self._submit(self._task_images)
            self._due = due

    def flush(self) -> None:
        """Submit what does not fill a task: nothing more comes for now."""
        if self._jobs:
            self._submit(len(self._jobs))

    def _submit(self, count: int) -> None:
        jobs, self._jobs = self._jobs[:count], self._jobs[count:]
        owners, self._owners = self._owners[:count], self._owners[count:]
        future = self._queue.submit((self._due, 0), materialize, jobs, poisoned_image)
        future.add_done_callback(partial(_hand_out, owners))


def _hand_out(owners: Sequence[tuple[Pending, int]], task: "Future[list[Any]]") -> None:
    """Give each batch the results of its images; it waits for nothing after an error."""
    error = CancelledError() if task.cancelled() else task.exception()
    results = [None] * len(owners) if error is not None else task.result()
    shares: dict[int, tuple[Pending, list[tuple[int, Any]]]] = {}
    for (pending, number), result in zip(owners, results, strict=True):
        shares.setdefault(id(pending), (pending, []))[1].append((number, result))
    for pending, share in shares.values():
        pending.end(share, error)


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
