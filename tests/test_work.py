"""The work source's laws: every row once a pass, exact shares, purity, small states."""

import json
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contracts.work_source import check_in_another_process, check_work_source
from zephon_mm.errors import ConfigError
from zephon_mm.records import ShardInfo
from zephon_mm.work import StaticMixtureWorkSource, TokenEstimation


@dataclass
class Rows:
    """A dataset of which only the shard sizes matter."""

    name: str
    sizes: Sequence[int]

    @property
    def shards(self) -> list[ShardInfo]:
        return [ShardInfo(f"{i}.tar", n, 100 * n) for i, n in enumerate(self.sizes)]

    def __len__(self) -> int:
        return sum(self.sizes)

    def digest(self) -> str:
        return f"{self.name}:{list(self.sizes)}"

    def every_row(self) -> set[tuple[int, int]]:
        return {(shard, row) for shard, n in enumerate(self.sizes) for row in range(n)}


def source(*datasets: Rows, weights: Sequence[float] = (), **options: Any) -> Any:
    mixture = dict(zip((d.name for d in datasets), weights or [1] * len(datasets), strict=True))
    return StaticMixtureWorkSource(list(datasets), mixture, seed=options.pop("seed", 5), **options)


def lane_refs(
    work: Any, lane: int, num_lanes: int, *, chunk_size: int, limit: int = 10**9
) -> list[tuple[int, int, int]]:
    """Return the first `limit` references of a lane, or all of them."""
    refs: list[tuple[int, int, int]] = []
    state = work.start(lane, num_lanes)
    while len(refs) < limit:
        chunk, state = work.next(state, chunk_size)
        if chunk is None:
            break
        refs += map(tuple, chunk.refs.tolist())
    return refs[:limit]


def all_refs(work: Any, num_lanes: int, *, chunk_size: int = 7) -> list[tuple[int, int, int]]:
    lanes = range(num_lanes)
    return [
        ref for lane in lanes for ref in lane_refs(work, lane, num_lanes, chunk_size=chunk_size)
    ]


shard_sizes = st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any)


@given(
    sizes=shard_sizes,
    num_lanes=st.integers(1, 9),
    chunk_size=st.integers(1, 50),
    block=st.sampled_from([1, 3, 4096]),
    passes=st.integers(1, 11),
    shuffle=st.booleans(),
    stop=st.sampled_from(["first_exhausted", "all_exhausted"]),
)
@settings(deadline=None, max_examples=60)
def test_every_row_comes_once_a_pass_over_all_lanes(
    sizes: list[int],
    num_lanes: int,
    chunk_size: int,
    block: int,
    passes: int,
    shuffle: bool,
    stop: str,
) -> None:
    data = Rows("a", sizes)
    work = source(
        data, stop_after_passes=passes, stop=stop, shuffle=shuffle, shuffle_block_rows=block
    )
    counts = Counter(all_refs(work, num_lanes, chunk_size=chunk_size))
    assert counts == dict.fromkeys(((0, *row) for row in data.every_row()), passes)


@given(sizes=shard_sizes, num_lanes=st.integers(1, 9), passes=st.integers(1, 3))
@settings(deadline=None, max_examples=40)
def test_lanes_differ_by_one_row_a_pass_at_most(
    sizes: list[int], num_lanes: int, passes: int
) -> None:
    work = source(Rows("a", sizes), stop_after_passes=passes)
    lanes = range(num_lanes)
    counts = [len(lane_refs(work, lane, num_lanes, chunk_size=16)) for lane in lanes]
    assert max(counts) - min(counts) <= passes
    assert sum(counts) == passes * sum(sizes)


@given(
    sizes=shard_sizes,
    num_lanes=st.integers(1, 9),
    first=st.integers(1, 40),
    second=st.integers(1, 40),
)
@settings(deadline=None, max_examples=40)
def test_the_chunk_size_does_not_change_the_order_of_a_dataset(
    sizes: list[int], num_lanes: int, first: int, second: int
) -> None:
    work = source(Rows("a", sizes))
    lane = num_lanes - 1
    one = lane_refs(work, lane, num_lanes, chunk_size=first, limit=60)
    assert one == lane_refs(work, lane, num_lanes, chunk_size=second, limit=60)


