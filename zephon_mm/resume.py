"""A pipeline's state as a JSON-serialisable mapping, and back.

Imports: checkpoint, engine, errors. Used by: pipeline.
"""

import json
from collections.abc import Mapping
from typing import Any

from zephon_mm.checkpoint import FORMAT, check_fingerprint, check_format
from zephon_mm.engine.lanes import Cursor
from zephon_mm.engine.order import Topology
from zephon_mm.engine.planner import Hand, Position, Start
from zephon_mm.errors import CheckpointError


def state_of(
    at: Position,
    cursors: Mapping[int, Cursor],
    *,
    num_lanes: int,
    topology: Topology,
    all_lanes: bool,
    constants: Any,
    fingerprint: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what a checkpoint holds: plain JSON values.

    `all_lanes` says that this rank plans every lane, so that its part is the whole.
    """
    state = {
        "format": FORMAT,
        "delivered": at.delivered,
        "next_lane": at.next_lane,
        "dealt": at.dealt,
        "num_lanes": num_lanes,
        "dp_degree": topology.dp_degree,
        "dp_rank": topology.dp_rank,
        "complete": all_lanes or topology.dp_degree == 1 or not at.delivered,
        "lanes": {str(number): [c.window, c.state, c.offset] for number, c in cursors.items()},
        "constants": constants,
        "fingerprint": fingerprint,
    }
    plain: dict[str, Any] = json.loads(json.dumps(state))
    return plain


def check_whole(state: Mapping[str, Any]) -> None:
    """Raise a CheckpointError unless this is a complete state of a format that we read."""
    check_format(state)
    if state["delivered"] and not state["lanes"] and not state["dealt"]:
        raise CheckpointError("the state is damaged: it has no lanes. Use another checkpoint.")
    if not state["complete"]:
        raise CheckpointError(
            f"this state is the part of rank {state['dp_rank']} of {state['dp_degree']}: merge "
            "the parts of all ranks with zephon_mm.checkpoint.merge_checkpoints, or take it with "
            "checkpoint(group=...)"
        )


def start_of(state: Mapping[str, Any], *, fingerprint: Mapping[str, Any], all_lanes: bool) -> Start:
    """Return where a pipeline with this fingerprint goes on.

    Raises:
        CheckpointError: The state is of another recipe, or was taken inside a balanced step and
            this pipeline does not balance.
    """
    check_fingerprint(state["fingerprint"], fingerprint)
    cursors = {
        int(lane): Cursor(window, tuple(where), offset)
        for lane, (window, where, offset) in state["lanes"].items()
    }
    dealt = tuple(Hand(*hand) for hand in state["dealt"])
    if dealt and not all_lanes:
        raise CheckpointError(
            "the state was taken inside a step that balance=True had dealt: restore it with "
            "options(balance=True), or take it at the end of a step"
        )
    return Start(state["delivered"], cursors, state["next_lane"], dealt)
