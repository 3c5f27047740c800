"""An awkward topology against an even one: `python -m benchmarks.topology`.

64 lanes on 7 ranks, each of which needs sequences of every lane, against 64 lanes on 8 ranks, each
of which needs 8 lanes: what rank 0 delivers per second. It runs alone with its own workers, as it
does on a cluster, where other ranks use other processors; eight ranks at once on two cores would
only show how two cores are shared. All ranks do the same amount of work, so one stands for all.

Without an index a rank of 7 measures everything, 7 times its share; with one it measures nothing.
A rank is timed over its share of one window of all lanes, after as much to warm up, in a process of
its own; pairs are interleaved and the median of their ratios counts.

Imports: the package, benchmarks.data. Writes an index beside the data.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.data import make_data, write_benchmark_tokenizer
from zephon_mm import Dataset, Pipeline
from zephon_mm.processors import SigLIPProcessor
from zephon_mm.work import StaticMixtureWorkSource

LANES = 64
AWKWARD, EVEN = 7, 8
BARS = {"read": 0.95, "off": 0.6}


def build(data: Path, ranks: int, index: str, workers: int, window_chunks: int) -> Pipeline:
    """Return the pipeline of rank 0."""
    photos = Dataset.from_path("photos", data, cache_dir=data.with_name("cache"), progress=False)
    return (
        Pipeline(StaticMixtureWorkSource([photos], {"photos": 1.0}, seed=42))
        .options(
            canonical_replicas=LANES,
            flush_every_k_chunks=window_chunks,
            dp_degree=ranks,
            runner="process",
            workers=workers,
            index=index,
        )
        .interleave(
            tokenizer=data.with_name("tokenizer"),
            image_processor=SigLIPProcessor(size=384, patch_size=14),
        )
        .pack_flat(max_length=4096)
        .shuffle(buffer_size=64, seed=42)
        .batch(microbatch_size=2)
    )


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


def one(ranks: int, index: str, args: argparse.Namespace) -> float:
    """Run one contender in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.topology", "--data"]
    command += [str(args.data), "--workers", str(args.workers)]
    command += ["--window-chunks", str(args.window_chunks), "--one", str(ranks), index]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Parse the command line, print each pair and the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("benchmarks/data_cache/photos"))
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--window-chunks", type=int, default=4, help="of 256 samples")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--one", nargs=2, metavar=("RANKS", "INDEX"))
    args = parser.parse_args()
    if args.one:
        ranks, index = int(args.one[0]), args.one[1]
        pipeline = build(args.data, ranks, index, args.workers, args.window_chunks)
        print(json.dumps(run(pipeline, LANES * args.window_chunks * 256 // ranks)))
        return
    make_data(args.data, num_samples=args.samples)
    write_benchmark_tokenizer(args.data.with_name("tokenizer"))
    with build(args.data, EVEN, "fill", args.workers, args.window_chunks) as pipeline:
        pipeline.build_index(progress=False)
    for index, bar in BARS.items():
        ratios = []
        for number in range(args.pairs):
            even, awkward = (one(ranks, index, args) for ranks in (EVEN, AWKWARD))
            ratios.append(awkward / even)
            print(
                f"index {index:4} pair {number + 1}: {EVEN} ranks {even:6.1f} sequences/s, "
                f"{AWKWARD} ranks {awkward:6.1f} ({ratios[-1]:.3f})",
                flush=True,
            )
        print(f"index {index:4}: median {statistics.median(ratios):.3f}, bar >= {bar}")


if __name__ == "__main__":
    main()