@given(weights=st.lists(st.integers(1, 50), min_size=1, max_size=5), num_lanes=st.integers(1, 4))
@settings(deadline=None, max_examples=8)
def test_shares_are_exact_to_one_record_a_chunk(weights: list[int], num_lanes: int) -> None:
    work = source(*(Rows(f"d{i}", [50, 9]) for i in range(len(weights))), weights=weights)
    state = work.start(0, num_lanes)
    total = np.zeros(len(weights))
    wanted = np.array(weights) / sum(weights)
    for _ in range(200):
        chunk, state = work.next(state, 64)
        counts = np.bincount(chunk.refs[:, 0], minlength=len(weights))
        assert np.abs(counts - 64 * wanted).max() <= 1
        total += counts
    assert np.abs(total / total.sum() - wanted).max() <= 0.005


@pytest.mark.parametrize("options", [{}, {"stop_after_passes": 1}, {"shuffle": False}])
def test_it_keeps_the_contract_of_work_sources(options: dict[str, Any]) -> None:
    data = [Rows("a", [30, 0, 7]), Rows("b", [11])]
    check_work_source(source(*data, weights=[3, 1], **options))
    check_work_source(source(*data, stop="all_exhausted", **options), num_lanes=8)


@pytest.mark.slow
def test_another_process_gets_the_same_chunks() -> None:
    check_in_another_process(source(Rows("a", [30, 0, 7]), Rows("b", [11]), weights=[3, 1]))


def test_threads_that_share_a_source_get_what_each_would_alone() -> None:
    data = [Rows("a", [300] * 3), Rows("b", [70])]

    def read(lane: int) -> list[tuple[int, int, int]]:
        return lane_refs(shared, lane % 8, 8, chunk_size=16, limit=300)

    shared = source(*data, shuffle_block_rows=16)
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(read, range(32)))
    shared = source(*data, shuffle_block_rows=16)
    assert together == [read(lane) for lane in range(32)]


def test_the_order_is_the_same_in_every_version() -> None:
    # Pinned: a change here changes the data order of every run that resumes with this version.
    work = source(Rows("a", [40, 60]), Rows("b", [30]), weights=[3, 1])
    expected = [(1, 0, 23), (1, 0, 29), (0, 1, 39), (0, 1, 36), (0, 1, 56), (0, 1, 59)]
    assert lane_refs(work, 1, 3, chunk_size=6, limit=6) == expected


def test_the_natural_order_is_kept_without_shuffling() -> None:
    data = Rows("a", [3, 0, 4])
    refs = lane_refs(source(data, shuffle=False, stop_after_passes=2), 0, 1, chunk_size=5)
    assert [ref[1:] for ref in refs] == sorted(data.every_row()) * 2


def test_passes_seeds_and_datasets_have_different_orders() -> None:
    refs = lane_refs(source(Rows("a", [64] * 4)), 0, 1, chunk_size=64, limit=512)
    assert sorted(refs[:256]) == sorted(refs[256:])
    assert refs[:256] != refs[256:]
    assert refs != lane_refs(source(Rows("a", [64] * 4), seed=6), 0, 1, chunk_size=64, limit=512)
    assert refs != lane_refs(source(Rows("b", [64] * 4)), 0, 1, chunk_size=64, limit=512)


def test_an_endless_lane_that_often_owns_nothing_goes_on() -> None:
    refs = lane_refs(source(Rows("a", [2])), 3, 64, chunk_size=8, limit=40)
    assert set(refs) == {(0, 0, 0), (0, 0, 1)}


def test_a_state_is_a_few_small_integers() -> None:
    work = source(*(Rows(f"d{i}", [1000]) for i in range(8)))
    state = work.start(63, 64)
    for _ in range(50):
        _, state = work.next(state, 256)
    assert len(state) == 3 + 2 * 8
    assert len(json.dumps(state)) < 200


# CKP-08: sizes 1000 and 3, equal weights.
def test_first_exhausted_ends_when_the_small_dataset_is_through() -> None:
    work = source(Rows("big", [1000]), Rows("small", [3]), stop_after_passes=1)
    counts = Counter(ref[0] for ref in all_refs(work, 1, chunk_size=8))
    assert counts[1] == 3
    assert 2 <= counts[0] <= 5


