"""Delivered tokens follow the weights, on any topology and wherever a run is restored."""

import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fixtures.memory import Recipe, dataset, digests, random_rows, run_ranks, take
from zephon_mm.checkpoint import merge_checkpoints
from zephon_mm.errors import DatasetError
from zephon_mm.io import Dataset
from zephon_mm.records import FileBlob, Text
from zephon_mm.work import StaticMixtureWorkSource

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* ranks on .* lanes measure each sample"),
    pytest.mark.filterwarnings("ignore:a shuffle buffer of .* never fills"),
]
drawn_runs = settings(
    max_examples=15,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
STEPS, N = 200, 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed(Recipe):
    """The recipe with more of the source's settings."""

    more: Mapping[str, Any] = field(default_factory=dict)
    mix: bool = True

    def source(self) -> StaticMixtureWorkSource:
        mixture = {d.name: w for d, w in zip(self.datasets, self.weights, strict=True)}
        settings_of = {"stop_after_passes": self.passes, "stop": self.stop, **self.more}
        return StaticMixtureWorkSource(self.datasets, mixture, self.seed, **settings_of)


def texts(name: str, lengths: Sequence[int], folder: Path | None = None) -> Dataset:
    return dataset(name, [(Text("x " * n),) for n in lengths], cache_dir=folder)


@pytest.fixture(scope="module")
def unequal(tmp_path_factory: pytest.TempPathFactory) -> Mixed:
    """Short, long-tailed and long documents; the index keeps planning them quick."""
    rng, folder = random.Random(1), tmp_path_factory.mktemp("index")
    lengths = {
        "a": [rng.randint(1, 9) for _ in range(500)],
        "b": [min(int(rng.lognormvariate(3.0, 1)) + 1, 120) for _ in range(400)],
        "c": [rng.randint(60, 120) for _ in range(60)],
    }
    datasets = tuple(texts(name, found, folder) for name, found in lengths.items())
    return Mixed(
        datasets=datasets,
        weights=(0.2, 0.5, 0.3),
        lanes=8,
        chunk_size=64,
        chunks_per_window=8,
        max_length=256,
        global_batch_size=N,
    )


@pytest.fixture(scope="module")
def mixed(blobs: list[FileBlob]) -> Mixed:
    """Two small datasets of texts and images, of unequal lengths."""
    datasets = (
        dataset("a", random_rows(1, 40, blobs)),
        dataset("b", [row[:1] for row in random_rows(2, 23, [])], shard_rows=5),
    )
    return Mixed(datasets=datasets, weights=(0.3, 0.7), shuffle=3, lanes=5)


def planned(recipe: Recipe, steps: int) -> list[Counter[int]]:
    """Return the tokens of each dataset in each step."""
    found: list[Counter[int]] = [Counter() for _ in range(steps)]
    size = recipe.global_batch_size or 0
    with recipe.build() as pipeline:
        for one in pipeline.plan(steps * size):
            for piece in one.sequence.pieces:
                found[one.number // size][piece.record.ref.dataset] += piece.num_tokens
    return found


def least(recipe: Recipe, steps: Sequence[Counter[int]]) -> float:
    """Return the least of delivered share / target, of all datasets, over any 200 steps."""
    worst = []
    for first in range(len(steps) - STEPS + 1):
        counts: Counter[int] = sum(steps[first : first + STEPS], Counter())
        shares = [counts[number] / counts.total() for number in range(len(recipe.weights))]
        worst.append(min(s / w for s, w in zip(shares, recipe.weights, strict=True)))
    return min(worst)


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [None, 16])
def test_over_any_200_steps_each_dataset_has_its_share_of_the_tokens(
    unequal: Mixed, shuffle: int | None
) -> None:
    recipe = replace(unequal, shuffle=shuffle)
    assert least(recipe, planned(recipe, 2 * STEPS)) >= 0.995
    by_samples = replace(recipe, mix=False)
    assert least(by_samples, planned(by_samples, STEPS)) < 0.5


@drawn_runs
@given(
    lanes=st.integers(1, 8),
    window=st.tuples(st.integers(1, 7), st.integers(1, 4)),
    passes=st.sampled_from([None, None, 1, 3]),
    stop=st.sampled_from(["first_exhausted", "all_exhausted"]),
    algorithm=st.sampled_from(["best_fit", "wrap"]),
    dp=st.integers(1, 5),
    microbatch=st.integers(1, 3),
    ahead=st.integers(1, 9),
)
def test_any_topology_gives_the_batches_of_one_rank(  # noqa: PLR0913 - what is drawn
    mixed: Mixed,
    lanes: int,
    window: tuple[int, int],
    passes: int | None,
    stop: str,
    algorithm: str,
    dp: int,
    microbatch: int,
    ahead: int,
) -> None:
    recipe = replace(
        mixed,
        lanes=lanes,
        chunk_size=window[0],
        chunks_per_window=window[1],
        passes=passes,
        stop=stop,
        algorithm=algorithm,
        global_batch_size=None,
    )
    expected = run_ranks(recipe, dp=1, microbatch=1, sequences=60)
    sequences = 60 // (dp * microbatch) * dp * microbatch
    found = run_ranks(
        recipe, dp=dp, microbatch=microbatch, sequences=sequences, prefetch_batches=ahead
    )
    assert found == {number: expected[number] for number in found}
    assert len(found) >= min(len(expected), sequences) - dp * microbatch + 1


@drawn_runs
@given(
    legs=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 4)), min_size=2, max_size=4
    ),
    window=st.tuples(st.integers(1, 7), st.integers(1, 4)),
    balance=st.booleans(),
)
def test_a_state_goes_on_with_what_follows_on_any_topology(
    mixed: Mixed, legs: list[tuple[int, int, int]], window: tuple[int, int], balance: bool
) -> None:
    recipe = replace(mixed, chunk_size=window[0], chunks_per_window=window[1])
    recipe = replace(recipe, global_batch_size=None)
    found: dict[int, str] = {}
    state = None
    for dp, microbatch, groups in legs:
        parts = []
        for rank in range(dp):
            with recipe.build(
                dp=dp, rank=rank, microbatch=microbatch, state=state, balance=balance
            ) as pipeline:
                rows = digests(take(pipeline, groups))
                assert found.keys().isdisjoint(rows)
                found |= rows
                parts.append(pipeline.checkpoint())
        state = json.loads(json.dumps(merge_checkpoints(parts)))
    with recipe.build() as pipeline:
        assert found == digests(take(pipeline, len(found)))


