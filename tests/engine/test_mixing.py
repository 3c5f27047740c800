"""A lane with exact shares of tokens, against the obvious loop; each row once a pass."""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.lanes import sequences
from tests.fixtures.memory import dataset, random_rows
from zephon_mm.engine.lanes import LanePlan
from zephon_mm.engine.mixing import MixingLane
from zephon_mm.engine.omissions import Omissions
from zephon_mm.errors import DataQualityError
from zephon_mm.metrics import Metrics
from zephon_mm.ops.pack import PackConfig, make_packer
from zephon_mm.packed import AnyRecord, Block
from zephon_mm.protocols import Accumulator
from zephon_mm.records import Record, SampleRef, Skip, record_of
from zephon_mm.work import StaticMixtureWorkSource

LANES = 3
MAX_LENGTH = 40
SIZES = (40, 25, 11)
SHARES = (0.5, 0.3, 0.2)


class Whole:
    """An accumulator that makes a sequence of each record, so that what is taken is seen."""

    def __init__(self) -> None:
        self._packer = make_packer(PackConfig(MAX_LENGTH, "wrap"))

    def push(self, item: AnyRecord) -> list[Any]:
        return [*self._packer.push(item), *self._packer.flush()]

    def flush(self) -> list[Any]:
        return []


class Store:
    """What a block makes its records from."""

    def extents(self, at: int) -> list[int]:
        return [0, 0]

    def skip(self, at: int, ref: SampleRef) -> Skip:
        return skip_of(ref)


def skip_of(ref: SampleRef) -> Skip:
    return Skip(ref, "filtered", "", False)


def tokens_of(ref: SampleRef) -> int:
    """1 to 3, 5 to 37 or 20 tokens by dataset; 0 is a row that gives no record."""
    mixed = (7 * ref.row + 3 * ref.shard) % 9
    return (mixed % 4, 1 + 4 * mixed, 20)[ref.dataset]


def item_of(ref: SampleRef) -> Record | Skip:
    tokens = tokens_of(ref)
    ones = np.ones(tokens, dtype=np.bool_)
    return record_of(ref, ones.astype(np.int32), ones) if tokens else skip_of(ref)


def block_of(refs: Sequence[SampleRef]) -> Block:
    columns = np.zeros((6, len(refs)), dtype=np.int64)
    columns[0] = [tokens_of(ref) for ref in refs]
    return Block(np.array(refs, dtype=np.int64), columns, [Store()])


def source(shares: Sequence[float] = SHARES, **settings: Any) -> Any:
    data = [dataset(name, random_rows(0, n, [])) for name, n in zip("abc", SIZES, strict=True)]
    return StaticMixtureWorkSource(
        data, dict(zip("abc", shares, strict=True)), seed=3, **settings
    ).by_tokens()


def make_plan(chunk_size: int, chunks_per_window: int, **settings: Any) -> LanePlan:
    def accumulators(lane: int, window: int) -> Sequence[Accumulator[Any, Any]]:
        return [Whole()]

    return LanePlan(
        source=source(**settings).with_windows(chunks_per_window),
        accumulators=accumulators,
        chunk_size=chunk_size,
        chunks_per_window=chunks_per_window,
        max_error_rate=0.01,
        barren_records=1_000,
        remembered=1_000,
        mix=PackConfig(MAX_LENGTH, "wrap"),
    )


def make_lane(plan: LanePlan, *, part_rows: int = 3, blocks: bool = False, **where: Any) -> Any:
    def measure(lane: int, refs: Any) -> Any:
        for at in range(0, len(refs), part_rows):
            part = [SampleRef(*ref) for ref in refs[at : at + part_rows].tolist()]
            future: Future[Any] = Future()
            future.set_result(block_of(part) if blocks else [item_of(ref) for ref in part])
            yield future

    where = {"number": 1, "cursor": None, "first": 0} | where
    return MixingLane(plan=plan, measure=measure, num_lanes=LANES, metrics=Metrics(), **where)


def read(lane: Any, first: int, count: int, ahead: int = 2) -> list[SampleRef]:
    found = sequences(lane, first, count, ahead=ahead)
    return [sequence.pieces[0].record.ref for sequence in found]


def naive(count: int, number: int = 1, **settings: Any) -> list[SampleRef]:
    """Return what a lane takes: always a row of the dataset furthest behind, in its order."""
    work = source(**settings)
    given = [0] * len(SHARES)
    at = [(0, 0)] * len(SHARES)
    taken: list[SampleRef] = []
    while len(taken) < count:
        behind = min(range(len(SHARES)), key=lambda one: given[one] / SHARES[one])
        rows, at[behind] = work._orders[behind].take(number, LANES, *at[behind], 1)
        ref = SampleRef(behind, *rows[0].tolist())
        given[behind] += tokens_of(ref)
        taken += [ref] if tokens_of(ref) else []
    return taken


drawn = st.tuples(st.integers(1, 40), st.integers(1, 4))


@settings(deadline=None, max_examples=40)
@given(window=drawn, ahead=st.integers(1, 9), part=st.integers(1, 9), blocks=st.booleans())
def test_windows_look_ahead_and_index_do_not_show(
    window: tuple[int, int], ahead: int, part: int, blocks: bool
) -> None:
    # But for a token of rounding a window, which may turn a tie around: see the next test.
    lane = make_lane(make_plan(400, 2), part_rows=part, blocks=blocks)
    assert read(lane, 0, 150, ahead) == naive(150)
    plan = make_plan(*window)
    expected = read(make_lane(plan), 0, 150)
    assert read(make_lane(plan, part_rows=part, blocks=blocks), 0, 150, ahead) == expected


