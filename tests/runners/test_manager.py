"""What happens when workers crash, hang, or are killed: exactly one running task is concerned."""

import ctypes
import os
import pathlib
import random
import signal
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import psutil
import pytest

from zephon_mm.errors import RunnerError, WorkerCrashed, WorkerLost
from zephon_mm.runners.launcher import has_ended
from zephon_mm.runners.processes import ProcessRunner


@pytest.fixture(scope="module")
def runner() -> Iterator[ProcessRunner]:
    # The context brings this module into the zygote, so that workers need not import it again.
    with ProcessRunner(answer, workers=2, preload=(), max_attempts=3) as runner:
        yield runner


def zygote_of(runner: ProcessRunner) -> psutil.Process:
    return psutil.Process(runner._manager._launcher._process.pid)


def answer(context: Any, seed: int, num_bytes: int, busy_us: int) -> bytes:
    end = time.perf_counter() + busy_us / 1e6
    while time.perf_counter() < end:
        pass
    return random.Random(seed).randbytes(num_bytes)


def own_pid(context: Any) -> int:
    return os.getpid()


def first_time_only(context: Any, marker: pathlib.Path, number: int) -> str:
    """Get killed by a signal, or hang for signal 0, unless the marker is there."""
    if not marker.exists():
        marker.touch()
        while True:
            os.kill(os.getpid(), number)
    return "second attempt"


class DiesWhilePickled:
    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_kills_at_random_moments_never_change_a_result(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [0, 100, 4090, 4100, 50_000, 2_000_000]
    killed: set[int] = set()
    waiting: deque[tuple[bytes, Future[bytes]]] = deque()
    with ProcessRunner(answer, workers=2, preload=(), max_attempts=100) as runner:
        while waiting or len(killed) < 50:
            while len(waiting) < 40 and len(killed) < 50:
                job = (len(killed), rng.choice(sizes), rng.choice([0, 200, 2000]))
                waiting.append((answer(None, *job[:2], 0), runner.submit(answer, *job)))
            expected, future = waiting.popleft()
            assert future.result() == expected
            alive = {child.pid for child in zygote_of(runner).children()} - killed
            if alive and len(killed) < 50 and rng.random() < 0.5:
                killed.add(victim := rng.choice(sorted(alive)))
                os.kill(victim, rng.choice([signal.SIGKILL, signal.SIGTERM]))
        assert len(killed) - 2 <= runner.stats()["worker_restarts"] <= len(killed)


@pytest.mark.parametrize(
    ("die", "name"),
    [
        (lambda context: os.abort(), "SIGABRT"),
        (lambda context: ctypes.string_at(0), "SIGSEGV"),
        (lambda context: os._exit(3), "exit code 3"),
        (lambda context: os._exit(0), "exit code 0"),
    ],
    ids=["abort", "segfault", "exit", "exit_zero"],
)
def test_a_native_crash_is_reported_at_once_and_hurts_no_other_task(
    runner: ProcessRunner, die: Any, name: str
) -> None:
    before = runner.stats()
    futures = [runner.submit(die if n == 25 else own_pid) for n in range(50)]
    error = futures.pop(25).exception()
    assert type(error) is WorkerCrashed
    assert name in str(error)
    assert "<lambda>" in str(error)
    assert all(future.result() > 0 for future in futures)
    after = runner.stats()
    assert after["task_retries"] == before["task_retries"]
    assert after["worker_restarts"] == before["worker_restarts"] + 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_task_whose_worker_is_killed_runs_again(
    runner: ProcessRunner, tmp_path: pathlib.Path, number: int
) -> None:
    before = runner.stats()["task_retries"]
    future = runner.submit(first_time_only, tmp_path / "marker", number)
    assert future.result() == "second attempt"
    assert runner.stats()["task_retries"] == before + 1


def test_a_task_that_is_always_killed_is_lost_and_named(runner: ProcessRunner) -> None:
    error = runner.submit(kill_self, "shard 7").exception()
    assert type(error) is WorkerLost
    assert "kill_self('shard 7') was not finished in 3 attempts" in str(error)
    assert "SIGKILL" in str(error)


def kill_self(context: Any, name: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_death_inside_a_reply_neither_hangs_nor_corrupts(runner: ProcessRunner) -> None:
    futures: list[Future[Any]] = [runner.submit(answer, n, 9_000, 0) for n in range(10)]
    doomed = runner.submit(lambda context: [bytes(100_000), DiesWhilePickled()])
    futures += [runner.submit(answer, n, 9_000, 0) for n in range(10, 20)]
    assert type(doomed.exception()) is WorkerLost
    assert [f.result() for f in futures] == [answer(None, n, 9_000, 0) for n in range(20)]


def test_a_hang_is_ended_and_tried_again_while_others_go_on(tmp_path: pathlib.Path) -> None:
    with ProcessRunner(
        answer, workers=2, preload=(), task_timeout_s=0.5, max_attempts=2
    ) as impatient:
        once = impatient.submit(first_time_only, tmp_path / "marker", 0)
        others = [impatient.submit(own_pid) for _ in range(20)]
        always = impatient.submit(hang)
        assert once.result() == "second attempt"
        assert all(other.result() > 0 for other in others)
        error = always.exception()
    assert type(error) is WorkerLost
    assert "hang() was not finished in 2 attempts" in str(error)
    assert "task_timeout_s" in str(error)


def hang(context: Any) -> None:
    signal.pause()


def test_a_death_between_tasks_costs_a_restart_and_nothing_else(runner: ProcessRunner) -> None:
    before = runner.stats()
    pid = runner.submit(own_pid).result()
    os.kill(pid, signal.SIGABRT)
    assert pid not in [runner.submit(own_pid).result() for _ in range(50)][10:]
    after = runner.stats()
    assert after["task_retries"] == before["task_retries"]
    assert after["worker_restarts"] == before["worker_restarts"] + 1


def test_descriptors_do_not_grow_with_restarts(runner: ProcessRunner) -> None:
    runner.submit(own_pid).result()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(200):
        assert type(runner.submit(lambda context: os.abort()).exception()) is WorkerCrashed
    in_worker = {runner.submit(highest_descriptor).result() for _ in range(10)}
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # a worker may be on its way
    assert max(in_worker) < 40


def highest_descriptor(context: Any) -> int:
    return max(int(name) for name in os.listdir("/proc/self/fd"))


def test_a_zygote_that_is_killed_is_replaced_again_and_again(runner: ProcessRunner) -> None:
    for _ in range(2):
        futures = [runner.submit(answer, n, 5_000, 2000) for n in range(100)]
        futures[10].result()
        zygote = zygote_of(runner)
        pidfds = [os.pidfd_open(process.pid) for process in [zygote, *zygote.children()]]
        zygote.kill()
        assert [f.result() for f in futures] == [answer(None, n, 5_000, 0) for n in range(100)]
        assert all(has_ended(pidfd, 10) for pidfd in pidfds)
        for pidfd in pidfds:
            os.close(pidfd)


class DiesAfterFork:
    def __setstate__(self, state: Any) -> None:
        os.register_at_fork(after_in_child=lambda: os._exit(1))

    def __getstate__(self) -> dict[str, int]:
        return {"any": 1}


def test_workers_that_cannot_live_end_the_run_instead_of_looping() -> None:
    with ProcessRunner(DiesAfterFork(), workers=2, preload=()) as runner:
        error = runner.submit(own_pid).exception()
    assert type(error) is RunnerError
    assert "died one after the other" in str(error)
    assert "exit code 1" in str(error)