def test_the_index_changes_no_byte(mixed: Mixed, blobs: list[FileBlob], tmp_path: Path) -> None:
    expected = run_ranks(mixed, dp=1, microbatch=2, sequences=80)
    rows = random_rows(1, 40, blobs), [row[:1] for row in random_rows(2, 23, [])]
    kept = tuple(
        dataset(name, found, shard_rows=size, cache_dir=tmp_path)
        for name, found, size in zip("ab", rows, (7, 5), strict=True)
    )
    recipe = replace(mixed, datasets=kept)
    for dp in (1, 2, 1):  # filled while it is used, then read
        assert run_ranks(recipe, dp=dp, microbatch=2, sequences=80) == expected


@pytest.mark.parametrize("mix", [True, False])
def test_max_passes_of_a_dataset_are_passes_of_it_alone(mixed: Mixed, mix: bool) -> None:
    more = {"max_passes": {"b": 3}, "stop": "all_exhausted"}
    recipe = replace(mixed, passes=1, more=more, mix=mix, shuffle=None, tail="pad")
    with recipe.build() as pipeline:
        keys = Counter(key for batch in pipeline for row in batch.keys for key in row)
        told = pipeline.metrics()["datasets"]
    assert keys == {f"a/{n}": 1 for n in range(40)} | {f"b/{n}": 3 for n in range(23)}
    assert (told["a"]["passes"], told["b"]["passes"]) == (1.0, 3.0)


