"""What the trainer knows of a task and of a worker, and the verdict on a task whose worker died.

Imports: errors. Used by: manager, processes.
"""

import pickle
import reprlib
import signal
import socket
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from zephon_mm.errors import RunnerError, WorkerCrashed, WorkerLost
from zephon_mm.runners import pickles

_TEXT_LIMIT = 200
_TASKS_PER_WORKER = 2
_OVERDUE_ATTEMPTS = 2  # a hang is rarely luck, and each attempt waits for the whole timeout

_NATIVE = {
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGABRT,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGTRAP,
    signal.SIGSYS,
}


@dataclass(slots=True, eq=False)
class Task:
    """One call and its future. `attempts` counts the workers that died while they ran it."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    payload: bytes
    future: Future[Any] = field(default_factory=Future)
    number: int = 0
    attempts: int = 0
    started: bool = False

    def start(self) -> bool:
        """Mark the future as running. Return False if it was cancelled before."""
        self.started = self.started or self.future.set_running_or_notify_cancel()
        return self.started

    def settle(self, payload: bytes, *, ok: bool) -> None:
        """Resolve the future with a worker's reply: a pickled result or exception."""
        try:
            value = pickle.loads(payload) if ok else pickles.loads_error(payload)
        except Exception as error:  # noqa: BLE001  # the user's classes, whatever they do
            ok = False
            value = RunnerError(
                f"the reply of {self} cannot be unpickled in the trainer "
                f"({type(error).__name__}: {error}). Return plain data."
            )
        (self.future.set_result if ok else self.future.set_exception)(value)

    def __str__(self) -> str:
        """Return the call as text: the function's name and its arguments, cut to size."""
        name = getattr(self.fn, "__qualname__", None) or reprlib.repr(self.fn)
        text = ", ".join(reprlib.repr(arg) for arg in self.args)
        if len(text) > _TEXT_LIMIT:
            text = text[:_TEXT_LIMIT] + "..."
        return f"{name}({text})"


@dataclass(slots=True, eq=False)
class Worker:
    """A worker process, from the request to fork it until it is reaped.

    `pidfd` is -1 until it is born. `tasks` are those it was sent and has not replied to, at most
    two. `deadline` is when the first of them is overdue, on the monotonic clock. `board` is shared
    with the workers: (slots,) uint64, the number of the task that each runs, 0 for none.
    """

    slot: int
    sock: socket.socket
    board: "memoryview[int]"
    pidfd: int = -1
    doomed: bool = False
    overdue: bool = False
    deadline: float = float("inf")
    tasks: deque[Task] = field(default_factory=deque)

    def accepts(self) -> bool:
        """Tell whether it may be given a task now."""
        return self.pidfd >= 0 and not self.doomed and len(self.tasks) < _TASKS_PER_WORKER

    def running(self) -> Task | None:
        """Return the task that it has begun, if any; the others only wait in its socket."""
        begun = self.tasks and self.tasks[0].number == self.board[self.slot]
        return self.tasks[0] if begun else None


def judge(task: Task, code: int, *, overdue: bool, max_attempts: int) -> RunnerError | None:
    """Decide about a task whose worker died under it, and count the attempt.

    Args:
        task: What the worker ran.
        code: Its exit code, negative for a signal.
        overdue: It was killed because the task ran too long.
        max_attempts: Deaths from outside that a task may survive, plus one; it may be overdue once.

    Returns:
        None to run it again, or the error it ends with. A native crash ends it at once: only the
        caller knows how to find the sample to blame.
    """
    if not overdue and (code >= 0 or -code in _NATIVE):
        return WorkerCrashed(
            f"a worker died by itself ({cause_of_death(code)}) while it ran {task}. Native code "
            "crashed on these arguments, or the task ended its process: run it alone to see."
        )
    task.attempts += 1
    if task.attempts < (min(max_attempts, _OVERDUE_ATTEMPTS) if overdue else max_attempts):
        return None
    cause = "running longer than task_timeout_s" if overdue else cause_of_death(code)
    return WorkerLost(
        f"{task} was not finished in {task.attempts} attempts; the last one ended by {cause}. If "
        "memory ran out (see dmesg), use fewer workers; if it is only slow, raise task_timeout_s."
    )


def cause_of_death(code: int) -> str:
    """Return a signal's name, or the exit code."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
