"""Real ranks: four processes save over gloo, and two and three go on.

Two ranks are started by torchrun, the others as it would start them, by a fork of the nursery: what
torchrun costs is that each rank imports torch, its checkpoints and meshes.
"""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.fixtures.memory import Recipe, digests, take
from tests.fixtures.nursery import Nursery
from tests.laws.scripts.mesh import DATA_RANKS, GROUPS, TENSOR_RANKS
from tests.laws.scripts.ranks import MORE, STATES
from zephon_mm.checkpoint import merge_checkpoints
from zephon_mm.errors import CheckpointError

ROOT = Path(__file__).parents[2]
SAVING_RANKS = 4
pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def torchrun(folder: Path, ranks: int, mode: str, name: str, script: str = "ranks") -> list[Any]:
    """Run a script on so many processes; return what each wrote."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={ranks}", str(ROOT / f"tests/laws/scripts/{script}.py")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(folder), mode, name], env=env, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    return written(folder, ranks, name)


def fork_ranks(
    nursery: Nursery, folder: Path, ranks: int, mode: str, name: str, script: str = "ranks"
) -> list[Any]:
    """Do what `torchrun` does, without its imports."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # ours, as torchrun's in its own process
        "TORCHELASTIC_RESTART_COUNT": "0",
        "WORLD_SIZE": str(ranks),
    }
    args = [str(folder), mode, name]
    with open(folder / f"{name}.log", "w+b") as log:
        fds = {0: log.fileno(), 1: log.fileno(), 2: log.fileno()}
        target = f"tests.laws.scripts.{script}:main"
        children = [
            nursery.start(target, args, env=env | {"RANK": str(rank)}, fds=fds)
            for rank in range(ranks)
        ]
        codes = [child.wait() for child in children]
    assert codes == [0] * ranks, (folder / f"{name}.log").read_text()
    return written(folder, ranks, name)


def written(folder: Path, ranks: int, name: str) -> list[Any]:
    return [pickle.loads((folder / f"{name}-{n}.rows").read_bytes()) for n in range(ranks)]


def union(parts: list[dict[int, str]]) -> dict[int, str]:
    """Return the rows of all ranks; a row that comes twice is an error."""
    assert len({number for part in parts for number in part}) == sum(map(len, parts))
    return {number: row for part in parts for number, row in part.items()}


@pytest.fixture(scope="module")
def run(recipe: Recipe) -> Recipe:
    return replace(recipe, lanes=8, global_batch_size=24)


@pytest.fixture(scope="module")
def expected(run: Recipe) -> dict[int, str]:
    with run.build() as pipeline:
        return digests(take(pipeline, SAVING_RANKS * max(STATES.values()) + MORE))