@pytest.mark.parametrize("num_lanes", [1, 4])
def test_all_exhausted_gives_every_row_of_every_dataset(num_lanes: int) -> None:
    data = [Rows("big", [1000]), Rows("small", [3]), Rows("mid", [40, 2])]
    work = source(*data, weights=[1, 1, 2], stop_after_passes=2, stop="all_exhausted")
    counts = Counter(all_refs(work, num_lanes, chunk_size=16))
    rows = {(i, *row) for i, d in enumerate(data) for row in d.every_row()}
    assert counts == dict.fromkeys(rows, 2)


def test_endless_reading_repeats_the_small_dataset() -> None:
    refs = lane_refs(source(Rows("big", [1000]), Rows("small", [3])), 0, 1, chunk_size=8, limit=400)
    assert Counter(ref[0] for ref in refs) == {0: 200, 1: 200}


def test_ckp_07_a_weight_of_zero_leaves_a_dataset_out() -> None:
    work = source(Rows("a", [5]), Rows("b", []), Rows("c", [5]), weights=[1, 0, 1])
    assert [dataset.name for dataset in work.datasets] == ["a", "c"]
    assert {ref[0] for ref in lane_refs(work, 0, 1, chunk_size=4, limit=20)} == {0, 1}


def tokens_of(dataset: int, rows: list[tuple[int, int]]) -> list[int | None]:
    """Dataset 0 has 100 tokens a row, dataset 1 has 300 but every third row is defective."""
    if dataset == 0:
        return [100] * len(rows)
    return [None if row % 3 == 0 else 300 for _, row in rows]


def test_token_estimation_makes_weights_shares_of_tokens() -> None:
    data = [Rows("a", [300]), Rows("b", [300, 300])]
    work = source(*data, token_estimation=TokenEstimation(sample_rows=600))
    assert work.needs_constants
    with pytest.raises(ConfigError, match="with_constants"):
        work.next(work.start(0, 1), 8)
    constants = json.loads(json.dumps(work.estimate(tokens_of)))
    assert constants["tokens_per_row"] == {"a": 100.0, "b": 200.0}
    assert constants["tokens_per_byte"] == {"a": 1.0, "b": 2.0}
    ready = work.with_constants(constants)
    assert (ready.needs_constants, ready.constants) == (False, constants)
    assert work.needs_constants
    refs = lane_refs(ready, 0, 1, chunk_size=30, limit=300)
    assert Counter(ref[0] for ref in refs) == {0: 200, 1: 100}
    assert ready.fingerprint() != work.fingerprint()
    check_work_source(ready)


def test_the_estimation_sample_is_a_function_of_the_seed_alone() -> None:
    asked: list[list[tuple[int, int]]] = []

    def measure(dataset: int, rows: list[tuple[int, int]]) -> list[int | None]:
        asked.append(rows)
        return [1] * len(rows)

    data = Rows("a", [500, 0, 800])
    for seed in (1, 1, 2):
        source(data, seed=seed, token_estimation=TokenEstimation()).estimate(measure)
    assert asked[0] == asked[1] != asked[2]
    assert 50 <= len(asked[0]) == len(set(asked[0])) <= 64
    assert set(asked[0]) <= data.every_row()


def test_constants_that_do_not_fit_are_errors() -> None:
    work = source(Rows("a", [9]), token_estimation=TokenEstimation())
    with pytest.raises(ConfigError, match="none of 9 sampled rows of dataset 'a'"):
        work.estimate(lambda dataset, rows: [None] * len(rows))


def test_constants_of_some_datasets_leave_the_others_to_be_measured() -> None:
    data = [Rows("a", [300]), Rows("b", [300, 300])]
    work = source(*data, token_estimation=TokenEstimation(sample_rows=600))
    known = {"tokens_per_row": {"a": 7.0, "c": 1.0}, "tokens_per_byte": {"a": 8.0, "c": 1.0}}
    partly = work.with_constants(known)
    assert partly.needs_constants
    constants = partly.estimate(tokens_of)
    assert constants["tokens_per_row"] == {"a": 7.0, "b": 200.0}
    assert constants["tokens_per_byte"] == {"a": 8.0, "b": 2.0}
    assert not partly.with_constants(constants).needs_constants


def test_the_fingerprint_depends_on_every_setting() -> None:
    a, b = Rows("a", [9]), Rows("b", [9])
    sources = [
        source(a, b),
        source(a, b, seed=6),
        source(a, b, weights=[1, 2]),
        source(a, Rows("b", [8])),
        source(a, b, stop_after_passes=1),
        source(a, b, stop="all_exhausted"),
        source(a, b, shuffle=False),
        source(a, b, shuffle_block_rows=8),
        source(a, b, token_estimation=TokenEstimation()),
        source(a, b, token_estimation=TokenEstimation(sample_rows=8)),
    ]
    assert len({json.dumps(work.fingerprint(), sort_keys=True) for work in sources}) == len(sources)


