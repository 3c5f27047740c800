"""One rank under torchrun that is steered: `steering.py FOLDER steer NAME`.

The first rank chooses, after its callback failed once, of which all ranks hear; the others would
fail if they were asked. Each writes the rows that it
delivers after that, and its lineage; the first one the complete state at that time.
"""

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.fixtures.memory import digests, take


def decide(told: dict[str, Any]) -> dict[str, float]:
    assert dist.get_rank() == 0
    assert told["datasets"]["a"]["rows"] > 0
    return {"a": 0.0, "b": 1.0}


def fail(told: dict[str, Any]) -> None:
    raise KeyError("of the callback")


def main(place: str, _: str, name: str) -> None:
    folder = Path(place)
    dist.init_process_group("gloo")
    recipe = pickle.loads((folder / "recipe").read_bytes())
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # Ranks run ahead differently far: the window must be new to all of them.
    with recipe.build(dp=ranks, rank=rank, runner="thread", prefetch_batches=1 + 5 * rank) as run:
        take(run, 8)
        with pytest.raises(RuntimeError if rank else KeyError, match="of the callback"):
            run.steer(fail, group=dist.group.WORLD)
        run.steer(decide, group=dist.group.WORLD)
        state = run.checkpoint(group=dist.group.WORLD)
        found = digests(take(run, 40))
        lineage = run.checkpoint()["lineage"]
    if rank == 0:
        (folder / f"{name}.json").write_text(json.dumps(state))
    (folder / f"{name}-{rank}.rows").write_bytes(pickle.dumps((found, lineage)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
