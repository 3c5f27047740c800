"""Weights that a callback chose: kept in states, replayed by any topology, and nobody is asked."""

import json
import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fixtures.memory import PROCESSOR, Recipe, digests, take
from tests.fixtures.nursery import Nursery
from tests.fixtures.tokenizers import byte_level_bpe
from tests.laws.test_distributed import fork_ranks, union
from zephon_mm.checkpoint import merge_checkpoints
from zephon_mm.errors import CheckpointError, ConfigError
from zephon_mm.pipeline import Pipeline
from zephon_mm.work import StaticMixtureWorkSource

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* ranks on .* lanes measure each sample"),
    pytest.mark.filterwarnings("ignore:a shuffle buffer of .* never fills"),
]
drawn_runs = settings(
    max_examples=15,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
HALVES, FIRST, SECOND = {"a": 1, "b": 1}, {"a": 1, "b": 0}, {"a": 0, "b": 1}


@pytest.fixture(scope="module")
def base(recipe: Recipe) -> Recipe:
    return replace(recipe, lanes=3, global_batch_size=None)


def names(batches: Any) -> set[str]:
    return {key[0] for batch in batches for row in batch.keys for key in row}


def go_on(recipe: Recipe, state: Mapping[str, Any], dp: int, groups: int) -> Any:
    """Restore on so many ranks; return their rows and the merged state."""
    found: dict[int, str] = {}
    parts = []
    for rank in range(dp):
        with recipe.build(dp=dp, rank=rank, state=state) as pipeline:
            found |= digests(take(pipeline, groups))
            parts.append(pipeline.checkpoint())
    return found, json.loads(json.dumps(merge_checkpoints(parts)))


@drawn_runs
@given(
    choices=st.lists(st.sampled_from([HALVES, FIRST, SECOND, None]), min_size=1, max_size=3),
    legs=st.lists(st.integers(0, 5), min_size=4, max_size=4),
    restored=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=3),
    window=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    mix=st.booleans(),
    ahead=st.integers(1, 6),
)
def test_a_state_goes_on_as_the_run_did_that_was_steered(
    base: Recipe,
    choices: list[Any],
    legs: list[int],
    restored: list[tuple[int, int]],
    window: tuple[int, int],
    mix: bool,
    ahead: int,
) -> None:
    recipe = replace(base, chunk_size=window[0], chunks_per_window=window[1], mix=mix)
    states, rows = [], {}
    with recipe.build(prefetch_batches=ahead) as pipeline:
        for choice, groups in zip([*choices, None], legs, strict=False):
            rows |= digests(take(pipeline, groups))
            pipeline.steer(lambda _, choice=choice: choice)
            states.append(json.loads(json.dumps(pipeline.checkpoint())))
        rows |= digests(take(pipeline, 25))
    lineage = states[-1]["lineage"]
    assert [entry["new"] for entry in lineage] == [one for one in choices if one is not None]
    state = states[-1]
    for dp, groups in restored:  # a restore of a restore, on other topologies
        found, state = go_on(recipe, state, dp, groups)
        assert found == {number: rows[number] for number in found if number in rows}
        assert state["lineage"] == lineage


def test_the_weights_hold_from_a_window_that_no_lane_has_begun(base: Recipe) -> None:
    with base.build(prefetch_batches=1) as pipeline:
        take(pipeline, 5)
        pipeline.steer(lambda told: SECOND if told["datasets"]["a"]["target"] == 0.6 else None)
        (entry,) = pipeline.checkpoint()["lineage"]
        take(pipeline, 30)
        assert names(take(pipeline, 30)) == {"b"}
        assert pipeline.metrics()["datasets"]["b"]["target"] == 1.0
    assert (entry["name"], entry["delivered"]) == ("steer", 5)
    assert entry["old"] == {"a": 0.6, "b": 0.4}
    assert entry["new"] == SECOND
    assert entry["window"] >= 1


def test_it_may_be_called_before_the_first_batch_and_after_a_restore(base: Recipe) -> None:
    with base.build() as pipeline:
        pipeline.steer(lambda _: SECOND)
        assert names(take(pipeline, 9)) == {"b"}
        state = pipeline.checkpoint()
    with base.build(state=state) as pipeline:
        pipeline.steer(lambda _: FIRST)
        take(pipeline, 40)
        assert names(take(pipeline, 9)) == {"a"}
        assert len(pipeline.checkpoint()["lineage"]) == 2


def test_a_restore_forgets_what_an_earlier_one_was_steered_to(base: Recipe) -> None:
    states, rows = [], []
    for groups, choice in ((0, FIRST), (7, SECOND), (3, None)):
        with base.build() as pipeline:
            take(pipeline, groups)
            pipeline.steer(lambda _, choice=choice: choice)
            states.append(json.loads(json.dumps(pipeline.checkpoint())))
            rows.append(digests(take(pipeline, 30)))
    for order in ((0, 1), (1, 0), (0, 2), (2, 1)):
        with base.build() as pipeline:
            for number in order:
                pipeline.restore(states[number])
            assert digests(take(pipeline, 30)) == rows[order[-1]]


