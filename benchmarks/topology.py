"""An awkward topology against an even one: `python -m benchmarks.topology`.

64 lanes on 7 ranks, each of which needs sequences of every lane, against 64 lanes on 8 ranks, each
of which needs 8 lanes: what rank 0 delivers per second. It runs alone with its own workers, as it
does on a cluster, where other ranks use other processors; eight ranks at once on two cores would
only show how two cores are shared. All ranks do the same amount of work, so one stands for all.

Without an index a rank of 7 measures everything, 7 times its share; with one it measures nothing.
A rank is timed over its share of one window of all lanes, after as much to warm up, in a process of
its own; pairs are interleaved and the median of their ratios counts.

Imports: the package, benchmarks.photos. Writes an index beside the data.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from benchmarks.photos import alone, packed, parsed, source
from zephon_mm import Pipeline

LANES = 64
AWKWARD, EVEN = 7, 8
BARS = {"read": 0.95, "off": 0.6}


def build(data: Path, ranks: int, index: str, workers: int, window_chunks: int) -> Pipeline:
    """Return the pipeline of rank 0."""
    lanes = {"canonical_replicas": LANES, "flush_every_k_chunks": window_chunks}
    how = {"dp_degree": ranks, "runner": "process", "workers": workers, "index": index}
    return packed(source(data), data, **lanes, **how)


def run(pipeline: Pipeline, documents: int) -> float:
    """Return sequences per second over `documents`, after as many to warm up."""
    seen = sequences = 0
    began = 0.0
    with pipeline:
        for batch in pipeline:
            if began:
                sequences += len(batch.keys)
            seen += sum(len(row) for row in batch.keys)
            if not began and seen >= documents:
                began = time.perf_counter()
            if seen >= 2 * documents:
                break
        return sequences / (time.perf_counter() - began)


def main() -> None:
    """Parse the command line, print each pair and the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--window-chunks", type=int, default=4, help="of 256 samples")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--one", nargs=2, metavar=("RANKS", "INDEX"))
    args = parsed(parser)
    if args.one:
        ranks, index = int(args.one[0]), args.one[1]
        pipeline = build(args.data, ranks, index, args.workers, args.window_chunks)
        print(json.dumps(run(pipeline, LANES * args.window_chunks * 256 // ranks)))
        return
    with build(args.data, EVEN, "fill", args.workers, args.window_chunks) as pipeline:
        pipeline.build_index(progress=False)
    for index, bar in BARS.items():
        ratios = []
        for number in range(args.pairs):
            even, awkward = (
                alone("benchmarks.topology", args, ranks, index) for ranks in (EVEN, AWKWARD)
            )
            ratios.append(awkward / even)
            print(
                f"index {index:4} pair {number + 1}: {EVEN} ranks {even:6.1f} sequences/s, "
                f"{AWKWARD} ranks {awkward:6.1f} ({ratios[-1]:.3f})",
                flush=True,
            )
        print(f"index {index:4}: median {statistics.median(ratios):.3f}, bar >= {bar}")


if __name__ == "__main__":
    main()
