"""A run whose recipe changes by name goes on as if one source had made the change at a window."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from tests.fixtures.memory import PROCESSOR, Recipe, dataset, digests, random_rows, take
from tests.fixtures.tokenizers import byte_level_bpe
from zephon_mm.checkpoint import merge_checkpoints
from zephon_mm.errors import CheckpointError, ConfigError, DataQualityError
from zephon_mm.io import Dataset
from zephon_mm.pipeline import Pipeline
from zephon_mm.records import Chunk, FileBlob, State, Text
from zephon_mm.work import StaticMixtureWorkSource, TokenEstimation

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* ranks on .* lanes measure each sample"),
    pytest.mark.filterwarnings("ignore:a shuffle buffer of .* never fills"),
]

# The obvious reference: one source after the other, each from the positions of that before it.


class Spliced:
    """Gives in each lane the chunks of one recipe's source, then of the next, by chunk number.

    Args:
        legs: (recipe, number of the first chunk that is not of it any more), ascending; the last
            recipe's number is ignored. A recipe lists its datasets in the order of the last.
    """

    def __init__(self, legs: Sequence[tuple[Recipe, int]]) -> None:
        self._sources = [recipe.source() for recipe, _ in legs]
        self._until = [until for _, until in legs]
        self.datasets: Sequence[Dataset] = legs[-1][0].datasets
        self.finite = self._sources[0].finite
        self._lanes: dict[Any, tuple[list[np.ndarray], dict[str, Any]]] = {}  # so far

    def start(self, lane: int, num_lanes: int) -> State:
        return (lane, num_lanes, 0)

    def next(self, state: State, chunk_size: int) -> tuple[Chunk | None, State]:
        lane, num_lanes, number = (int(part) for part in state)
        chunks = self._chunks(lane, num_lanes, number, chunk_size)
        if len(chunks) <= number:
            return None, state
        return Chunk(chunks[number]), (lane, num_lanes, number + 1)

    def fingerprint(self) -> Mapping[str, Any]:
        return {"spliced": [source.fingerprint() for source in self._sources]}

    def _chunks(self, lane: int, num_lanes: int, last: int, chunk_size: int) -> list[np.ndarray]:
        """Return the references of all chunks up to a number, from the lane's very beginning on."""
        names = [d.name for d in self.datasets]
        key = (lane, num_lanes, chunk_size)
        found, positions = self._lanes.setdefault(key, ([], dict.fromkeys(names, (0, 0))))
        while len(found) <= last:
            past = sum(len(found) >= until for until in self._until[:-1])
            source = self._sources[past]
            mine = [d.name for d in source.datasets]
            at = [n for name in mine for n in positions[name]]
            chunk, after = source.next((lane, num_lanes, len(found), *at), chunk_size)
            if chunk is None and past == len(self._sources) - 1:
                break
            refs = np.empty((0, 3), dtype=np.int64) if chunk is None else chunk.refs.copy()
            refs[:, 0] = np.array([names.index(name) for name in mine])[refs[:, 0]]
            positions |= dict(zip(mine, zip(after[3::2], after[4::2], strict=True), strict=True))
            found.append(refs)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Changing(Recipe):
    """The recipe whose source is `Spliced`."""

    legs: tuple[tuple[Recipe, int], ...] = ()

    def source(self) -> Any:
        return Spliced(self.legs)


# Runs of several legs.


@pytest.fixture(scope="module")
def three(recipe: Recipe, blobs: list[FileBlob]) -> Recipe:
    """Three datasets; without a global batch size, so that any topology goes on from anywhere."""
    c = dataset("c", random_rows(3, 31, blobs), shard_rows=4)
    return replace(
        recipe, datasets=(*recipe.datasets, c), weights=(0.5, 0.3, 0.2), global_batch_size=None
    )


def mixed(base: Recipe, *mixtures: Sequence[float]) -> list[Recipe]:
    """Return a recipe for each mixture, which has the datasets that had a weight so far."""
    recipes = []
    order: list[int] = []
    for weights in mixtures:
        order += [i for i, weight in enumerate(weights) if weight and i not in order]
        datasets = tuple(base.datasets[i] for i in order)
        recipes.append(replace(base, datasets=datasets, weights=tuple(weights[i] for i in order)))
    return recipes