def test_it_ends_a_curriculum(base: Recipe) -> None:
    class Turning(Recipe):
        def source(self) -> StaticMixtureWorkSource:
            turns = {"curriculum": [(4, SECOND), (40, HALVES)], "windows_per_step": 1.0}
            return StaticMixtureWorkSource(self.datasets, {"a": 1, "b": 0}, self.seed, **turns)

    turning = Turning(**{name: getattr(base, name) for name in Recipe.__dataclass_fields__})
    with turning.build(prefetch_batches=1) as pipeline:
        assert names(take(pipeline, 9)) == {"a"}
        take(pipeline, 50)
        pipeline.steer(lambda _: FIRST)
        state = pipeline.checkpoint()
        rows = digests(take(pipeline, 200))
        assert names(take(pipeline, 9)) == {"a"}
    with turning.build(state=state) as pipeline:
        assert digests(take(pipeline, 200)) == rows
    source = {**state["fingerprint"]["source"], "weights": [0.5, 0.5]}
    other = {**state, "fingerprint": {**state["fingerprint"], "source": source}}
    with (
        turning.build() as pipeline,
        pytest.raises(CheckpointError, match=r"by its curriculum or by steer\(\)"),
    ):
        pipeline.restore(other, allow=["mixture"])


def test_what_cannot_be_is_an_error_and_changes_nothing(base: Recipe) -> None:
    with base.build() as pipeline:
        take(pipeline, 3)
        with pytest.raises(ConfigError, match=r"mixture names \['a'\], datasets are \['a', 'b'\]"):
            pipeline.steer(lambda _: {"a": 1.0})
        with pytest.raises(ZeroDivisionError):
            pipeline.steer(lambda _: 1 / 0)
        assert pipeline.checkpoint()["lineage"] == []
        rows = digests(take(pipeline, 9))
    with base.build() as pipeline:
        take(pipeline, 3)
        assert digests(take(pipeline, 9)) == rows
    with replace(base, passes=1).build() as pipeline, pytest.raises(ConfigError, match="no end"):
        pipeline.steer(lambda _: FIRST)
    with base.build(dp=2) as pipeline, pytest.raises(ConfigError, match="need a group="):
        pipeline.steer(lambda _: FIRST)
    dealt = replace(base, global_batch_size=8)
    with dealt.build(dp=2, balance=True) as pipeline:
        take(pipeline, 1)
        with pytest.raises(CheckpointError, match="step's end"):
            pipeline.steer(lambda _: FIRST)


def steerable(base: Recipe, weights: Mapping[str, float], **options: Any) -> Pipeline:
    source = StaticMixtureWorkSource(base.datasets, weights, 0, **options)
    return (
        Pipeline(source)
        .options(canonical_replicas=3, chunk_size=3, flush_every_k_chunks=2, runner="inline")
        .interleave(tokenizer=byte_level_bpe(), image_processor=PROCESSOR)
        .pack_flat(max_length=64)
        .batch(microbatch_size=1)
    )


@pytest.mark.parametrize(
    ("stop", "choice"), [("all_exhausted", SECOND), ("error", SECOND), ("first_exhausted", HALVES)]
)
def test_an_endless_run_cannot_be_steered_to_an_end(base: Recipe, stop: str, choice: Any) -> None:
    options = {"max_passes": {"b": 3}, "stop": stop}
    if stop == "first_exhausted":
        options |= {"curriculum": [(1, FIRST)], "windows_per_step": 1.0}
    with steerable(base, HALVES, **options) as pipeline:
        take(pipeline, 3)
        with pytest.raises(ConfigError, match="would let this endless run end, by max_passes"):
            pipeline.steer(lambda _: choice)
        assert pipeline.checkpoint()["lineage"] == []
        assert len(take(pipeline, 9)) == 9


def test_a_dataset_that_began_without_weight_may_be_named_and_cannot_join(base: Recipe) -> None:
    with steerable(base, FIRST) as pipeline:
        pipeline.steer(lambda _: FIRST)
        assert names(take(pipeline, 3)) == {"a"}
        with pytest.raises(ConfigError, match=r"datasets are \['a'\]"):
            pipeline.steer(lambda _: HALVES)
        state = json.loads(json.dumps(pipeline.checkpoint()))
        rows = digests(take(pipeline, 9))
    with steerable(base, FIRST) as pipeline:
        assert digests(take(pipeline.restore(state), 9)) == rows


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_all_ranks_get_what_the_first_one_chose(
    base: Recipe, nursery: Nursery, tmp_path: Path
) -> None:
    recipe = replace(base, lanes=4, global_batch_size=12)
    (tmp_path / "recipe").write_bytes(pickle.dumps(recipe))
    found = fork_ranks(nursery, tmp_path, 3, "steer", "steered", "steering")
    state = json.loads((tmp_path / "steered.json").read_text())
    rows = union([rows for rows, _ in found])
    assert {json.dumps(lineage) for _, lineage in found} == {json.dumps(state["lineage"])}
    for dp in (1, 2):
        more, _ = go_on(recipe, state, dp, 12 // dp)
        assert more.items() <= rows.items()
        assert len(more) == 12
