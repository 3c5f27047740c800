"""The runner that runs a task where it is submitted: the reference for all others.

Laws:
    1. `submit` returns a future that is done already.
    2. A task's exception lands in its future; only KeyboardInterrupt is the caller's.

Imports: nothing from the package. Used by: pipeline, tests.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from typing import Any


class InlineRunner(Executor):
    """Runs each task inside `submit`. It cannot contain a native crash: there the run dies.

    Args:
        context: The first argument of every task, handed over as it is.
    """

    def __init__(self, context: Any) -> None:
        self.workers = 1
        self._context = context
        self._closed = False
        self._tasks_done = 0

    def submit(  # type: ignore[override]  # tasks take positional arguments only
        self, fn: Callable[..., Any], /, *args: Any
    ) -> Future[Any]:
        """Run `fn(context, *args)` now and return its finished future.

        Raises:
            RuntimeError: The runner was shut down.
        """
        if self._closed:
            raise RuntimeError("this InlineRunner was shut down and takes no more tasks")
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        try:
            future.set_result(fn(self._context, *args))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  # the worker boundary
            future.set_exception(error)
        self._tasks_done += 1
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Refuse further tasks. Nothing is ever left to wait for or to cancel."""
        self._closed = True

    def stats(self) -> Mapping[str, int]:
        """Return the counters that every runner has."""
        return {"tasks_done": self._tasks_done, "task_retries": 0, "worker_restarts": 0}
