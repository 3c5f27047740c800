"""A pipeline's state as a JSON-serialisable mapping, and back.

A restore may change the mixture. Windows that lanes have begun are planned again as they were, so
the new weights hold from the first window that no lane has begun. The state's lineage lists what
was allowed so far, or chosen by a callback (`Pipeline.steer`): the `name`, the `delivered` count at
that time, the `window` from which it holds in every lane (None: at once), and the `old` and `new`
values: weights by dataset name, parts of the fingerprint, `{"steps": [[first, stop], ...]}` that
are skipped from here on, or `{"keys": [...]}` of samples that are excluded (`engine.omissions`).

Laws (tests/laws/test_lineage.py):
    1. A run that changed its mixture gives what one source gives that changes it in every lane at
       that window, on any topology and however often it is restored. So does one whose weights a
       callback chose (tests/laws/test_steering.py); the callback is not asked again.

Imports: checkpoint, compiled, engine, errors, options, stages. Used by: pipeline.
"""

import itertools
import json
import operator
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from zephon_mm.checkpoint import FORMAT, check_allow, check_fingerprint, check_format
from zephon_mm.compiled import fingerprint, topology_of, with_constants
from zephon_mm.engine.lanes import Cursor
from zephon_mm.engine.omissions import EXCLUDED, SKIPPED, Omissions
from zephon_mm.engine.order import Topology, check_resume
from zephon_mm.engine.planner import Hand, Position, Start
from zephon_mm.errors import CheckpointError, ConfigError
from zephon_mm.ops.map import name_of
from zephon_mm.options import Options
from zephon_mm.stages import Stages, UserStage

STEERED = "steer"
"""The name in a lineage of weights that a callback chose."""


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
    source = with_constants(_source_of(source, state, allow), stages, options)
    found = fingerprint(source, stages, options, batching[1] if batching else None)
    changes = check_fingerprint(state["fingerprint"], found, allow)
    _warn_of_lambdas(source, stages)
    dealt = tuple(Hand(*hand) for hand in state["dealt"])
    if dealt and (not all_lanes or "mixture" in changes):
        raise CheckpointError(
            "the state was taken inside a step that balance=True had dealt: restore it with "
            "options(balance=True) and the mixture that it has, or take it at the end of a step"
        )
    if "mixture" in changes and "curriculum" in state["fingerprint"]["source"]:
        raise CheckpointError(
            "allow=['mixture']: this run's weights have changed by its curriculum or by steer(); "
            "restore it as it was, and change them by steer()"
        )
    if batching is not None and batching[1] is not None:
        check_resume(state["delivered"], topology_of(options, batching))
    lineage = [*state["lineage"], *_entries(state, found, changes)]
    cursors = {
        int(lane): Cursor(window, tuple(where), offset)
        for lane, (window, where, offset) in state["lanes"].items()
    }
    if "mixture" in changes:
        source = source.with_history(_names(found), _history(lineage))
        cursors = {
            lane: at._replace(state=source.carried(at.state, at.window * size))
            for lane, at in cursors.items()
        }
    return Resumed(source, Start(state["delivered"], cursors, state["next_lane"], dealt), lineage)


def leave_out(
    resumed: Resumed, steps: Iterable[int], keys: Iterable[str], step_size: int | None
) -> Resumed:
    """Return where a pipeline goes on without some steps and rows, those that it knows already too.

    Args:
        resumed: Where it goes on.
        steps: Numbers of global steps.
        keys: Names of samples, as in `batch.keys`.
        step_size: N; None if it is not set.

    Raises:
        ConfigError: There are steps and no N, one of them was begun, or a sample is unknown.
        CheckpointError: Rows are to leave a step that is dealt already.
    """
    source, start, lineage = resumed
    known = Omissions.of(lineage, source.datasets, 1)
    if skipped := sorted({operator.index(step) for step in steps} - known.steps):
        if not step_size or skipped[0] * step_size < start.delivered:
            why = f"was begun, {start.delivered} sequences are delivered: restore an earlier state"
            if not step_size:
                why = "depends on the ranks: set batch(global_batch_size=...) when a run starts"
            raise ConfigError(f"restore(state, skip_steps=...): step {skipped[0]} {why}")
        place = itertools.count()
        runs = [list(run) for _, run in itertools.groupby(skipped, lambda n: n - next(place))]
        new = {"steps": [[run[0], run[-1] + 1] for run in runs]}
        lineage = [*lineage, _entry(SKIPPED, start.delivered, None, new)]
    said = {key for entry in lineage if entry["name"] == EXCLUDED for key in entry["new"]["keys"]}
    if names := sorted(set(keys) - said):
        if start.dealt:
            raise CheckpointError(
                "restore(state, exclude_keys=...): the state was taken inside a step that "
                "balance=True had dealt by weight; take one at the end of a step"
            )
        window = 1 + max((cursor.window for cursor in (start.cursors or {}).values()), default=-1)
        lineage = [*lineage, _entry(EXCLUDED, start.delivered, window, {"keys": names})]
        Omissions.of(lineage, source.datasets, 1)  # checks them
    return Resumed(source, start, lineage)


def _warn_of_lambdas(source: Any, stages: Stages) -> None:
    """Warn of functions that the fingerprint cannot tell from others of their name."""
    found = [(name_of(one.operator.fn), one.version) for one in stages.documents]  # type: ignore[attr-defined]
    found += [(one.name, one.version) for one in stages.sequences if isinstance(one, UserStage)]
    found += [(name_of(d.schema), d.version) for d in source.datasets if callable(d.schema)]
    if nameless := [name for name, version in found if "<lambda>" in name and not version]:
        warnings.warn(
            f"restore: another function in the place of {nameless} would not be noticed. Give "
            "each a version='...', or use functions with names",
            stacklevel=4,
        )


def _entry(name: str, delivered: int, window: int | None, new: Any) -> dict[str, Any]:
    return {"name": name, "delivered": delivered, "window": window, "old": {}, "new": new}


def _source_of(source: Any, state: Mapping[str, Any], allow: Sequence[str]) -> Any:
    """Return a source with the datasets, past mixtures and constants of a state.

    Raises:
        ConfigError: A dataset of a past mixture is not given, or this source has but one mixture.
    """
    if hasattr(source, "with_history"):
        lineage = state["lineage"]
        names = _names(state["fingerprint"]) if lineage or "mixture" in allow else ()
        source = source.with_history(names, _history(lineage))
        for entry in (entry for entry in lineage if entry["name"] == STEERED):
            source = source.with_turn(entry["window"], entry["new"])
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


def _history(lineage: Sequence[Mapping[str, Any]]) -> list[tuple[int, Mapping[str, float]]]:
    """Return each past mixture and the window after it, the same in all lanes."""
    return [(entry["window"], entry["old"]) for entry in lineage if entry["name"] == "mixture"]


def _names(fingerprint: Mapping[str, Any]) -> list[str]:
    """Return the datasets of a source, in the order of its states; none of a user's own source."""
    source = fingerprint.get("source")
    datasets = source.get("datasets", ()) if isinstance(source, Mapping) else ()
    return [name for name, _ in datasets]


def _weights(fingerprint: Mapping[str, Any]) -> dict[str, float]:
    pairs = zip(_names(fingerprint), fingerprint["source"]["weights"], strict=True)
    return {name: weight for name, weight in pairs if weight}
