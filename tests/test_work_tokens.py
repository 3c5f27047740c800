"""The source's laws for shares of tokens, schedules, and datasets that are used up."""

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contracts.work_source import check_work_source
from tests.test_work import Rows, lane_refs, source
from zephon_mm.errors import ConfigError, DatasetError
from zephon_mm.work import TokenEstimation
from zephon_mm.work.shares import Account

# Accounts.


@given(
    weights=st.lists(st.integers(1, 50), min_size=1, max_size=5),
    sizes=st.lists(st.integers(0, 500), min_size=1, max_size=200),
    cuts=st.sets(st.integers(0, 200)),
)
def test_each_dataset_is_with_its_share_to_a_document_at_any_time(
    weights: list[int], sizes: list[int], cuts: set[int]
) -> None:
    shares = [weight / sum(weights) for weight in weights]
    account = Account(shares, [0] * len(shares))
    given_tokens = [0] * len(shares)
    for number, size in enumerate(sizes):
        if number in cuts:  # as where a window begins
            account = Account(shares, account.ahead())
        dataset = account.next()
        assert dataset is not None
        account.give(dataset, size)
        given_tokens[dataset] += size
        for tokens, share in zip(given_tokens, shares, strict=True):
            off = tokens - share * sum(given_tokens)
            most = 500 * max(1, share * (len(weights) - 1))  # one document of each, of 500
            assert abs(off) <= most + len(cuts) / 20 + 1e-6


@pytest.mark.parametrize("share", [0.0014, 0.0026, 0.0123])
def test_many_small_windows_move_no_dataset_off_its_share(share: float) -> None:
    account, counts = Account([1 - share, share], [0, 0]), Counter[int]()
    for _ in range(4_000):  # windows of a few tokens of the smaller one
        account = Account([1 - share, share], account.ahead())
        for _ in range(50):
            dataset = account.next()
            assert dataset is not None
            account.give(dataset, 20)
            counts[dataset] += 20
    assert counts[1] / counts.total() == pytest.approx(share, rel=0.01)


def test_one_that_is_used_up_or_has_no_share_gives_nothing() -> None:
    account = Account([0.5, 0.5, 0.0], [0, 10, 0])
    assert account.next() == 0
    account.end(0)
    assert (account.next(), account.ahead()) == (1, [0, 0, 0])
    account.end(1)
    assert account.next() is None


# By tokens.


def test_it_keeps_the_contract_of_work_sources() -> None:
    data = [Rows("a", [30, 0, 7]), Rows("b", [11])]
    for options in ({}, {"stop_after_passes": 2}, {"stop": "error"}, {"max_passes": {"b": 1}}):
        check_work_source(source(*data, weights=[3, 1], **options).by_tokens())
        check_work_source(source(*data, weights=[3, 1], **options))


def test_it_needs_no_estimation() -> None:
    work = source(Rows("a", [9]), token_estimation=TokenEstimation()).by_tokens()
    assert not work.needs_constants
    assert work.fingerprint()["by"] == "tokens"
    assert "by" not in source(Rows("a", [9])).fingerprint()


@settings(deadline=None)
@given(rows=st.lists(st.integers(0, 20), min_size=2, max_size=2), tokens=st.integers(1, 900))
def test_the_next_window_begins_behind_what_was_taken(rows: list[int], tokens: int) -> None:
    work = source(Rows("a", [40, 11]), Rows("b", [29])).by_tokens()
    taken = {place: count for place, count in enumerate(rows) if count}
    counts = {place: count * tokens for place, count in taken.items()}
    state = work.settled(work.start(1, 3), 8, taken, counts)
    assert state[:3] == (1, 3, 8)
    plain = source(Rows("a", [40, 11]), Rows("b", [29]))
    for place, count in enumerate(rows):
        order = plain._orders[place]
        expected, _ = order.take(1, 3, 0, 0, count + 5) if count else order.take(1, 3, 0, 0, 5)
        found, _ = work._orders[place].take(1, 3, *state[3 + 4 * place : 5 + 4 * place], 5)
        assert found.tolist() == expected[count:].tolist()
    ahead = [state[5], state[9]]
    assert min(ahead) == 0
    assert ahead[0] - ahead[1] == 100 * (rows[0] - rows[1]) * tokens  # hundredths


def test_means_of_earlier_windows_decide_how_many_rows_are_guessed() -> None:
    work = source(Rows("a", [5000]), Rows("b", [5000])).by_tokens()
    state = work.start(0, 1)
    for _ in range(6):
        state = work.settled(state, 8, {0: 150, 1: 15}, {0: 15_000, 1: 15_000})
    refs = lane_refs_from(work, state, 110)
    assert Counter(ref[0] for ref in refs)[0] == pytest.approx(100, abs=6)


def lane_refs_from(work: Any, state: Any, count: int) -> list[tuple[int, int, int]]:
    chunk, _ = work.next(state, count)
    return [tuple(ref) for ref in chunk.refs.tolist()]


# Passes of each dataset.