def run(
    recipe: Recipe,
    topology: tuple[int, int],
    groups: int,
    state: Mapping[str, Any] | None = None,
    allow: Sequence[str] = (),
    **options: Any,
) -> tuple[dict[int, tuple[str, tuple[str, ...]]], dict[str, Any]]:
    """Deliver groups of dp * B sequences on all ranks.

    Returns:
        Number -> (row digest, keys) of each sequence, and the merged state.
    """
    dp, microbatch = topology
    found: dict[int, tuple[str, tuple[str, ...]]] = {}
    parts = []
    for rank in range(dp):
        with recipe.build(dp=dp, rank=rank, microbatch=microbatch, **options) as pipeline:
            if state is not None:
                pipeline.restore(state, allow=allow)
            batches = take(pipeline, groups)
            keys = {
                n: row
                for batch in batches
                for n, row in zip(batch.sequence_ids.tolist(), batch.keys, strict=True)
            }
            found |= {n: (row, tuple(keys[n])) for n, row in digests(batches).items()}
            parts.append(pipeline.checkpoint())
    return found, json.loads(json.dumps(merge_checkpoints(parts)))


def first_free_window(state: Mapping[str, Any]) -> int:
    return 1 + max((window for window, _, _ in state["lanes"].values()), default=-1)


def run_legs(
    recipes: Sequence[Recipe], legs: Sequence[tuple[tuple[int, int], int]], **options: Any
) -> tuple[dict[int, tuple[str, tuple[str, ...]]], Changing]:
    """Run two times so many groups of each recipe.

    Returns:
        The sequences, and the recipe that says the same at once.
    """
    found: dict[int, tuple[str, tuple[str, ...]]] = {}
    state = None
    until: list[int] = []
    for recipe, (topology, groups) in zip(recipes, legs, strict=True):
        if state is not None:
            until.append(first_free_window(state) * recipe.chunks_per_window)
        for more in (["mixture"] if until else (), ()):  # each leg is restored once in its middle
            rows, state = run(recipe, topology, groups, state, more, **options)
            assert rows.keys().isdisjoint(found)
            found |= rows
        assert sorted(found) == list(range(state["delivered"]))
    last = recipes[-1]
    settings_of = {name: getattr(last, name) for name in Recipe.__dataclass_fields__}
    spliced = tuple(zip(recipes, [*until, -1], strict=True))
    return found, Changing(**settings_of, legs=spliced)


