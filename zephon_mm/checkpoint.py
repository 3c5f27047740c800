"""A checkpoint: the delivered count, one cursor per planned lane, fingerprint and lineage.

There is no payload in it: restoring builds each lane at its window and plans it again. A part taken
by one rank of several knows the lanes that this rank plans; parts merge into the whole, which any
topology can restore. The lineage tells which changes of the recipe were allowed so far.

Laws (tests/test_checkpoint.py):
    1. JSON round trip changes nothing.
    2. Merging parts gives what one rank planning every lane would have written.
    3. Parts that disagree, and a whole that lacks a lane, are errors that name the rank or lane.
    4. Two fingerprints fit if they are equal, or differ in what is allowed by name alone.

Imports: errors, tables. Used by: pipeline.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from zephon_mm.errors import CheckpointError, ConfigError
from zephon_mm.tables import unknown

FORMAT = "zephon_mm checkpoint 1"
ALLOWED = ("mixture", "pixels")
"""What `restore(state, allow=[...])` may let differ: which datasets have which weights; what
changes pixels in their last bit, and no plan."""

_ENTRIES: Mapping[str, type] = {
    **dict.fromkeys(("mixture", "steer", "exclude_keys"), int),
    **dict.fromkeys(("pixels", "skip_steps"), type(None)),
}
"""What a lineage may list -> the type of the window from which it holds."""

Flat = dict[str, Any]
"""Dotted names -> plain values."""

_SHARED = (
    *("delivered", "next_lane", "dealt", "num_lanes", "dp_degree", "constants", "fingerprint"),
    "lineage",
)
_PROCESSOR = "tokens.image_processor."
_PIXELS = {"backend", "cpu_capability", "pillow", "simplejpeg", "torch", "torchvision", "av"}

_FIELDS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("delivered", "next_lane", "num_lanes", "dp_degree", "dp_rank"), (int,)),
    "complete": (bool,),
    "dealt": (list,),
    "lanes": (dict,),
    "constants": (dict, type(None)),
    "fingerprint": (dict,),
    "lineage": (list,),
}
_ADDED: Mapping[str, Any] = {"lineage": []}  # what a state has that was written before the field
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
            one, other = _value(first, field), _value(part, field)
            if one != other:
                raise CheckpointError(
                    f"the parts of ranks {first['dp_rank']} and {part['dp_rank']} disagree on "
                    f"{field}: {one!r} and {other!r}. Merge parts that were taken "
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
    return merge_checkpoints(gather(dict(part), group))


def gather(value: Any, group: Any) -> list[Any]:
    """Return what the ranks of a CPU process group have, in their order; collective."""
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, value, group=group)
    return parts


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
        value = _value(state, field)
        if type(value) not in kind or (field == "lineage" and not all(map(_is_entry, value))):
            raise CheckpointError(
                f"{name} is damaged: its {field!r} is {_shown(value)}. Use another checkpoint, or "
                "write this one again."
            )
    for lane, cursor in state["lanes"].items():
        if not (isinstance(cursor, list | tuple) and [type(v) for v in cursor] == _CURSOR):
            raise CheckpointError(
                f"{name} is damaged: lane {lane} is at {cursor!r}, not [window, [state], offset]"
            )


def check_allow(allow: Sequence[str]) -> Sequence[str]:
    """Return the names that a restore allows.

    Raises:
        ConfigError: A name is unknown.
    """
    names = [allow] if isinstance(allow, str) else list(allow)
    for name in names:
        if name not in ALLOWED:
            raise ConfigError(f"restore(state, allow=[...]): {unknown(name, ALLOWED, 'change')}")
    return names


def check_fingerprint(
    saved: Mapping[str, Any], current: Mapping[str, Any], allow: Sequence[str] = ()
) -> dict[str, tuple[Flat, Flat]]:
    """Return, for each allowed name under which two fingerprints differ, the old and new values.

    Raises:
        CheckpointError: They differ in something else, too; every such difference is named.
    """
    old, new = _flat(saved), _flat(current)
    allowed: dict[str, tuple[Flat, Flat]] = {}
    refused: dict[str, list[str]] = {}
    lines = []
    for path in sorted(old.keys() | new.keys()):
        was, now = old.get(path, _ABSENT), new.get(path, _ABSENT)
        if was == now:
            continue
        name = _allowing(path, joins_or_leaves=was is _ABSENT or now is _ABSENT)
        if name in allow:
            for values, value in zip(allowed.setdefault(name, ({}, {})), (was, now), strict=True):
                values |= {} if value is _ABSENT else {path: value}
        else:
            refused.setdefault(name, []).append(path)
            lines.append(f"{path}: {_shown(was)} in the state, {_shown(now)} now")
    if lines:
        hints = [
            f" restore(state, allow=[{name!r}]) would accept {', '.join(paths)}."
            for name, paths in refused.items()
            if name
        ]
        raise CheckpointError(
            "the state belongs to another recipe, whose batches would differ:\n  "
            + "\n  ".join(lines)
            + "\nUse the recipe that wrote it. Ranks, microbatch size, runner, workers and budgets "
            "may change freely." + "".join(hints)
        )
    return allowed


def _allowing(path: str, *, joins_or_leaves: bool) -> str:
    """Return the name that allows a difference, "" if none does."""
    if path.startswith(_PROCESSOR) and path.rpartition(".")[2] in _PIXELS:
        return "pixels"
    of_datasets = path.startswith(("source.datasets.", "source.constants.", "schemas."))
    of_weights = path.startswith(("source.weights.", "source.curriculum"))
    if of_weights or (of_datasets and joins_or_leaves):
        return "mixture"
    return ""


def _value(state: Mapping[str, Any], field: str) -> Any:
    return state.get(field, _ADDED.get(field, _ABSENT))


def _shown(value: object) -> str:
    return "'absent'" if value is _ABSENT else repr(value)


def _is_entry(entry: object) -> bool:
    """Return whether this is an entry of a lineage, as `resume` writes it."""
    if not isinstance(entry, Mapping) or entry.get("name") not in _ENTRIES:
        return False
    kinds = [type(entry.get(field)) for field in ("delivered", "old", "new", "window")]
    return kinds == [int, dict, dict, _ENTRIES[entry["name"]]]


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
