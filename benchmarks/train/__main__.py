r"""Train on a recipe: `python -m benchmarks.train --config RECIPE`, or the same under torchrun.

The model is named as the recipe's file, unless `--shape` names another; its weights are random, or
read from local folders. A resumed run may have any number of ranks that divides the global batch.

    torchrun --nproc_per_node=8 -m benchmarks.train --config configs/RECIPE.toml \
        --dtype bfloat16 --steps 1000 --checkpoint runs/a --every 100 --out runs/a.jsonl

Imports: recipe, benchmarks.train.run. Writes the checkpoints and the lines that it is asked for.
"""

import argparse
import json
import os
import sys
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.train.model import IMPLEMENTATION, SHAPES
from benchmarks.train.run import Settings, process_group, totals, train
from zephon_mm.recipe import Recipe, load_recipe

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CUDA = torch.cuda.is_available()


def parse() -> argparse.Namespace:
    """Return the checked command line; what has the name of a setting is that setting."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train", description=__doc__)
    add = parser.add_argument
    add("--config", type=Path, required=True, help="a recipe, such as configs/tiny_vlm.toml")
    add("--shape", choices=SHAPES, help="the model (that of the recipe's name)")
    add("--vision", help="folder of SigLIP weights (random ones)")
    add("--language", help="folder of Qwen3 weights (random ones)")
    add("--steps", type=int, default=20, help="steps of the whole run (%(default)s)")
    add("--device", choices=("cpu", "cuda"), default="cuda" if CUDA else "cpu")
    add("--dtype", choices=DTYPES, default="float32", help="of matrix products (%(default)s)")
    add("--attention", choices=IMPLEMENTATION, default="sdpa", help="(%(default)s)")
    add("--learning-rate", type=float, default=3e-3, help="(%(default)s)")
    add("--runner", help="inline, thread or process (the recipe's)")
    add("--workers", type=int, help="(the recipe's)")
    add("--checkpoint", type=Path, help="folder that checkpoints are written to")
    add("--every", type=int, default=0, help="steps between two checkpoints")
    add("--resume", type=Path, help="a checkpoint, such as runs/a/step-100")
    add("--out", type=Path, help="file for one line of JSON a step (standard output)")
    add("--digests", action="store_true", help="hash each step's data")
    add("--deterministic", action="store_true", help="the same arithmetic in each run")
    args = parser.parse_args()
    if bool(args.checkpoint) != (args.every > 0):
        parser.error("--checkpoint FOLDER and --every STEPS go together")
    if args.resume and not (args.resume / ".metadata").is_file():
        parser.error(
            f"{args.resume} has no .metadata, which is written last: it is no checkpoint, or a run "
            "ended while it was written. Resume from the one before"
        )
    if args.device == "cuda" and not CUDA:
        parser.error("--device cuda: torch finds no CUDA device here")
    args.shape = args.shape or args.config.stem
    if args.shape not in SHAPES:
        parser.error(f"no model is named {args.shape}: give --shape")
    args.dtype = DTYPES[args.dtype]
    given = {"runner": args.runner, "workers": args.workers}
    args.options = {name: value for name, value in given.items() if value is not None}
    return args


def report(recipe: Recipe, settings: Settings, out: Path | None) -> None:
    """Train; rank 0 writes the lines and shows the last."""
    shown, lines = dist.get_rank() == 0, []
    if out and shown:
        out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", buffering=1) if out and shown else nullcontext(sys.stdout) as file:
        for line in train(recipe, settings):
            lines.append(line)
            if shown:
                file.write(json.dumps(line) + "\n")
    if not lines:
        print(f"nothing to do: the run has its {settings.steps} steps")
        return
    found = totals(lines[1:] or lines)  # the first step waits for the first batch
    if shown:
        print(
            f"loss {lines[0]['loss']:.4f} -> {lines[-1]['loss']:.4f}; "
            f"{found['samples_per_s']:,.1f} samples/s, {found['tokens_per_s']:,.0f} usable "
            f"tokens/s; the loader is waited for {found['wait_share']:.2%} of the time"
        )


def main() -> int:
    """Run."""
    args = parse()
    settings = Settings(**{one.name: getattr(args, one.name) for one in fields(Settings)})
    if settings.device == "cpu":
        torch.set_num_threads(1)  # torch's threads wait by spinning, the workers need the others
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # With warn_only CUDA's attention would stay as it is.
        torch.use_deterministic_algorithms(True)
    with process_group(settings.device):
        report(load_recipe(args.config), settings, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
