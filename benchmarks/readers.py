"""Fetching without decoding, against each format's own library: `python -m benchmarks.readers`.

Text (600 bytes), and images (20 to 30 KB) with text, written by each format's own library, read in
shuffled order by two worker processes in batches of 256; every consumer touches each byte once.
Pairs are interleaved, each run is a process of its own, and the median of the pairs' ratios counts:
the machines are shared and noisy. CPU time a sample, over all processes, says what a quiet machine
would give: two cores deliver at most 2e6 / cpu_us samples a second.

mosaicml-streaming and litdata pin old versions of much. `READERS_PYTHON` names the Python of an
environment that has them, webdataset and torch; without it they are left out, with a note.

Imports: benchmarks.contenders (in processes of its own). Writes benchmarks/data_cache/readers.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

FORMATS = {  # format -> the module of its own library
    "webdataset": "webdataset",
    "mds": "streaming",
    "litdata": "litdata",
    "lance": "lance",
    "parquet": "pyarrow",
}
BARS = {"text": 200_000, "image": 30_000}
CONTENDERS = Path(__file__).with_name("contenders.py")
CACHE = Path(__file__).with_name("data_cache") / "readers"


def python_of(module: str) -> str | None:
    """Return the Python that has a library; None if there is none."""
    for python in (sys.executable, os.environ.get("READERS_PYTHON", "")):
        command = [python, "-c", f"import {module}"]
        if python and not subprocess.run(command, capture_output=True).returncode:
            return python
    return None


def run(python: str, *arguments: str) -> Any:
    """Run a contender; return what it prints."""
    command = [python, str(CONTENDERS), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else None


def measured(fmt: str, kind: str, data: Path, rounds: int) -> dict[str, list[Any]] | None:
    """Return the runs of each contender, interleaved; None where no Python has the library."""
    if (python := python_of(FORMATS[fmt])) is None:
        print(f"{fmt:10} {kind:5} skipped: no Python has {FORMATS[fmt]}; set READERS_PYTHON")
        return None
    folder, done = data / f"{fmt}-{kind}", data / f"{fmt}-{kind}.done"
    if not done.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        run(python, "write", fmt, kind, str(folder))
        done.touch()
    pythons = {"own": python, "zephon": sys.executable, "zephon_samples": sys.executable}
    found: dict[str, list[Any]] = {action: [] for action in pythons}
    for _ in range(rounds):
        for action, results in found.items():
            results.append(run(pythons[action], action, fmt, kind, str(folder)))
    return found


def compare(fmt: str, kind: str, data: Path, pairs: int) -> None:
    """Print the figures of one format and one kind of samples."""
    if (found := measured(fmt, kind, data, pairs)) is None:
        return
    own = [one["samples_per_s"] for one in found["own"]]
    for action, results in found.items():
        rates = [one["samples_per_s"] for one in results]
        ratio = statistics.median(rate / other for rate, other in zip(rates, own, strict=True))
        cpu_us = statistics.median(one["cpu_us"] for one in results)
        print(
            f"{fmt:10} {kind:5} {action:14} {statistics.median(rates):9,.0f} samples/s"
            f"   {ratio:5.1f} x own   {cpu_us:6.1f} us CPU a sample"
            f"   at most {2e6 / cpu_us:9,.0f}/s on 2 cores, bar {BARS[kind]:,}",
            flush=True,
        )


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--kinds", default="text,image")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--data", type=Path, default=CACHE)
    args = parser.parse_args()
    for fmt in args.formats.split(","):
        for kind in args.kinds.split(","):
            compare(fmt, kind, args.data, args.pairs)


if __name__ == "__main__":
    main()
