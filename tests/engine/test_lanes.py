"""A lane against the obvious loop: same sequences, and a cursor for each of them."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.lanes import sequences
from tests.fixtures.memory import dataset, random_rows
from zephon_mm.engine import lanes
from zephon_mm.engine.lanes import FIRST_SEEN, Cursor, Lane, LanePlan
from zephon_mm.engine.mixing import MixingLane
from zephon_mm.engine.rawplan import RawLane
from zephon_mm.errors import DataQualityError
from zephon_mm.metrics import Metrics, skips
from zephon_mm.ops.pack import PackConfig, make_packer
from zephon_mm.ops.shuffle import ShuffleBuffer
from zephon_mm.packed import Sequence as PackedSequence
from zephon_mm.protocols import Accumulator
from zephon_mm.records import Chunk, Record, SampleRef, Skip
from zephon_mm.records import record_of as from_tokens
from zephon_mm.rng import Stream
from zephon_mm.work import StaticMixtureWorkSource

LANES = 3
Measured = Record | Skip
Rule = Callable[[SampleRef], Measured]


def record_of(ref: SampleRef) -> Record:
    tokens = (7 * ref.row + 3 * ref.shard) % 9 + 1
    ids = np.zeros(tokens, dtype=np.int32)
    return from_tokens(ref, ids, np.ones(tokens, dtype=np.bool_))


def skip_of(ref: SampleRef, *, defect: bool) -> Skip:
    return Skip(ref, "broken" if defect else "filtered", f"sample {tuple(ref)}", defect)


def sparse(ref: SampleRef) -> Measured:
    """Only few samples give a record, so that whole windows give no sequence."""
    return record_of(ref) if ref.row % 5 == 0 else skip_of(ref, defect=False)


def accumulators(lane: int, window: int) -> Sequence[Accumulator[Any, Any]]:
    packer = make_packer(PackConfig(16, lookahead=4))
    return [packer, ShuffleBuffer(3, Stream("test", lane, window))]


def make_plan(**changes: Any) -> LanePlan:
    source = StaticMixtureWorkSource([dataset("a", random_rows(0, 40, []))], {"a": 1.0}, seed=3)
    plan = LanePlan(
        source=source,
        accumulators=accumulators,
        chunk_size=4,
        chunks_per_window=2,
        max_error_rate=0.01,
        barren_records=100,
        remembered=1000,
    )
    return replace(plan, **changes)


def finite(passes: int) -> StaticMixtureWorkSource:
    return StaticMixtureWorkSource(
        [dataset("a", random_rows(0, 40, []))], {"a": 1.0}, seed=3, stop_after_passes=passes
    )


def make_lane(
    plan: LanePlan,
    rule: Rule = record_of,
    *,
    number: int = 1,
    cursor: Cursor | None = None,
    first: int = 0,
    metrics: Metrics | None = None,
    part_rows: int = 3,
    lane_type: type[Lane] = Lane,
) -> Lane:
    def measure(lane: int, refs: Any) -> "Iterator[Future[list[Measured]]]":
        for at in range(0, len(refs), part_rows):
            future: Future[list[Measured]] = Future()
            part = refs[at : at + part_rows].tolist()
            future.set_result([rule(SampleRef(*ref)) for ref in part])
            yield future

    return lane_type(
        number,
        plan=plan,
        measure=measure,
        cursor=cursor,
        num_lanes=LANES,
        first=first,
        metrics=metrics or Metrics(),
    )


def names(sequence: PackedSequence) -> tuple[SampleRef, ...]:
    return tuple(piece.record.ref for piece in sequence.pieces)


def read(lane: Lane, first: int, count: int, *, ahead: int = 2) -> list[tuple[SampleRef, ...]]:
    return [names(sequence) for sequence in sequences(lane, first, count, ahead=ahead)]


class Naive(NamedTuple):
    sequences: list[tuple[SampleRef, ...]]
    cursors: list[Cursor]  # one more than sequences when the lane ends


def naive(plan: LanePlan, rule: Rule, count: int, number: int = 1) -> Naive:
    """Go through one lane window by window, with nothing ahead."""
    found = Naive([], [])
    state, window, ended = plan.source.start(number, LANES), 0, False
    while len(found.sequences) < count and not ended:
        packer, shuffle = plan.accumulators(number, window)
        start, packed, out = state, [], []
        for _ in range(plan.chunks_per_window):
            chunk, state = plan.source.next(state, plan.chunk_size)
            if chunk is None:
                ended = True
                break
            for ref in chunk.refs:
                item = rule(SampleRef(*map(int, ref)))
                packed += packer.push(item) if isinstance(item, Record) else []
        packed += packer.flush()
        for sequence in packed:
            out += shuffle.push(sequence)
        out += shuffle.flush()
        found.cursors.extend(Cursor(window, start, offset) for offset in range(len(out)))
        found.sequences.extend(map(names, out))
        window += 1
    if ended:
        found.cursors.append(Cursor(window, state, 0))
    return found


plans = st.builds(
    lambda passes, chunk, chunks: make_plan(
        **({"source": finite(passes)} if passes else {}),
        chunk_size=chunk,
        chunks_per_window=chunks,
    ),
    st.sampled_from([0, 1, 4]),
    st.integers(1, 9),
    st.integers(1, 4),
)


@settings(max_examples=60)
@given(plans, st.sampled_from([record_of, sparse]), st.integers(1, 9), st.integers(1, 5))
def test_a_lane_is_the_obvious_loop(plan: LanePlan, rule: Rule, ahead: int, part: int) -> None:
    expected = naive(plan, rule, 30).sequences[:30]
    assert read(make_lane(plan, rule, part_rows=part), 0, 30, ahead=ahead) == expected


@settings(max_examples=60)
@given(plans, st.sampled_from([record_of, sparse]), st.integers(0, 25), st.integers(0, 25))
def test_a_cursor_depends_on_its_place_alone_and_goes_on_from_there(
    plan: LanePlan, rule: Rule, place: int, further: int
) -> None:
    expected = naive(plan, rule, 60)
    lane = make_lane(plan, rule)
    read(lane, 0, place + further)
    place = min(place, len(expected.sequences))
    while (cursor := lane.cursor(place)) is None:
        lane.fill(1)
        lane.step()
    assert cursor == expected.cursors[place]
    again = make_lane(plan, rule, cursor=cursor, first=place)
    assert read(again, place, 10) == expected.sequences[place : place + 10]
    if place < len(expected.sequences):
        assert again.cursor(place) == cursor


def test_a_restored_lane_writes_the_cursors_of_the_first_run() -> None:
    plan = make_plan()
    expected = naive(plan, record_of, 60)
    lane = make_lane(plan, cursor=expected.cursors[7], first=7)
    read(lane, 7, 30)
    assert [lane.cursor(place) for place in range(7, 37)] == expected.cursors[7:37]


def test_sequences_that_other_ranks_deliver_are_left_out() -> None:
    plan = make_plan()
    expected = naive(plan, record_of, 60).sequences
    lane = make_lane(plan)
    for index in range(2, 40, 5):
        assert read(lane, index, 1) == [expected[index]]


def test_lanes_differ_and_do_not_meet_within_a_pass() -> None:
    plan = make_plan(source=finite(1))
    read_by = [
        {ref for refs in read(make_lane(plan, number=number), 0, 99) for ref in refs}
        for number in range(LANES)
    ]
    assert sum(map(len, read_by)) == len(set().union(*read_by)) == 40


def test_windows_that_give_nothing_are_gone_through_and_no_cursor_names_them() -> None:
    plan = make_plan(chunk_size=1, chunks_per_window=1, barren_records=1000)
    expected = naive(plan, sparse, 12)
    lane = make_lane(plan, sparse)
    assert read(lane, 0, 12) == expected.sequences[:12]
    assert [lane.cursor(i) for i in range(11)] == expected.cursors[:11]
    windows = [cursor.window for cursor in expected.cursors]
    assert max(np.diff(windows)) > 1


def test_a_source_that_gives_nothing_is_an_error_not_an_endless_loop() -> None:
    def none(ref: SampleRef) -> Measured:
        return skip_of(ref, defect=False)

    lane = make_lane(make_plan(barren_records=50), none)
    with pytest.raises(DataQualityError, match=r"lane 1 read 5[0-9] samples in a row.*filtered"):
        read(lane, 0, 1)


@pytest.mark.parametrize("kind", [Lane, MixingLane, RawLane])
def test_a_source_whose_chunks_are_empty_is_an_error_not_an_endless_loop(
    monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    monkeypatch.setattr(lanes, "MOST_EMPTY", 1000)

    class Ending(StaticMixtureWorkSource):
        def next(self, state: Any, chunk_size: int) -> Any:
            chunk, after = super().next(state, chunk_size)
            return Chunk(np.empty((0, 3), dtype=np.int64)) if chunk is None else chunk, after

    rows = dataset("a", random_rows(0, 40, []))
    source = Ending([rows], {"a": 1.0}, seed=3, stop_after_passes=1)
    plan = make_plan(source=source.by_tokens() if kind is MixingLane else source)
    if kind is MixingLane:
        plan = replace(plan, mix=PackConfig(16))
    elif kind is RawLane:
        plan = replace(plan, accumulators=lambda *_: [])
    lane: Any = make_lane(plan, lane_type=kind)
    with pytest.raises(DataQualityError, match=r"lane 1 drew 1000 chunks without a row. A source"):
        lane.ready(1000, 1) if kind is RawLane else read(lane, 0, 1000)


@pytest.mark.parametrize(("rate", "tolerated"), [(0.0, 0), (0.003, 3), (0.01, 10)])
def test_ckp_17_defects_are_counted_and_zero_means_the_first_stops(
    rate: float, tolerated: int
) -> None:
    def bad(ref: SampleRef) -> Measured:
        return skip_of(ref, defect=True)

    metrics = Metrics()
    lane = make_lane(make_plan(max_error_rate=rate, barren_records=10_000), bad, metrics=metrics)
    message = rf"{tolerated + 1} of the first \d+ samples of lane 1 .*\[broken\]\. Repair"
    with pytest.raises(DataQualityError, match=message):
        read(lane, 0, 1)
    assert skips(metrics.snapshot()) == {"broken": tolerated + 1}
    with pytest.raises(DataQualityError, match=message):  # it stays broken
        read(lane, 0, 1)


def test_a_share_of_defects_within_the_rate_is_skipped_and_counted() -> None:
    def some(ref: SampleRef) -> Measured:
        return skip_of(ref, defect=True) if ref.row == 3 else record_of(ref)

    metrics = Metrics()
    plan = make_plan(max_error_rate=0.2)
    assert (
        read(make_lane(plan, some, metrics=metrics), 0, 600)
        == (naive(plan, some, 600).sequences[:600])
    )
    assert skips(metrics.snapshot())["broken"] > FIRST_SEEN / 40


def test_windows_delivered_long_ago_are_forgotten_but_not_those_that_may_be_asked() -> None:
    plan = make_plan(remembered=10)
    expected = naive(plan, record_of, 300)
    lane = make_lane(plan)
    read(lane, 0, 200)
    for back in range(11):
        assert lane.cursor(200 - back) in (None, expected.cursors[200 - back])
    with pytest.raises(ValueError, match="lane 1 no longer remembers sequence 3"):
        lane.cursor(3)
