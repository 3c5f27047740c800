"""The runner that survives its workers. Linux only.

The standard executor cannot keep our promise: a SIGKILL during a large reply hangs it, one death
breaks every task in flight, its processes outlive a killed trainer, it leaves named semaphores, and
it imports the user's `__main__` again.

Who is who. One thread of the trainer, the *manager*, owns all state below. It starts one *zygote*,
a fresh interpreter that loads the context and then forks the *workers*. The zygote is the parent of
the workers: it alone forks and reaps them, so that a worker costs milliseconds and shares the pages
of torch and the context. A worker has a socket to the manager; nobody else has either end.

A worker's life, as the manager sees it: *asked for* (a slot of the crew is taken) -> *born* (the
zygote reported it, with a pidfd) -> *doomed* (overdue, or its socket failed; it gets SIGKILL and
no more tasks) -> *buried* (the zygote reaped it, and its slot is free). A worker that dies by
itself goes from born to buried. Only a burial moves tasks.

A task's life: inbox -> pending -> with a worker -> resolved, or back to the front of pending.
    1. A task is in exactly one place. A worker has at most two: one runs, one waits in its socket,
       so that no worker idles while the manager waits for the GIL.
    2. A task is in the hands of a worker until its reply has been taken or the worker is buried.
       Before that it neither runs again nor is resolved, so shared memory that it writes to has
       at most one writer, and none when its future is done.
    3. Replies that a worker sent before it died count. The board, a word of shared memory for each
       worker, says whether the next task had begun: then it is judged (crew.judge), otherwise it
       goes back as if nothing had been.
    4. Whoever is killed, there is progress or an end: an attempt at a task is counted, or a death
       without any finished task is; both have a limit.

Who watches whom. Zygote dies -> the kernel kills the workers; the manager sees the zygote's pidfd,
waits for the pidfd of each worker as invariant 2 demands, and starts another zygote. Trainer dies
-> the zygote sees its pidfd. (PR_SET_PDEATHSIG would not do there: it fires when the *thread* that
started the zygote ends. End of file would not do either: other children of the trainer may hold
the socket.) Trainer forks -> the child's copy refuses to work and closes nothing but its own
descriptors. The interpreter exits -> an atexit hook ends the manager, which ends the rest. The
manager is a daemon thread so that this hook is reached: Python joins the other threads before it.

Cost: 40 to 55 us of the trainer's CPU a small task; a fork is 3 ms, 10 ms once torch is loaded.

Imports: errors. Used by: runners, pipeline.
"""

import atexit
import functools
import multiprocessing
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any

from zephon_mm.errors import ConfigError, RunnerError
from zephon_mm.runners import pickles, wire
from zephon_mm.runners.crew import Task
from zephon_mm.runners.launcher import Setup
from zephon_mm.runners.manager import Manager

_EXIT_TIMEOUT_S = 20.0

_managers: "weakref.WeakSet[Manager]" = weakref.WeakSet()


