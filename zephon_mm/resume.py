"""A pipeline's state as a JSON-serialisable mapping, and back.

A restore may change the mixture. Windows that lanes have begun are planned again as they were, so
the new weights hold from the first window that no lane has begun. The state's lineage lists what
was allowed so far: the `name`, the `delivered` count of the restore, the `window` from which it
holds in every lane (None: at once), and the `old` and `new` values: weights by dataset name, or
parts of the fingerprint.

Laws (tests/laws/test_lineage.py):
    1. A run that changed its mixture gives what one source gives that changes it in every lane at
       that window, on any topology and however often it is restored.

Imports: checkpoint, compiled, engine, errors, options, stages. Used by: pipeline.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from zephon_mm.checkpoint import FORMAT, check_allow, check_fingerprint, check_format
from zephon_mm.compiled import fingerprint, topology_of, with_constants
from zephon_mm.engine.lanes import Cursor
from zephon_mm.engine.order import Topology, check_resume
from zephon_mm.engine.planner import Hand, Position, Start
from zephon_mm.errors import CheckpointError, ConfigError
from zephon_mm.options import Options
from zephon_mm.stages import Stages


def state_of(
    at: Position,
    cursors: Mapping[int, Cursor],
    *,
    num_lanes: int,
    topology: Topology,
    all_lanes: bool,
    constants: Any,
    recipe: Mapping[str, Any],
    lineage: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return what a checkpoint holds: plain JSON values.

    `all_lanes` says that this rank plans every lane, so that its part is the whole; `recipe` is the
    fingerprint.
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
        "fingerprint": recipe,
        "lineage": lineage,
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


class Resumed(NamedTuple):
    """A pipeline's source, where it goes on, and what was allowed so far."""

    source: Any
    start: Start
    lineage: list[Mapping[str, Any]]


def resume(
    state: Mapping[str, Any],
    allow: Sequence[str],
    source: Any,
    stages: Stages,
    options: Options,
    batching: tuple[int, int | None] | None,
    *,
    all_lanes: bool,
) -> Resumed:
    """Return where a pipeline of these parts goes on; `all_lanes` says that it plans every lane.

    Raises:
        CheckpointError: The state is a part or of another recipe, or was taken inside a balanced
            step that this pipeline cannot plan again.
        ConfigError: `allow` has an unknown name, a dataset of a past mixture is not given, or the
            state was taken inside a step that this topology cannot finish.
    """
    check_whole(state)
    allow = check_allow(allow)
    state = {"lineage": [], **state}  # which a state of before there were lineages lacks
    size = options.flush_every_k_chunks
    source = with_constants(_source_of(source, state, allow, size), stages, options)
    found = fingerprint(source, stages, options, batching[1] if batching else None)
    changes = check_fingerprint(state["fingerprint"], found, allow)
    dealt = tuple(Hand(*hand) for hand in state["dealt"])
    if dealt and (not all_lanes or "mixture" in changes):
        raise CheckpointError(
            "the state was taken inside a step that balance=True had dealt: restore it with "
            "options(balance=True) and the mixture that it has, or take it at the end of a step"
        )
    if batching is not None and batching[1] is not None:
        check_resume(state["delivered"], topology_of(options, batching))
    lineage = [*state["lineage"], *_entries(state, found, changes)]
    cursors = {
        int(lane): Cursor(window, tuple(where), offset)
        for lane, (window, where, offset) in state["lanes"].items()
    }
    if "mixture" in changes:
        source = source.with_history(_names(found), _history(lineage, size))
        cursors = {
            lane: at._replace(state=source.carried(at.state, at.window * size))
            for lane, at in cursors.items()
        }
    return Resumed(source, Start(state["delivered"], cursors, state["next_lane"], dealt), lineage)


def _source_of(source: Any, state: Mapping[str, Any], allow: Sequence[str], size: int) -> Any:
    """Return a source with the datasets, past mixtures and constants of a state.

    Raises:
        ConfigError: A dataset of a past mixture is not given, or this source has but one mixture.
    """
    if hasattr(source, "with_history"):
        lineage = state["lineage"]
        names = _names(state["fingerprint"]) if lineage or "mixture" in allow else ()
        source = source.with_history(names, _history(lineage, size))
    elif "mixture" in allow:
        raise ConfigError(f"allow=['mixture']: {type(source).__name__} has no with_history")
    if state["constants"] is not None and getattr(source, "needs_constants", False):
        source = source.with_constants(state["constants"])
    return source


def _entries(
    state: Mapping[str, Any],
    found: Mapping[str, Any],
    changes: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]],
) -> list[dict[str, Any]]:
    """Return what a restore adds to the lineage; a mixture holds from a window that is not begun.

    Args:
        state: A complete state.
        found: The fingerprint now.
        changes: What `check_fingerprint` returned of the two.
    """
    entries = []
    for name, (old, new) in changes.items():
        at: dict[str, Any] = {"name": name, "delivered": state["delivered"], "window": None}
        if name == "mixture":
            at["window"] = 1 + max((window for window, _, _ in state["lanes"].values()), default=-1)
            old, new = _weights(state["fingerprint"]), _weights(found)
        entries.append({**at, "old": old, "new": new})
    return entries


def _history(
    lineage: Sequence[Mapping[str, Any]], chunks_per_window: int
) -> list[tuple[int, Mapping[str, float]]]:
    """Return each past mixture and the number of the first chunk after it, the same in all lanes.

    Each window before that of a change has `chunks_per_window` chunks.
    """
    mixtures = [entry for entry in lineage if entry["name"] == "mixture"]
    return [(entry["window"] * chunks_per_window, entry["old"]) for entry in mixtures]


def _names(fingerprint: Mapping[str, Any]) -> list[str]:
    """Return the datasets of a source, in the order of its states; none of a user's own source."""
    source = fingerprint.get("source")
    datasets = source.get("datasets", ()) if isinstance(source, Mapping) else ()
    return [name for name, _ in datasets]


def _weights(fingerprint: Mapping[str, Any]) -> dict[str, float]:
    pairs = zip(_names(fingerprint), fingerprint["source"]["weights"], strict=True)
    return {name: weight for name, weight in pairs if weight}