@settings(deadline=None, max_examples=40)
@given(window=drawn, number=st.integers(0, LANES - 1))
def test_shares_are_exact_to_a_document_at_any_time(window: tuple[int, int], number: int) -> None:
    given_tokens = Counter({0: 0, 1: 0, 2: 0})
    for ref in read(make_lane(make_plan(*window), number=number), 0, 300):
        given_tokens[ref.dataset] += tokens_of(ref)
        total = given_tokens.total()
        for number_, share in enumerate(SHARES):
            assert abs(given_tokens[number_] - share * total) <= 37 + 20 + 3


@settings(deadline=None, max_examples=40)
@given(window=drawn, place=st.integers(0, 120), blocks=st.booleans())
def test_a_cursor_goes_on_with_what_follows(
    window: tuple[int, int], place: int, blocks: bool
) -> None:
    plan = make_plan(*window)
    lane = make_lane(plan)
    whole = read(lane, 0, 160)
    lane = make_lane(plan)
    read(lane, 0, place)
    while (cursor := lane.cursor(place)) is None:
        lane.fill(2)
        lane.step()
    later = make_lane(plan, cursor=cursor, first=place, blocks=blocks)
    assert read(later, place, 40) == whole[place : place + 40]


@settings(deadline=None, max_examples=25)
@given(
    window=drawn,
    passes=st.integers(1, 3),
    limits=st.dictionaries(st.sampled_from("abc"), st.integers(1, 4)),
    blocks=st.booleans(),
)
def test_each_row_is_taken_once_a_pass_until_all_are_used_up(
    window: tuple[int, int], passes: int, limits: dict[str, int], blocks: bool
) -> None:
    settings_of = {"stop_after_passes": passes, "stop": "all_exhausted", "max_passes": limits}
    plan = make_plan(*window, **settings_of)
    found = Counter(
        ref
        for number in range(LANES)
        for ref in read(make_lane(plan, number=number, blocks=blocks), 0, 10**6)
    )
    expected = {
        SampleRef(place, row // 7, row % 7): limits.get(name, passes)
        for place, (name, size) in enumerate(zip("abc", SIZES, strict=True))
        for row in range(size)
    }
    assert found == {ref: count for ref, count in expected.items() if tokens_of(ref)}


@settings(deadline=None, max_examples=25)
@given(window=drawn, passes=st.integers(1, 3), number=st.integers(0, LANES - 1))
def test_the_first_dataset_that_is_used_up_ends_a_lane(
    window: tuple[int, int], passes: int, number: int
) -> None:
    plan = make_plan(*window, stop_after_passes=passes)
    lane = make_lane(plan, number=number)
    found = read(lane, 0, 10**6)
    _, _, left = plan.source._at(lane._state)
    assert not left.all()
    taken = Counter(found)
    assert max(taken.values()) <= passes
    endless = read(make_lane(make_plan(400, 2), number=number), 0, len(found))
    together = sum((taken & Counter(endless)).values())
    assert together >= len(found) - 3 * passes  # a token of rounding a window turns ties around


def test_rows_that_are_left_out_are_passed_over_in_their_place() -> None:
    plan = make_plan(16, 2)
    whole = read(make_lane(plan), 0, 400)
    out = {ref for ref in whole if ref.row % 3 == 0}
    found = read(make_lane(replace(plan, omissions=Omissions(rows=((0, frozenset(out)),)))), 0, 250)
    assert out.isdisjoint(found)
    for place in range(len(SHARES)):  # the others come in the order in which they would have come
        kept = [ref for ref in found if ref.dataset == place]
        wanted = [ref for ref in whole if ref.dataset == place and ref not in out]
        both = min(len(kept), len(wanted))
        assert both >= 4
        assert kept[:both] == wanted[:both]


@settings(deadline=None)
@given(window=drawn, number=st.integers(0, LANES - 1), blocks=st.booleans())
def test_a_dataset_without_a_token_to_give_is_an_error_and_one_with_few_is_not(
    window: tuple[int, int], number: int, blocks: bool
) -> None:
    plan = replace(make_plan(*window), mix=PackConfig(10), barren_records=10**9)  # all of c is 20
    with pytest.raises(DataQualityError, match=r"no row of dataset 'c' .* others wait for"):
        read(make_lane(plan, number=number, blocks=blocks), 0, 10**6)
    few = replace(make_plan(*window, shares=(0.1, 0.9, 0.0)), mix=PackConfig(1))  # 2 rows of b
    assert len(read(make_lane(few, number=number, blocks=blocks), 0, 50)) == 50


def test_tokens_are_those_that_the_packer_takes() -> None:
    lane = make_lane(replace(make_plan(4, 1), mix=PackConfig(10, overlong="drop")))
    refs = [SampleRef(1, 0, row) for row in range(7)]
    sizes = [tokens_of(ref) for ref in refs]
    expected = [(1, size if size <= 10 else 0) for size in sizes]
    assert [lane._counted([item_of(ref) for ref in refs], at) for at in range(7)] == expected
    assert [lane._counted(block_of(refs), at) for at in range(7)] == expected
    lane = make_lane(replace(make_plan(4, 1), mix=PackConfig(10, overlong="truncate")))
    cut = [(1, min(size, 10)) for size in sizes]
    assert [lane._counted([item_of(ref) for ref in refs], at) for at in range(7)] == cut
