"""Do workers copy the list of samples? `python -m benchmarks.keys` (case PRF-01).

A JSONL file of a million rows, each with its own key, is read once through by four workers; the
memory of the workers and their zygote is looked at now and then. It is PSS: shared pages are
divided among those that share them, so that the sum is what the machine holds.

Imports: the package, tests.fixtures. Writes a temporary folder.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.fixtures.memory import Recipe
from zephon_mm.io import Dataset


class Usage(NamedTuple):
    """The sum of PSS after so many keys."""

    keys: int
    pss_bytes: int


def descendants() -> set[psutil.Process]:
    """Return all processes that this one started, and those that they did."""
    return set(psutil.Process().children(recursive=True))


def sum_of_pss(others: set[psutil.Process]) -> int:
    """Return the bytes of all descendants but these, shared pages divided among them."""
    return sum(one.memory_full_info().pss for one in descendants() - others)


def one_pass(folder: Path, keys: int, workers: int, looks: int) -> Iterator[Usage]:
    """Read a file of so many rows once; yield what is held after each part of it."""
    path = folder / "rows.jsonl"
    with path.open("w") as file:
        for number in range(keys):
            file.write(f'{{"id": "sample-{number:09}", "text": "{number} fox"}}\n')
    data = Dataset.from_path("rows", path, cache_dir=folder / "cache", progress=False)
    recipe = Recipe(
        datasets=(data,),
        passes=1,
        stop="all_exhausted",
        max_length=8192,
        chunk_size=256,
        chunks_per_window=8,
        global_batch_size=1,
    )
    seen = taken = 0
    others = descendants()
    with recipe.build(runner="process", workers=workers) as pipeline:
        for batch in pipeline:
            seen += len(batch.keys[0])
            if seen * looks >= (taken + 1) * keys:
                taken += 1
                yield Usage(seen, sum_of_pss(others))


def main() -> None:
    """Print the samples as a table, and the growth."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--looks", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for usage in one_pass(Path(folder), args.keys, args.workers, args.looks):
            found.append(usage)
            print(f"{usage.keys:9} keys {usage.pss_bytes / 2**20:8.1f} MiB", flush=True)
    growth = found[-1].pss_bytes / found[0].pss_bytes - 1
    print(f"growth from the first look to the last: {growth:+.1%}")


if __name__ == "__main__":
    main()
