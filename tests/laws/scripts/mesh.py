"""One rank of a model that is split in two, under torchrun: `mesh.py FOLDER MODE NAME`.

Two data-parallel times two tensor-parallel ranks train from one mesh, save over the data-parallel
group, and go on from what they saved. Each writes its place in the mesh, its rows and its states.
The recipe comes pickled in FOLDER; there is one MODE.
"""

import pickle
import sys
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401  # cutting a mesh imports it: here, ranks that are forked share it
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.fixtures.memory import Recipe, digests, take

DATA_RANKS = 2
TENSOR_RANKS = 2
GROUPS = 6
"""Batches that each rank takes before and after the restore."""


def run(recipe: Recipe) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (DATA_RANKS, TENSOR_RANKS), mesh_dim_names=("dp", "tp"))
    options = {"mesh": mesh, "runner": "thread", "workers": 1}
    with recipe.build().options(**options) as pipeline:
        before = digests(take(pipeline, GROUPS))
        part = pipeline.checkpoint()
        state = pipeline.checkpoint(group=mesh["dp"].get_group())
    with recipe.build().options(**options).restore(state) as pipeline:
        after = digests(take(pipeline, GROUPS))
    place = tuple(mesh.get_coordinate() or ())
    return {"place": place, "before": before, "after": after, "part": part, "state": state}


def main(place: str, _: str, name: str) -> None:
    folder = Path(place)
    dist.init_process_group("gloo")
    found = run(pickle.loads((folder / "recipe").read_bytes()))
    (folder / f"{name}-{dist.get_rank()}.rows").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
