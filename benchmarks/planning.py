"""Records per second that one rank plans with an index: `python -m benchmarks.planning`.

Planning is all of a rank's serial work before batches are laid out: the source draws from two data
sets (captioned photographs and texts), the index gives what each row measures to, and the records
are packed to 4,096 tokens, shuffled and put in the global order, in all lanes. No sample is read.
Whole windows of all lanes are timed, because a lane takes records in at a window's start that it
gives out at its end. The median of several runs counts, each from the beginning. A rank that plans
whole steps also counts each step's trained tokens (`step_tokens`), for which the index is asked for
more of each row; both ways are shown.

Imports: the package, benchmarks.photos, .plans. Writes texts and an index beside the data.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from benchmarks.data import caption
from benchmarks.photos import dataset, packed, parsed
from benchmarks.plans import Plans
from zephon_mm import Pipeline
from zephon_mm.rng import Stream
from zephon_mm.work import StaticMixtureWorkSource, TokenEstimation

BAR = 150_000
LANES = 8
WINDOW = LANES * 2048  # records between two flush sentinels of all lanes


def write_texts(path: Path, count: int = 5_000) -> Path:
    """Write documents of one to eight paragraphs unless the file is there; return the file."""
    if not path.exists():
        stream = Stream(1, "texts")
        rows = []
        for number in range(count):
            parts = range(1 + stream.integer(8))
            text = "\n".join(caption(1, 8 * number + part) for part in parts)
            rows.append(json.dumps({"text": text}) + "\n")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(rows))
    return path


def build(data: Path, index: str) -> Pipeline:
    """Return a pipeline of equal shares of tokens of photographs and texts."""
    texts = write_texts(data.with_name("texts") / "texts.jsonl")
    datasets = [dataset(data), dataset(texts.parent, "texts")]
    work = StaticMixtureWorkSource(
        datasets, {"photos": 0.5, "texts": 0.5}, seed=42, token_estimation=TokenEstimation()
    )
    return packed(work, data, canonical_replicas=LANES, runner="thread", index=index)


def records_per_s(pipeline: Pipeline, windows: int) -> float:
    """Return records planned per second over so many windows of all lanes."""
    plans = Plans(pipeline)
    records = 0
    began = time.perf_counter()
    for group in plans.groups():
        records += sum(len(sequence.pieces) for sequence in group.sequences)
        if records >= windows * WINDOW:
            break
    return records / (time.perf_counter() - began)


def main() -> None:
    """Parse the command line, print each run and the median."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=10)
    parser.add_argument("--runs", type=int, default=5)
    args = parsed(parser)
    with build(args.data, "fill") as pipeline:
        pipeline.build_index(progress=False)
    for step_tokens in (False, True):
        pipeline = build(args.data, "read").options(step_tokens=step_tokens)
        pipeline.fingerprint()  # measures the source's constants, which is no part of planning
        rates = [records_per_s(pipeline, args.windows) for _ in range(args.runs)]
        shown = " ".join(f"{rate:,.0f}" for rate in rates)
        print(
            f"step_tokens={step_tokens!s:5}: {statistics.median(rates):,.0f} records/s of {shown}"
        )
    print(f"median of the runs; bar >= {BAR:,}")


if __name__ == "__main__":
    main()
