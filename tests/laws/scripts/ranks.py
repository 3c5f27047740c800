"""One rank of a training run under torchrun: `ranks.py FOLDER save|load NAME`.

`save` delivers a step and a half, and leaves the states at a step's end and inside a step: gathered
as JSON, as parts of ranks, and through torch.distributed.checkpoint. `load` goes on from each of
them. Both write the row digests of what they delivered. The recipe comes pickled in FOLDER.
"""

import json
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.fixtures.memory import Recipe, digests, take
from zephon_mm.pipeline import Pipeline

STATES = {"step": 6, "inside": 9}
"""Groups of four sequences that are delivered before each state: N is 24."""
MORE = 24
"""Sequences that all ranks together deliver after a restore."""


class InOneKey:
    """A pipeline's complete state as one text, the same on every rank: what DCP can keep."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def state_dict(self) -> dict[str, Any]:
        return {"json": json.dumps(self._pipeline.checkpoint(group=dist.group.WORLD))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._pipeline.restore(json.loads(state["json"]))


def build(recipe: Recipe, state: Mapping[str, Any] | None = None) -> Pipeline:
    return recipe.build(
        dp=dist.get_world_size(), rank=dist.get_rank(), runner="thread", workers=1, state=state
    )


def save(recipe: Recipe, folder: Path) -> dict[int, str]:
    found: dict[int, str] = {}
    delivered = 0
    with build(recipe) as pipeline:
        for name, groups in STATES.items():
            found |= digests(take(pipeline, groups - delivered))
            delivered = groups
            part = pipeline.checkpoint()
            (folder / f"{name}-{dist.get_rank()}.json").write_text(json.dumps(part))
            gathered = pipeline.checkpoint(group=dist.group.WORLD)
            if dist.get_rank() == 0:
                (folder / f"{name}.json").write_text(json.dumps(gathered))
            dcp.save({"data": InOneKey(pipeline)}, checkpoint_id=folder / f"{name}-dcp")
    return found


def load(recipe: Recipe, folder: Path) -> dict[str, dict[int, str]]:
    found = {}
    for name in STATES:
        count = MORE // dist.get_world_size()
        with build(recipe, json.loads((folder / f"{name}.json").read_text())) as pipeline:
            found[name] = digests(take(pipeline, count))
        with build(recipe) as pipeline:
            dcp.load({"data": InOneKey(pipeline)}, checkpoint_id=folder / f"{name}-dcp")
            found[f"{name}-dcp"] = digests(take(pipeline, count))
    return found


def main(place: str, mode: str, name: str) -> None:
    folder = Path(place)
    dist.init_process_group("gloo")
    recipe = pickle.loads((folder / "recipe").read_bytes())
    found = save(recipe, folder) if mode == "save" else load(recipe, folder)
    (folder / f"{name}-{dist.get_rank()}.rows").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
