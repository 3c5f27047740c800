"""Steps 1 to 3 for one rank: lanes in, the rank's packed sequences out, in global order.

An endless source is planned in the lanes that this rank needs. A finite one is planned in all lanes
everywhere, one whole step ahead, because which lanes have ended decides the order of what follows;
so every rank stops at the same step without talking. Balancing needs whole steps too.

Imports: engine.balance, engine.lanes, engine.order, records. Used by: engine.driver, pipeline.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from zephon_mm.engine.balance import Costs, costs_of, deal, in_order, straggler
from zephon_mm.engine.lanes import Cursor, Lane, LanePlan
from zephon_mm.engine.measuring import Measured, Measuring
from zephon_mm.engine.mixing import MixingLane
from zephon_mm.engine.order import Round, Topology, delivered_of_lane
from zephon_mm.errors import CheckpointError, DataQualityError
from zephon_mm.metrics import Metrics
from zephon_mm.packed import Sequence as PackedSequence

Wait = Callable[[Measured], None]
"""Blocks until measuring is done; the driver serves other requests meanwhile."""


class Hand(NamedTuple):
    """A part of a step that was delivered: the first `groups` of its deal to a topology."""

    groups: int
    ranks: int
    microbatch_size: int
    balanced: bool

    @property
    def size(self) -> int:
        """Sequences delivered, over all ranks."""
        return self.groups * self.ranks * self.microbatch_size


@dataclass(frozen=True, slots=True)
class Start:
    """Where planning begins: globally delivered sequences, and a cursor for lanes that began.

    `next_lane` is whose turn it is, in a run that plans whole steps. `dealt` is what was delivered
    of a step whose rows do not come in order.
    """

    delivered: int = 0
    cursors: Mapping[int, Cursor] | None = None
    next_lane: int = 0
    dealt: tuple[Hand, ...] = ()


class Position(NamedTuple):
    """The state of the global order after `delivered` sequences.

    `counts` holds, in a run that plans whole steps, how many sequences each lane has given since
    the start. Inside a balanced step, these and `next_lane` are those of its beginning.
    """

    delivered: int
    next_lane: int
    counts: tuple[int, ...] | None
    dealt: tuple[Hand, ...] = ()


class Group(NamedTuple):
    """What this rank delivers next: its rows, their global numbers, the position afterwards.

    `step_valid_tokens` is known where this rank plans whole steps.
    """

    sequences: list[PackedSequence]
    numbers: list[int]
    after: Position
    step_valid_tokens: int | None = None


class Planner:
    """Plans this rank's batches. Not thread-safe: it belongs to the driver.

    Args:
        plan: What all lanes have in common.
        num_lanes: L.
        topology: Who materializes what.
        start: Where to begin.
        finite: Whether lanes may end.
        measuring: Gives the records of chunks.
        wait: How to wait for measuring.
        metrics: Where skips are counted.
    """

    _lane_type: Any = Lane

    def __init__(
        self,
        plan: LanePlan,
        *,
        num_lanes: int,
        topology: Topology,
        start: Start,
        finite: bool,
        measuring: Measuring,
        wait: Wait,
        metrics: Metrics,
    ) -> None:
        self.num_lanes = num_lanes
        self._plan = plan
        self._topology = topology
        self._start = start
        self._finite = finite
        self._stepwise = finite or plan.whole_steps  # plans all lanes, a step at a time
        self._measuring = measuring
        self._wait = wait
        self._metrics = metrics
        self._lanes: dict[int, Lane] = {}
        self._due = 0  # batches planned so far: measuring for an earlier batch goes first
        self._runs_ahead = measuring.queue.runs_ahead
        slots = measuring.queue.slots
        self._first_round = self._num_needed()
        self._tasks_ahead = max(2, -(-slots // self._first_round)) if self._runs_ahead else 1
        self._most_ahead = max(self._tasks_ahead, slots) if self._runs_ahead else 1

    def groups(self) -> Iterator[Group]:
        """Yield this rank's batches until the data ends; endless if the source is."""
        groups = self._step_groups() if self._stepwise else self._endless_groups()
        for group in groups:
            self._due += 1
            yield group

    @property
    def newest_window(self) -> int:
        """The newest window that a lane may have begun; -1 where none has."""
        known = [cursor.window for cursor in (self._start.cursors or {}).values()]
        return max([-1, *known, *(lane.reading for lane in list(self._lanes.values()))])

    def steer(self, agree: Callable[[int], Any]) -> None:
        """Draw from now on from the source that `agree(newest_window)` returns; None changes none.

        That source may differ in windows after the newest.
        """
        source = agree(self.newest_window)
        if source is not None:
            self._plan = replace(self._plan, source=source)
            for lane in self._lanes.values():
                lane.use(self._plan)

    def cursors(self, at: Position) -> dict[int, Cursor]:
        """Return the cursors that this rank knows at a position, planning on where it must.

        A lane that gave nothing since the start keeps the cursor that it started with, whoever
        plans it; one that had none is at its beginning and is left out.
        """
        started = self._start.cursors or {}
        found = {}
        for number in range(self.num_lanes):
            index = self._index(at, number)
            lane = self._lanes.get(number)
            if index == self._first(number):
                if number in started:
                    found[number] = started[number]
            elif lane is not None:
                while (cursor := lane.cursor(index)) is None:
                    self._advance(lane, self._tasks_ahead)
                found[number] = cursor
        return found

    def _endless_groups(self) -> Iterator[Group]:
        delivered = self._start.delivered
        group_size = self._topology.group_size
        for number in self._needed(delivered):
            self._look_ahead(self._lane(number))
        while True:
            if self._plan.omissions.skips(delivered):
                delivered += group_size
                continue
            numbers = list(self._topology.numbers(delivered))
            sequences = [
                self._sequence(number % self.num_lanes, number // self.num_lanes)
                for number in numbers
            ]
            delivered += group_size
            after = Position(delivered, delivered % self.num_lanes, None)
            yield Group(sequences, numbers, after)

    def _step_groups(self) -> Iterator[Group]:
        turn = Round(self.num_lanes, next_lane=self._start.next_lane)
        counts = [0] * self.num_lanes
        turns = turn.turns()
        for lane in range(self.num_lanes):
            self._look_ahead(self._lane(lane))
        dealt = self._start.dealt
        delivered = self._start.delivered - sum(hand.size for hand in dealt)
        step_size = self._topology.global_batch_size
        while True:
            left = step_size - delivered % step_size
            if left % self._topology.group_size and not dealt:
                left = step_size  # only without a global batch size: steps count from the start
            after = {0: Position(delivered, turn.next_lane, tuple(counts))}
            given = sum(hand.size for hand in dealt)
            ends = range(given + self._topology.group_size, left + 1, self._topology.group_size)
            step: list[PackedSequence] = []
            for sequence in itertools.islice(self._in_turn(turns, turn, counts), left):
                step.append(sequence)
                if len(step) in ends:
                    at = Position(delivered + len(step), turn.next_lane, tuple(counts))
                    after[len(step)] = at
            planned = len(step)
            if planned < left and not self._completes(step, left):
                if delivered == 0:
                    raise self._too_few(planned)
                return
            for end in (end for end in ends if end > planned):
                after[end] = Position(delivered + end, turn.next_lane, tuple(counts))
            if not self._plan.omissions.skips(delivered):
                yield from self._dealt_groups(step, after, dealt)
            delivered, dealt = delivered + left, ()

    def _completes(self, step: list[PackedSequence], left: int) -> bool:
        """Pad the last step of a finite run with empty rows, if that is asked for."""
        if not self._plan.pad_tail or not step:
            self._metrics.add("leftover_sequences", len(step))
            return False
        missing = left - len(step)
        self._metrics.add("padded_rows", missing)
        step += [PackedSequence(())] * missing
        return True

    def _dealt_groups(
        self, step: list[PackedSequence], after: Mapping[int, Position], dealt: tuple[Hand, ...]
    ) -> Iterator[Group]:
        """Yield this rank's rows of a step of which the hands `dealt` were delivered before.

        Args:
            step: The whole step.
            after: Sequences of the step -> the position after them, where a group ends.
            dealt: As in `Start`.
        """
        dp, rank, size, _ = self._topology
        weighed = self._plan.balance or any(hand.balanced for hand in dealt)
        costs = costs_of(step if weighed else [])
        rows = list(range(len(step)))
        for hand in dealt:
            hands = self._deal(costs, rows, hand)[: hand.groups]
            rows = sorted(set(rows) - {row for group in hands for part in group for row in part})
        hands = self._deal(costs, rows, Hand(0, dp, size, self._plan.balance))
        self._measure_straggling(costs, rows, hands)
        first = after[0].delivered
        tokens = sum(sequence.num_valid_tokens for sequence in step)
        for number, group in enumerate(hands, start=1):
            at = after[len(step) - len(rows) + number * dp * size]
            if (self._plan.balance or dealt) and number < len(hands):
                # Not a prefix of the order: the step is planned and dealt again on restore.
                history = (*dealt, Hand(number, dp, size, self._plan.balance))
                at = after[0]._replace(delivered=at.delivered, dealt=history)
            mine = group[rank]
            yield Group([step[i] for i in mine], [first + i for i in mine], at, tokens)

    @staticmethod
    def _deal(costs: Costs, rows: list[int], hand: Hand) -> list[list[list[int]]]:
        """Return [group][rank] -> rows, of the rows that are left of a step."""
        if not hand.balanced:
            parts = in_order(len(rows), ranks=hand.ranks, microbatch_size=hand.microbatch_size)
        else:
            parts = deal(costs[rows], ranks=hand.ranks, microbatch_size=hand.microbatch_size)
        return [[[rows[i] for i in part] for part in group] for group in parts]

    def _measure_straggling(
        self, costs: Costs, rows: list[int], hands: list[list[list[int]]]
    ) -> None:
        """Add up how uneven the ranks' work was and is, for `metrics()`."""
        dp, _, size, _ = self._topology
        if not self._plan.balance:
            return
        plain = self._deal(costs, rows, Hand(0, dp, size, False))
        for name, parts in (("before", plain), ("after", hands)):
            vision, attention = straggler(costs, parts)
            self._metrics.add_all(
                {f"vision_straggler_{name}": vision, f"attention_straggler_{name}": attention}
            )
        self._metrics.add("balanced_steps")

    def _in_turn(
        self, turns: Iterator[int], turn: Round, counts: list[int]
    ) -> Iterator[PackedSequence]:
        """Yield the next sequences of the global order, counting them by lane."""
        for lane in turns:
            sequence = self._planned(self._lane(lane), counts[lane])
            if sequence is None:
                turn.end(lane)
            else:
                counts[lane] += 1
                yield sequence

    def _too_few(self, found: int) -> DataQualityError:
        return DataQualityError(
            f"a full pass gives {found} sequences, a step needs "
            f"{self._topology.global_batch_size}. {self._metrics.skipped()}. "
            "Lower global_batch_size, or check the schema, the filters and the packer's limits."
        )

    def _sequence(self, lane: int, index: int) -> PackedSequence:
        sequence = self._planned(self._lane(lane), index)
        if sequence is None:
            raise RuntimeError(
                f"lane {lane} ended, but the source says that it is endless; a source that can "
                "end must have finite = True"
            )
        return sequence

    def _planned(self, lane: Lane, index: int) -> PackedSequence | None:
        """Return sequence `index` of a lane, planning as far as needed; None at its end."""
        ahead = self._tasks_ahead
        while (sequence := lane.take(index)) is None and not lane.exhausted:
            self._advance(lane, ahead)
            ahead += 1  # the further off it is, the more of the workers may turn to this lane
        if self._due >= self._first_round:  # before that the other lanes' first ones are waited for
            self._look_ahead(lane)
        return sequence

    def _look_ahead(self, lane: Lane) -> None:
        if self._runs_ahead:
            lane.fill(self._tasks_ahead)

    def _advance(self, lane: Lane, ahead: int) -> None:
        lane.fill(self._tasks_ahead, min(ahead, self._most_ahead))
        head = lane.head
        if head is not None and not head.done():
            self._wait(head)
            return  # a request served meanwhile may have taken the lane further
        if not lane.exhausted:
            lane.step()

    def _lane(self, number: int) -> Lane:
        lane = self._lanes.get(number)
        if lane is None:
            lane = self._lanes[number] = self._new_lane(number)
        return lane

    def _new_lane(self, number: int) -> Lane:
        start = self._start
        cursor = (start.cursors or {}).get(number)
        begun = start.delivered - sum(hand.size for hand in start.dealt)
        given = 0 if self._finite else delivered_of_lane(begun, number, self.num_lanes)
        if cursor is None and given > 0:
            raise CheckpointError(
                f"the state has no cursor for lane {number}, which {given} sequences of were "
                "delivered: it is a part of one rank. Merge the parts of all ranks with "
                "zephon_mm.checkpoint.merge_checkpoints, or take it with checkpoint(group=...)."
            )
        lane_type = MixingLane if self._plan.mix else self._lane_type
        lane: Lane = lane_type(
            number,
            plan=self._plan,
            measure=self._measure,
            cursor=cursor,
            num_lanes=self.num_lanes,
            first=self._first(number),
            metrics=self._metrics,
        )
        return lane

    def _measure(self, lane: int, refs: Any) -> Iterator[Measured]:
        # Materializing a batch has priority (its number, 0): what is due sooner goes first.
        urgent = self._due < self._first_round
        return self._measuring((self._due, 1, lane), refs, urgent=urgent)

    def _first(self, lane: int) -> int:
        """Return the index of a lane's first owed sequence; a finite run counts from its start."""
        delivered = self._start.delivered
        return 0 if self._stepwise else delivered_of_lane(delivered, lane, self.num_lanes)

    def _index(self, at: Position, lane: int) -> int:
        if at.counts is not None:
            return at.counts[lane]
        if self._stepwise:
            return 0  # nothing has been delivered since the start
        return delivered_of_lane(at.delivered, lane, self.num_lanes)

    def _needed(self, delivered: int) -> Sequence[int]:
        """Return the lanes of this rank in the order in which it meets them."""
        numbers: dict[int, None] = {}
        for step in range(self.num_lanes):
            for number in self._topology.numbers(delivered + step * self._topology.group_size):
                numbers.setdefault(number % self.num_lanes)
        return list(numbers)

    def _num_needed(self) -> int:
        return self.num_lanes if self._stepwise else len(self._needed(self._start.delivered))
