"""A state taken after any batch goes on with exactly the batches that follow, on any topology."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fixtures.memory import Recipe, dataset, digests, random_rows, take
from zephon_mm.checkpoint import merge_checkpoints
from zephon_mm.errors import CheckpointError, ConfigError

N = 12
TOPOLOGIES = [(1, 1), (1, 4), (2, 3), (3, 4), (4, 1), (6, 2), (12, 1)]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* ranks on .* lanes measure each sample"),
    pytest.mark.filterwarnings("ignore:a shuffle buffer of .* never fills"),
]
drawn_runs = settings(
    max_examples=15,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def endless(recipe: Recipe) -> Recipe:
    return replace(recipe, lanes=5, global_batch_size=N)


@pytest.fixture(scope="module")
def finite(recipe: Recipe) -> Recipe:
    return replace(recipe, lanes=5, global_batch_size=N, passes=2, stop="all_exhausted")


State = Mapping[str, Any]


def run(
    recipe: Recipe,
    dp: int,
    microbatch: int,
    groups: int,
    state: State | None = None,
    **options: Any,
) -> tuple[dict[int, str], dict[str, Any]]:
    """Deliver so many groups of dp * B sequences on all ranks; return rows and merged state."""
    options = {"prefetch_batches": 2} | options  # inline, a checkpoint waits for them
    found: dict[int, str] = {}
    parts = []
    for rank in range(dp):
        with recipe.build(
            dp=dp, rank=rank, microbatch=microbatch, state=state, **options
        ) as pipeline:
            found |= digests(take(pipeline, groups))
            parts.append(pipeline.checkpoint())
    return found, json.loads(json.dumps(merge_checkpoints(parts)))


def comparable(state: State) -> dict[str, Any]:
    """Return what two topologies' states have in common."""
    return {k: v for k, v in state.items() if k not in ("dp_degree", "dp_rank", "complete")}


def all_rows(recipe: Recipe, count: int) -> dict[int, str]:
    with recipe.build(microbatch=1) as pipeline:
        return digests(take(pipeline, count))


# CKP-01, CKP-20, ZEP-01.
@drawn_runs
@given(
    legs=st.lists(
        st.tuples(st.sampled_from(TOPOLOGIES), st.integers(0, 3), st.integers(1, 4)),
        min_size=2,
        max_size=3,
    ),
    ends=st.booleans(),
    lanes=st.sampled_from([1, 3, 5, 16]),
    window=st.tuples(st.integers(1, 5), st.integers(1, 3)),
)
def test_a_chain_of_restores_gives_what_one_run_gives(
    endless: Recipe, finite: Recipe, legs: Any, ends: bool, lanes: int, window: tuple[int, int]
) -> None:
    recipe = replace(
        finite if ends else endless, lanes=lanes, chunk_size=window[0], chunks_per_window=window[1]
    )
    found: dict[int, str] = {}
    state = None
    for (dp, microbatch), steps, ahead in legs:
        groups = steps * N // (dp * microbatch)
        rows, state = run(recipe, dp, microbatch, groups, state, prefetch_batches=ahead)
        assert rows.keys().isdisjoint(found)
        found |= rows
        assert state["delivered"] == len(found)
    expected = all_rows(recipe, sum(steps for _, steps, _ in legs) * N)
    assert found == expected


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize(("dp", "microbatch"), [(1, 1), (2, 1), (3, 2), (12, 1)])
def test_merged_parts_are_what_one_rank_would_have_written(
    endless: Recipe, finite: Recipe, dp: int, microbatch: int, ends: bool
) -> None:
    recipe = finite if ends else endless
    for groups in range(4):
        _, parts = run(recipe, dp, microbatch, groups)
        _, whole = run(recipe, 1, 1, groups * dp * microbatch)
        assert comparable(parts) == comparable(whole)


# CKP-05.
@pytest.mark.parametrize("ends", [False, True])
def test_every_batch_of_every_step_is_a_place_to_restore_from(
    endless: Recipe, finite: Recipe, ends: bool
) -> None:
    recipe = finite if ends else endless
    expected = all_rows(recipe, 3 * N)
    with recipe.build(microbatch=1) as pipeline:
        states = [pipeline.checkpoint()]
        for batch in take(pipeline, 2 * N):
            states.append(pipeline.checkpoint(after=batch))
    for delivered, state in enumerate(states):
        assert state["delivered"] == delivered
        with recipe.build(microbatch=1, state=state) as pipeline:
            tail = digests(take(pipeline, 3))
        assert tail == {n: expected[n] for n in range(delivered, delivered + 3)}