@pytest.fixture(scope="module")
def saved(run: Recipe, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which four ranks left their states and rows."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "recipe").write_bytes(pickle.dumps(run))
    fork_ranks(nursery, folder, SAVING_RANKS, "save", "saved")
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_pipeline_that_dcp_keeps_itself_goes_on(recipe: Recipe, tmp_path: Path) -> None:
    finite = replace(recipe, passes=2, stop="all_exhausted")
    with finite.build() as pipeline:
        take(pipeline, 5)
        dcp.save({"data": pipeline}, checkpoint_id=tmp_path, no_dist=True)
        wanted = digests(take(pipeline, 5))
    with finite.build() as pipeline:
        dcp.load({"data": pipeline}, checkpoint_id=tmp_path, no_dist=True)
        assert digests(take(pipeline, 5)) == wanted


def read_parts(folder: Path, name: str) -> list[Any]:
    files = [folder / f"{name}-{rank}.json" for rank in range(SAVING_RANKS)]
    return [json.loads(file.read_text()) for file in files]


def test_four_processes_deliver_what_one_rank_would(saved: Path, expected: dict[int, str]) -> None:
    rows = written(saved, SAVING_RANKS, "saved")
    count = SAVING_RANKS * max(STATES.values())
    assert union(rows) == {number: expected[number] for number in range(count)}


@pytest.mark.parametrize("ranks", [2, 3])
def test_other_numbers_of_processes_go_on_from_json_and_from_dcp(
    saved: Path, nursery: Nursery, expected: dict[int, str], ranks: int
) -> None:
    start = torchrun if ranks == 2 else partial(fork_ranks, nursery)
    found = start(saved, ranks, "load", f"on{ranks}")
    for name, groups in STATES.items():
        first = SAVING_RANKS * groups
        wanted = {number: expected[number] for number in range(first, first + MORE)}
        for kind in (name, f"{name}-dcp"):
            assert union([rank[kind] for rank in found]) == wanted


def test_parts_in_files_merge_into_the_gathered_state(saved: Path) -> None:
    for name in STATES:
        parts = read_parts(saved, name)
        assert not any(part["complete"] for part in parts)
        assert merge_checkpoints(parts) == json.loads((saved / f"{name}.json").read_text())


def test_a_part_alone_is_refused(saved: Path, run: Recipe) -> None:
    with pytest.raises(CheckpointError, match=r"the part of rank 2 of 4: merge the parts"):
        run.build(state=read_parts(saved, "step")[2])


def _without(parts: list[Any], saved: Path) -> list[Any]:
    return [part for part in parts if part["dp_rank"] != 2]


def _from_another_step(parts: list[Any], saved: Path) -> list[Any]:
    return [*parts[:2], read_parts(saved, "inside")[2], parts[3]]


def _from_another_recipe(parts: list[Any], saved: Path) -> list[Any]:
    foreign: Mapping[str, Any] = parts[2]["fingerprint"] | {"chunk_size": 99}
    return [*parts[:2], parts[2] | {"fingerprint": foreign}, parts[3]]


def _half_written(parts: list[Any], saved: Path) -> list[Any]:
    text = (saved / "step-2.json").read_text()
    return [*parts[:2], text[: len(text) // 2], parts[3]]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_without, r"parts of ranks \[2\] are missing, of dp_degree = 4"),
        (_from_another_step, r"ranks 0 and 2 disagree on delivered: 24 and 36"),
        (_from_another_recipe, r"ranks 0 and 2 disagree on fingerprint"),
        (_half_written, r"part 2 is not a checkpoint"),
    ],
)
def test_a_bad_part_is_an_error_that_names_its_rank(
    saved: Path, spoil: Callable[[list[Any], Path], list[Any]], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        merge_checkpoints(spoil(read_parts(saved, "step"), saved))


def test_ckp_10_ranks_of_a_mesh_that_differ_in_tensor_parallelism_get_equal_batches(
    run: Recipe, nursery: Nursery, expected: dict[int, str], tmp_path: Path
) -> None:
    (tmp_path / "recipe").write_bytes(pickle.dumps(run))
    ranks = fork_ranks(nursery, tmp_path, DATA_RANKS * TENSOR_RANKS, "both", "mesh", "mesh")
    by_place = {rank["place"]: rank for rank in ranks}
    first = DATA_RANKS * GROUPS
    for data_rank in range(DATA_RANKS):
        peers = [by_place[data_rank, other] for other in range(TENSOR_RANKS)]
        for name in ("before", "after", "part"):
            assert peers[0][name] == peers[1][name]
    data_ranks = [by_place[number, 0] for number in range(DATA_RANKS)]
    assert union([rank["before"] for rank in data_ranks]) == _range(expected, 0, first)
    assert union([rank["after"] for rank in data_ranks]) == _range(expected, first, 2 * first)

    # One state a data rank: those of one tensor rank are complete, and all that are gathered agree.
    state = merge_checkpoints([rank["part"] for rank in data_ranks])
    assert all(rank["state"] == state for rank in ranks)
    with run.build(state=json.loads(json.dumps(state))) as pipeline:
        assert digests(take(pipeline, first)) == _range(expected, first, 2 * first)


def _range(rows: dict[int, str], start: int, stop: int) -> dict[int, str]:
    return {number: rows[number] for number in range(start, stop)}
