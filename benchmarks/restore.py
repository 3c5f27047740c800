"""What a checkpoint and a restore cost: `python -m benchmarks.restore size|time|decoded|all`.

- size: bytes of the JSON after 10, 1,000 and 10,000 steps of 64 sequences, 64 lanes x 8 data sets
  of 10 million rows. Planning only: rows are lengths, accumulators and checkpoints are real.
- time: from building the pipeline to its first L sequences, decoded, from a cold start and from a
  state deep inside the lanes' second windows; and how long the workers take to measure one window
  of each lane, which is what a restore without an index may cost on top. Medians of interleaved
  tries; every try starts its own workers.
- decoded: images that a restored run decodes although they were delivered before the checkpoint,
  counted by an image processor, in data of which no image comes twice.

Imports: the package, benchmarks.data, .photos, .lengths, .plans. Writes an index beside the data.
"""

import argparse
import hashlib
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from benchmarks.data import make_data, write_benchmark_tokenizer
from benchmarks.lengths import pipeline as lengths_pipeline
from benchmarks.photos import packed, source
from benchmarks.plans import Plans, late_state
from zephon_mm import Pipeline
from zephon_mm.engine.schedule import TaskQueue
from zephon_mm.engine.tasks import measure, poisoned_sample
from zephon_mm.io import read_blob
from zephon_mm.metrics import Metrics
from zephon_mm.processors import SigLIPProcessor
from zephon_mm.runners import make_runner
from zephon_mm.work import StaticMixtureWorkSource, TokenEstimation

STEPS = (10, 1_000, 10_000)
SIZE_BAR = 16 << 10  # bytes
DECODED_WINDOW = {"chunk_size": 25, "flush_every_k_chunks": 6}  # three fit in a lane's 500 rows


def many_lanes() -> Pipeline:
    """Return a pipeline of 64 lanes x 8 data sets of lengths, which can be planned."""
    names = [f"dataset-{number}" for number in range(8)]
    mixture = {name: 1.0 + number for number, name in enumerate(names)}
    return lengths_pipeline(
        dict.fromkeys(names, "short_text"),
        lambda datasets: StaticMixtureWorkSource(datasets, mixture, 42, TokenEstimation()),
        max_length=48,
        shuffle=64,
        canonical_replicas=64,
        runner="inline",
    ).batch(microbatch_size=64, global_batch_size=64)


def states(steps: tuple[int, ...] = STEPS) -> Iterator[tuple[int, str]]:
    """Yield the checkpoints, as JSON, of `many_lanes` after some numbers of steps."""
    plans = Plans(many_lanes())
    for step, group in zip(range(1, max(steps) + 1), plans.groups(), strict=False):
        if step in steps:
            yield step, json.dumps(plans.checkpoint(group.after))


def build(data: Path, lanes: int, index: str, **options: Any) -> Pipeline:
    """Return one rank's pipeline over the benchmark's photographs."""
    made = packed(source(data), data, canonical_replicas=lanes, index=index, **options)
    return made.batch(microbatch_size=1)


def first_round_s(data: Path, lanes: int, index: str, state: Any, **options: Any) -> float:
    """Return seconds from building a pipeline to its first L sequences."""
    began = time.perf_counter()
    with build(data, lanes, index, **options) as made:
        if state is not None:
            made.restore(state)
        for _ in itertools.islice(made, lanes):
            pass
        return time.perf_counter() - began


def window_s(data: Path, lanes: int, **options: Any) -> float:
    """Return how long the workers take to measure one window of each lane."""
    made: Any = build(data, lanes, "off", **options)
    work, settings = made._source, made._options
    runner = make_runner(
        settings.runner, made._compiled(Metrics()).context, workers=settings.workers
    )
    queue = TaskQueue(runner)
    rows, count = settings.task_rows, settings.flush_every_k_chunks * settings.chunk_size
    refs = np.concatenate(
        [work.next(work.start(lane, lanes), count)[0].refs for lane in range(lanes)]
    )
    parts = [refs[at : at + rows] for at in range(0, len(refs), rows)]
    queue.submit((0,), measure, parts[0][:1], poisoned_sample).result()  # the workers are up
    began = time.perf_counter()
    for future in [queue.submit((0,), measure, part, poisoned_sample) for part in parts]:
        future.result()
    elapsed_s = time.perf_counter() - began
    runner.shutdown()
    return elapsed_s


