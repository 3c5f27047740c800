"""A lane: one fixed logical stream of sequences, planned window by window.

A window is `chunks_per_window` chunks between two flush sentinels. It starts with newly made
accumulators, so a lane can be rebuilt at any window from the source's state there, and its
sequences depend on nothing that came before. Measuring runs ahead in the workers; its results are
taken in the order in which they were submitted.

Laws (tests/engine/test_lanes.py):
    1. The sequences are a function of (source, operators, lane number) alone.
    2. A lane built at `cursor(k)` gives sequence k, k + 1, ... of the same lane.
    3. `cursor(k)` is a function of k: two ranks that planned a lane differently far agree.

Imports: records, protocols, errors, metrics, ops.pack, engine.{ahead, measuring, omissions}. Used
by: engine.{mixing, planner}.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zephon_mm.engine.ahead import CHUNKS_AHEAD, Ahead
from zephon_mm.engine.measuring import Items, Measured
from zephon_mm.engine.omissions import NOTHING, Omissions
from zephon_mm.errors import DataQualityError
from zephon_mm.metrics import Metrics
from zephon_mm.ops.pack import PackConfig
from zephon_mm.packed import AnyRecord, Block
from zephon_mm.packed import Sequence as PackedSequence
from zephon_mm.protocols import Accumulator, WorkSource
from zephon_mm.records import Chunk, Skip, State

FIRST_SEEN = 1_000
"""`max_error_rate` allows its share of at least this many samples, so that one early defect
does not stop a run."""

MOST_EMPTY = 100_000
"""So many chunks without a row, one after another, are an error: it comes within seconds."""


def check_gives(lane: int, empty: int) -> None:
    """Raise a DataQualityError if a lane drew too many chunks without a row, one after another."""
    if empty >= MOST_EMPTY:
        raise DataQualityError(
            f"lane {lane} drew {empty} chunks without a row. A source says by (None, state) "
            "that a lane ends; a curriculum's next turn is to come sooner."
        )


class Cursor(NamedTuple):
    """A position in a lane: a window, the source's state at its start, sequences into it."""

    window: int
    state: State
    offset: int


class _WindowEnd(NamedTuple):
    """The flush sentinel."""


class WindowStart(NamedTuple):
    """Where a window begins: its number, the source's state, its first output's index."""

    number: int
    state: State
    first: int


@dataclass(frozen=True, slots=True)
class LanePlan:
    """What all lanes of a pipeline have in common.

    `accumulators(lane, window)` makes the operators of one window. `max_error_rate` is the share of
    defective samples that is tolerated, 0 for none. `barren_records` is how many samples in a row
    may give no sequence before that is an error. `remembered` is how many sequences before the
    next one a lane can still give a cursor of. `balance` deals each step's sequences to ranks by
    their work; `whole_steps` plans all lanes, a step at a time; `pad_tail` completes the last step
    of a finite run with empty rows. `ahead` is told what will be read, if any data is in a store.
    `omissions` are the steps and rows that are left out. `mix` has the packer's settings where
    rows are taken as measured tokens ask for them (`engine.mixing`).
    """

    source: WorkSource
    accumulators: Callable[[int, int], Sequence[Accumulator[Any, Any]]]
    chunk_size: int
    chunks_per_window: int
    max_error_rate: float
    barren_records: int
    remembered: int
    balance: bool = False
    whole_steps: bool = False
    pad_tail: bool = False
    ahead: Ahead | None = None
    omissions: Omissions = NOTHING
    mix: PackConfig | None = None


Measure = Callable[[int, Any], Iterable[Measured]]
"""(lane, refs) -> their records to come, in parts: how a lane asks for measuring."""


