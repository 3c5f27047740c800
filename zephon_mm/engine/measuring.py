"""Where a lane's records come from: the index where it knows a row, else a task in a worker.

Laws (tests/engine/test_measuring.py):
    1. The records of a chunk are in the order of its refs, whatever the index knows of them.
    2. A chunk that is known whole starts no task.

Imports: engine.schedule, engine.tasks, index, records. Used by: engine.planner.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from zephon_mm.engine.schedule import Priority, TaskQueue
from zephon_mm.engine.tasks import measure, poisoned_sample
from zephon_mm.index import Index
from zephon_mm.packed import AnyRecord, Block
from zephon_mm.records import Skip

Items = Block | Sequence[AnyRecord | Skip]


class Measured(Protocol):
    """Records to come; a part of what `concurrent.futures.Future` has."""

    def done(self) -> bool:
        """Return whether `result` would not wait."""
        ...

    def add_done_callback(self, fn: Callable[[Any], object], /) -> None:
        """Call `fn` when it is done, in any thread."""
        ...

    def result(self) -> Items:
        """Return the records, or raise what the task raised."""
        ...


class _Known:
    """Records out of the index."""

    def __init__(self, items: Items) -> None:
        self._items = items

    def done(self) -> bool:
        return True

    def add_done_callback(self, fn: Callable[[Any], object], /) -> None:
        fn(self)

    def result(self) -> Items:
        return self._items


class _Asked:
    """Records of which a task measures those that the index does not know."""

    def __init__(
        self, index: Index, items: list[Any], unknown: list[int], task: "Future[Any]"
    ) -> None:
        self._index = index
        self._items = items
        self._unknown = unknown
        self._task = task
        self.done = task.done
        self.add_done_callback = task.add_done_callback

    def result(self) -> Items:
        """Join both; the driver's thread calls this once, so it may fill the index."""
        results = self._task.result()
        self._index.add(results)
        for place, result in zip(self._unknown, results, strict=True):
            self._items[place] = result
        return self._items


class Measuring:
    """Gives the records of chunks.

    Args:
        queue: Where measuring is submitted.
        index: What is known, or None.
        task_rows: Rows that one task measures.
    """

    def __init__(self, queue: TaskQueue, index: Index | None, task_rows: int) -> None:
        self.queue = queue
        self._index = index
        self._task_rows = task_rows

    def __call__(
        self, priority: Priority, refs: NDArray[np.int64], *, urgent: bool = False
    ) -> Iterator[Measured]:
        """Yield the chunk's records, in parts that follow one another.

        They are large where nobody waits for them, or for what waits behind them; not if `urgent`.
        """
        size = self._task_rows
        if self.queue.depth >= 2 * self.queue.workers and not urgent:
            size *= 4
        if self._index is None:
            for at in range(0, len(refs), size):
                part = refs[at : at + size]
                yield self.queue.submit(priority, measure, part, poisoned_sample)
            return
        block = self._index.lookup(refs)
        if Block.UNKNOWN not in block.num_tokens:
            yield _Known(block)
            return
        found = list(block)
        for at in range(0, len(refs), size):
            yield self._part(priority, refs[at : at + size], found[at : at + size])

    def _part(self, priority: Priority, refs: NDArray[np.int64], found: list[Any]) -> Measured:
        assert self._index is not None
        unknown = [place for place, item in enumerate(found) if item is None]
        if not unknown:
            return _Known(found)
        task = self.queue.submit(priority, measure, refs[unknown], poisoned_sample)
        return _Asked(self._index, found, unknown, task)
