"""Where other threads leave tasks and orders for the manager thread, and wake it.

Imports: errors. Used by: manager.
"""

import os
import threading
from collections import deque

from zephon_mm.errors import RunnerError
from zephon_mm.runners.crew import Task


class Inbox:
    """A queue with an eventfd that a selector can watch.

    Attributes:
        bell: The eventfd; readable when there is something to take.
        closed: No more tasks come; end when the present ones are done.
        abort: End now.
    """

    def __init__(self) -> None:
        self.closed = self.abort = False
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Reentrant, because a garbage collection inside a locked block may finalize another runner,
        # and so close another inbox, in this same thread.
        self._lock = threading.RLock()
        self._tasks: deque[Task] = deque()
        self._cancel = self._rung = False
        self._failure: str | None = None

    def put(self, task: Task) -> None:
        """Leave a task.

        Raises:
            RunnerError: The workers failed for good.
            RuntimeError: The runner was shut down.
        """
        with self._lock:
            if self._failure is not None:
                raise RunnerError(self._failure)
            if self.closed:
                raise RuntimeError("this ProcessRunner was shut down and takes no more tasks")
            self._tasks.append(task)
            self._ring()

    def close(self, *, cancel: bool = False, abort: bool = False) -> None:
        """Refuse further tasks; `cancel` those not given to a worker yet, or `abort` all."""
        with self._lock:
            self.closed = True
            self._cancel |= cancel
            self.abort |= abort
            self._ring()

    def take(self) -> tuple[deque[Task], bool]:
        """Return the tasks left so far, and whether to cancel whatever was not begun."""
        with self._lock:
            if self._rung:
                os.eventfd_read(self.bell)
                self._rung = False
            tasks, self._tasks = self._tasks, deque()
            return tasks, self._cancel

    def is_empty(self) -> bool:
        """Tell whether no task waits to be taken."""
        return not self._tasks

    def seal(self, failure: str | None) -> deque[Task]:
        """Refuse everything from now on, because of `failure` if given; return what was left."""
        tasks, _ = self.take()
        with self._lock:
            self.closed = True
            self._failure = failure
            tasks.extend(self._tasks)
            self._tasks.clear()
            os.close(self.bell)
            self.bell = -1
        return tasks

    def _ring(self) -> None:
        """Wake the manager; once is enough until it answers. The lock is held."""
        if not self._rung and self.bell >= 0:
            self._rung = True
            os.eventfd_write(self.bell, 1)