class ProcessRunner(Executor):
    """Runs tasks in worker processes; a death or a hang concerns exactly one running task.

    The constructor does not wait for the workers. A worker has one native thread, /dev/null as its
    standard input, and the trainer's output; it ignores SIGINT and never imports `__main__`.

    Args:
        context: The first argument of every task, pickled once and shared by all workers.
        workers: Processes, at least 1.
        fds: Descriptors that the context relies on: inherited under the same numbers. They must
            stay open while the runner lives, since a new zygote inherits them again.
        task_timeout_s: How long one task may run, in seconds, before its worker is killed.
        max_attempts: How often a task may run when its workers are killed from outside; when they
            are overdue it has two attempts.
        preload: Modules that are imported once, before the workers are forked.

    Raises:
        ConfigError: The runner cannot work here, or the context cannot be pickled.
        OSError: There is no memory or no descriptor left to start it.
    """

    def __init__(
        self,
        context: Any,
        *,
        workers: int,
        fds: Sequence[int] = (),
        task_timeout_s: float = 300.0,
        max_attempts: int = 4,
        preload: Sequence[str] = ("torch",),
    ) -> None:
        _check(workers, task_timeout_s, max_attempts)
        try:
            data = pickles.dumps(context)
        except Exception as error:
            raise ConfigError(
                f"the context of the workers cannot be pickled ({type(error).__name__}: {error}). "
                'Give functions and objects that pickle, or use runner="thread".'
            ) from error
        self.workers = workers
        self._pid = os.getpid()
        self._manager = Manager(
            Setup(wire.store(data), slots=workers, fds=tuple(fds), preload=tuple(preload)),
            task_timeout_s=task_timeout_s,
            max_attempts=max_attempts,
        )
        # A runner that is dropped finishes what it was given, as every executor does.
        weakref.finalize(self, _close, self._manager).atexit = False
        _managers.add(self._manager)
        _end_all_at_exit()

    def submit(  # type: ignore[override]  # tasks take positional arguments only
        self, fn: Callable[..., Any], /, *args: Any
    ) -> Future[Any]:
        """Run `fn(context, *args)` in a worker.

        The future's exception is the task's own, with the worker's traceback as its cause, or

        - RunnerError: the call, its result or its exception cannot be pickled; or the workers
          failed for good;
        - WorkerCrashed: the worker died by itself while it ran this task;
        - WorkerLost: workers were killed from outside `max_attempts` times, or overdue twice.

        Raises:
            RuntimeError: The runner was shut down, or belongs to the parent of this process.
            RunnerError: The workers failed for good.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this ProcessRunner belongs to process {self._pid} and was inherited by a fork. "
                "Make the runner in the process that uses it."
            )
        try:
            task = Task(fn, args, pickles.dumps((fn, args)))
        except Exception as error:  # noqa: BLE001  # the user's objects, whatever they do
            failed: Future[Any] = Future()
            failed.set_exception(
                RunnerError(
                    f"a task for {getattr(fn, '__qualname__', fn)} cannot be pickled "
                    f"({type(error).__name__}: {error}). Put large or live objects in the context."
                )
            )
            return failed
        self._manager.inbox.put(task)
        return task.future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more tasks; end the workers when the present ones are done.

        Args:
            wait: Return when all processes are gone and all descriptors are closed.
            cancel_futures: Cancel the tasks that were not given to a worker yet.
        """
        if os.getpid() != self._pid:
            return
        self._manager.inbox.close(cancel=cancel_futures)
        if wait and threading.current_thread() is not self._manager.thread:
            self._manager.thread.join()

    def stats(self) -> Mapping[str, int]:
        """Return the counters that every runner has."""
        manager = self._manager
        return {
            "tasks_done": manager.tasks_done,
            "task_retries": manager.task_retries,
            "worker_restarts": manager.worker_restarts,
        }


def _check(workers: int, task_timeout_s: float, max_attempts: int) -> None:
    if sys.platform != "linux":
        raise ConfigError(f'runner="process" needs Linux, found {sys.platform}: use "thread"')
    if multiprocessing.current_process().daemon:
        raise ConfigError(
            'runner="process" cannot start workers inside a daemonic process, such as a worker of '
            'a DataLoader: use runner="thread" there, or DataLoader(num_workers=0)'
        )
    limits = {"workers": workers, "task_timeout_s": task_timeout_s, "max_attempts": max_attempts}
    for name, value in limits.items():
        if not value > 0:
            raise ConfigError(f"{name} must be above 0, got {value}")


def _close(manager: Manager) -> None:
    if os.getpid() == manager.pid:
        manager.inbox.close()


@functools.cache
def _end_all_at_exit() -> None:
    atexit.register(_end_all)


def _end_all() -> None:
    """End what the user left running. Tasks that are not done are given up."""
    mine = [manager for manager in _managers if manager.pid == os.getpid()]
    for manager in mine:
        manager.inbox.close(abort=True)
    for manager in mine:
        manager.thread.join(_EXIT_TIMEOUT_S)
