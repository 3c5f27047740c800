"""Where tasks run: a callable in, a result out. Runners know nothing of samples.

Imports: errors, and the runners themselves. Used by: engine, pipeline.
"""

from collections.abc import Sequence
from typing import Any

from zephon_mm.errors import ConfigError
from zephon_mm.protocols import Runner
from zephon_mm.runners.inline import InlineRunner
from zephon_mm.runners.processes import ProcessRunner
from zephon_mm.runners.threads import ThreadRunner

__all__ = ["RUNNERS", "make_runner"]

RUNNERS = ("inline", "thread", "process")


def make_runner(
    name: str,
    context: Any,
    *,
    workers: int,
    fds: Sequence[int] = (),
    task_timeout_s: float = 300.0,
) -> Runner:
    """Return the runner of that name.

    Args:
        name: One of `RUNNERS`.
        context: The first argument of every task.
        workers: Threads or processes; `inline` always has one.
        fds: Descriptors that the context relies on: `process` workers have them under the same
            numbers. They must stay open while the runner lives.
        task_timeout_s: How long one task may run in a `process` worker, in seconds.

    Raises:
        ConfigError: There is no runner of that name, or it cannot work here.
    """
    if name == "inline":
        return InlineRunner(context)
    if name == "thread":
        return ThreadRunner(context, workers=workers)
    if name == "process":
        return ProcessRunner(context, workers=workers, fds=fds, task_timeout_s=task_timeout_s)
    raise ConfigError(f"there is no runner {name!r}: choose one of {', '.join(RUNNERS)}")