# Mixtures that follow one another; tests/laws/test_lineage.py has the law for whole runs.


@given(
    first=st.lists(st.integers(1, 9), min_size=2, max_size=2),
    second=st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any),
    until=st.integers(0, 9),
    chunk_size=st.integers(1, 9),
    options=st.fixed_dictionaries(
        {
            "stop_after_passes": st.sampled_from([None, 1, 3]),
            "stop": st.sampled_from(["first_exhausted", "all_exhausted"]),
        }
    ),
)
def test_a_source_with_a_history_is_one_source_and_then_another(
    first: list[int], second: list[int], until: int, chunk_size: int, options: dict[str, Any]
) -> None:
    data = [Rows("a", [9, 5]), Rows("b", [11]), Rows("c", [8, 1])]
    old = source(*data[:2], weights=first, **options)
    new = source(*data, weights=second, **options)
    total = sum(first)
    history = [(until, {"a": first[0] / total, "b": first[1] / total})]
    both = new.with_history(["a", "b"], history)
    kept = [index for index, weight in enumerate(second) if weight]
    places = [*range(2), *(index for index in kept if index == 2)]  # datasets of `both`
    check_work_source(both) if options["stop_after_passes"] is None else None
    state, plain = both.start(1, 2), old.start(1, 2)
    for number in range(until):
        chunk, state = both.next(state, chunk_size)
        expected, plain = old.next(plain, chunk_size)
        assert chunk.refs.tolist() == ([] if expected is None else expected.refs.tolist())
        assert state == both.carried(plain, number + 1)
    at = {index: state[3 + 2 * place : 5 + 2 * place] for place, index in enumerate(places)}
    plain = (1, 2, until, *(n for index in kept for n in at[index]))
    for _ in range(9):
        chunk, state = both.next(state, chunk_size)
        expected, plain = new.next(plain, chunk_size)
        assert (chunk is None) == (expected is None)
        if chunk is None:
            break
        numbered = [(kept[d], shard, row) for d, shard, row in expected.refs.tolist()]
        assert [(places[d], shard, row) for d, shard, row in chunk.refs.tolist()] == numbered


def test_a_history_needs_its_datasets() -> None:
    with pytest.raises(ConfigError, match=r"needs datasets \['b'\], this source has \['a'\]"):
        source(Rows("a", [9])).with_history(["b", "a"], [])


@pytest.mark.parametrize(
    ("mixture", "found"),
    [
        ({"a": 1}, r"mixture names \['a'\], datasets are \['a', 'b'\]"),
        ({"a": 1, "b": 1, "c": 1}, r"mixture names \['a', 'b', 'c'\]"),
        ({"a": 1, "b": -1}, r"mixture\['b'\] is -1.0"),
        ({"a": 1, "b": float("nan")}, r"mixture\['b'\] is nan"),
        ({"a": 0, "b": 0}, "all weights .* are 0"),
    ],
)
def test_a_mixture_that_cannot_work_is_named(mixture: dict[str, float], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        StaticMixtureWorkSource([Rows("a", [1]), Rows("b", [1])], mixture, seed=0)


def test_settings_that_cannot_work_are_named() -> None:
    with pytest.raises(ConfigError, match=r"datasets \['a'\] appear twice"):
        StaticMixtureWorkSource([Rows("a", [1]), Rows("a", [1])], {"a": 1}, seed=0)
    with pytest.raises(ConfigError, match="dataset 'a' has no rows"):
        source(Rows("a", [0]))
    for option in ({"stop_after_passes": 0}, {"stop": "never"}, {"shuffle_block_rows": 0}):
        with pytest.raises(ConfigError, match=next(iter(option))):
            source(Rows("a", [1]), **option)
    with pytest.raises(ConfigError, match="sample_rows"):
        TokenEstimation(sample_rows=0)
    with pytest.raises(ConfigError, match=r"lane must be in \[0, 2\), got 2"):
        source(Rows("a", [1])).start(2, 2)
    with pytest.raises(ConfigError, match="chunk_size"):
        source(Rows("a", [1])).next((0, 1, 0, 0, 0), 0)