def times(data: Path, tries: int, **options: Any) -> None:
    """Print cold starts and restores for 1 and 8 lanes without an index, 64 with one."""
    with build(data, 64, "fill", **options) as made:
        made.build_index(progress=False)
    print("lanes  index     cold s  restored s  window's measuring s   restored / bar")
    for lanes, index in ((1, "off"), (8, "off"), (64, "read")):
        state = late_state(build(data, lanes, "read", **options))  # it does not depend on it
        tried = [
            (
                first_round_s(data, lanes, index, None, **options),
                first_round_s(data, lanes, index, state, **options),
                window_s(data, lanes, **options) if index == "off" else 0.0,
            )
            for _ in range(tries)
        ]
        cold_s, restored_s, measuring_s = map(statistics.median, zip(*tried, strict=True))
        bar_s = cold_s + measuring_s if index == "off" else 1.2 * cold_s + 2
        shown = f"{measuring_s:20.2f}" if index == "off" else f"{'none':>20}"
        print(
            f"{lanes:5}  {index:6} {cold_s:9.2f}  {restored_s:10.2f}  {shown}   "
            f"{restored_s / bar_s:.3f} of {bar_s:.2f} s",
            flush=True,
        )
    print("bars: cold + measuring without an index, 1.2 x cold + 2 s with one")


class CountingProcessor(SigLIPProcessor):
    """Notes the bytes that it decodes; for runners whose workers are threads."""

    decoded: ClassVar[list[str]] = []

    def write(self, encoded: bytes, out: NDArray[np.uint8]) -> None:
        """Note and decode an image."""
        self.decoded.append(hashlib.sha256(encoded).hexdigest())
        super().write(encoded, out)


def decoded_again(data: Path, after: int = 40) -> None:
    """Print how many images a restored run decodes that were delivered before."""
    counting = {"image_processor": CountingProcessor(384)}
    options: Any = {"runner": "thread", "processors": counting, **DECODED_WINDOW}
    state = late_state(build(data, 8, "off", **options))
    before = set()
    with build(data, 8, "off", **options) as made:
        reader = made._source.datasets[0]
        for planned in made.plan(state["delivered"]):
            blobs = [i.blob for piece in planned.sequence.pieces for i in piece.images()]
            before.update(hashlib.sha256(read_blob(reader, blob)).hexdigest() for blob in blobs)
    CountingProcessor.decoded.clear()
    with build(data, 8, "off", **options).restore(state) as made:
        images = sum(len(batch.image_valid) for batch in itertools.islice(made, after))
    found = CountingProcessor.decoded
    dropped = sum(offset for _, _, offset in state["lanes"].values())
    print(
        f"restored after {state['delivered']} sequences with {len(before)} images, {dropped} of "
        f"them planned again: {images} images delivered, {len(found)} decoded, of these "
        f"{sum(one in before for one in found)} that were delivered before (bar 0)"
    )


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "part", choices=["size", "time", "decoded", "all"], nargs="?", default="all"
    )
    parser.add_argument("--data", type=Path, default=Path("benchmarks/data_cache/photos"))
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument("--runner", default="process")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    make_data(args.data, num_samples=args.samples)
    write_benchmark_tokenizer(args.data.with_name("tokenizer"))
    if args.part in ("size", "all"):
        for step, state in states():
            print(f"checkpoint after {step:6,} steps: {len(state):6,} bytes, bar {SIZE_BAR:,}")
    if args.part in ("time", "all"):
        times(args.data, args.tries, runner=args.runner, workers=args.workers)
    if args.part in ("decoded", "all"):
        decoded_again(args.data)


if __name__ == "__main__":
    main()
