"""Does the loader feed a GPU? `python -m benchmarks.cuda_check`, under 8 minutes on one machine.

It trains the 2.1 billion weights of `configs/siglip2_so400m_qwen3_1.7b.toml`, random ones, in
bfloat16 on the benchmark's photographs, and shows

- usable tokens/s, and the share of the time in which the loader is waited for (bar: 1 %);
- how fast memory crosses the bus, pinned and not;
- whether each step's sha256 is that of a run without a GPU or workers, and whether the tensors on
  the device are bit for bit those that the CPU makes.

`--shape tiny_vlm --device cpu` is the form that any machine can run.

Imports: the package, benchmarks.data, benchmarks.train. Writes benchmarks/data_cache, and
`cuda_check.json` in benchmarks/results.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.data import make_data, write_benchmark_tokenizer
from benchmarks.train.model import SHAPES
from benchmarks.train.run import Settings, process_group, totals, train
from zephon_mm.cli.verify import Combination, Delivered, Run
from zephon_mm.integrations.cuda import on_device, pinned
from zephon_mm.recipe import Recipe, load_recipe
from zephon_mm.shm.arena import Arena

ROOT = Path(__file__).parents[1]
WAIT_BAR = 0.01
COPIED_BYTES, COPIES = 256 << 20, 8
WARM_UP_STEPS, COMPARED_STEPS, COMPARED_BATCHES = 2, 3, 4
STEP = 16  # sequences


def recipe_on_photographs(shape: str, folder: Path, samples: int) -> Recipe:
    """Return the recipe of a shape, reading photographs."""
    recipe = load_recipe(ROOT / "configs" / f"{shape}.toml")
    tables: dict[str, Any] = {name: recipe.tables[name] for name in recipe.tables}
    data = make_data(folder / f"photos-{samples}", num_samples=samples)
    tokenizer = write_benchmark_tokenizer(folder / "tokenizer")
    tables["datasets"] = [{"name": "photos", "path": str(data), "weight": 1.0}]
    tables["interleave"] = tables["interleave"] | {"tokenizer": str(tokenizer)}
    tables["pack"] = tables["pack"] | {"max_length": max(512, tables["pack"]["max_length"])}
    # One row of 4,096 tokens: two keep some 75 GB (127 KB a token and layer, 20 of logits).
    tables["batch"] = tables["batch"] | {"global_batch_size": STEP, "microbatch_size": 1}
    return replace(recipe, tables=tables | {"source": {"seed": 42}})


def copy_rates() -> dict[str, float]:
    """Return GB/s from an arena to the device, before and after it is pinned."""
    arena = Arena(COPIED_BYTES)
    memory = torch.from_numpy(arena.view(0, COPIED_BYTES)).fill_(1)
    pageable = _copy_rate(memory)
    with pinned(arena):
        return {"pageable_gb_per_s": pageable, "pinned_gb_per_s": _copy_rate(memory)}


def _copy_rate(memory: torch.Tensor) -> float:
    memory.cuda()  # the first makes the memory and the context
    began = time.perf_counter()
    for _ in range(COPIES):
        memory.cuda()
    torch.cuda.synchronize()
    return COPIES * memory.nbytes / (time.perf_counter() - began) / 1e9


def tensors_equal(recipe: Recipe, settings: Settings) -> bool:
    """Say whether the tensors on the device have the bits of those that the CPU makes."""
    training: dict[str, Any] = {"dtype": settings.dtype, "attention": settings.attention}
    with recipe.pipeline() as pipeline:
        batches = on_device(pipeline, settings.device, **training)
        return all(
            torch.equal(there[name].cpu(), value)
            for batch, there in islice(batches, COMPARED_BATCHES)
            for name, value in batch.to_training(**training).items()
            if isinstance(value, torch.Tensor)
        )


def check(recipe: Recipe, settings: Settings) -> dict[str, Any]:
    """Return all figures, and `ok`, whether the bars are met."""
    cuda, lines = settings.device == "cuda", []
    found: dict[str, Any] = {"device": torch.cuda.get_device_name() if cuda else "cpu"}
    found |= copy_rates() if cuda else {}
    with process_group(settings.device):
        for line in train(recipe, settings):
            lines.append(line)
            print({name: line[name] for name in ("step", "loss", "tokens", "step_s", "wait_s")})
    found |= totals(lines[WARM_UP_STEPS:]) | {"losses": [line["loss"] for line in lines]}
    plain = Delivered()
    Run(recipe, Combination(1, 1, "inline"), STEP, None).deliver(COMPARED_STEPS, plain, advance=int)
    found["sha256"] = [plain.step(number, STEP) for number in range(COMPARED_STEPS)]
    equal = found["sha256"] == [line["sha256"] for line in lines[:COMPARED_STEPS]]
    found |= {"digests_equal": equal, "tensors_equal": tensors_equal(recipe, settings)}
    found["ok"] = equal and found["tensors_equal"] and found["wait_share"] < WAIT_BAR
    return found


def main() -> int:
    """Parse the command line and check; return 0 if the bars are met."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda_check", description=__doc__)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    add("--shape", choices=SHAPES, default="siglip2_so400m_qwen3_1.7b" if cuda else "tiny_vlm")
    add("--steps", type=int, default=20)
    add("--samples", type=int, default=2_000, help="photographs (%(default)s)")
    add("--data", type=Path, default=ROOT / "benchmarks" / "data_cache")
    args = parser.parse_args()
    if args.steps < (least := max(WARM_UP_STEPS + 1, COMPARED_STEPS)):
        parser.error(f"--steps must be at least {least}: {WARM_UP_STEPS} do not count")
    if args.device == "cpu":
        torch.set_num_threads(1)  # as in benchmarks.train
    more = {"device": args.device, "dtype": torch.bfloat16, "learning_rate": 1e-4, "digests": True}
    settings = Settings(steps=args.steps, shape=args.shape, **more)
    found = check(recipe_on_photographs(args.shape, args.data, args.samples), settings)
    print(text := json.dumps(found, indent=1))
    (ROOT / "benchmarks" / "results" / "cuda_check.json").write_text(text + "\n")
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
