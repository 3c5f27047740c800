"""What the process runner promises beyond the contract, while nobody dies."""

import contextlib
import gc
import multiprocessing
import os
import pathlib
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import psutil
import pytest

from tests.contracts.runner import Make, RunnerContract
from zephon_mm.errors import ConfigError, RunnerError
from zephon_mm.runners.processes import ProcessRunner


class TestProcessRunner(RunnerContract):
    @pytest.fixture(scope="class")
    @classmethod
    def make(cls) -> Make:
        return lambda context: ProcessRunner(context, workers=2, preload=())


class CountedContext:
    """Writes a line to a file each time it is unpickled; can be told to fail there."""

    def __init__(self, log: pathlib.Path, *, fail: bool = False) -> None:
        self.log = log
        self.fail = fail

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        with open(self.log, "a") as file:
            file.write("unpickled\n")
        if self.fail:
            import module_that_only_the_trainer_has  # noqa: F401


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessRunner]:
    context = CountedContext(tmp_path_factory.mktemp("context") / "log")
    with ProcessRunner(context, workers=2, preload=()) as runner:
        yield runner


def worker_facts(context: CountedContext) -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "unpickled": context.log.read_text().splitlines(),
        "threads": len(os.listdir("/proc/self/task")),
        "stdin": os.readlink("/proc/self/fd/0"),
        "sigint": signal.getsignal(signal.SIGINT),
        "omp": os.environ["OMP_NUM_THREADS"],
        "tokenizers": os.environ["TOKENIZERS_PARALLELISM"],
        "cwd": os.getcwd(),
        "path": sys.path,
    }


def test_the_context_is_unpickled_once_for_all_workers(runner: ProcessRunner) -> None:
    facts = [runner.submit(worker_facts).result() for _ in range(20)]
    assert all(fact["unpickled"] == ["unpickled"] for fact in facts)


def test_a_worker_is_quiet_and_alike_the_trainer_where_it_matters(runner: ProcessRunner) -> None:
    facts = runner.submit(worker_facts).result()
    assert facts["threads"] == 1
    assert (facts["omp"], facts["tokenizers"]) == ("1", "false")
    assert facts["stdin"] == "/dev/null"
    assert facts["sigint"] == signal.SIG_IGN
    assert facts["cwd"] == os.getcwd()
    assert facts["path"] == sys.path


# PRF-02.
def test_torch_in_a_worker_has_one_native_thread(tmp_path: pathlib.Path) -> None:
    def threads_after_work(context: CountedContext) -> tuple[int, int]:
        import torch

        torch.rand(256, 256) @ torch.rand(256, 256)
        return torch.get_num_threads(), len(os.listdir("/proc/self/task"))

    with ProcessRunner(CountedContext(tmp_path / "log"), workers=1) as runner:
        assert runner.submit(threads_after_work).result() == (1, 1)


def test_inherited_descriptors_keep_their_numbers() -> None:
    fd = os.memfd_create("arena")
    with ProcessRunner(fd, workers=1, fds=[fd], preload=()) as runner:
        assert runner.submit(os.write, b"from the worker").result() == 15
    assert os.pread(fd, 100, 0) == b"from the worker"
    os.close(fd)


def test_what_does_not_pickle_is_a_runner_error_that_says_so(runner: ProcessRunner) -> None:
    argument = runner.submit(worker_facts, threading.Lock()).exception()
    result = runner.submit(lambda context: threading.Lock()).exception()
    assert type(argument) is type(result) is RunnerError
    assert "task for worker_facts cannot be pickled" in str(argument)
    assert "result of a task, a lock, cannot be pickled" in str(result)
    with pytest.raises(ConfigError, match="context of the workers cannot be pickled"):
        ProcessRunner(threading.Lock(), workers=1)


def test_a_context_that_does_not_load_names_the_missing_module(tmp_path: pathlib.Path) -> None:
    context = CountedContext(tmp_path / "log", fail=True)
    with ProcessRunner(context, workers=2, preload=()) as runner:
        futures = [runner.submit(worker_facts) for _ in range(5)]
        for future in futures:
            error = future.exception()
            assert type(error) is RunnerError
            assert "No module named 'module_that_only_the_trainer_has'" in str(error)
            assert "in __setstate__" in str(error)
        with pytest.raises(RunnerError, match="could not start"):
            runner.submit(worker_facts)


def test_a_daemonic_process_is_told_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    with pytest.raises(ConfigError, match=r'runner="thread" there, or DataLoader\(num_workers=0\)'):
        ProcessRunner(None, workers=1)


def test_a_forked_copy_is_inert(runner: ProcessRunner) -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            runner.shutdown(cancel_futures=True)
            try:
                runner.submit(worker_facts)
            except RuntimeError as error:
                code = 7 if "inherited by a fork" in str(error) else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert runner.submit(worker_facts).result()["unpickled"] == ["unpickled"]


def test_cancelled_tasks_never_run_and_shutdown_does_not_wait_for_them(
    tmp_path: pathlib.Path,
) -> None:
    runner = ProcessRunner(CountedContext(tmp_path / "log"), workers=1, preload=())
    futures = [runner.submit(worker_facts) for _ in range(100)]
    runner.shutdown(cancel_futures=True)
    assert all(future.done() for future in futures)
    assert futures[-1].cancelled()


def test_a_callback_may_submit_and_shut_down(tmp_path: pathlib.Path) -> None:
    runner = ProcessRunner(CountedContext(tmp_path / "log"), workers=2, preload=())
    facts: list[dict[str, Any]] = []
    finished = threading.Event()

    def go_on(future: Future[dict[str, Any]]) -> None:
        facts.append(future.result())
        if len(facts) < 5:
            runner.submit(worker_facts).add_done_callback(go_on)
        else:
            runner.shutdown()
            finished.set()

    runner.submit(worker_facts).add_done_callback(go_on)
    assert finished.wait(60)
    runner.shutdown()
    assert not runner._manager.thread.is_alive()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("ending", ["shutdown", "drop"])
def test_nothing_is_left_behind(ending: str) -> None:
    gc.collect()
    fds, threads = open_descriptors(), threading.active_count()
    children = set(psutil.Process().children(recursive=True))
    runner = ProcessRunner(None, workers=2, preload=())
    future = runner.submit(callable)
    thread = runner._manager.thread
    if ending == "shutdown":
        runner.shutdown()
    del runner
    thread.join()
    assert future.result() is False
    assert open_descriptors() == fds
    assert threading.active_count() == threads
    assert set(psutil.Process().children(recursive=True)) == children
