"""Planning raw samples: which rows this rank delivers, in global order, as arrays.

A raw sample is a sequence of its own, so planning reads no data, and the order is arithmetic over
the refs of the lanes. Windows, cursors and the rules of the global order are those of packed
sequences (`engine.lanes`, `engine.order`), but no Python object is made per sample.

Laws (tests/engine/test_raw.py):
    1. The order is the one that `Planner` gives to sequences of one sample each.
    2. Which batches are planned at once does not show.

Cost: below a microsecond a sample, 2 us with a shuffle buffer.

Imports: engine.lanes, engine.planner, records. Used by: engine.raw, planning.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zephon_mm.engine.lanes import Cursor, LanePlan, WindowStart, check_gives, flush, push
from zephon_mm.engine.planner import Planner, Position

Rows = NDArray[np.int64]


class RawGroup(NamedTuple):
    """A batch: rows `[start, start + B)` of a block, and the position after it.

    The block is given as its refs, (n, 3) int64 with -1 for padding, and their global numbers.
    """

    refs: Rows
    numbers: Rows
    start: int
    after: Position


class RawLane:
    """One lane's refs, drawn window by window; made and asked as a `Lane` is.

    Args:
        number: The lane, in [0, L).
        plan: What the lanes have in common; its accumulators reorder.
        cursor: Where to start; None for the lane's beginning.
        num_lanes: L.
        first: Index in the lane of the sample at `cursor`.
    """

    def __init__(
        self,
        number: int,
        *,
        plan: LanePlan,
        cursor: Cursor | None,
        num_lanes: int,
        first: int,
        **_: Any,
    ) -> None:
        self.number = number
        self.exhausted = False
        self._plan = plan
        self._window, self._state, offset = cursor or Cursor(
            0, plan.source.start(number, num_lanes), 0
        )
        self._drawn = self._kept_from = first - offset
        self._kept: Rows = np.empty((0, 3), dtype=np.int64)
        self._windows: deque[WindowStart] = deque()
        self._empty = 0  # chunks drawn since a window had rows
        self._begin_window()

    @property
    def reading(self) -> int:
        """The window that is drawn next."""
        return self._window

    def ready(self, index: int, count: int) -> int:
        """Return how many of `count` samples from `index` on there are: fewer at the lane's end."""
        while self._drawn < index + count and not self.exhausted:
            self._draw_window()
        return min(count, self._drawn - index)

    def take(self, indices: Rows) -> Rows:
        """Return the refs of ascending indices, (n, 3); forget them and those before."""
        last = int(indices[-1])
        if self.ready(last, 1) < 1:
            raise RuntimeError(
                f"lane {self.number} ended, but the source says that it is endless; a source that "
                "can end must have finite = True"
            )
        refs = self._kept[indices - self._kept_from]
        self._kept = self._kept[last + 1 - self._kept_from :]
        self._kept_from = last + 1
        return refs

    def cursor(self, index: int) -> Cursor:
        """Return the cursor of sample `index`, as `Lane.cursor` does."""
        self.ready(index, 1)
        for start in reversed(self._windows):
            if start.first <= index:
                return Cursor(start.number, start.state, index - start.first)
        raise ValueError(f"lane {self.number} no longer remembers sample {index}")

    def _draw_window(self) -> None:
        plan, parts = self._plan, [self._kept]
        for _ in range(plan.chunks_per_window):
            chunk, self._state = plan.source.next(self._state, plan.chunk_size)
            if chunk is None:
                self.exhausted = True
                break
            parts.append(chunk.refs)
        kept = np.concatenate(parts)
        new = self._kept.shape[0]
        if operators := plan.accumulators(self.number, self._window):
            places = range(new, len(kept))
            order = [out for place in places for out in push(operators, place)]
            kept[new:] = kept[[*order, *flush(operators)]]
        self._empty = 0 if len(kept) > new else self._empty + plan.chunks_per_window
        check_gives(self.number, 0 if self.exhausted else self._empty)
        if plan.ahead:
            plan.ahead.measured(kept[new:])
        self._kept = kept
        self._drawn += len(kept) - new
        self._window += 1
        self._begin_window()

    def _begin_window(self) -> None:
        if self._windows and self._windows[-1].first == self._drawn:
            self._windows.pop()  # it gave nothing: no cursor names it
        self._windows.append(WindowStart(self._window, self._state, self._drawn))
        oldest = self._kept_from - self._plan.remembered
        while len(self._windows) > 1 and self._windows[1].first <= oldest:
            self._windows.popleft()


