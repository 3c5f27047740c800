"""One queue in front of a runner: what is due first goes first, and crashes are isolated.

The runner is a plain executor that knows nothing of samples. This queue holds back all but
`4 * workers` tasks, so that a task which is due sooner overtakes those that wait, and runs the
items of a task one by one when it took its workers with it: an item that crashes natively twice
alone is a defect of the data, whatever it shared a task with; one whose workers are killed or
overdue alone too ends the task with an error that names it. The runner is filled up again when it
is half empty: each worker then still has a task to run and one to follow.

Laws (tests/engine/test_schedule.py):
    1. The result of a task is the list of its items' results, in order, however it was run.
    2. At most `slots` tasks are in the runner; of those waiting, the smallest priority goes next.
    3. Every task ends, also when the runner fails for good.

Imports: errors, protocols. Used by: engine.planner, engine.driver.
"""

import heapq
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

from zephon_mm.errors import RunnerError, WorkerCrashed, WorkerLost
from zephon_mm.protocols import Runner
from zephon_mm.runners.inline import InlineRunner

Priority = tuple[int, ...]
Poison = Callable[[Any, Any, str], Any]
"""A worker function, since only the context has names: (context, item, what happened) -> result.

Its result must have a `message` that names the item."""


class _Task(NamedTuple):
    priority: Priority
    order: int  # ties are broken by submission order; never compares what follows
    fn: Callable[..., list[Any]]
    items: Any
    poison: Poison
    future: Future[list[Any]]
    crashes: int


class TaskQueue:
    """Submits `fn(context, items)` to a runner, smallest priority first.

    `runs_ahead` is False where a task runs when it is submitted: look-ahead is only a delay there.

    Args:
        runner: Where tasks run.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.workers = runner.workers
        self.slots = 4 * runner.workers
        self.runs_ahead = not isinstance(runner, InlineRunner)
        self._limits: dict[Callable[..., Any], int] = {}
        self._running: dict[Callable[..., Any], int] = {}
        self._waiting: list[_Task] = []
        self._lock = threading.Lock()
        self._order = itertools.count()
        self._closed = False

    def limit(self, fn: Callable[..., Any], parallelism: int) -> None:
        """Let at most `parallelism` tasks of one function be in the runner at once."""
        self._limits[fn] = parallelism

    def submit(
        self, priority: Priority, fn: Callable[..., list[Any]], items: Any, poison: Poison
    ) -> Future[list[Any]]:
        """Queue a task.

        Args:
            priority: Smaller runs first.
            fn: A worker function: (context, items) -> list with one result an item.
            items: A sequence that can be sliced.
            poison: Gives the result of an item that crashed its worker twice, alone.

        The future's exception is the task's own; a WorkerLost names the item.
        """
        future: Future[list[Any]] = Future()
        self._push(_Task(priority, next(self._order), fn, items, poison, future, 0))
        return future

    def close(self) -> None:
        """Cancel what waits. What runs is left to the runner's shutdown."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, []
        for task in waiting:
            task.future.cancel()

    @property
    def depth(self) -> int:
        """Tasks that wait or run."""
        with self._lock:
            return len(self._waiting) + sum(self._running.values())

    def _push(self, task: _Task) -> None:
        with self._lock:
            if self._closed:
                task.future.cancel()
                return
            heapq.heappush(self._waiting, task)
        self._pump()

    def _pump(self) -> None:
        while (task := self._next()) is not None:
            try:
                inner = self._runner.submit(task.fn, task.items)
            except (RuntimeError, RunnerError) as error:  # it was shut down, or failed for good
                self._left(task)
                task.future.set_exception(error)
                continue  # so will all that wait
            inner.add_done_callback(partial(self._done, task))

    def _next(self) -> _Task | None:
        """Take the first waiting task that may run now."""
        with self._lock:
            if sum(self._running.values()) >= self.slots:
                return None
            held = []
            found = None
            while self._waiting and found is None:
                task = heapq.heappop(self._waiting)
                limit = self._limits.get(task.fn, self.slots)
                if self._running.get(task.fn, 0) < limit:
                    found = task
                    self._running[task.fn] = self._running.get(task.fn, 0) + 1
                else:
                    held.append(task)
            for task in held:
                heapq.heappush(self._waiting, task)
            return found

    def _left(self, task: _Task) -> int:
        """Count a task as gone from the runner; return how many are there."""
        with self._lock:
            self._running[task.fn] -= 1
            return sum(self._running.values())

    def _done(self, task: _Task, inner: Future[list[Any]]) -> None:
        if self._left(task) <= self.slots // 2:
            self._pump()
        if inner.cancelled():
            task.future.cancel()
            return
        error = inner.exception()
        if error is None:
            task.future.set_result(inner.result())
        elif isinstance(error, WorkerCrashed | WorkerLost):
            self._isolate(task, error)
        else:
            task.future.set_exception(error)

    def _isolate(self, task: _Task, error: WorkerCrashed | WorkerLost) -> None:
        """Run the items of a task alone; one that crashed alone gets one more try."""
        if len(task.items) > 1:
            parts: list[Future[list[Any]]] = [Future() for _ in task.items]
            for part in parts:
                part.add_done_callback(lambda _: _gather(parts, task.future))
            for position, part in enumerate(parts):
                item = task.items[position : position + 1]
                self._push(task._replace(order=next(self._order), items=item, future=part))
        elif isinstance(error, WorkerCrashed) and task.crashes == 0:
            self._push(task._replace(order=next(self._order), crashes=1))
        else:
            self._blame(task, error)

    def _blame(self, task: _Task, error: WorkerCrashed | WorkerLost) -> None:
        """End the task of one item with its poison, or with an error that names the item."""
        try:
            named = self._runner.submit(task.poison, task.items[0], str(error))
        except (RuntimeError, RunnerError):
            task.future.set_exception(error)
            return
        named.add_done_callback(lambda done: _convict(task.future, error, done))


def _convict(
    future: Future[list[Any]], error: WorkerCrashed | WorkerLost, named: Future[Any]
) -> None:
    if named.cancelled():
        future.cancel()
    elif named.exception() is not None:
        future.set_exception(error)
    elif isinstance(error, WorkerCrashed):
        future.set_result([named.result()])
    else:
        future.set_exception(WorkerLost(named.result().message))


def _gather(parts: Sequence[Future[list[Any]]], whole: Future[list[Any]]) -> None:
    """Finish the whole once every part has finished, in order.

    Deaths exist in the process runner alone, whose one manager thread finishes every future.
    """
    if whole.done() or not all(part.done() for part in parts):
        return
    if any(part.cancelled() for part in parts):
        whole.cancel()
    elif errors := [error for part in parts if (error := part.exception()) is not None]:
        whole.set_exception(errors[0])
    else:
        whole.set_result([part.result()[0] for part in parts])
