"""Runner, workers, task sizes and memory change the speed, never the data."""

from typing import Any

import pytest

from tests.fixtures.memory import Recipe, digests, run_ranks, take

STEPS = 6


@pytest.fixture(scope="module")
def expected(recipe: Recipe) -> dict[int, str]:
    with recipe.build(microbatch=1) as pipeline:
        return digests(take(pipeline, STEPS * 4))


@pytest.mark.parametrize(
    "options",
    [
        {"runner": "inline", "task_rows": 1, "task_images": 1},
        {"runner": "inline", "task_rows": 1000, "task_images": 1000},
        {"runner": "thread", "workers": 1},
        {"runner": "thread", "workers": 2},
        {"runner": "thread", "workers": 5, "task_rows": 2, "task_images": 1},
        {"runner": "thread", "workers": 3, "prefetch_batches": 1},
        {"runner": "thread", "workers": 3, "prefetch_batches": 100},
        {"runner": "thread", "workers": 2, "memory_budget_bytes": 1 << 16},
    ],
    ids=str,
)
def test_threads_and_task_sizes_do_not_show(
    recipe: Recipe, expected: dict[int, str], options: dict[str, Any]
) -> None:
    for dp, microbatch in [(1, 4), (2, 2)]:
        found = run_ranks(recipe, dp=dp, microbatch=microbatch, sequences=STEPS * 4, **options)
        assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_processes_do_not_show(recipe: Recipe, expected: dict[int, str], workers: int) -> None:
    found = run_ranks(
        recipe,
        dp=2,
        microbatch=1,
        sequences=STEPS * 4,
        runner="process",
        workers=workers,
        task_rows=2,
        task_images=1,
    )
    assert found == expected


@pytest.mark.slow
def test_batches_in_ordinary_memory_come_from_processes_too(
    recipe: Recipe, expected: dict[int, str]
) -> None:
    options = {"runner": "process", "workers": 2, "memory_budget_bytes": 1 << 16}
    with recipe.build(microbatch=2, **options) as pipeline:
        batches = take(pipeline, STEPS * 2)
        metrics = pipeline.metrics()
    assert digests(batches) == expected
    assert metrics["batches_in_ordinary_memory"] > 0