class Lane:
    """Plans one lane. Not thread-safe: it belongs to the driver.

    Args:
        number: The lane, in [0, L).
        plan: What the lanes have in common.
        measure: Submits refs to be measured.
        cursor: Where to start; None for the lane's beginning.
        num_lanes: L.
        first: Index in the lane of the sequence at `cursor`.
        metrics: Where skips are counted.
    """

    def __init__(
        self,
        number: int,
        *,
        plan: LanePlan,
        measure: Measure,
        cursor: Cursor | None,
        num_lanes: int,
        first: int,
        metrics: Metrics,
    ) -> None:
        self.number = number
        self._plan = plan
        self._measure = measure
        self._metrics = metrics
        window, state, offset = cursor or Cursor(0, plan.source.start(number, num_lanes), 0)
        self._state = state
        self._coming: deque[tuple[Chunk | None, State]] = deque()
        self._empty = 0  # chunks drawn since one had rows
        self._drawn = 0  # chunks drawn of the window that is being read ahead
        self._source_ended = False
        self._queue: deque[Measured | _WindowEnd] = deque()
        self._tasks = 0  # of the queue, those that are records to come
        self._next_states: deque[State] = deque()
        self.emitted = first - offset
        self._keep_from = first
        self._outputs: deque[PackedSequence] = deque()
        self._seen = self._defects = self._barren = 0
        self._windows: deque[WindowStart] = deque()
        self._failed: BaseException | None = None
        self._begin_window(window, state)

    @property
    def exhausted(self) -> bool:
        """True when a finite lane has planned its last sequence."""
        return self._source_ended and not self._queue

    @property
    def head(self) -> Measured | None:
        """The oldest measuring that `step` would wait for; None when it would not."""
        head = self._queue[0] if self._queue else None
        return None if isinstance(head, _WindowEnd) else head

    @property
    def reading(self) -> int:
        """The window that is read ahead."""
        return self._windows[-1].number + len(self._next_states)

    def use(self, plan: LanePlan) -> None:
        """Draw what was not drawn yet by another plan."""
        self._plan = plan
        self._coming.clear()

    def fill(self, tasks_ahead: int, in_window: int = 0) -> None:
        """Submit measuring until `tasks_ahead` tasks are under way or the lane has ended.

        Of the window that is planned, `in_window` may be: a restore needs all of that, and nothing
        of the next one.
        """
        while not self._source_ended and (
            self._tasks < tasks_ahead or (self._tasks < in_window and not self._next_states)
        ):
            self._draw()

    def step(self) -> None:
        """Take the oldest measured records, or the flush sentinel, through the accumulators.

        Raises:
            DataQualityError: Too many samples are defective, or a full pass gave no sequence.
            Exception: What a worker or a user's operator raised; the lane is unusable from then on.
        """
        if self._failed is not None:
            raise self._failed
        try:
            self._take_head()
        except BaseException as error:
            self._failed = error
            raise

    def take(self, index: int) -> PackedSequence | None:
        """Return sequence `index` of the lane if it is planned; forget those before it."""
        self.forget(index)
        if index < self.emitted:
            self._keep_from = index + 1
            return self._outputs.popleft()
        return None

    def forget(self, index: int) -> None:
        """Drop sequences before `index`: other ranks deliver those."""
        while self._outputs and self._keep_from < index:
            self._outputs.popleft()
            self._keep_from += 1
        self._keep_from = max(self._keep_from, index)

    def cursor(self, index: int) -> Cursor | None:
        """Return the cursor of sequence `index`; None until it is planned, or the lane ended.

        The end of a window is written as the next window that gives a sequence, offset 0.
        """
        if index >= self.emitted and not self.exhausted:
            return None
        for start in reversed(self._windows):
            if start.first <= index:
                return Cursor(start.number, start.state, index - start.first)
        raise ValueError(f"lane {self.number} no longer remembers sequence {index}")

    def _take_head(self) -> None:
        head = self._queue.popleft()
        if isinstance(head, _WindowEnd):
            self._emit(flush(self._accumulators))
            _, _, first = self._windows[-1]
            self._metrics.add_all({"windows": 1, "window_sequences": self.emitted - first})
            self._begin_window(self._windows[-1].number + 1, self._end_window())
            return
        self._tasks -= 1
        self._take_items(head.result())
        if self._barren > self._plan.barren_records:
            raise DataQualityError(
                f"lane {self.number} read {self._barren} samples in a row, a full pass, that "
                f"gave no sequence. {self._metrics.skipped()}. Check the schema, the filters and "
                "max_length."
            )

    def _end_window(self) -> State:
        """Return the state in which the next window begins."""
        return self._next_states.popleft()

    def _take_items(self, items: Items) -> None:
        if isinstance(items, Block) and hasattr(self._accumulators[0], "push_block"):
            self._take_block(items)
        else:
            for item in items:
                self._take(item)

    def _take(self, item: AnyRecord | Skip) -> None:
        self._seen += 1
        self._barren += 1
        if isinstance(item, Skip):
            self._count_skip(item)
        elif sequences := push(self._accumulators, item):
            self._emit(sequences)

    def _take_block(self, block: Block) -> None:
        """Take rows that the first operator takes by the block, those between two skips at once."""
        start = 0
        for stop in (*block.gaps, len(block)):
            self._take_rows(block, start, stop)
            if stop < len(block):
                self._take(block[stop])
            start = stop + 1

    def _take_rows(self, block: Block, start: int, stop: int) -> None:
        """Take neighbouring rows that are records."""
        self._seen += stop - start
        self._barren += stop - start
        first: Any = self._accumulators[0]
        for item in first.push_block(block, start, stop):
            self._emit(push(self._accumulators[1:], item))

    def _draw(self) -> None:
        try:
            chunk, self._state = self._next()
        except Exception as error:  # noqa: BLE001  # raised when all that was drawn is planned
            failed: Future[Items] = Future()
            failed.set_exception(error)
            self._queue.append(failed)
            self._tasks += 1
            self._source_ended = True
            return
        if chunk is None:
            self._source_ended = True
            self._queue.append(_WindowEnd())
            self._next_states.append(self._state)
            return
        self._empty = 0 if len(chunk.refs) else self._empty + 1
        check_gives(self.number, self._empty)
        for part in self._measured(chunk.refs):
            self._queue.append(part)
            self._tasks += 1
        self._drawn += 1
        if self._drawn == self._plan.chunks_per_window:
            self._queue.append(_WindowEnd())
            self._next_states.append(self._state)
            self._drawn = 0

    def _measured(self, refs: NDArray[np.int64]) -> Iterable[Measured]:
        """Yield the records of a chunk to come, after skips of the rows that are left out."""
        if self._plan.omissions.rows:
            refs, skips = self._plan.omissions.drawn(refs, self.reading)
            if skips:
                known: Future[Items] = Future()
                known.set_result(skips)
                yield known
        yield from self._measure(self.number, refs)

    def _next(self) -> tuple[Chunk | None, State]:
        """Return the next chunk and the state after it; ask for the data of those that follow."""
        ahead = self._plan.ahead
        while len(self._coming) <= (CHUNKS_AHEAD if ahead else 0):
            state = self._coming[-1][1] if self._coming else self._state
            chunk, state = self._plan.source.next(state, self._plan.chunk_size)
            self._coming.append((chunk, state))
            if ahead and chunk is not None:
                ahead.measured(chunk.refs)
        return self._coming.popleft()

    def _begin_window(self, number: int, state: State) -> None:
        self._accumulators = self._plan.accumulators(self.number, number)
        if self._windows and self._windows[-1].first == self.emitted:
            self._windows.pop()  # it gave nothing: no cursor names it
        self._windows.append(WindowStart(number, state, self.emitted))
        oldest = self._keep_from - self._plan.remembered
        while len(self._windows) > 1 and self._windows[1].first <= oldest:
            self._windows.popleft()

    def _emit(self, sequences: Iterable[PackedSequence]) -> None:
        for sequence in sequences:
            if not isinstance(sequence, PackedSequence):
                raise TypeError(
                    f"an operator after .pack_flat gave a {type(sequence).__name__}, expected a "
                    "Sequence: check what push and flush of .accumulate return"
                )
            if self.emitted >= self._keep_from:
                kept, lost = self._plan.omissions.cleared(sequence, self._windows[-1].number)
                self._outputs.append(kept)
                if lost:
                    self._metrics.add("skipped.excluded", lost)
            self.emitted += 1
            self._barren = 0

    def _count_skip(self, skip: Skip) -> None:
        if not skip.defect:
            self._metrics.add(f"skipped.{skip.reason}")
            return
        self._metrics.skip(skip.reason, skip.message)
        self._defects += 1
        allowed = self._plan.max_error_rate * max(self._seen, FIRST_SEEN)
        if self._plan.max_error_rate == 0 or self._defects > allowed:
            raise DataQualityError(
                f"{self._defects} of the first {self._seen} samples of lane {self.number} are "
                f"defective, max_error_rate is {self._plan.max_error_rate}. The last one: "
                f"{skip.message} [{skip.reason}]. Repair the data, or raise max_error_rate."
            )


def push(accumulators: Sequence[Accumulator[Any, Any]], item: Any) -> list[Any]:
    """Push an item through operators; return what leaves the last."""
    items = [item]
    for accumulator in accumulators:
        items = [out for one in items for out in accumulator.push(one)]
        if not items:
            break
    return items


def flush(accumulators: Sequence[Accumulator[Any, Any]]) -> Iterable[Any]:
    """Flush operators from the first to the last, each into those after it."""
    for position, accumulator in enumerate(accumulators):
        for item in accumulator.flush():
            yield from push(accumulators[position + 1 :], item)
