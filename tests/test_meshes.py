"""Which ranks of a mesh get equal batches, read off real meshes over a fake process group."""

import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.fixtures.memory import Recipe
from tests.fixtures.tokenizers import save_byte_level_bpe
from zephon_mm.errors import ConfigError
from zephon_mm.meshes import DATA_DIMS, PEER_DIMS, data_parallel, without_mesh
from zephon_mm.recipe import load_recipe

RECIPE = """
[[datasets]]
name = "a"
path = "rows.jsonl"
weight = 1

[source]
seed = 1

[options]
dp_degree = 2

[interleave]
tokenizer = "tokenizer"

[pack]
max_length = 64

[batch]
microbatch_size = 2
"""


@contextmanager
def process(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of so many, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh_of(shape: Sequence[int], names: Sequence[str] | None) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(shape), mesh_dim_names=names and tuple(names))


@st.composite
def named_shapes(draw: st.DrawFn) -> tuple[list[str], list[int]]:
    names = draw(st.lists(st.sampled_from(sorted(DATA_DIMS | PEER_DIMS)), max_size=4, unique=True))
    return names or ["dp"], [draw(st.integers(1, 3)) for _ in names or ["dp"]]


@given(named_shapes())
def test_ranks_share_a_data_rank_exactly_when_they_share_every_data_coordinate(
    drawn: tuple[list[str], list[int]],
) -> None:
    names, shape = drawn
    found: dict[tuple[int, ...], int] = {}
    world_size = math.prod(shape)
    for rank in range(world_size):
        with process(rank, world_size):
            mesh = mesh_of(shape, names)
            degree, dp_rank = data_parallel(mesh)
            at = mesh.get_coordinate()
        assert at is not None
        seen = tuple(place for place, name in zip(at, names, strict=True) if name in DATA_DIMS)
        assert found.setdefault(seen, dp_rank) == dp_rank
    assert [found[at] for at in sorted(found)] == list(range(degree))


def test_the_rank_is_that_of_the_flattened_data_dimensions() -> None:
    names = ["pp", "dp_replicate", "cp", "dp_shard", "tp"]
    for rank in range(48):
        with process(rank, 48):
            mesh = mesh_of([2, 3, 2, 2, 2], names)
            flat = mesh["dp_replicate", "dp_shard"]._flatten("dp")
            assert data_parallel(mesh) == (flat.size(), flat.get_local_rank())
            assert data_parallel(flat) == data_parallel(mesh)
            assert data_parallel(mesh["dp_replicate", "dp_shard"]) == data_parallel(mesh)


@pytest.mark.parametrize(
    ("shape", "names", "expected"),
    [
        ([8], None, (8, 5)),
        ([8], ["tp"], (1, 0)),
        ([2, 4], ["pp", "tp"], (1, 0)),
        ([1, 8], ["anything", "dp"], (8, 5)),
        ([2, 4], ["replicate", "shard"], (8, 5)),
        ([4, 2], ["data_parallel", "tensor_parallel"], (4, 2)),
    ],
)
def test_the_names_in_use_are_understood(
    shape: list[int], names: list[str] | None, expected: tuple[int, int]
) -> None:
    with process(5, 8):
        assert data_parallel(mesh_of(shape, names)) == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mesh_of([4, 2], None), r"\(unnamed=4, unnamed=2\) has no names .* mesh_dim_names"),
        (
            lambda: mesh_of([4, 2], ["dp_cp", "tp"]),
            r"along 'dp_cp' .* flattens both, pass the mesh",
        ),
        (
            lambda: mesh_of([4, 2], ["dp", "inner"]),
            r"along 'inner' get different batches\? Name it",
        ),
        (lambda: mesh_of([8], ["spatial"]), r"\(spatial=8\): do ranks along 'spatial'"),
        (lambda: mesh_of([4, 2], ["dp", "tp"])["tp"], r"\(tp=2\) .* holds 2 of 8 ranks.* whole"),
        (lambda: DeviceMesh("cpu", [0, 1]), r"does not contain this process, rank 5"),
        (lambda: dist.group.WORLD, r"must be a torch\.distributed\.device_mesh\.DeviceMesh"),
        (lambda: {"dp": 2}, r"DeviceMesh, got \{'dp': 2\}"),
    ],
)
def test_a_mesh_that_does_not_say_who_shares_is_an_error_that_says_what_to_do(
    make: Callable[[], Any], message: str
) -> None:
    with process(5, 8), pytest.raises(ConfigError, match=f"^options: mesh.*{message}"):
        without_mesh({"mesh": make()})


def test_a_mesh_and_the_numbers_that_it_sets_exclude_each_other() -> None:
    with process(5, 8):
        mesh = mesh_of([4, 2], ["dp", "tp"])
        for name in ("dp_degree", "dp_rank"):
            with pytest.raises(ConfigError, match=f"mesh sets {name}; leave {name} = 2 out"):
                without_mesh({"mesh": mesh, name: 2})
        assert without_mesh({"mesh": mesh, "workers": 3}) == {
            "workers": 3,
            "dp_degree": 4,
            "dp_rank": 2,
        }
    assert without_mesh({"mesh": None, "dp_degree": 2}) == {"dp_degree": 2}


def test_a_pipeline_keeps_the_numbers_and_not_the_mesh(recipe: Recipe) -> None:
    with process(5, 8):
        pipeline = (
            replace(recipe, global_batch_size=8).build().options(mesh=mesh_of([4, 2], ["dp", "tp"]))
        )
    topology = pipeline._topology()
    assert (topology.dp_degree, topology.dp_rank) == (4, 2)
    assert pickle.loads(pickle.dumps(pipeline._options)) == pipeline._options


def test_a_mesh_takes_the_place_of_a_recipes_numbers(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a fox"}\n')
    save_byte_level_bpe(tmp_path / "tokenizer")
    (tmp_path / "recipe.toml").write_text(RECIPE)
    loaded = load_recipe(tmp_path / "recipe.toml")
    with process(5, 8):
        topology = loaded.pipeline(mesh=mesh_of([4, 2], ["dp", "tp"]))._topology()
    assert (topology.dp_degree, topology.dp_rank) == (4, 2)
