"""The contenders, and how one is run: in processes that are killed as a group at the end.

A contender runs in the first Python that can import its library: that of this run, or one of those
that `PEERS_PYTHON` names, separated by colons (`setup.sh` beside this file makes them).

Imports: nothing of the package. Used by: .table.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]


class Peer(NamedTuple):
    """A contender: the function of its name is in `file`; `package` has `module`."""

    file: str
    module: str
    package: str
    format: str


PEERS = {
    "zephon_mm": Peer("ours", "zephon_mm", "zephon-mm", "webdataset"),
    "torch": Peer("dataloaders", "torch", "torch", "records"),
    "hf_datasets": Peer("dataloaders", "datasets", "datasets", "arrow"),
    "webdataset": Peer("dataloaders", "webdataset", "webdataset", "webdataset"),
    "mosaic": Peer("dataloaders", "streaming", "mosaicml-streaming", "mds"),
    "litdata": Peer("dataloaders", "litdata", "litdata", "litdata"),
    "grain": Peer("grain", "grain", "grain", "arrayrecord"),
    "energon": Peer("energon", "megatron.energon", "megatron-energon", "energon"),
    "zephon": Peer("zephon", "zephon", "zephon", "litdata"),
}


@cache
def python_of(peer: Peer) -> tuple[str, str]:
    """Return the Python that can import a contender's library, and the library's version.

    Where none can the first is empty, and the second says why.
    """
    code = f"import {peer.module}; from importlib.metadata import version"
    said = "PEERS_PYTHON names no Python"
    for python in (sys.executable, *filter(None, os.environ.get("PEERS_PYTHON", "").split(":"))):
        command = [python, "-P", "-c", f"{code}; print(version({peer.package!r}))"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        if not done.returncode:
            return python, done.stdout.split()[-1]
        said = done.stderr.splitlines()[-1]
    return "", f"not installed: {said}"


def start(peer: Peer, *commands: list[str], limit_s: float) -> list[Any]:
    """Run modules in a contender's Python, at once, each for at most `limit_s`.

    Returns:
        What each prints last, a list of one in JSON, or instead a text that says what went wrong.
    """
    python, said = python_of(peer)
    if not python:
        return [said] * len(commands)
    single = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}  # workers are enough
    env = {**os.environ, **single, "PYTHONPATH": str(ROOT)}
    with contextlib.ExitStack() as stack:
        running = []
        for command in commands:
            out = stack.enter_context(tempfile.TemporaryFile("w+"))
            streams: dict[str, Any] = {"stdout": out, "stderr": subprocess.STDOUT}
            words = [python, "-m", *command]
            process = subprocess.Popen(words, cwd=ROOT, env=env, start_new_session=True, **streams)
            stack.callback(_end, process)
            running.append((process, out))
        return [_result(process, out, limit_s) for process, out in running]


def _result(process: subprocess.Popen[str], out: Any, limit_s: float) -> Any:
    said = f"no result in {limit_s:.0f} s: "
    with contextlib.suppress(subprocess.TimeoutExpired):
        said = f"exit status {process.wait(limit_s)}: "
    out.seek(0)
    lines = [line for line in out.read().split("\n") if line] or ["no message"]
    found = [line for line in lines if line.startswith("[")]
    return said + lines[-1][:300] if process.returncode or not found else json.loads(found[-1])[0]


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended, and all that it started
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
