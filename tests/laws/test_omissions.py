"""A run without some steps or rows is the same run, but for those."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fixtures.memory import Recipe, dataset, digests, random_rows, take
from zephon_mm.checkpoint import merge_checkpoints
from zephon_mm.errors import CheckpointError, ConfigError, DataQualityError, SampleError
from zephon_mm.pipeline import Pipeline
from zephon_mm.records import Chunk, Document, FileBlob, State
from zephon_mm.work import StaticMixtureWorkSource

N = 6
TOPOLOGIES = [(1, 1), (1, 6), (2, 1), (3, 2), (6, 1)]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* ranks on .* lanes measure each sample"),
    pytest.mark.filterwarnings("ignore:a shuffle buffer of .* never fills"),
]
drawn_runs = settings(
    max_examples=15,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)

Rows = dict[int, tuple[str, tuple[str, ...]]]
"""Global number -> (digest, keys)."""


@pytest.fixture(scope="module")
def endless(recipe: Recipe, blobs: list[FileBlob], tmp_path_factory: Any) -> Recipe:
    folder = tmp_path_factory.mktemp("index")  # so that what is drawn comes from an index, too
    a = dataset("a", random_rows(1, 40, blobs), cache_dir=folder)
    b = dataset("b", random_rows(2, 23, blobs), shard_rows=5, cache_dir=folder)
    return replace(recipe, datasets=(a, b), lanes=5, global_batch_size=N, shuffle=3)


def run(
    recipe: Recipe,
    topology: tuple[int, int],
    groups: int,
    state: Mapping[str, Any] | None = None,
    omit: Mapping[str, Any] = {},
    **options: Any,
) -> tuple[Rows, dict[str, Any]]:
    """Deliver groups of dp * B sequences on all ranks; return them, and the merged state."""
    dp, microbatch = topology
    found: Rows = {}
    parts = []
    for rank in range(dp):
        with recipe.build(dp=dp, rank=rank, microbatch=microbatch, **options) as pipeline:
            pipeline.restore(state or pipeline.checkpoint(), **omit)
            batches = take(pipeline, groups)
            rows = digests(batches)
            keys = [row for batch in batches for row in batch.keys]
            assert rows.keys().isdisjoint(found)
            found |= {n: (row, names) for (n, row), names in zip(rows.items(), keys, strict=True)}
            parts.append(pipeline.checkpoint())
    return found, json.loads(json.dumps(merge_checkpoints(parts)))


def run_legs(
    recipe: Recipe,
    legs: Sequence[tuple[tuple[int, int], int]],
    state: Any,
    omit: Any,
    **options: Any,
) -> tuple[Rows, dict[str, Any]]:
    """Run whole steps on one topology after another; the first restore leaves something out."""
    found: Rows = {}
    for (dp, microbatch), steps in legs:
        groups = steps * N // (dp * microbatch)
        rows, state = run(recipe, (dp, microbatch), groups, state, omit, **options)
        assert rows.keys().isdisjoint(found)
        found, omit = found | rows, {}
    return found, state


legs_drawn = st.lists(
    st.tuples(st.sampled_from(TOPOLOGIES), st.integers(0, 2)), min_size=2, max_size=3
)


# Steps.


@drawn_runs
@given(
    legs=legs_drawn,
    before=st.integers(0, 2),
    skipped=st.sets(st.integers(2, 7)),
    ends=st.booleans(),
    lanes=st.sampled_from([1, 3, 8]),
    balance=st.booleans(),
)
def test_a_run_that_skips_steps_is_the_run_without_them(
    endless: Recipe,
    legs: Any,
    before: int,
    skipped: set[int],
    ends: bool,
    lanes: int,
    balance: bool,
) -> None:
    recipe = replace(endless, lanes=lanes, passes=2 if ends else None, stop="all_exhausted")
    straight, _ = run(recipe, (1, 1), 15 * N)
    kept = [n for n in sorted(straight) if n // N >= before and n // N not in skipped]
    _, state = run(recipe, (1, 2), before * N // 2, balance=balance)
    found, last = run_legs(recipe, legs, state, {"skip_steps": skipped}, balance=balance)
    assert found == {n: straight[n] for n in kept[: len(found)]}
    assert last["delivered"] == (max(found) + 1 if found else before * N)
    assert ends or len(found) == N * sum(steps for _, steps in legs)


@pytest.mark.parametrize("passes", [None, 120])
def test_steps_are_skipped_from_inside_a_step_and_a_state_of_before_them_is_not_lost(
    endless: Recipe, passes: int | None
) -> None:
    recipe = replace(endless, passes=passes, lanes=1)
    straight = {planned.number: planned.keys for planned in recipe.build().plan(190 * N)}
    _, middle = run(recipe, (1, 2), 1)
    with recipe.build(prefetch_batches=8) as pipeline:
        pipeline.restore(middle, skip_steps=range(1, 189))  # more than a lane remembers
        rest = take(pipeline, 4)
        state = pipeline.checkpoint()
        batch = next(iter(pipeline))
    assert [batch.keys for batch in rest] == [(straight[n],) for n in range(2, 6)]
    assert batch.sequence_ids.tolist() == [189 * N]
    assert state["delivered"] == N
    more, _ = run(recipe, (3, 2), 1, state)
    assert {n: keys for n, (_, keys) in more.items()} == {
        n: straight[n] for n in range(189 * N, 190 * N)
    }


# Rows.


@dataclass(frozen=True)
class Dropping:
    """A source without some rows from a chunk of every lane on: the obvious reference."""

    source: StaticMixtureWorkSource
    keys: Collection[str]
    since: int
    finite: bool

    @property
    def datasets(self) -> Sequence[Any]:
        return self.source.datasets

    def start(self, lane: int, num_lanes: int) -> State:
        return self.source.start(lane, num_lanes)

    def next(self, state: State, chunk_size: int) -> tuple[Chunk | None, State]:
        chunk, after = self.source.next(state, chunk_size)
        if chunk is None or int(state[2]) < self.since:
            return chunk, after
        names = [self.datasets[d].key(shard, row) for d, shard, row in chunk.refs.tolist()]
        return Chunk(chunk.refs[[name not in self.keys for name in names]]), after

    def fingerprint(self) -> Mapping[str, Any]:
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Without(Recipe):
    """The recipe whose source is `Dropping`."""

    keys: frozenset[str]
    window: int

    def source(self) -> Any:
        source = Recipe.source(self)
        return Dropping(source, self.keys, self.window * self.chunks_per_window, source.finite)


def without(recipe: Recipe, keys: Collection[str], window: int) -> Without:
    known = {name: getattr(recipe, name) for name in Recipe.__dataclass_fields__}
    return Without(**known, keys=frozenset(keys), window=window)


keys_drawn = st.sets(
    st.one_of(
        st.integers(0, 39).map(lambda row: f"a/{row}"), st.integers(0, 22).map(lambda r: f"b/{r}")
    ),
    min_size=1,
    max_size=30,
)


@drawn_runs
@given(
    keys=keys_drawn,
    legs=legs_drawn,
    before=st.integers(0, 9),
    passes=st.sampled_from([None, 2]),
    lanes=st.sampled_from([1, 3, 8]),
    algorithm=st.sampled_from(["best_fit", "wrap"]),
    options=st.fixed_dictionaries(
        {"balance": st.booleans(), "index": st.sampled_from(["fill", "off"])}
    ),
)
def test_excluded_rows_are_in_no_batch_and_the_others_are_as_if_never_drawn(
    endless: Recipe,
    keys: set[str],
    legs: Any,
    before: int,
    passes: int | None,
    lanes: int,
    algorithm: str,
    options: Any,
) -> None:
    base = replace(endless, passes=passes, lanes=lanes, algorithm=algorithm, global_batch_size=N)
    recipe = replace(base, stop="all_exhausted")
    _, state = run(recipe, (1, 1), before, **options | {"balance": False})
    legs = [((1, 1), 1)] if before % N else legs
    found, last = run_legs(recipe, legs, state, {"exclude_keys": keys}, **options)
    reference = without(recipe, keys, last["lineage"][0]["window"])
    expected, _ = run(reference, (1, 1), 12 * N)
    for number, (row, names) in found.items():
        assert names == tuple(name for name in expected[number][1] if name not in keys)
        assert row == expected[number][0] or names != expected[number][1]


@drawn_runs
@given(keys=keys_drawn, topology=st.sampled_from(TOPOLOGIES), lanes=st.sampled_from([1, 3, 8]))
def test_rows_excluded_from_the_start_are_as_good_as_filtered_out(
    endless: Recipe, blobs: Any, keys: set[str], topology: tuple[int, int], lanes: int
) -> None:
    recipe = replace(endless, lanes=lanes, max_error_rate=1.0)
    rows = {"a": random_rows(1, 40, blobs), "b": random_rows(2, 23, blobs)}
    segments = {rows[key[0]][int(key[2:])] for key in keys}

    def fit(document: Document) -> Document:
        if document.segments in segments:
            raise SampleError("unfit", "it is among those to drop")
        return document

    found, state = run(recipe, topology, 2, omit={"exclude_keys": keys})
    expected, filtered = run(recipe, topology, 2, fn=fit, index="off")
    assert found == expected
    assert state["lanes"] == filtered["lanes"]


def test_excluded_rows_are_counted(endless: Recipe) -> None:
    with endless.build(microbatch=N) as pipeline:
        pipeline.restore(pipeline.checkpoint(), exclude_keys=[f"a/{n}" for n in range(30)])
        take(pipeline, 5)
        assert pipeline.metrics()["skipped"]["excluded"] > 10


def test_excluding_all_that_a_lane_has_is_an_error_not_a_hang(endless: Recipe) -> None:
    every = [f"a/{n}" for n in range(40)] + [f"b/{n}" for n in range(23)]
    with endless.build() as pipeline:
        pipeline.restore(pipeline.checkpoint(), exclude_keys=every)
        with pytest.raises(DataQualityError, match=r"gave no sequence.*'excluded': "):
            take(pipeline, 1)


# The lineage.


def test_the_lineage_tells_what_is_left_out_from_where_and_says_it_once(endless: Recipe) -> None:
    _, state = run(endless, (1, 1), 2 * N)
    omit = {"skip_steps": [7, 3, 4], "exclude_keys": ["b/3", "a/11", "a/2"]}
    _, later = run(endless, (2, 1), 3, state, omit)
    window = 1 + max(window for window, _, _ in state["lanes"].values())
    steps, rows = later["lineage"]
    assert steps == {
        **{"name": "skip_steps", "delivered": 2 * N, "window": None},
        **{"old": {}, "new": {"steps": [[3, 5], [7, 8]]}},
    }
    assert rows == {
        **{"name": "exclude_keys", "delivered": 2 * N, "window": window},
        **{"old": {}, "new": {"keys": ["a/11", "a/2", "b/3"]}},
    }
    _, last = run(endless, (1, 1), N, later, omit)
    assert last["lineage"] == later["lineage"]
    _, more = run(endless, (1, 1), N, last, {"exclude_keys": ["a/2", "a/3"], "skip_steps": [3, 9]})
    assert [entry["new"] for entry in more["lineage"][2:]] == [
        {"steps": [[9, 10]]},
        {"keys": ["a/3"]},
    ]
    json.dumps(more)


@pytest.mark.parametrize(
    ("omit", "message"),
    [
        ({"exclude_keys": ["c/1"]}, r"'c/1' is no sample of the datasets \['a', 'b'\]"),
        ({"exclude_keys": ["a/40"]}, "'a/40' is no sample"),
        ({"exclude_keys": "a/1"}, "'/' is no sample"),
        ({"exclude_keys": ["a/²"]}, "'a/²' is no sample"),
        ({"exclude_keys": [7]}, "7 is no sample"),
        ({"skip_steps": [2, 0]}, "step 0 was begun, 2 sequences are delivered"),
    ],
)
def test_what_cannot_be_left_out_is_named(endless: Recipe, omit: Any, message: str) -> None:
    _, state = run(endless, (1, 1), 2)
    with pytest.raises(ConfigError, match=message):
        run(endless, (1, 1), 1, state, omit)


def test_steps_that_depend_on_the_ranks_cannot_be_skipped(endless: Recipe) -> None:
    with pytest.raises(ConfigError, match=r"step 2 depends on the ranks: set batch"):
        run(replace(endless, global_batch_size=None), (1, 1), 1, omit={"skip_steps": [2]})


def test_steps_are_whole_numbers(endless: Recipe) -> None:
    with pytest.raises(TypeError, match="float"):
        run(endless, (1, 1), 1, omit={"skip_steps": [2.5]})


def test_rows_cannot_leave_a_step_that_is_dealt(endless: Recipe) -> None:
    _, state = run(endless, (2, 1), 1, balance=True)
    with pytest.raises(CheckpointError, match="take one at the end of a step"):
        run(endless, (2, 1), 1, state, {"exclude_keys": ["a/1"]}, balance=True)


def test_raw_samples_have_neither(endless: Recipe) -> None:
    pipeline = Pipeline(endless.source()).options(runner="inline").batch(microbatch_size=1)
    with pipeline, pytest.raises(ConfigError, match="not raw samples"):
        pipeline.restore(pipeline.checkpoint(), skip_steps=[1])
