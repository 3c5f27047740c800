"""A child of the nursery is as one that this process had started, but for what it had imported."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.contracts.runner import Make, RunnerContract
from tests.fixtures.nursery import Child, Nursery
from zephon_mm.runners.processes import ProcessRunner


class TestProcessRunnerFromTheNursery(RunnerContract):
    @pytest.fixture(scope="class")
    @classmethod
    def make(cls, nursery: Nursery) -> Iterator[Make]:
        with nursery.launching():
            yield lambda context: ProcessRunner(context, workers=2)


def tell(path: str) -> None:
    """Write to descriptor 77 what this process is."""
    facts = {
        "parent": os.getppid(),
        "env": dict(os.environ),
        "folder": os.getcwd(),
        "fds": sorted(map(int, os.listdir("/proc/self/fd"))),
        "warm": "torch" in sys.modules,
        "threads": psutil.Process().num_threads(),
    }
    os.write(77, json.dumps(facts).encode())
    if path:
        raise RuntimeError(path)


def start(nursery: Nursery, log: Path, path: str) -> Child:
    with log.open("wb") as file:
        fds = dict.fromkeys((0, 1, 2, 77), file.fileno())
        target = "tests.runners.test_nursery:tell"
        return nursery.start(target, [path], env={"ONLY": "this"}, fds=fds)


def test_it_has_the_askers_directory_environment_and_descriptors_and_no_more(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert start(nursery, tmp_path / "log", "").wait() == 0
    facts = json.loads((tmp_path / "log").read_text())
    assert facts["parent"] == os.getpid()
    assert facts["env"] == {"ONLY": "this"}
    assert facts["folder"] == str(tmp_path)
    assert facts["fds"] == [0, 1, 2, 3, 77]  # 3 is open to list them
    assert facts["warm"]
    assert facts["threads"] == 1


def test_its_end_is_told_to_the_asker(nursery: Nursery, tmp_path: Path) -> None:
    assert start(nursery, tmp_path / "log", "it failed").wait() == 1
    assert "RuntimeError: it failed" in (tmp_path / "log").read_text()
    child = nursery.start("signal:pause", [], env={}, fds={})
    os.kill(child.pid, signal.SIGTERM)
    assert child.wait() == -signal.SIGTERM
