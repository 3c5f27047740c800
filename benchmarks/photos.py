"""What most benchmarks share: photographs, packed to 4,096 tokens, and runs in their own process.

Imports: the package, benchmarks.data. Used by: benchmarks.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.data import make_data, write_benchmark_tokenizer
from zephon_mm import Dataset, Pipeline
from zephon_mm.processors import SigLIPProcessor
from zephon_mm.work import StaticMixtureWorkSource

SIGLIP = SigLIPProcessor(size=384, patch_size=14)
CACHE = Path("benchmarks/data_cache")


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the arguments, with those that say where the photographs are; they are made."""
    parser.add_argument("--data", type=Path, default=CACHE / "photos")
    parser.add_argument("--samples", type=int, default=4000)
    args = parser.parse_args()
    make_data(args.data, num_samples=args.samples)
    write_benchmark_tokenizer(args.data.with_name("tokenizer"))
    return args


def dataset(data: Path, name: str = "photos") -> Dataset:
    """Return data of the benchmarks, its index beside it."""
    return Dataset.from_path(name, data, cache_dir=data.with_name("cache"), progress=False)


def source(data: Path) -> StaticMixtureWorkSource:
    """Return the work of the photographs alone."""
    return StaticMixtureWorkSource([dataset(data)], {"photos": 1.0}, seed=42)


def packed(
    work: Any,
    data: Path,
    *,
    processors: dict[str, Any] | None = None,
    max_images: int | None = None,
    **options: Any,
) -> Pipeline:
    """Return the README's pipeline with a source; `data` has a tokenizer beside it."""
    return (
        Pipeline(work)
        .options(**options)
        .interleave(
            tokenizer=data.with_name("tokenizer"), **processors or {"image_processor": SIGLIP}
        )
        .pack_flat(max_length=4096, max_images=max_images)
        .shuffle(buffer_size=64, seed=42)
        .batch(microbatch_size=2)
    )


def alone(module: str, args: argparse.Namespace, *one: object) -> Any:
    """Return the JSON that `python -m MODULE --one ONE` prints last, with the other arguments."""
    command = [sys.executable, "-W", "ignore", "-m", module, "--one", *map(str, one)]
    for name, value in vars(args).items():
        if name not in ("one", "short"):
            command += [f"--{name.replace('_', '-')}", str(value)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])
