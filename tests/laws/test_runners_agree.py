"""Runner, workers, task sizes and memory change the speed, never the data."""

from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.memory import (
    DEADLY,
    DeadlyProcessor,
    Recipe,
    dataset,
    digests,
    random_rows,
    run_ranks,
    take,
)
from zephon_mm.records import FileBlob, Image, Text

pytestmark = pytest.mark.usefixtures("warm_workers")
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


@pytest.mark.slow
def test_an_image_that_kills_its_workers_is_invalid_and_no_other(
    blobs: list[FileBlob], tmp_path: Path
) -> None:
    deadly = tmp_path / "deadly.png"
    deadly.write_bytes(Path(blobs[1].path).read_bytes() + DEADLY)
    rows = random_rows(1, 12, blobs)
    rows[5] = (Text("so"), Image(FileBlob(str(deadly), 0, deadly.stat().st_size)))
    recipe = Recipe(datasets=(dataset("a", rows),), passes=2)
    processor = DeadlyProcessor(size=32, patch_size=16)
    found = []
    for workers, task_images in [(1, 100), (2, 1)]:
        options = {"runner": "process", "workers": workers, "task_images": task_images}
        with recipe.build(microbatch=4, processor=processor, **options) as pipeline:
            batches = take(pipeline, 100)
            metrics = pipeline.metrics()
        invalid = [int((~batch.image_valid).sum()) for batch in batches]
        assert sum(invalid) == metrics["skipped"]["crashed_worker"] > 0
        found.append(digests(batches))
    assert found[0] == found[1]
