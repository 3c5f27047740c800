"""The program of the zygote: load the context once, then fork workers and reap them.

The trainer starts it as `python -c`, so that the user's `__main__` is never imported. It has one
thread, since a fork copies only one. Nobody else forks workers, and nobody else waits for them.

Laws:
    1. A worker that ended is reaped before the trainer hears of it ("died").
    2. When the trainer dies, even by SIGKILL, the zygote sees it by pidfd and ends; when the zygote
       ends, for whatever reason, the kernel kills its workers (PR_SET_PDEATHSIG).
    3. It stays in the trainer's session and process group, so that Ctrl-Z and a shell's job control
       reach everybody alike. For the same reason it and its workers ignore what is meant for the
       trainer: Ctrl-C, and the user signals by which a scheduler asks for a checkpoint.

Messages, each one packet, as pickled tuples:
    trainer -> zygote   ("fork", slot) + the worker's socket; ("stop",)
    zygote -> trainer   ("ready",); ("failed", text); ("born", slot) + a pidfd;
                        ("died", slot, exit code, negative for a signal)

Imports: nothing else. Used by: launcher, which runs it.
"""

import ctypes
import gc
import importlib
import json
import mmap
import os
import pickle
import select
import signal
import socket
import sys
import traceback
from dataclasses import dataclass
from typing import Any, NoReturn

from zephon_mm.runners import wire, worker

BOOT = (
    "import json, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "sys.path[:] = json.loads(sys.argv[1])['path']; "
    "from zephon_mm.runners.zygote import main; main(sys.argv[1])"
)
"""What `python -c` runs; its argument is a `Boot` as JSON."""

_BOOT_TIMEOUT_S = 600
_TEXT_LIMIT = 30_000
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Boot:
    """What the zygote needs to know. The descriptors are inherited under the same numbers.

    `control` is its socket to the trainer, `context` holds the pickled context, `board` is a shared
    uint64 for each worker, `fds` are the user's.
    """

    path: list[str]
    trainer: int
    control: int
    context: int
    board: int
    fds: list[int]
    preload: list[str]


def main(text: str) -> None:
    """Run the zygote until the trainer says stop, hangs up or dies."""
    boot = Boot(**json.loads(text))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an inherited SIG_IGN would lose exit codes
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    for fd in (boot.control, boot.context, boot.board, *boot.fds):
        os.set_inheritable(fd, False)
    try:
        trainer = os.pidfd_open(boot.trainer)
    except ProcessLookupError:
        return
    if os.getppid() != boot.trainer:
        return  # it died before the pidfd was opened; the number may be another process by now
    control = socket.socket(fileno=boot.control)
    try:
        zygote = Zygote(boot, control, trainer, _load(boot))
    except BaseException:  # noqa: BLE001  # imports and the user's context: anything may come
        report = f"the worker processes could not start:\n{traceback.format_exc()}"
        wire.send(control, [pickle.dumps(("failed", report[-_TEXT_LIMIT:]))])
        return
    zygote.run()
    worker.flush_output()
    os._exit(0)  # the trainer waits for this end, and tearing torch down would take a second


def _load(boot: Boot) -> Any:
    """Import what the workers share and return the context."""
    # A boot that hangs must not outlive the trainer for ever: the alarm ends it.
    signal.alarm(_BOOT_TIMEOUT_S)
    for name in boot.preload:
        importlib.import_module(name)
    with mmap.mmap(boot.context, 0, prot=mmap.PROT_READ) as data:
        context = pickle.loads(data)
    os.close(boot.context)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    signal.alarm(0)
    threads = sorted(_thread_names())
    if len(threads) > 1 and sys.stderr is not None:
        sys.stderr.write(
            f"zephon_mm: importing the context started threads ({', '.join(threads)}). Workers are "
            "forked without them; start threads when a task first needs them, not at import.\n"
        )
    return context


def _thread_names() -> list[str]:
    root = "/proc/self/task"
    names = []
    for task in os.listdir(root):
        with open(f"{root}/{task}/comm", encoding="utf-8", errors="replace") as file:
            names.append(file.read().strip())
    return names


class Zygote:
    """Forks workers on request and reports their deaths."""

    def __init__(self, boot: Boot, control: socket.socket, trainer: int, context: Any) -> None:
        self._control = control
        self._trainer = trainer
        self._context = context
        self._board = memoryview(mmap.mmap(boot.board, 0)).cast("Q")
        os.close(boot.board)
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl
        self._pid = os.getpid()
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._poll.register(trainer, select.POLLIN)
        self._workers: dict[int, tuple[int, int]] = {}  # pidfd -> (slot, pid)

    def run(self) -> None:
        """Serve until the trainer says stop, hangs up or dies; then end all workers."""
        gc.collect()
        gc.freeze()  # the collector would write to, and so copy, every page that workers share
        try:
            self._report("ready")
            while self._step():
                pass
        except ConnectionError:
            pass  # the trainer is gone
        finally:
            self._end_workers()

    def _step(self) -> bool:
        """Handle what is ready now. Return False to stop."""
        ready = {fd for fd, _ in self._poll.poll()}
        if self._trainer in ready:
            return False
        for pidfd in ready & self._workers.keys():
            slot, code = self._reap(pidfd)
            self._report("died", slot, code)
        return self._control.fileno() not in ready or self._obey()

    def _obey(self) -> bool:
        message, fds = wire.receive(self._control)
        if not message:
            return False
        request = pickle.loads(message)
        if request[0] == "stop":
            return False
        with socket.socket(fileno=fds[0]) as sock:
            self._fork(request[1], sock)
        return True

    def _fork(self, slot: int, sock: socket.socket) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            self._report("failed", f"a worker could not be forked: {error}. Use fewer workers.")
            return
        if pid == 0:
            self._become_worker(slot, sock)
        pidfd = os.pidfd_open(pid)  # ours to reap, so the number is still its own
        self._workers[pidfd] = (slot, pid)
        self._poll.register(pidfd, select.POLLIN)
        self._report("born", slot, fd=pidfd)

    def _become_worker(self, slot: int, sock: socket.socket) -> NoReturn:
        code = 1
        try:
            self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() == self._pid:  # else the zygote died before the kernel was told
                self._control.close()
                for fd in (self._trainer, *self._workers):
                    os.close(fd)
                worker.serve(sock, self._context, self._board, slot)
            code = 0
        except BaseException:  # noqa: BLE001  # nothing may return into the zygote's frames
            traceback.print_exc()
        finally:
            os._exit(code)

    def _reap(self, pidfd: int) -> tuple[int, int]:
        """Wait for a worker that ended; return its slot and exit code."""
        slot, pid = self._workers.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        return slot, os.waitstatus_to_exitcode(status)

    def _end_workers(self) -> None:
        for _, pid in self._workers.values():
            os.kill(pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
        for pidfd in list(self._workers):
            self._reap(pidfd)

    def _report(self, *message: Any, fd: int | None = None) -> None:
        wire.send(self._control, [pickle.dumps(message)], () if fd is None else (fd,))