@pytest.mark.parametrize("mix", [True, False])
def test_a_dataset_that_is_used_up_leaves_an_endless_run_or_is_an_error(
    mixed: Mixed, mix: bool
) -> None:
    recipe = replace(mixed, more={"max_passes": {"b": 1}, "stop": "all_exhausted"}, mix=mix)
    with recipe.build() as pipeline:
        keys = Counter(key for one in take(pipeline, 120) for row in one.keys for key in row)
    assert {key: n for key, n in keys.items() if key[0] == "b"} == {f"b/{n}": 1 for n in range(23)}
    with (
        replace(recipe, more={"max_passes": {"b": 1}, "stop": "error"}).build() as pipeline,
        pytest.raises(DatasetError, match=r"'b' is used up in lane \d after 1 passes"),
    ):
        take(pipeline, 120)


def test_metrics_tell_target_and_delivered_shares(unequal: Mixed) -> None:
    with unequal.build(microbatch=N) as pipeline:
        batches = take(pipeline, 12)
        told = pipeline.metrics()
    found = told["datasets"]
    assert {name: one["target"] for name, one in found.items()} == {"a": 0.2, "b": 0.5, "c": 0.3}
    assert sum(one["tokens"] for one in found.values()) == told["tokens"]
    assert sum(one["rows"] for one in found.values()) == told["documents"]
    trained = sum(batch.num_valid_tokens for batch in batches)
    assert sum(one["trained_tokens"] for one in found.values()) == trained
    for one in found.values():
        assert one["share"] == pytest.approx(one["tokens"] / told["tokens"])
        assert one["share"] == pytest.approx(one["target"], rel=0.05)
        assert 0.5 < one["trained"] < 1
    assert told["windows_per_step"] > 0


def test_a_curriculum_in_steps_holds_from_the_window_of_each_step(unequal: Mixed) -> None:
    base = replace(unequal, chunk_size=16, chunks_per_window=4, global_batch_size=2 * N)
    turns = [(20, (0.0, 0.2, 0.8)), (40, (0.5, 0.5, 0.0))]
    rates = []
    for weights in (base.weights, turns[0][1]):
        with replace(base, weights=weights).build() as pipeline:
            take(pipeline, 60 * 2 * N)
            rates.append(pipeline.metrics()["windows_per_step"])
    curriculum = [(step, dict(zip("abc", weights, strict=True))) for step, weights in turns]
    steps = planned(replace(base, more={"curriculum": curriculum, "windows_per_step": rates}), 60)
    for (first, stop), weights in [
        ((0, 16), base.weights),
        ((21, 36), turns[0][1]),
        ((48, 60), turns[1][1]),
    ]:
        counts: Counter[int] = sum(steps[first:stop], Counter())
        shares = [counts[number] / counts.total() for number in range(3)]
        assert shares == pytest.approx(weights, abs=0.02)


def test_a_state_at_64_lanes_and_8_datasets_is_at_most_16_kib() -> None:
    datasets = tuple(texts(f"dataset{n}", range(1, 40 + n)) for n in range(8))
    recipe = Mixed(
        datasets=datasets,
        weights=(1.0,) * 8,
        lanes=64,
        chunk_size=64,
        max_length=256,
        global_batch_size=64,
    )
    with recipe.build(microbatch=64) as pipeline:
        take(pipeline, 3)
        state = pipeline.checkpoint()
    # Of 10 million rows each, late in a long run; the dataset that is furthest behind has 0.
    datasets_at = [*[9, 156_249, 2_345_00, 789] * 7, 9, 156_249, 0, 789]
    for cursor in state["lanes"].values():
        cursor[0], cursor[1] = 9_999, [63, 64, 79_992, *datasets_at]
    assert len(json.dumps(state)) <= 16 << 10
