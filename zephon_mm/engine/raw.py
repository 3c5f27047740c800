"""The driver of raw samples: blocks of rows are read by workers, batches are views of them.

Delivery, memory and errors are those of `engine.driver`. A batch of a few hundred short texts is
too small a task, so a block of several is read at once; how many never shows in the batches.

Invariants:
    1. A block leases its slab before its task is submitted; a batch is ready when its block is.
    2. The slab goes back when the last view of the last of its batches is gone.

Imports: engine.blocks, engine.driver, engine.rawplan, samples. Used by: pipeline.
"""

import threading
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zephon_mm.engine.blocks import (
    BLOCK_BYTES,
    BLOCK_ROWS,
    Block,
    BlockJob,
    RawContext,
    block_columns,
    header_bytes,
    poisoned_block,
    read_blocks,
)
from zephon_mm.engine.driver import Driver, EngineConfig
from zephon_mm.engine.planner import Start
from zephon_mm.engine.rawplan import RawGroup, RawPlanner
from zephon_mm.engine.tasks import Failure
from zephon_mm.errors import WorkerCrashed
from zephon_mm.metrics import Metrics
from zephon_mm.records import Column
from zephon_mm.samples import SampleBatch

_ROOM = 1.5  # of a block's estimated size, is leased


class RawDriver(Driver):
    """Runs one rank's pipeline of raw samples; arguments as for `Driver`."""

    _planner_type = RawPlanner
    _judged = "documents"

    def __init__(self, config: EngineConfig, start: Start, metrics: Metrics) -> None:
        assert isinstance(config.context, RawContext)
        self._context = config.context
        self._row_bytes = config.context.row_bytes
        self._reading: _Reading
        super().__init__(config, start, metrics)

    def _submit(self, group: Any) -> Any:
        if group.start == 0:
            self._reading = self._read(group)
            batch_rows = self._config.topology.microbatch_size
            rows = min(BLOCK_ROWS, BLOCK_BYTES / self._row_bytes)
            self._planner.block_batches = max(int(rows / batch_rows), 1)
            # Two blocks for each worker: more would only be more memory that has left the caches.
            ahead, blocks = self._config.prefetch_batches, 2 * (self._config.workers + 1)
            self._ahead = max(ahead, min(ahead, blocks) * self._planner.block_batches)
        return _RawPending(self._reading, group, self._config.topology.microbatch_size)

    def _read(self, group: RawGroup) -> "_Reading":
        rows, fields = len(group.refs), len(self._context.kinds)
        header = header_bytes(rows, fields)
        size = header + int(_ROOM * rows * self._row_bytes) + (64 << 10)
        slab, offset = self._slab(max(header, min(size, self._config.memory_budget_bytes // 4)))
        reading = _Reading(self._context, slab)
        job = BlockJob(group.refs, offset, len(slab))
        future = self._queue.submit((self._planned, 0), read_blocks, [job], poisoned_block)
        future.add_done_callback(lambda done: self._learn(reading, done, rows))
        return reading

    def _learn(self, reading: "_Reading", done: "Future[list[Any]]", rows: int) -> None:
        """Finish a block; what it took is what the next ones will take, about."""
        reading.end(done)
        if reading.block is not None:
            self._row_bytes = max(reading.block.num_bytes / rows, 0.9 * self._row_bytes)


class _Reading:
    """A block on its way."""

    def __init__(self, context: RawContext, slab: NDArray[np.uint8]) -> None:
        self.context = context
        self.ready = threading.Event()
        self.error: BaseException | None = None
        self.block: Block | None = None
        self.buffer = slab

    def end(self, done: "Future[list[Any]]") -> None:
        """Take the result of its task."""
        self.error = CancelledError() if done.cancelled() else done.exception()
        if self.error is None:
            (result,) = done.result()
            if isinstance(result, Block):
                self.block = result._replace(buffer=None)
                self.buffer = self.buffer if result.buffer is None else result.buffer
            else:
                self.error = WorkerCrashed(result.message)
        self.ready.set()


class _RawPending:
    """A batch of a block; has what the driver asks a `Pending` for."""

    def __init__(self, reading: _Reading, group: RawGroup, size: int) -> None:
        self.after = group.after
        self.ready = reading.ready
        self._reading = reading
        self._group = group
        self._rows = slice(group.start, group.start + size)
        refs = group.refs[self._rows]
        documents = int(np.count_nonzero(refs[:, 0] >= 0))
        self.counts = {"batches": 1, "sequences": size, "documents": documents}

    @property
    def error(self) -> BaseException | None:
        """What stopped its block."""
        return self._reading.error

    @property
    def failures(self) -> Mapping[int, Failure]:
        """Its defective rows, by their place in the block."""
        block = self._reading.block
        assert block is not None
        start, stop = self._rows.start, self._rows.stop
        return {row: bad for row, bad in block.failures.items() if start <= row < stop}

    def delivered(self) -> SampleBatch:
        """Return the batch."""
        reading, rows = self._reading, self._rows
        assert reading.block is not None
        columns = {}
        fields = block_columns(reading.buffer, reading.block.starts, len(self._group.refs))
        for name, (ends, valid, data) in zip(reading.context.kinds, fields, strict=True):
            start = int(ends[rows.start - 1]) if rows.start else 0
            stop = int(ends[rows.stop - 1])
            columns[name] = Column(data[start:stop], ends[rows] - start, valid[rows])
        return SampleBatch(
            columns,
            reading.context.kinds,
            refs=self._group.refs[rows],
            sequence_ids=self._group.numbers[rows],
            delivered=self.after.delivered,
            datasets=reading.context.datasets,
        )
