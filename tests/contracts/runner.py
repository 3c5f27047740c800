"""The contract of a runner. A new runner passes it with five lines:

class TestMyRunner(RunnerContract):
    @pytest.fixture(scope="class")
    @classmethod
    def make(cls):
        return lambda context: MyRunner(context, workers=2)
"""

import hashlib
import random
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, as_completed, wait
from typing import Any

import numpy as np
import pytest

from zephon_mm.errors import SampleError
from zephon_mm.protocols import Runner

CONTEXT = {"offset": 1000, "table": np.arange(50_000)}

Make = Callable[[Any], Runner]


class TwoPartError(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code


def add(context: dict[str, Any], x: int) -> int:
    return context["offset"] + x


def look_up(context: dict[str, Any], rows: np.ndarray) -> np.ndarray:
    return context["table"][rows]


def noise(context: dict[str, Any], seed: int, num_bytes: int) -> bytes:
    return random.Random(seed).randbytes(num_bytes)


def digest(context: dict[str, Any], data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def nothing(context: dict[str, Any]) -> None:
    return None


def this_function_raises(context: dict[str, Any], error: BaseException) -> None:
    error.add_note("while reading shard 3, row 14")
    raise error


class RunnerContract:
    """Subclasses give a class-scoped fixture `make`: a runner with the given context."""

    @pytest.fixture(scope="class")
    @classmethod
    def runner(cls, make: Make) -> Iterator[Runner]:
        runner = make(CONTEXT)
        yield runner
        runner.shutdown()

    def test_is_an_executor_and_a_runner(self, runner: Runner) -> None:
        assert isinstance(runner, Executor)
        assert isinstance(runner, Runner)
        assert runner.workers >= 1

    def test_a_task_gets_the_context_and_its_arguments(self, runner: Runner) -> None:
        assert runner.submit(add, 5).result() == 1005
        assert runner.submit(nothing).result() is None
        rows = np.array([3, 1, 4, 1, 5])
        assert (runner.submit(look_up, rows).result() == rows).all()

    def test_many_tasks_each_get_their_own_result(self, runner: Runner) -> None:
        futures = [runner.submit(add, x) for x in range(2000)]
        assert [future.result() for future in futures] == [1000 + x for x in range(2000)]

    def test_results_do_not_depend_on_the_order_of_submission(self, runner: Runner) -> None:
        seeds = list(range(64))
        random.Random(0).shuffle(seeds)
        futures = {runner.submit(noise, seed, 50 + 500 * seed): seed for seed in seeds}
        for future in as_completed(futures):
            seed = futures[future]
            assert future.result() == noise(CONTEXT, seed, 50 + 500 * seed)

    @pytest.mark.parametrize("num_bytes", [0, 4000, 4096, 4097, 70_000, 10_000_000])
    def test_arguments_and_results_may_have_any_size(self, runner: Runner, num_bytes: int) -> None:
        data = noise(CONTEXT, 1, num_bytes)
        assert runner.submit(noise, 1, num_bytes).result() == data
        assert runner.submit(digest, data).result() == digest(CONTEXT, data)

    def test_functions_may_be_closures(self, runner: Runner) -> None:
        factor = 3
        assert runner.submit(lambda context, x: factor * x, 5).result() == 15

    @pytest.mark.parametrize(
        "error",
        [ValueError("no"), SampleError("overlong", "cut it"), TwoPartError(3, "x"), SystemExit(2)],
        ids=lambda error: type(error).__name__,
    )
    def test_an_exception_keeps_type_arguments_notes_and_traceback(
        self, runner: Runner, error: BaseException
    ) -> None:
        caught = runner.submit(this_function_raises, error).exception()
        assert type(caught) is type(error)
        assert caught.args == error.args
        assert caught.__notes__[0] == "while reading shard 3, row 14"
        assert "this_function_raises" in "".join(traceback.format_exception(caught))

    def test_a_failed_task_hurts_no_other(self, runner: Runner) -> None:
        futures = [
            runner.submit(this_function_raises, KeyError(x))
            if x % 7 == 0
            else runner.submit(add, x)
            for x in range(200)
        ]
        wait(futures)
        for x, future in enumerate(futures):
            if x % 7 == 0:
                assert isinstance(future.exception(), KeyError)
            else:
                assert future.result() == 1000 + x

    def test_every_task_is_counted(self, runner: Runner) -> None:
        before = runner.stats()
        wait([runner.submit(add, x) for x in range(20)])
        after = runner.stats()
        assert after["tasks_done"] - before["tasks_done"] == 20
        assert {"tasks_done", "task_retries", "worker_restarts"} <= after.keys()

    def test_shutdown_finishes_what_was_submitted_and_takes_no_more(self, make: Make) -> None:
        runner = make(CONTEXT)
        futures = [runner.submit(add, x) for x in range(50)]
        runner.shutdown()
        assert all(future.done() for future in futures)
        assert [future.result() for future in futures] == [1000 + x for x in range(50)]
        with pytest.raises(RuntimeError, match=r"shut ?down"):
            runner.submit(add, 1)
        runner.shutdown()
        runner.shutdown(wait=False, cancel_futures=True)
