"""The same digests from every runner on the 4,000 photographs: `python -m benchmarks.digests`.

Exit status 1 if any runner's batches differ from the inline run's.

Imports: the package, benchmarks.pipeline. Writes nothing.
"""

import argparse
import hashlib
import sys
import time
from pathlib import Path

from benchmarks.photos import parsed
from benchmarks.pipeline import build

RUNS = (("inline", 1), ("thread", 2), ("process", 1), ("process", 2), ("process", 4))


def digest(
    data: Path, runner: str, workers: int, batches: int, cache_dir: str | None = None
) -> str:
    """Return one digest over the rows of the first batches."""
    sha = hashlib.sha256()
    with build(data, runner, workers, cache_dir) as pipeline:
        for _, batch in zip(range(batches), pipeline, strict=False):
            sha.update("".join(batch.row_sha256()).encode())
    return sha.hexdigest()


def main() -> int:
    """Parse the command line, print a line for each runner."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=200)
    args = parsed(parser)
    found = set()
    for runner, workers in RUNS:
        began = time.perf_counter()
        sha = digest(args.data, runner, workers, args.batches)
        found.add(sha)
        print(
            f"{runner:8} x {workers}  {sha[:32]}  {time.perf_counter() - began:6.1f} s", flush=True
        )
    print("all equal" if len(found) == 1 else "DIFFERENT")
    return 0 if len(found) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
