"""Does anything grow? `python -m benchmarks.soak` runs 20,000 small batches and looks now and then.

The rows are made in memory and the images are small files, so that batches come fast; the pipeline
packs and shuffles, and the runner is `process`. Memory is USS: what a process has for itself alone.

Imports: the package, tests.fixtures. Used by: tests/laws/test_pressure.py. Writes nothing.
"""

import argparse
import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.fixtures.memory import Recipe, dataset, random_rows, write_images
from zephon_mm.pipeline import Pipeline


class Usage(NamedTuple):
    """What the trainer and its descendants hold after so many batches; memory is USS."""

    batches: int
    descriptors: int
    threads: int
    processes: int
    own_bytes: int
    worker_bytes: int


def usage(batches: int) -> Usage:
    """Look at this process and its descendants."""
    own = psutil.Process()
    children = own.children(recursive=True)
    return Usage(
        batches,
        len(os.listdir("/proc/self/fd")) - 1,  # less the one that lists
        own.num_threads(),
        len(children),
        own.memory_full_info().uss,
        sum(child.memory_full_info().uss for child in children),
    )


def soak(*, batches: int, every: int, workers: int = 2) -> list[Usage]:
    """Run so many batches; return samples taken every few of them."""
    with tempfile.TemporaryDirectory() as folder:
        rows = random_rows(1, 400, write_images(Path(folder)))
        recipe = Recipe(datasets=(dataset("a", rows, shard_rows=50),), shuffle=3)
        with recipe.build(microbatch=4, runner="process", workers=workers) as pipeline:
            return list(_samples(pipeline, batches, every))


def _samples(pipeline: Pipeline, batches: int, every: int) -> Iterator[Usage]:
    for number, batch in enumerate(itertools.islice(pipeline, batches), 1):
        batch.to_training()
        if number % every == 0:
            yield usage(number)


def main() -> None:
    """Print the samples as a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=20_000)
    parser.add_argument("--every", type=int, default=2_000)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    print(" batches   fds  threads  processes  trainer MiB  workers MiB")
    for one in soak(**vars(arguments)):
        print(
            f"{one.batches:8} {one.descriptors:5} {one.threads:8} {one.processes:10} "
            f"{one.own_bytes / 2**20:12.1f} {one.worker_bytes / 2**20:12.1f}"
        )


if __name__ == "__main__":
    main()