@pytest.mark.parametrize("ends", [False, True])
def test_a_state_taken_inside_a_step_needs_a_topology_that_divides_the_rest(
    endless: Recipe, finite: Recipe, ends: bool
) -> None:
    recipe = finite if ends else endless
    expected = all_rows(recipe, 2 * N)
    _, state = run(recipe, 2, 1, 3)  # 6 of 12
    for dp, microbatch in [(1, 1), (2, 3), (3, 2), (6, 1)]:
        rows, _ = run(recipe, dp, microbatch, 6 // (dp * microbatch), state)
        assert rows == {n: expected[n] for n in range(6, 12)}
    with pytest.raises(ConfigError, match=r"inside a step: 6 of its 12 .* = 4 .* dp_degree may be"):
        recipe.build(dp=4, microbatch=1, state=state)


@pytest.mark.parametrize("ends", [False, True])
def test_without_a_global_batch_size_a_run_goes_on_from_anywhere(
    endless: Recipe, finite: Recipe, ends: bool
) -> None:
    recipe = replace(finite if ends else endless, global_batch_size=None)
    expected = all_rows(recipe, 26)
    _, state = run(recipe, 2, 1, 3)  # 6 sequences
    rows, state = run(recipe, 1, 4, 3, state)
    assert rows == {n: expected[n] for n in range(6, 18)}
    rows, _ = run(recipe, 4, 2, 1, state)
    assert rows == {n: expected[n] for n in range(18, 26)}


@pytest.mark.parametrize("ends", [False, True])
def test_a_state_taken_right_after_a_restore_is_the_state_restored(
    endless: Recipe, finite: Recipe, ends: bool
) -> None:
    recipe = finite if ends else endless
    for groups in range(4):
        _, state = run(recipe, 3, 2, groups)
        for dp in (1, 3, 6):
            with recipe.build(dp=dp, rank=dp - 1, microbatch=1, state=state) as pipeline:
                assert comparable(pipeline.checkpoint()) == comparable(state)
                iter(pipeline)
                assert comparable(pipeline.checkpoint()) == comparable(state)


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("runner", ["inline", "thread"])
def test_what_is_prefetched_does_not_show_in_the_state(
    endless: Recipe, finite: Recipe, runner: str, ends: bool
) -> None:
    recipe = finite if ends else endless
    states = []
    for ahead in (1, 40):
        with recipe.build(microbatch=1, runner=runner, prefetch_batches=ahead) as pipeline:
            states.append([pipeline.checkpoint(after=b) for b in take(pipeline, 7)])
            states[-1].append(pipeline.checkpoint())
    assert states[0] == states[1]
    assert states[0][-1] == states[0][-2]


def test_a_batch_delivered_long_ago_still_has_its_state(endless: Recipe) -> None:
    with endless.build(microbatch=1) as pipeline:
        batches = iter(pipeline)
        oldest = next(batches)
        state = pipeline.checkpoint()
        for _ in range(200):  # over 64 windows in some lane
            next(batches)
        assert pipeline.checkpoint(after=oldest) == state


def test_prefetching_over_many_windows_leaves_the_current_state_known(endless: Recipe) -> None:
    recipe = replace(endless, lanes=1, chunk_size=1, chunks_per_window=1)  # a sequence a window
    with recipe.build(microbatch=2, prefetch_batches=80) as pipeline:
        batches = iter(pipeline)
        for delivered in range(2, 40, 2):
            next(batches)
            state = pipeline.checkpoint()
            assert state["lanes"]["0"][0] == state["delivered"] == delivered


def test_a_batch_of_another_run_is_refused(endless: Recipe) -> None:
    with endless.build(microbatch=2) as pipeline:
        foreign = take(pipeline, 3)[-1]
    with (
        endless.build(microbatch=2) as pipeline,
        pytest.raises(CheckpointError, match=r"ends at sequence 6 is not among the last"),
    ):
        pipeline.checkpoint(after=foreign)


@pytest.mark.parametrize(("dp", "microbatch"), TOPOLOGIES)
def test_every_rank_of_a_finite_run_stops_at_the_same_step(
    finite: Recipe, dp: int, microbatch: int
) -> None:
    with replace(finite, global_batch_size=1).build() as pipeline:
        total = len(take(pipeline, 10_000))
    steps = total // N
    counts, leftover = set(), set()
    for rank in range(dp):
        with finite.build(dp=dp, rank=rank, microbatch=microbatch) as pipeline:
            counts.add(len(take(pipeline, 10_000)))
            leftover.add(pipeline.metrics().get("leftover_sequences", 0))
            assert take(pipeline, 1) == []
    assert counts == {steps * N // (dp * microbatch)}
    assert leftover == {total - steps * N}
    assert total - steps * N < N


# CKP-19.
def test_a_state_taken_at_the_end_gives_nothing_more(finite: Recipe) -> None:
    with finite.build(microbatch=4) as pipeline:
        assert take(pipeline, 10_000)
        state = pipeline.checkpoint()
    with finite.build(dp=3, rank=1, microbatch=2, state=state) as pipeline:
        assert take(pipeline, 10) == []
        assert comparable(pipeline.checkpoint()) == comparable(state)


def test_passes_give_every_row_exactly_once_each(finite: Recipe) -> None:
    recipe = replace(finite, global_batch_size=1, max_length=256)
    with recipe.build() as pipeline:
        keys = [key for batch in take(pipeline, 10_000) for row in batch.keys for key in row]
    expected = [
        d.key(shard, row)
        for d in recipe.datasets
        for shard, info in enumerate(d.shards)
        for row in range(info.num_rows)
    ]
    assert sorted(keys) == sorted(expected * 2)


def test_one_row_on_many_lanes_ends_too() -> None:
    recipe = Recipe(
        datasets=(dataset("a", random_rows(1, 1, [])),), lanes=9, passes=3, global_batch_size=1
    )
    with recipe.build() as pipeline:
        first = take(pipeline, 2)
        state = pipeline.checkpoint()
        assert len(first + take(pipeline, 10)) == 3
    with recipe.build(state=state) as pipeline:
        assert len(take(pipeline, 10)) == 1