class RawPlanner(Planner):
    """Plans this rank's raw batches; arguments as for `Planner`.

    Attributes:
        block_batches: Batches that are planned, and read, at once; may be set at any time.
    """

    _lane_type = RawLane
    block_batches = 1

    def groups(self) -> Iterator[Any]:
        """Yield this rank's batches, each a `RawGroup`, until the data ends."""
        return self._finite_groups() if self._stepwise else self._arithmetic_groups()

    def _arithmetic_groups(self) -> Iterator[RawGroup]:
        """No lane ends: sample s is number s // L of lane s mod L."""
        _, rank, size, _ = self._topology
        group_size = self._topology.group_size
        delivered = self._start.delivered
        while True:
            ends = delivered + group_size * np.arange(1, self.block_batches + 1)
            firsts = ends - group_size + rank * size
            numbers = (firsts[:, None] + np.arange(size)).ravel()
            refs = self._refs(numbers % self.num_lanes, numbers // self.num_lanes)
            delivered = int(ends[-1])
            for place, end in enumerate(ends.tolist()):
                yield RawGroup(
                    refs, numbers, place * size, Position(end, end % self.num_lanes, None)
                )

    def _finite_groups(self) -> Iterator[RawGroup]:
        """Every rank deals all lanes, since which of them have ended decides what follows."""
        size, step_size = self._topology.group_size, self._topology.global_batch_size
        delivered = self._start.delivered
        turn = _Turn(self._lane, self.num_lanes, self._start.next_lane)
        while True:
            left = step_size - delivered % step_size
            if left % size:
                left = step_size  # only without a global batch size: steps count from the start
            steps = max(self.block_batches * size // step_size, 1)
            wanted = left + (steps - 1) * step_size
            before = Position(delivered, turn.next_lane, tuple(turn.given.tolist()))
            lanes, indices = turn.deal(wanted)
            missing = wanted - len(lanes)
            full, spare = left, len(lanes)  # of the last step: its rows, and those that are there
            if spare >= left:
                full, spare = step_size, (spare - left) % step_size
            if missing and self._plan.pad_tail and spare:
                fill = np.full(full - spare, -1)
                lanes, indices = np.concatenate((lanes, fill)), np.concatenate((indices, fill))
                self._metrics.add("padded_rows", len(fill))
            elif missing:
                self._metrics.add("leftover_sequences", spare)
                lanes, indices = lanes[: len(lanes) - spare], indices[: len(lanes) - spare]
            if not len(lanes) and not delivered:
                raise self._too_few(spare)
            yield from self._cut(lanes, indices, before)
            delivered += len(lanes)
            if missing:
                return

    def _cut(self, lanes: Rows, indices: Rows, at: Position) -> Iterator[RawGroup]:
        """Yield this rank's batches of a stretch of the global order that begins at a position."""
        ranks, rank, size, _ = self._topology
        group_size = ranks * size
        shape = len(lanes) // group_size, ranks, size
        numbers = (at.delivered + np.arange(len(lanes))).reshape(shape)[:, rank]
        mine, places = lanes.reshape(shape)[:, rank], indices.reshape(shape)[:, rank]
        given, next_lane = np.array(at.counts), at.next_lane
        at_once = self.block_batches  # the driver may set it while this waits
        for first in range(0, shape[0], at_once):
            block = slice(first, first + at_once)
            refs = self._refs(mine[block].ravel(), places[block].ravel())
            for number in range(len(mine[block])):
                start = (first + number) * group_size
                dealt = lanes[start : start + group_size]
                dealt = dealt[dealt >= 0]
                given = given + np.bincount(dealt, minlength=self.num_lanes)
                next_lane = (int(dealt[-1]) + 1) % self.num_lanes if len(dealt) else next_lane
                after = Position(
                    at.delivered + start + group_size, next_lane, tuple(given.tolist())
                )
                yield RawGroup(refs, numbers[block].ravel(), number * size, after)

    def _lane(self, number: int) -> Any:
        return super()._lane(number)  # a RawLane

    def _refs(self, lanes: Rows, indices: Rows) -> Rows:
        """Return the refs at ascending indices of lanes, (n, 3) int64; -1 where the lane is."""
        refs = np.full((len(lanes), 3), -1, dtype=np.int64)
        for lane in np.unique(lanes[lanes >= 0]).tolist():
            mine = np.flatnonzero(lanes == lane)
            refs[mine] = self._lane(lane).take(indices[mine])
        return refs


class _Turn:
    """Deals a finite run's samples: lanes in rotation, without those that have ended."""

    def __init__(self, lane: Callable[[int], RawLane], num_lanes: int, next_lane: int) -> None:
        self._lane = lane
        self._active = list(range(num_lanes))
        self.given = np.zeros(num_lanes, dtype=np.int64)
        self.next_lane = next_lane

    def deal(self, count: int) -> tuple[Rows, Rows]:
        """Return the lanes of the next samples and their indices there; fewer at the end."""
        lanes, indices = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        num_lanes = len(self.given)
        while count and self._active:
            order = sorted(self._active, key=lambda number: (number - self.next_lane) % num_lanes)
            wanted = -(-count // len(order))
            have = [self._lane(n).ready(int(self.given[n]), wanted) for n in order]
            rounds = min(have)
            self._active = [n for n, some in zip(order, have, strict=True) if some]
            if not rounds:
                continue
            part = np.tile(order, rounds)[:count]
            lanes.append(part)
            indices.append(self.given[part] + np.arange(len(part)) // len(order))
            self.given += np.bincount(part, minlength=num_lanes)
            self.next_lane = int(part[-1] + 1) % num_lanes
            count -= len(part)
        return np.concatenate(lanes), np.concatenate(indices)
