"""A DeviceMesh's data-parallel degree and rank: which ranks get equal batches.

Laws (tests/test_meshes.py, tests/laws/test_distributed.py):
    1. Ranks that differ only in tensor, pipeline, context, sequence or expert parallelism have one
       data-parallel rank, and so get equal batches.
    2. That rank is the row-major position among the mesh's data-parallel dimensions, the local rank
       of the mesh that flattens them; the degree is the product of their sizes.
    3. A dimension whose name does not say which of the two it is, is an error, never a guess: read
       as data it would split a model's batches, read as a peer it would train on them twice.

A dimension that flattens data parallelism with another one, such as `dp_cp` or `dp_shard_cp` (which
share weights or losses, not batches), is such a name. Flattened names that a mesh has beside its
own dimensions are not among `mesh_dim_names`, so that nothing counts twice.

Imports: errors. Used by: builder, recipe.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zephon_mm.errors import ConfigError

# As torchtitan, accelerate, transformers, Lightning, Megatron-FSDP, verl and PyTorch's own
# documentation name them.
DATA_DIMS = frozenset(
    {
        *("dp", "ddp", "fsdp", "hsdp", "dp_replicate", "dp_shard", "dp_outer", "dp_inner"),
        *("replicate", "shard", "data", "data_parallel", "batch"),
    }
)
PEER_DIMS = frozenset(
    {
        *("tp", "tensor", "tensor_parallel", "mp", "model", "model_parallel"),
        *("pp", "pipe", "pipeline", "pipeline_parallel"),
        *("cp", "context", "context_parallel", "sp", "sequence", "sequence_parallel"),
        *("ulysses", "ring", "ep", "expert", "expert_parallel", "etp"),
    }
)


def without_mesh(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options in which `dp_degree` and `dp_rank` stand for a `mesh`.

    Raises:
        ConfigError: The mesh does not say what its dimensions are, or degree or rank are given too.
    """
    plain = dict(options)
    mesh = plain.pop("mesh", None)
    if mesh is None:
        return plain
    for name in ("dp_degree", "dp_rank"):
        if name in plain:
            raise ConfigError(f"options: mesh sets {name}; leave {name} = {plain[name]!r} out")
    plain["dp_degree"], plain["dp_rank"] = data_parallel(mesh)
    return plain


def data_parallel(mesh: DeviceMesh) -> tuple[int, int]:
    """Return (degree, rank in [0, degree)) of this process among the mesh's data-parallel dims.

    Args:
        mesh: The whole mesh of a model, or the part of it that is data-parallel.

    Raises:
        ConfigError: It is no DeviceMesh, this process is not in it, or a name is not known.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f"options: mesh must be a torch.distributed.device_mesh.DeviceMesh, got {mesh!r}"
        )
    is_data = _data_dims(mesh)
    at = mesh.get_coordinate()
    if at is None:
        raise ConfigError(
            f"options: mesh {_shown(mesh)} does not contain this process, rank {dist.get_rank()}. "
            "Pass the mesh of the model that this process trains."
        )
    degree, rank = 1, 0
    for size, place, counts in zip(mesh.shape, at, is_data, strict=True):
        if counts:
            degree, rank = degree * size, rank * size + place
    return degree, rank


def _data_dims(mesh: DeviceMesh) -> list[bool]:
    """Return for each dimension whether it is data-parallel."""
    names = mesh.mesh_dim_names
    if names is None:
        if len(mesh.shape) > 1:
            raise ConfigError(
                f"options: mesh {_shown(mesh)} has no names that tell data parallelism from tensor "
                "parallelism: name its dimensions, as in init_device_mesh(..., "
                'mesh_dim_names=("dp", "tp")), or set dp_degree and dp_rank instead of mesh'
            )
        return [True]
    for name, size in zip(names, mesh.shape, strict=True):
        if size > 1 and name not in DATA_DIMS | PEER_DIMS:
            raise ConfigError(
                f"options: mesh {_shown(mesh)}: do ranks along {name!r} get different batches? "
                f"Name it as one of {', '.join(sorted(DATA_DIMS))} if so, and as one of "
                f"{', '.join(sorted(PEER_DIMS))} if their batches are equal. If it flattens both, "
                "pass the mesh that it was made of. Or set dp_degree and dp_rank instead of mesh."
            )
    is_data = [name in DATA_DIMS for name in names]
    world_size = dist.get_world_size() if dist.is_initialized() else math.prod(mesh.shape)
    if not any(is_data) and math.prod(mesh.shape) != world_size:
        raise ConfigError(
            f"options: mesh {_shown(mesh)} has no data-parallel dimension and holds "
            f"{math.prod(mesh.shape)} of {world_size} ranks: how the others share the data cannot "
            "be seen from it. Pass the whole mesh that it was sliced from."
        )
    return is_data


def _shown(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names or ["unnamed"] * len(mesh.shape)
    return "(" + ", ".join(f"{n}={size}" for n, size in zip(names, mesh.shape, strict=True)) + ")"
