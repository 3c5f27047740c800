"""Planning without decoding, with the checkpoints that a run has: what the benchmarks stand on.

`Plans` stands in the place of a pipeline's driver. It plans the pipeline's batches with the
package's own planner, in this thread, and makes none of them; so a state at a late step takes
seconds, and planning can be timed alone.

Imports: the package. Used by: benchmarks.
"""

from collections.abc import Iterator
from typing import Any

from zephon_mm import Pipeline
from zephon_mm.engine.planner import Group, Position, Start
from zephon_mm.metrics import Metrics
from zephon_mm.planning import planner_of


class Plans:
    """Plans a pipeline's batches from its beginning."""

    plans_all_lanes = True  # of a pipeline with one rank

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline: Any = pipeline
        self._planner = planner_of(self._pipeline._compiled(Metrics()), Start())

    def groups(self) -> Iterator[Group]:
        """Yield what this rank would deliver, batch by batch."""
        return self._planner.groups()

    def cursors(self, at: Position) -> Any:
        """Return the cursors at a planned position; a pipeline's `checkpoint` asks for them."""
        return self._planner.cursors(at)

    def checkpoint(self, at: Position) -> dict[str, Any]:
        """Return the state that the pipeline would have at a planned position."""
        self._pipeline._driver, self._pipeline._position = self, at
        try:
            state: dict[str, Any] = self._pipeline.checkpoint()
            return state
        finally:
            self._pipeline._driver, self._pipeline._position = None, Position(0, 0, None)


def late_state(pipeline: Pipeline, share: float = 0.97) -> dict[str, Any]:
    """Return a state deep inside the second window of every lane, where a restore costs most."""
    plans, positions = Plans(pipeline), []
    for group in plans.groups():
        positions.append(group.after)
        if len(positions) % 64 == 0 and plans.cursors(group.after)[0].window > 1:
            return plans.checkpoint(positions[int(share * len(positions))])
    raise ValueError("the data ends before the second window does")