weights = st.lists(st.sampled_from([0, 0, 1, 2, 5]), min_size=3, max_size=3).filter(any)
topologies = st.tuples(st.integers(1, 4), st.integers(1, 3))
drawn_runs = settings(
    max_examples=15,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@drawn_runs
@given(
    mixtures=st.lists(weights, min_size=2, max_size=4),
    legs=st.lists(st.tuples(topologies, st.integers(0, 3)), min_size=4, max_size=4),
    lanes=st.integers(1, 8),
    window=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    balance=st.booleans(),
)
def test_an_endless_run_is_that_of_one_source_that_changes_at_a_window(
    three: Recipe, mixtures: Any, legs: Any, lanes: int, window: tuple[int, int], balance: bool
) -> None:
    base = replace(three, lanes=lanes, chunk_size=window[0], chunks_per_window=window[1])
    legs = [*legs[: len(mixtures) - 1], ((2, 2), 4)]  # long enough to reach the last mixture
    found, changing = run_legs(mixed(base, *mixtures), legs, balance=balance)
    expected, _ = run(changing, (1, 1), len(found))
    assert found == expected


@drawn_runs
@given(
    mixtures=st.lists(weights, min_size=2, max_size=3),
    legs=st.lists(st.tuples(topologies, st.integers(1, 3)), min_size=3, max_size=3),
    lanes=st.integers(1, 8),
    window=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    stop=st.sampled_from(["first_exhausted", "all_exhausted"]),
    balance=st.booleans(),
)
def test_each_lane_of_a_finite_run_is_that_of_one_source_that_changes_at_a_window(
    three: Recipe,
    mixtures: Any,
    legs: Any,
    lanes: int,
    window: tuple[int, int],
    stop: str,
    balance: bool,
) -> None:
    # In one pass a key is in one lane. Lanes that had ended in the old run go on with the new
    # mixture, so that the lanes' turns, unlike the lanes, are not those of the reference.
    base = replace(three, lanes=lanes, chunk_size=window[0], chunks_per_window=window[1])
    base = replace(base, passes=1, stop=stop)
    legs = [*legs[: len(mixtures) - 1], ((1, 1), 10_000)]
    try:
        found, changing = run_legs(mixed(base, *mixtures), legs, balance=balance)
    except DataQualityError as error:  # the drawn step is larger than a pass of the drawn data
        if "a step needs" not in str(error):
            raise
        reject()
    expected, _ = run(changing, (1, 1), 10_000)
    assert by_lane(changing, found) == by_lane(changing, expected)


def by_lane(
    recipe: Recipe, sequences: Mapping[int, tuple[str, tuple[str, ...]]]
) -> dict[int, list[Any]]:
    source = recipe.source()
    lane_of = {}
    for lane in range(recipe.lanes):
        state = source.start(lane, recipe.lanes)
        while True:
            chunk, state = source.next(state, recipe.chunk_size)
            if chunk is None:
                break
            for number, shard, row in chunk.refs.tolist():
                lane_of[source.datasets[number].key(shard, row)] = lane
    found: dict[int, list[Any]] = {lane: [] for lane in range(recipe.lanes)}
    for _, (row, keys) in sorted(sequences.items()):
        found[lane_of[keys[0]]].append((row, keys))
    return found


@pytest.mark.parametrize("passes", [None, 2])
@pytest.mark.parametrize("balance", [False, True])
def test_a_changed_run_restores_plainly_wherever_it_is_and_whoever_goes_on(
    three: Recipe, passes: int | None, balance: bool
) -> None:
    base = replace(three, passes=passes, stop="all_exhausted", lanes=5)
    old, new = mixed(base, (5, 3, 0), (0, 1, 2))
    _, state = run(old, (2, 2), 3, balance=balance)
    straight, _ = run(new, (1, 1), 40, state, ["mixture"], balance=balance)
    lineage = None
    for groups in range(6):
        rows, later = run(new, (1, 3), groups, state, ["mixture"], balance=balance)
        lineage = lineage or later["lineage"]
        assert later["lineage"] == lineage
        for topology in [(1, 1), (2, 3), (4, 1)]:
            more, last = run(new, topology, 3, later, balance=balance)
            assert more == {n: straight[n] for n in more}
            assert rows.keys().isdisjoint(more)
            assert last["lineage"] == lineage


def test_an_endless_run_keeps_the_new_weights_from_the_window_on(three: Recipe) -> None:
    base = replace(three, lanes=2, chunk_size=8, chunks_per_window=2, max_length=512)
    old, new = mixed(base, (1, 1, 0), (0, 1, 3))
    _, state = run(old, (1, 1), 5)
    rows, _ = run(new, (1, 1), 60, state, ["mixture"])
    names = [key.split("/")[0][:1] for n in sorted(rows)[30:] for key in rows[n][1]]
    assert {name: names.count(name) / len(names) for name in "abc"} == pytest.approx(
        {"a": 0, "b": 0.25, "c": 0.75}, abs=0.04
    )


def test_the_lineage_tells_what_changed_where_and_when(three: Recipe) -> None:
    first, second, third = mixed(three, (3, 1, 0), (1, 0, 1), (1, 1, 2))
    _, state = run(first, (1, 1), 5)
    assert state["lineage"] == []
    _, later = run(second, (2, 1), 10, state, ["mixture", "pixels"])
    entry = {
        "name": "mixture",
        "delivered": 5,
        "window": first_free_window(state),
        "old": {"a": 0.75, "b": 0.25},
        "new": {"a": 0.5, "c": 0.5},
    }
    assert later["lineage"] == [entry]
    _, last = run(third, (1, 1), 1, later, ["mixture"])
    assert last["lineage"][0] == entry
    assert last["lineage"][1]["delivered"] == 25
    assert last["lineage"][1]["new"] == {"a": 0.25, "b": 0.25, "c": 0.5}
    _, same = run(third, (1, 1), 0, last, ["mixture", "pixels"])
    assert same["lineage"] == last["lineage"]


def test_the_order_in_which_a_changed_recipe_lists_datasets_is_free(three: Recipe) -> None:
    old, new = mixed(three, (3, 1, 0), (1, 0, 1))
    turned = replace(new, datasets=new.datasets[::-1], weights=new.weights[::-1])
    _, state = run(old, (1, 1), 5)
    expected, later = run(new, (1, 1), 20, state, ["mixture"])
    rows, turned_later = run(turned, (1, 1), 20, state, ["mixture"])
    assert rows == expected
    assert turned_later == later
    assert run(turned, (1, 1), 9, later) == run(new, (1, 1), 9, later)


def test_a_pipeline_takes_its_history_from_the_state_that_it_restored_last(three: Recipe) -> None:
    old, new = mixed(three, (3, 1, 0), (1, 0, 1))
    _, state = run(old, (1, 1), 5)
    with new.build() as pipeline:
        start = pipeline.checkpoint()
        pipeline.restore(state, allow=["mixture"]).restore(start)
        rows = digests(take(pipeline, 9))
        assert pipeline.checkpoint()["lineage"] == []
    with new.build() as pipeline:
        assert digests(take(pipeline, 9)) == rows
    with new.build() as pipeline:
        with pytest.raises(CheckpointError, match="another recipe"):
            pipeline.restore({**state, "fingerprint": {}}, allow=["mixture"])
        assert digests(take(pipeline, 9)) == rows


# What is refused.


def test_a_change_that_is_not_allowed_is_refused_and_named(three: Recipe) -> None:
    old, new = mixed(three, (3, 1, 0), (1, 0, 1))
    _, state = run(old, (1, 1), 5)
    with pytest.raises(CheckpointError, match=r"(?s)datasets.*weights.*allow=\['mixture'\]"):
        new.build(state=state)
    with pytest.raises(CheckpointError, match=r"weights\.0: 0.75 .*1.0 now\n"):
        replace(old, weights=(1.0, 0.0)).build(state=state)
    with pytest.raises(ConfigError, match=r"unknown change 'mixtures'; did you mean 'mixture'"):
        new.build().restore(state, allow=["mixtures"])
    with pytest.raises(CheckpointError, match=r"seed: 0 in the state, 1 now"):
        replace(new, seed=1).build().restore(state, allow=["mixture"])


def test_a_dataset_that_leaves_stays_among_the_datasets(three: Recipe) -> None:
    old, new = mixed(three, (3, 1, 0), (1, 0, 1))
    _, state = run(old, (1, 1), 5)
    without = replace(new, datasets=(new.datasets[0], new.datasets[2]), weights=(1.0, 1.0))
    with pytest.raises(ConfigError, match=r"needs datasets \['b'\].*weight 0: keep it"):
        without.build().restore(state, allow=["mixture"])
    _, later = run(new, (1, 1), 5, state, ["mixture"])
    with pytest.raises(ConfigError, match=r"needs datasets \['b'\]"):
        without.build(state=later)


def test_data_that_changed_is_no_change_of_the_mixture(
    three: Recipe, blobs: list[FileBlob]
) -> None:
    old, new = mixed(three, (3, 1, 0), (1, 0, 1))
    _, state = run(old, (1, 1), 5)
    for place in (0, 1):  # one that stays, one that leaves
        datasets = list(new.datasets)
        datasets[place] = dataset("ab"[place], random_rows(9, 40, blobs))
        other = replace(new, datasets=tuple(datasets))
        with pytest.raises(CheckpointError, match=rf"\n  source.datasets.{place}.1: .*\nUse"):
            other.build().restore(state, allow=["mixture"])


@pytest.mark.parametrize("passes", [None, 1])
def test_inside_a_balanced_step_the_mixture_stays(three: Recipe, passes: int | None) -> None:
    base = replace(three, global_batch_size=8, passes=passes)
    old, new = mixed(base, (3, 1, 0), (1, 0, 1))
    _, state = run(old, (2, 2), 1, balance=True)
    assert state["dealt"]
    with pytest.raises(CheckpointError, match="at the end of a step"):
        new.build(balance=True).restore(state, allow=["mixture"])
    rows, _ = run(old, (1, 1), 4, state, ["mixture"], balance=True)
    assert len(rows) == 4
    _, state = run(old, (2, 2), 2, balance=True)
    rows, _ = run(new, (2, 1), 4, state, ["mixture"], balance=True)
    assert len(rows) == 8


def test_a_source_without_a_history_cannot_change(three: Recipe) -> None:
    settings_of = {name: getattr(three, name) for name in Recipe.__dataclass_fields__}
    spliced = Changing(**settings_of, legs=((three, 0),))
    with spliced.build() as pipeline:
        state = pipeline.checkpoint()
        pipeline.restore(state)
        with pytest.raises(ConfigError, match="Spliced has no with_history"):
            pipeline.restore(state, allow=["mixture"])


# Pixels.


def test_pixels_may_change_by_name_and_later_states_tell_of_it(three: Recipe) -> None:
    pillow = type(PROCESSOR)(size=32, patch_size=16, backend="pillow")
    _, state = run(three, (1, 1), 5)
    with pytest.raises(CheckpointError, match=r"(?s)backend: .*'pixels'\]\) would"):
        run(three, (1, 1), 1, state, ["mixture"], processor=pillow)
    rows, later = run(three, (1, 1), 20, state, ["pixels"], processor=pillow)
    expected, _ = run(three, (1, 1), 25, processor=pillow)
    assert rows == {n: expected[n] for n in range(5, 25)}
    (entry,) = later["lineage"]
    assert (entry["name"], entry["delivered"], entry["window"]) == ("pixels", 5, None)
    assert entry["old"]["tokens.image_processor.backend"] == "torchvision"
    assert entry["new"] == {"tokens.image_processor.backend": "pillow"}
    more, last = run(three, (1, 1), 5, later, processor=pillow)
    assert more.keys() == set(range(25, 30))
    assert last["lineage"] == [entry]


@pytest.mark.parametrize("change", [{"size": 48}, {"patch_size": 8}, {"resample": 2}])
def test_what_the_model_sees_may_not_change(three: Recipe, change: dict[str, Any]) -> None:
    _, state = run(three, (1, 1), 5)
    other = type(PROCESSOR)(**({"size": 32, "patch_size": 16} | change))
    with pytest.raises(CheckpointError, match=next(iter(change))):
        run(three, (1, 1), 1, state, ["mixture", "pixels"], processor=other)


# Estimated constants.


def estimated(datasets: Sequence[Dataset], mixture: Mapping[str, float]) -> Pipeline:
    source = StaticMixtureWorkSource(
        datasets, mixture, seed=1, token_estimation=TokenEstimation(sample_rows=8)
    )
    pipeline = Pipeline(source).options(runner="inline", canonical_replicas=2, chunk_size=4)
    pipeline.options(flush_every_k_chunks=2).interleave(tokenizer=byte_level_bpe())
    return pipeline.pack_flat(max_length=64).batch(microbatch_size=1)


def test_datasets_that_join_are_measured_and_what_was_measured_is_kept() -> None:
    steps = {"a": 1, "b": 3, "c": 5}
    a, b, c = (
        dataset(name, [(Text("word " * n),) for n in range(1, 30, step)])
        for name, step in steps.items()
    )
    with estimated([a, b], {"a": 1, "b": 1}) as pipeline:
        take(pipeline, 5)
        state = pipeline.checkpoint()
    with estimated([a, b, c], {"a": 0, "b": 1, "c": 1}) as pipeline:
        pipeline.restore(state, allow=["mixture"])
        straight = digests(take(pipeline, 20))
        later = pipeline.checkpoint()
    for kind, values in state["constants"].items():
        assert later["constants"][kind].items() > values.items()
        assert later["constants"][kind].keys() == {"a", "b", "c"}
    with estimated([a, b, c], {"a": 0, "b": 1, "c": 1}) as pipeline:
        pipeline.restore(state, allow=["mixture"])
        start = digests(take(pipeline, 4))
        middle = pipeline.checkpoint()
    with estimated([a, b, c], {"a": 0, "b": 1, "c": 1}) as pipeline:
        pipeline.restore(middle)
        assert start | digests(take(pipeline, 16)) == straight


def test_every_window_before_the_change_has_the_old_weights(three: Recipe) -> None:
    # What makes a chunk's number tell its window, also in lanes that had ended.
    base = replace(three, passes=1, lanes=3)
    old, new = mixed(base, (1, 0, 0), (0, 1, 0))
    _, state = run(old, (1, 1), 10_000)  # to its end
    numbers = [cursor[1][2] for cursor in state["lanes"].values()]
    rows, later = run(new, (1, 1), 10_000, state, ["mixture"])
    assert {key[0] for _, keys in rows.values() for key in keys} == {"b"}
    for (window, _, _), number in zip(state["lanes"].values(), numbers, strict=True):
        assert number <= window * base.chunks_per_window
    windows = [entry["window"] for entry in later["lineage"]]
    assert all(one < other for one, other in pairwise([*windows, 10**9]))
