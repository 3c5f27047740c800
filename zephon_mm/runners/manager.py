"""The thread behind the process runner: see the design notes in processes.

Imports: errors. Used by: processes.
"""

import contextlib
import functools
import itertools
import os
import selectors
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from zephon_mm.errors import RunnerError
from zephon_mm.runners import wire
from zephon_mm.runners.crew import Task, Worker, cause_of_death, judge
from zephon_mm.runners.inbox import Inbox
from zephon_mm.runners.launcher import Launcher, Setup, has_ended, reap_adopted

_BOOT_ATTEMPTS = 3
_STORM = 20
_REAP_TIMEOUT_S = 5.0


class Manager:
    """Owns the zygote, the workers and all tasks: one thread, `_run`, touches them.

    Args:
        setup: What the zygotes are started with; the manager closes its context in the end.
        task_timeout_s: How long a task may run, in seconds.
        max_attempts: Workers that may die from outside under one task before it is lost.
    """

    def __init__(self, setup: Setup, *, task_timeout_s: float, max_attempts: int) -> None:
        self.pid = os.getpid()
        self.tasks_done = self.task_retries = self.worker_restarts = 0
        self.inbox = Inbox()
        self._setup = setup
        self._task_timeout_s = task_timeout_s
        self._max_attempts = max_attempts
        self._storm = _STORM + 4 * setup.slots
        self._boots = self._deaths = 0
        self._numbers = itertools.count(1)
        self._pending: deque[Task] = deque()
        self._crew: list[Worker | None] = [None] * setup.slots
        self._selector = selectors.DefaultSelector()
        self._watch(self.inbox.bell, self._on_bell)
        try:
            self._start_zygote()
        except BaseException:
            self._free(None)
            raise
        self.thread = threading.Thread(target=self._run, name="zephon-mm-runner", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        failure = None
        try:
            while not self._is_finished():
                self._staff()
                self._assign()
                for key, _ in self._selector.select(self._patience_s()):
                    key.data()
                self._expire()
        except RunnerError as error:
            failure = str(error)
        except OSError as error:  # out of descriptors or memory
            failure = f"the worker processes cannot be managed any more: {error}"
        except BaseException as error:  # nobody may wait for ever because of a defect here
            failure = f"the runner's thread failed: {type(error).__name__}: {error}"
            raise
        finally:
            self._end(failure)

    def _is_finished(self) -> bool:
        if self.inbox.abort:
            return True
        busy = self._pending or any(worker and worker.tasks for worker in self._crew)
        return self.inbox.closed and self.inbox.is_empty() and not busy

    def _watch(self, source: Any, handler: Callable[..., object], *args: Any) -> None:
        self._selector.register(source, selectors.EVENT_READ, functools.partial(handler, *args))

    def _unwatch(self, source: Any) -> None:
        with contextlib.suppress(KeyError):  # it hung up before it ended
            self._selector.unregister(source)

    def _on_bell(self) -> None:
        tasks, cancel = self.inbox.take()
        for task in tasks:
            task.number = next(self._numbers)
            self._pending.append(task)
        if cancel:  # a task that a worker was given before cannot be cancelled: it stays
            kept = [task for task in self._pending if not task.future.cancel() or task.start()]
            self._pending = deque(kept)

    # ------------------------------------------------------------------ work for workers

    def _staff(self) -> None:
        """Ask for a worker in every empty slot."""
        if not self._launcher.ready:
            return
        for slot, worker in enumerate(self._crew):
            if worker is not None:
                continue
            ours, theirs = wire.pair()
            try:
                self._launcher.fork(slot, theirs)
            except OSError:  # behind, or gone: its next message or its end brings us back here
                ours.close()
                return
            finally:
                theirs.close()
            recruit = self._crew[slot] = Worker(slot, ours, self._launcher.board)
            self._watch(ours, self._take_reply, recruit)

    def _assign(self) -> None:
        """Give pending tasks, oldest first, to the workers that have least to do."""
        while self._pending:
            able = [worker for worker in self._crew if worker and worker.accepts()]
            if not able:
                return
            task = self._pending.popleft()
            if task.start():
                self._give(min(able, key=lambda worker: len(worker.tasks)), task)

    def _give(self, worker: Worker, task: Task) -> None:
        try:
            wire.post(worker.sock, wire.REQUEST.pack(task.number), task.payload)
        except (BlockingIOError, ConnectionError):
            self._pending.appendleft(task)
            self._doom(worker)
        except OSError as error:  # no memory for a large request
            task.future.set_exception(error)
        else:
            worker.tasks.append(task)
            if len(worker.tasks) == 1:
                worker.deadline = time.monotonic() + self._task_timeout_s

    def _take_reply(self, worker: Worker) -> bool:
        """Resolve the task whose reply is next. Return False when there is none."""
        if self._crew[worker.slot] is not worker:
            return False  # buried by another event of the same round
        try:
            header, payload = wire.collect(worker.sock, wire.REPLY.size)
        except BlockingIOError:
            return False
        except OSError:  # the descriptor of a large reply was lost
            header, payload = b"", b""
        number, ok = wire.REPLY.unpack(header) if header else (0, False)
        if not worker.tasks or worker.tasks[0].number != number:
            self._unwatch(worker.sock)  # an ended stream is always readable
            self._doom(worker)
            return False
        task = worker.tasks.popleft()
        timeout_s = self._task_timeout_s if worker.tasks else float("inf")
        worker.deadline = time.monotonic() + timeout_s
        self._deaths = 0
        self.tasks_done += 1
        task.settle(payload, ok=bool(ok))
        return True

    # ------------------------------------------------------------------ deaths

    def _patience_s(self) -> float | None:
        first = min((w.deadline for w in self._crew if w), default=float("inf"))
        return None if first == float("inf") else max(0.0, first - time.monotonic())

    def _expire(self) -> None:
        """Kill overdue workers. Replies that had arrived by now were taken just before."""
        now = time.monotonic()
        for worker in self._crew:
            if worker and worker.deadline <= now:
                worker.overdue = True
                worker.deadline = float("inf")
                self._doom(worker)

    def _doom(self, worker: Worker) -> None:
        """Make sure that a worker dies. Its tasks stay with it until it is reaped."""
        worker.doomed = True
        if worker.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)

    def _bury(self, worker: Worker, code: int) -> None:
        """Settle the tasks of a worker that is reaped: it can neither reply nor write any more."""
        while self._take_reply(worker):
            pass  # what it sent before it died counts
        self._discharge(worker)
        self.worker_restarts += 1
        self._deaths += 1
        if (task := worker.running()) is not None:
            error = judge(task, code, overdue=worker.overdue, max_attempts=self._max_attempts)
            if error is None:
                self.task_retries += 1
            else:
                worker.tasks.popleft()
                self._deaths = 0
                task.future.set_exception(error)
        self._pending.extendleft(reversed(worker.tasks))
        if self._deaths > self._storm:
            raise RunnerError(
                f"{self._deaths} processes died one after the other and no task was finished, the "
                f"last by {cause_of_death(code)}. Something outside kills them (a memory limit, a "
                "scheduler): see dmesg, and what they printed."
            )

    def _discharge(self, worker: Worker) -> None:
        """Forget a worker: free its slot and its descriptors."""
        self._crew[worker.slot] = None
        self._unwatch(worker.sock)
        worker.sock.close()
        if worker.pidfd >= 0:
            self._unwatch(worker.pidfd)
            os.close(worker.pidfd)

    # ------------------------------------------------------------------ the zygote

    def _start_zygote(self) -> None:
        self._launcher = Launcher(self._setup)
        self._watch(self._launcher.control, self._obey_zygote)
        self._watch(self._launcher.pidfd, self._on_zygote_end, self._launcher)

    def _obey_zygote(self) -> bool:
        """Handle the zygote's next message. Return False when there is none."""
        try:
            message, fds = self._launcher.message()
        except BlockingIOError:
            return False
        kind, *values = message
        if kind == "failed":
            raise RunnerError(values[0])
        if kind == "ready":
            self._launcher.ready = True
            self._boots = 0
        elif kind == "hung up":
            self._unwatch(self._launcher.control)
            self._launcher.kill()
            return False
        elif worker := self._crew[values[0]]:
            if kind == "died":
                self._bury(worker, values[1])
            else:
                worker.pidfd = fds[0]
                if worker.doomed:  # its socket ended before we heard of its birth
                    self._doom(worker)
        return True

    def _on_zygote_end(self, launcher: Launcher) -> None:
        """Start another zygote. The workers of this one die by the kernel's hand."""
        while self._obey_zygote():
            pass
        self._unwatch(launcher.control)
        self._unwatch(launcher.pidfd)
        code = launcher.close()
        for worker in filter(None, self._crew):
            if worker.pidfd < 0:  # it was given nothing yet
                self._bury(worker, -signal.SIGKILL)
                continue
            self._doom(worker)
            self._unwatch(worker.pidfd)  # it may be an orphan of an earlier zygote, still dying
            self._watch(worker.pidfd, self._on_orphan_end, worker)
        self._boots += not launcher.ready
        if self._boots >= _BOOT_ATTEMPTS:
            raise RunnerError(
                f"the zygote died {self._boots} times while it started, the last time by "
                f"{cause_of_death(code)}: see what it printed on stderr."
            )
        self._start_zygote()

    def _on_orphan_end(self, worker: Worker) -> None:
        reap_adopted(worker.pidfd)
        self._bury(worker, -signal.SIGKILL)

    # ------------------------------------------------------------------ the end

    def _end(self, failure: str | None) -> None:
        """End all processes, then resolve what is unfinished, then free what is left."""
        self._launcher.stop()
        for worker in self._crew:
            if worker is not None and worker.pidfd >= 0:
                self._doom(worker)
                has_ended(worker.pidfd, _REAP_TIMEOUT_S)
                reap_adopted(worker.pidfd)
        left = [task for worker in self._crew if worker for task in worker.tasks]
        for worker in filter(None, self._crew):
            self._discharge(worker)
        left.extend(self._pending)
        left.extend(self._free(failure))
        error = failure or "the runner was stopped before this task was done"
        for task in left:
            if task.start():
                task.future.set_exception(RunnerError(error))

    def _free(self, failure: str | None) -> deque[Task]:
        self._selector.close()
        os.close(self._setup.context)
        return self.inbox.seal(failure)
