"""A checkpoint: the delivered count, one cursor per planned lane, the recipe's fingerprint.

There is no payload in it: restoring builds each lane at its window and plans it again. A part taken
by one rank of several knows the lanes that this rank plans; parts merge into the whole, which any
topology can restore.

Laws (tests/test_checkpoint.py):
    1. JSON round trip changes nothing.
    2. Merging parts gives what one rank planning every lane would have written.
    3. Parts that disagree, and a whole that lacks a lane, are errors that name the rank or lane.

Imports: errors. Used by: pipeline.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from zephon_mm.errors import CheckpointError

FORMAT = "zephon_mm checkpoint 1"

_SHARED = ("delivered", "next_lane", "dealt", "num_lanes", "dp_degree", "constants", "fingerprint")


_FIELDS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("delivered", "next_lane", "num_lanes", "dp_degree", "dp_rank"), (int,)),
    "complete": (bool,),
    "dealt": (list,),
    "lanes": (dict,),
    "constants": (dict, type(None)),
    "fingerprint": (dict,),
}
_CURSOR = [int, list, int]
_ABSENT = object()


def merge_checkpoints(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the complete state from the parts of all ranks.

    Raises:
        CheckpointError: A part is missing, is no checkpoint, or disagrees with another.
    """
    if not parts:
        raise CheckpointError("there are no parts to merge; pass the states of all ranks")
    for number, part in enumerate(parts):
        check_format(part, f"part {number}")
    first = parts[0]
    lanes: dict[str, Any] = {}
    for part in parts:
        for field in _SHARED:
            if part[field] != first[field]:
                raise CheckpointError(
                    f"the parts of ranks {first['dp_rank']} and {part['dp_rank']} disagree on "
                    f"{field}: {first[field]!r} and {part[field]!r}. Merge parts that were taken "
                    "at the same step of the same run."
                )
        for lane, cursor in part["lanes"].items():
            if list(lanes.setdefault(lane, cursor)) != list(cursor):
                raise CheckpointError(
                    f"rank {part['dp_rank']} has lane {lane} at {list(cursor)}, another rank has "
                    f"it at {list(lanes[lane])}. They did not run the same recipe on the same data."
                )
    ranks = {part["dp_rank"] for part in parts}
    missing = sorted(set(range(first["dp_degree"])) - ranks)
    if missing and not first["complete"]:
        raise CheckpointError(
            f"the parts of ranks {missing} are missing, of dp_degree = {first['dp_degree']}"
        )
    ordered = dict(sorted(lanes.items(), key=lambda item: int(item[0])))
    return {**first, "lanes": ordered, "complete": True, "dp_rank": 0}


def gather_checkpoint(part: Mapping[str, Any], group: Any) -> dict[str, Any]:
    """Merge the parts of all ranks of a CPU process group; collective, the same on every rank."""
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, dict(part), group=group)
    return merge_checkpoints(parts)


def check_format(state: object, name: str = "the state") -> None:
    """Raise a CheckpointError unless this is a checkpoint of a format that we read."""
    found = state.get("format") if isinstance(state, Mapping) else type(state).__name__
    if found != FORMAT:
        raise CheckpointError(
            f"{name} is not a checkpoint of this version: its format is {found!r}, expected "
            f"{FORMAT!r}. Pass what Pipeline.checkpoint() returned."
        )
    assert isinstance(state, Mapping)
    for field, kind in _FIELDS.items():
        if type(state.get(field, _ABSENT)) not in kind:
            raise CheckpointError(
                f"{name} is damaged: its {field!r} is {state.get(field, 'absent')!r}. Use another "
                "checkpoint, or write this one again."
            )
    for lane, cursor in state["lanes"].items():
        if not (isinstance(cursor, list | tuple) and [type(v) for v in cursor] == _CURSOR):
            raise CheckpointError(
                f"{name} is damaged: lane {lane} is at {cursor!r}, not [window, [state], offset]"
            )


def check_fingerprint(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise a CheckpointError that names every difference between two fingerprints."""
    old, new = _flat(saved), _flat(current)
    differences = [
        f"{name}: {old.get(name, 'absent')!r} in the state, {new.get(name, 'absent')!r} now"
        for name in sorted(old.keys() | new.keys())
        if old.get(name, _ABSENT) != new.get(name, _ABSENT)
    ]
    if differences:
        raise CheckpointError(
            "the state belongs to another recipe, whose batches would differ:\n  "
            + "\n  ".join(differences)
            + "\nUse the recipe that wrote it. Ranks, microbatch size, runner, workers and budgets "
            "may change freely."
        )


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested mappings and lists as dotted names -> plain values."""
    if isinstance(value, Mapping):
        items = [(str(name), part) for name, part in value.items()]
    elif isinstance(value, list | tuple):
        items = [(str(number), part) for number, part in enumerate(value)]
    else:
        return {prefix: value}
    flat = {prefix: len(items)} if not items else {}
    for name, part in items:
        flat |= _flat(part, f"{prefix}.{name}" if prefix else name)
    return flat
