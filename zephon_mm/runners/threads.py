"""The runner that runs tasks in threads of the trainer.

Decoding, resizing, tokenising and file reads release the GIL, so threads pay. The runner never
sets a process-wide thread count: those belong to the trainer's own computation.

Imports: metrics. Used by: pipeline.
"""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from zephon_mm.errors import ConfigError
from zephon_mm.metrics import Metrics


class ThreadRunner(ThreadPoolExecutor):
    """Runs tasks in a thread pool. It cannot contain a native crash: there the run dies.

    Args:
        context: The first argument of every task, shared by all threads.
        workers: Threads, at least 1.

    Raises:
        ConfigError: `workers` is below 1.
    """

    def __init__(self, context: Any, *, workers: int) -> None:
        if workers < 1:
            raise ConfigError(f"workers must be at least 1, got {workers}: set options(workers=1)")
        super().__init__(workers, thread_name_prefix="zephon-mm-worker")
        self.workers = workers
        self._context = context
        self._metrics = Metrics()
        self._pid = os.getpid()

    def submit(  # type: ignore[override]  # tasks take positional arguments only
        self, fn: Callable[..., Any], /, *args: Any
    ) -> Future[Any]:
        """Run `fn(context, *args)` in one of the threads.

        Raises:
            RuntimeError: The runner was shut down, or belongs to the parent of this process.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this ThreadRunner belongs to process {self._pid}: threads do not survive a fork. "
                "Make the runner in the process that uses it."
            )
        return super().submit(self._run, fn, args)

    def stats(self) -> Mapping[str, int]:
        """Return the counters that every runner has."""
        done = int(self._metrics.snapshot().get("tasks_done", 0))
        return {"tasks_done": done, "task_retries": 0, "worker_restarts": 0}

    def _run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        try:
            return fn(self._context, *args)
        finally:
            self._metrics.add("tasks_done")
