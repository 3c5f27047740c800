"""A run's life as a state machine: legs on any topology and runner, killed or saved anywhere.

Every leg begins from a state of an earlier one, also of one long past, and must deliver exactly the
rows that a plain run on one rank, inline, has at those numbers.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, multiple, rule

from tests.fixtures.memory import Recipe, dataset, digests, random_rows, take, write_images
from zephon_mm.checkpoint import merge_checkpoints
from zephon_mm.io import Dataset

N = 8
TOPOLOGIES = [(1, 1), (1, 8), (2, 2), (2, 4), (4, 1), (8, 1)]
KNOWN = 96
"""How many rows of each recipe are known; runs go at most so far."""


class Runs:
    """The data, and what a plain run gives of each recipe; made once."""

    def __init__(self, folder: Path) -> None:
        blobs = write_images(folder)
        self._datasets = (
            dataset("a", random_rows(1, 60, blobs), cache_dir=folder),
            dataset("b", random_rows(2, 31, blobs), shard_rows=5, cache_dir=folder),
        )
        self._rows: dict[Recipe, dict[int, str]] = {}

    def recipe(self, lanes: int, passes: int | None, algorithm: str, chunks: int) -> Recipe:
        return Recipe(
            datasets=self._datasets,
            weights=(0.6, 0.4),
            lanes=lanes,
            passes=passes,
            stop="all_exhausted",
            algorithm=algorithm,
            chunks_per_window=chunks,
            shuffle=3,
            global_batch_size=N,
        )

    def rows(self, recipe: Recipe) -> dict[int, str]:
        if recipe not in self._rows:
            plain = tuple(Dataset(d.name, d.reader, schema=d.schema) for d in recipe.datasets)
            with replace(recipe, datasets=plain).build() as pipeline:
                self._rows[recipe] = digests(take(pipeline, KNOWN))
        return self._rows[recipe]


class Life(RuleBasedStateMachine):
    """Holds states that were saved; `runs` is set by the test."""

    runs: Runs
    states = Bundle("states")

    @initialize(
        target=states,
        lanes=st.sampled_from([1, 2, 3, 5, 8, 16]),
        passes=st.sampled_from([None, 1, 2]),
        algorithm=st.sampled_from(["best_fit", "wrap"]),
        chunks=st.integers(1, 4),
    )
    def begin(self, lanes: int, passes: int | None, algorithm: str, chunks: int) -> Any:
        self.recipe = self.runs.recipe(lanes, passes, algorithm, chunks)
        self.expected = self.runs.rows(self.recipe)
        return None

    @rule(
        target=states,
        state=states,
        topology=st.sampled_from(TOPOLOGIES),
        groups=st.integers(0, 5),
        runner=st.sampled_from(["inline", "inline", "thread"]),
        options=st.fixed_dictionaries(
            {
                "balance": st.booleans(),
                "index": st.sampled_from(["fill", "read", "off"]),
                "prefetch_batches": st.integers(1, 9),
                "step_tokens": st.sampled_from([None, True, False]),
                "task_rows": st.integers(1, 70),
            }
        ),
    )
    def leg(
        self,
        state: Mapping[str, Any] | None,
        topology: tuple[int, int],
        groups: int,
        runner: str,
        options: dict[str, Any],
    ) -> Any:
        dp, microbatch = topology
        delivered = state["delivered"] if state else 0
        left = N - delivered % N
        if left % (dp * microbatch):
            return multiple()  # an error, which test_resume holds
        if state and state["dealt"]:
            options = options | {"balance": True}
        groups = min(groups, max(0, KNOWN - N - delivered) // (dp * microbatch))
        found: dict[int, str] = {}
        parts = []
        for rank in range(dp):
            with self.recipe.build(
                dp=dp, rank=rank, microbatch=microbatch, state=state, runner=runner, **options
            ) as pipeline:
                if state is not None:
                    again = json.loads(json.dumps(pipeline.checkpoint()))
                    assert again["lanes"] == state["lanes"]
                found |= digests(take(pipeline, groups))
                parts.append(pipeline.checkpoint())
        assert found.items() <= self.expected.items()
        saved = json.loads(json.dumps(merge_checkpoints(parts)))
        assert saved["delivered"] == delivered + len(found)
        if self.recipe.passes is None:
            assert len(found) == groups * dp * microbatch
        return saved


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* ranks on .* lanes measure each sample")
@pytest.mark.filterwarnings("ignore:a shuffle buffer of .* never fills")
@pytest.mark.filterwarnings("ignore:.*=True measures each sample on each of")
def test_whatever_happens_in_a_run_its_rows_are_those_of_a_plain_one(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    class Machine(Life):
        runs = Runs(tmp_path_factory.mktemp("life"))

    Machine.TestCase.settings = settings(
        max_examples=30,
        stateful_step_count=8,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    Machine.TestCase("runTest").runTest()
