"""The trainer's handle on one zygote: start it, ask it for workers, hear of deaths, end it.

The environment of the workers is set here: one native thread each, since there is a worker for
every core, and a library's own threads would only fight over them.

Imports: nothing else. Used by: manager.
"""

import contextlib
import json
import mmap
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from zephon_mm.runners import wire, zygote

_STOP_TIMEOUT_S = 5.0

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # else importing pyarrow starts a thread
}


@dataclass(frozen=True, slots=True)
class Setup:
    """What every zygote of a runner is started with.

    `context` is a descriptor of the pickled context, `slots` the most workers that live at a time,
    `fds` are descriptors to inherit under the same numbers, `preload` modules to import first.
    """

    context: int
    slots: int
    fds: tuple[int, ...]
    preload: tuple[str, ...]


class Launcher:
    """Starts a zygote at once and does not wait for it.

    Attributes:
        ready: The zygote has loaded the context and takes requests.
        control: The socket on which it reports; never blocks.
        pidfd: Readable when the zygote has ended.
        board: (slots,) uint64: which task each worker runs, 0 for none.

    Raises:
        OSError: The process could not be started.
    """

    def __init__(self, setup: Setup) -> None:
        self.ready = False
        self.control, theirs = wire.pair()
        shared = os.memfd_create("zephon-mm-board")
        try:
            os.ftruncate(shared, 8 * setup.slots)
            self.board = memoryview(mmap.mmap(shared, 0)).cast("Q")
            boot = {
                "path": [os.fspath(entry) for entry in sys.path],
                "trainer": os.getpid(),
                "control": theirs.fileno(),
                "context": setup.context,
                "board": shared,
                "fds": list(setup.fds),
                "preload": list(setup.preload),
            }
            self._process = subprocess.Popen(
                [sys.executable, "-c", zygote.BOOT, json.dumps(boot)],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **_ENVIRONMENT},
                pass_fds=(theirs.fileno(), setup.context, shared, *setup.fds),
            )
        except BaseException:
            self.control.close()
            raise
        finally:
            theirs.close()
            os.close(shared)
        # Not reaped before `close`, so the number is its own (unless the user reaps all children).
        self.pidfd = os.pidfd_open(self._process.pid)

    def fork(self, slot: int, sock: socket.socket) -> None:
        """Ask for a worker that serves `sock`, which stays the caller's to close.

        Raises:
            BlockingIOError: The zygote is behind with its work: ask again after its next message.
            ConnectionError: The zygote is gone.
        """
        self.board[slot] = 0
        wire.send(self.control, [pickle.dumps(("fork", slot))], (sock.fileno(),))

    def message(self) -> tuple[tuple[Any, ...], list[int]]:
        """Return the zygote's next message and its descriptors; `("hung up",)` after the last.

        Raises:
            BlockingIOError: There is none now.
        """
        data, fds = wire.receive(self.control)
        return (pickle.loads(data) if data else ("hung up",)), fds

    def kill(self) -> None:
        """Kill the zygote, and so its workers; does not wait."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def stop(self) -> None:
        """End the zygote: it reaps its workers first if it can, and is killed if it does not."""
        if self._process.returncode is not None:
            return  # it ended before, and was closed
        if self.ready:
            with contextlib.suppress(OSError):  # it is ending already
                wire.send(self.control, [pickle.dumps(("stop",))])
        else:
            self.kill()
        if not has_ended(self.pidfd, _STOP_TIMEOUT_S):
            self.kill()
        self.close()

    def close(self) -> int:
        """Reap a zygote that ended, or is about to; return its exit code."""
        code = self._process.wait()
        self.control.close()
        os.close(self.pidfd)
        return code


def has_ended(pidfd: int, timeout_s: float) -> bool:
    """Wait for a process to end, at most so long."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def reap_adopted(pidfd: int) -> None:
    """Reap a worker that outlived its zygote, if this process has adopted it.

    Orphans go to the nearest subreaper or to process 1, which inside a container is often the
    trainer itself, and would stay there as zombies.
    """
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
