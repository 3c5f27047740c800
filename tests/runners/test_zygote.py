"""Who outlives whom, and which scripts work: each test runs one script as its own trainer."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import pytest

from zephon_mm.runners.launcher import has_ended

HEAD = """
import os, signal, sys
from zephon_mm.runners.processes import ProcessRunner

class Point:
    def __init__(self, x):
        self.x = x

class OddError(Exception):
    pass

def double(context, point):
    if point.x < 0:
        raise OddError(point.x)
    return Point(2 * point.x + context)
"""

UNGUARDED = (
    HEAD
    + """
print("main runs")
runner = ProcessRunner(1, workers=2, preload=())
result = runner.submit(double, Point(20)).result()
assert type(result) is Point and result.x == 41
assert type(runner.submit(double, Point(-1)).exception()) is OddError
assert runner.submit(lambda context, x: (context, x), 5).result() == (1, 5)
print("done")
"""
)


def run_script(tmp_path: pathlib.Path, text: str, *args: str) -> subprocess.Popen[str]:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text))
    command = [sys.executable, "-W", "error", str(path), *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_an_unguarded_script_runs_once_and_ends_without_shutdown(tmp_path: pathlib.Path) -> None:
    process = run_script(tmp_path, UNGUARDED)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "main runs\ndone\n", "")


def test_a_script_from_standard_input_works() -> None:
    done = subprocess.run(
        [sys.executable, "-"], input=UNGUARDED, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "main runs\ndone\n", "")


def test_an_exit_gives_up_what_still_runs_and_leaves_nobody(tmp_path: pathlib.Path) -> None:
    script = HEAD + textwrap.dedent("""
    runner = ProcessRunner(1, workers=2, preload=())
    print(*runner.submit(lambda context: (os.getppid(), os.getpid())).result(), flush=True)
    for _ in range(5):
        runner.submit(lambda context: signal.pause())
    raise SystemExit(5)
    """)
    process = run_script(tmp_path, script)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (5, "")
    for pid in map(int, out.split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nobody_outlives_a_killed_trainer_not_even_if_it_had_forked(
    tmp_path: pathlib.Path, number: int
) -> None:
    script = HEAD + textwrap.dedent("""
    runner = ProcessRunner(1, workers=2, preload=())
    pids = runner.submit(lambda context: (os.getppid(), os.getpid())).result()
    for _ in range(4):
        runner.submit(lambda context: signal.pause())
    child = os.fork()  # holds copies of all the runner's descriptors
    if child == 0:
        os.close(1)
        signal.pause()
    print(*pids, child, flush=True)
    signal.pause()
    """)
    process = run_script(tmp_path, script)
    assert process.stdout is not None
    zygote, worker, child = map(int, process.stdout.readline().split())
    watched = [os.pidfd_open(pid) for pid in (zygote, worker)]
    try:
        process.send_signal(number)
        assert all(has_ended(pidfd, 10) for pidfd in watched)
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        for pidfd in watched:
            os.close(pidfd)
        process.communicate()


def test_an_interrupt_from_the_terminal_is_the_trainers_alone(tmp_path: pathlib.Path) -> None:
    script = HEAD + textwrap.dedent("""
    os.setpgid(0, 0)
    runner = ProcessRunner(1, workers=2, preload=())
    runner.submit(double, Point(1)).result()
    try:
        os.killpg(0, signal.SIGINT)
        signal.pause()
    except KeyboardInterrupt:
        print(runner.submit(double, Point(2)).result().x, runner.stats()["worker_restarts"])
    """)
    process = run_script(tmp_path, script)
    assert process.communicate(timeout=60) == ("5 0\n", "")


def test_ignored_and_blocked_signals_of_the_trainer_do_no_harm(tmp_path: pathlib.Path) -> None:
    script = HEAD + textwrap.dedent("""
    from zephon_mm.errors import WorkerCrashed
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGABRT])
    runner = ProcessRunner(1, workers=1, preload=())
    error = runner.submit(lambda context: os.abort()).exception()
    assert type(error) is WorkerCrashed and "SIGABRT" in str(error), error
    runner.shutdown()
    print("done")
    """)
    process = run_script(tmp_path, script)
    assert process.communicate(timeout=60) == ("done\n", "")