def test_a_dataset_leaves_after_its_passes_and_the_others_go_on() -> None:
    work = source(Rows("a", [50]), Rows("b", [3]), max_passes={"b": 2}, stop="all_exhausted")
    counts = Counter(lane_refs(work, 0, 1, chunk_size=8, limit=300))
    assert not work.finite
    assert {ref: n for ref, n in counts.items() if ref[0] == 1} == {(1, 0, n): 2 for n in range(3)}


def test_a_dataset_that_is_used_up_ends_the_lanes_or_is_an_error() -> None:
    data = [Rows("a", [50]), Rows("b", [3])]
    work = source(*data, max_passes={"b": 2})
    assert work.finite
    assert Counter(ref[0] for ref in lane_refs(work, 0, 1, chunk_size=8))[1] == 6
    work = source(*data, max_passes={"b": 2}, stop="error")
    with pytest.raises(DatasetError, match=r"'b' is used up in lane 0 after 2 passes.*all_exhau"):
        lane_refs(work, 0, 1, chunk_size=8)


def test_max_passes_take_the_place_of_those_of_all() -> None:
    work = source(
        *(Rows("a", [5]), Rows("b", [3])),
        **{"stop_after_passes": 1, "max_passes": {"b": 4}, "stop": "all_exhausted"},
    )
    assert Counter(ref[0] for ref in lane_refs(work, 0, 1, chunk_size=8)) == {0: 5, 1: 12}


@pytest.mark.parametrize(
    ("passes", "found"),
    [
        ({"c": 1}, r"max_passes: unknown dataset 'c'"),
        ({"a": 0}, "at least 1, got 0 for a"),
        ({"a": 1.5}, r"at least 1, got 1\.5 for a"),
        ({"a": "2"}, "at least 1, got '2' for a"),
    ],
)
def test_passes_that_cannot_be_are_named(passes: dict[str, int], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        source(Rows("a", [5]), Rows("b", [3]), max_passes=passes)


# Schedules.


@pytest.mark.parametrize("rate", [0.5, [0.5, 0.5]])
def test_a_turn_of_the_curriculum_holds_from_its_window_in_every_lane(rate: Any) -> None:
    turns = [(4, {"a": 0, "b": 1, "c": 0}), (8, {"a": 0, "b": 1, "c": 3})]
    data = Rows("a", [90]), Rows("b", [90]), Rows("c", [90])
    work = source(*data, weights=[1, 0, 0], curriculum=turns, windows_per_step=rate)
    work = work.with_windows(3)
    for lane in range(2):
        names = [ref[0] for ref in lane_refs(work, lane, 2, chunk_size=4, limit=120)]
        assert set(names[:24]) == {0}  # two windows of three chunks
        assert set(names[24:48]) == {1}
        assert Counter(names[48:]) == {1: 18, 2: 54}
    assert [work.weights_at(window) for window in (0, 2, 4)] == [
        *({"a": 1.0}, {"b": 1.0}, {"b": 0.25, "c": 0.75})
    ]
    assert work.fingerprint()["curriculum"] == [[2, [0, 1, 0]], [4, [0, 0.25, 0.75]]]
    check_work_source(work)


@pytest.mark.parametrize(
    ("turns", "rate", "found"),
    [
        ([(4, {"a": 1, "b": 1})], None, r"in windows \[0\]. .*windows_per_step.*got None"),
        ([(4, {"a": 1, "b": 1})], [1.0, 2.0], r"one for the steps before each turn, got \[1.0, 2"),
        ([(4, {"a": 1, "b": 1})], -1.0, r"in windows \[-4\]"),
        ([(4, {"a": 1, "b": 1})], math.nan, r"in windows \[0\].*got nan"),
        ([(4, {"a": 1, "b": 1})], math.inf, r"in windows \[0\].*got inf"),
        ([(4, {"a": 1})], 1.0, r"mixture names \['a'\]"),
        ([(1, {"a": 1, "b": 1})], 0.1, r"in windows \[0\]. Give ascending steps, at least"),
        ([(9, {"a": 1, "b": 1}), (9, {"a": 1, "b": 1})], 1.0, r"in windows \[9, 9\]"),
        ([("4", {"a": 1, "b": 1})], 1.0, r"curriculum must be"),
    ],
)
def test_a_curriculum_that_cannot_be_is_named(turns: Any, rate: Any, found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        source(Rows("a", [5]), Rows("b", [3]), curriculum=turns, windows_per_step=rate)


def test_a_turn_that_is_added_ends_those_behind_it() -> None:
    turns = [(2, {"a": 0, "b": 1}), (6, {"a": 1, "b": 1})]
    work = source(
        Rows("a", [90]), Rows("b", [90]), weights=[1, 1], curriculum=turns, windows_per_step=1
    )
    changed = work.with_turn(4, {"a": 3, "b": 1})
    assert [changed.weights_at(window) for window in (0, 2, 4, 99)] == [
        *({"a": 0.5, "b": 0.5}, {"b": 1.0}, {"a": 0.75, "b": 0.25}, {"a": 0.75, "b": 0.25})
    ]
    assert work.weights_at(99) == {"a": 0.5, "b": 0.5}
    with pytest.raises(ConfigError, match=r"mixture names \['a'\]"):
        work.with_turn(4, {"a": 1})
