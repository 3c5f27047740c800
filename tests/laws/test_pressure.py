"""Little memory, slow or careless consumers, interrupts and forks: no hang, no leak, no wrong row.

Everything here runs in worker processes.
"""

import gc
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks.soak import soak
from tests.fixtures.memory import Recipe, digests, take
from zephon_mm.pipeline import Pipeline

ROOT = Path(__file__).parents[2]
BATCH_BYTES = 80 << 10  # about one batch of two rows of 64 tokens
OPTIONS: dict[str, Any] = {"runner": "process", "workers": 2, "task_images": 4, "task_rows": 4}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("warm_workers"),
]


@pytest.fixture(scope="module")
def expected(recipe: Recipe) -> dict[int, str]:
    with recipe.build(microbatch=2) as pipeline:
        return digests(take(pipeline, 60))


@pytest.fixture(autouse=True)
def _nobody_is_left() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    gc.collect()
    assert set(psutil.Process().children(recursive=True)) <= before


def first(expected: dict[int, str], count: int) -> dict[int, str]:
    return {number: expected[number] for number in range(count)}


# Memory.


@pytest.mark.parametrize("batches_of_memory", [1, 3])
def test_a_small_budget_only_slows(
    recipe: Recipe, expected: dict[int, str], batches_of_memory: int
) -> None:
    budget = batches_of_memory * BATCH_BYTES
    with recipe.build(microbatch=2, memory_budget_bytes=budget, **OPTIONS) as pipeline:
        found: dict[int, str] = {}
        for _, batch in zip(range(30), pipeline, strict=False):
            found |= digests([batch])
    assert found == first(expected, 60)


def test_all_batches_and_slices_that_are_kept_stay_as_they_were(
    recipe: Recipe, expected: dict[int, str]
) -> None:
    budget = 4 * BATCH_BYTES
    with recipe.build(microbatch=2, memory_budget_bytes=budget, **OPTIONS) as pipeline:
        kept, slices, copies = [], [], []
        for number, batch in zip(range(60), pipeline, strict=False):
            if number % 3:
                slices.append(batch.pixel_values[1:, 0])
                copies.append(slices[-1].clone())
            else:
                kept.append(batch)
        del batch
        assert pipeline.metrics()["batches_in_ordinary_memory"] > 0
    assert all(torch.equal(one, copy) for one, copy in zip(slices, copies, strict=True))
    found = digests(kept)
    assert found == {number: expected[number] for number in found}
    assert len(found) == 40


def test_a_slow_consumer_bounds_what_runs_ahead(recipe: Recipe, expected: dict[int, str]) -> None:
    found: dict[int, str] = {}
    with recipe.build(microbatch=2, prefetch_batches=4, **OPTIONS) as pipeline:
        for _, batch in zip(range(12), pipeline, strict=False):
            wait_until_idle(pipeline)
            assert pipeline.metrics()["batches_ahead"] <= 4
            found |= digests([batch])
    assert found == first(expected, 24)


def wait_until_idle(pipeline: Pipeline) -> None:
    """Wait until the workers have decoded all that may run ahead."""
    done = -1.0
    while pipeline.metrics()["tasks_queued"] or pipeline.metrics()["tasks_done"] != done:
        done = pipeline.metrics()["tasks_done"]
        os.sched_yield()


def test_a_consumer_that_drops_batches_at_random_gets_the_same_rows(
    recipe: Recipe, expected: dict[int, str]
) -> None:
    rng = random.Random(3)
    options = OPTIONS | {"memory_budget_bytes": 3 * BATCH_BYTES, "prefetch_batches": 9}
    kept = []
    found: dict[int, str] = {}
    with recipe.build(microbatch=2, **options) as pipeline:
        for _, batch in zip(range(60), pipeline, strict=False):
            kept.append(batch)
            while kept and rng.random() < 0.6:
                found |= digests([kept.pop(rng.randrange(len(kept)))])
    assert found | digests(kept) == expected


# Ends.


def test_a_pipeline_that_is_dropped_in_the_middle_leaves_nobody(recipe: Recipe) -> None:
    take(recipe.build(microbatch=2, **OPTIONS), 3)


def test_a_fork_of_the_consumer_harms_nobody(recipe: Recipe, expected: dict[int, str]) -> None:
    with recipe.build(microbatch=2, **OPTIONS) as pipeline:
        batches = iter(pipeline)
        found = {}
        for _ in range(3):
            batch = next(batches)
            assert exit_code_of_a_fork(pipeline, batches) == 0
            found |= digests([batch]) | digests([next(batches)])
        assert found == first(expected, 12)


def exit_code_of_a_fork(pipeline: Pipeline, batches: Iterator[Any]) -> int:
    """Fork; the child asks for a batch, which must be an error, and closes what it inherited."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        next(batches)
    except RuntimeError:
        pipeline.close()
        gc.collect()
        code = 0
    finally:
        os._exit(code)


class Trainer:
    """Runs `trainer.py`; what it started must be gone when it has ended."""

    def __init__(self, recipe: Recipe, folder: Path, mode: str, *prefix: str) -> None:
        path = folder / "recipe"
        path.write_bytes(pickle.dumps(recipe))
        script = str(ROOT / "tests/laws/scripts/trainer.py")
        self.process = subprocess.Popen(
            [*prefix, sys.executable, script, str(path), mode],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        self.started = json.loads(line)

    def end(self) -> tuple[int, str, str]:
        """Return its exit code and output."""
        out, err = self.process.communicate(timeout=10)
        assert [pid for pid in self.started if psutil.pid_exists(pid)] == []
        return self.process.returncode, out, err


def test_an_interrupt_ends_a_script_and_all_it_started(recipe: Recipe, tmp_path: Path) -> None:
    trainer = Trainer(recipe, tmp_path, "forever")
    assert len(trainer.started) >= 2
    trainer.process.send_signal(signal.SIGINT)
    code, _, err = trainer.end()
    assert code == -signal.SIGINT
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert "Exception ignored" not in err


def test_an_exception_in_the_training_loop_ends_a_script_that_closes_nothing(
    recipe: Recipe, tmp_path: Path
) -> None:
    code, _, err = Trainer(recipe, tmp_path, "raise").end()
    assert code == 1
    assert err.rstrip().endswith("RuntimeError: the training loop failed")
    assert err.count("Traceback") == 1


# SHM-01, SHM-04: it also ends without a close.
def test_a_tiny_dev_shm_does_not_matter(
    recipe: Recipe, expected: dict[int, str], tmp_path: Path
) -> None:
    namespace = ["unshare", "--map-root-user", "--mount"]
    if not shutil.which("unshare") or subprocess.run([*namespace, "true"]).returncode:
        pytest.skip("this machine allows no private mount namespace")
    mount = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
    trainer = Trainer(recipe, tmp_path, "digests", *namespace, "sh", "-c", mount, "sh")
    code, out, err = trainer.end()
    assert (code, err) == (0, "")
    found = {int(number): row for number, row in json.loads(out).items()}
    assert found == {number: expected[number] for number in range(2, 82)}


# Growth.


def test_descriptors_and_memory_stay_flat() -> None:
    _, early, *_, late = soak(batches=1_000, every=200)
    assert late.descriptors == early.descriptors
    assert late.threads == early.threads
    assert late.processes == early.processes
    assert late.own_bytes - early.own_bytes < 8 << 20
    assert late.worker_bytes - early.worker_bytes < 8 << 20
