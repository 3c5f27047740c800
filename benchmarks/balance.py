"""How unevenly 8 ranks are loaded, in order and dealt: `python -m benchmarks.balance`.

A straggler is max / mean over the ranks: of the pixels that they encode (vision) and of the squared
lengths of their documents (attention). "Step" takes each rank's whole step; "microbatch" takes one
microbatch, and the mean over those, because ranks that shard parameters wait in each. Nothing is
decoded: the data are lengths of captions, interleaved documents and texts, packed to 4,096 tokens.

"Floor" is the best possible for a step's vision: images are whole, so that a rank of the most
even deal still has ceil(images / ranks) of them.

Imports: the package, benchmarks.lengths. Writes nothing.
"""

import argparse
import statistics
import time
from collections.abc import Sequence

from benchmarks.lengths import MIXED, pipeline
from zephon_mm.engine.balance import Costs, costs_of, deal, in_order, straggler
from zephon_mm.packed import Sequence as PackedSequence
from zephon_mm.work import StaticMixtureWorkSource

Hands = list[list[list[int]]]


def sequences(count: int) -> list[PackedSequence]:
    """Return the first sequences of 64 lanes of mixed data."""
    made = pipeline(
        {kind: kind for kind in MIXED},
        lambda datasets: StaticMixtureWorkSource(datasets, MIXED, seed=0),
        max_length=4096,
        shuffle=64,
        canonical_replicas=64,
        runner="inline",
    )
    with made.batch(microbatch_size=1) as planned:
        return [one.sequence for one in planned.plan(count)]


def by_microbatch(costs: Costs, hands: Hands) -> tuple[float, float]:
    """Return the mean stragglers of a step's microbatches; 1 where none has such work."""
    pairs = [straggler(costs, [hand]) for hand in hands]
    vision, attention = (
        statistics.fmean(max(x, 1.0) for x in kind) for kind in zip(*pairs, strict=True)
    )
    return vision, attention


def floor(step: Sequence[PackedSequence], ranks: int) -> float:
    """Return the least vision straggler that whole images of one size allow."""
    images = sum(sequence.num_images for sequence in step)
    return -(-images // ranks) * ranks / images


def report(step_size: int, packed: Sequence[PackedSequence], ranks: int, size: int) -> None:
    """Print mean and worst stragglers of all steps, in order and dealt."""
    starts = range(0, len(packed) - step_size + 1, step_size)
    steps = [packed[at : at + step_size] for at in starts]
    costs = [costs_of(step) for step in steps]
    plain = [in_order(step_size, ranks=ranks, microbatch_size=size)] * len(steps)
    began = time.perf_counter()
    dealt = [deal(one, ranks=ranks, microbatch_size=size) for one in costs]
    each_ms = (time.perf_counter() - began) / len(steps) * 1e3
    least = statistics.fmean(floor(step, ranks) for step in steps)
    print(
        f"\nN = {step_size}, {ranks} ranks, B = {size}, {len(steps)} steps: {each_ms:.1f} ms a deal"
    )
    print(f"{'':24} {'vision':>16}  {'attention':>16}   floor of vision {least:.4f}")
    for name, measure in (("step", straggler), ("microbatch", by_microbatch)):
        for order, hands in (("in order", plain), ("dealt", dealt)):
            found = [measure(*one) for one in zip(costs, hands, strict=True)]
            cells = [
                f"{statistics.fmean(kind):.4f} (<= {max(kind):.3f})"
                for kind in zip(*found, strict=True)
            ]
            print(f"  {name:11} {order:10} {cells[0]:>16}  {cells[1]:>16}")


def main() -> None:
    """Parse the command line, print a table for each step size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatch", type=int, default=2)
    args = parser.parse_args()
    sizes = (64, 128)
    packed = sequences(args.steps * max(sizes))
    for step_size in sizes:
        part = packed[: args.steps * step_size]
        report(step_size, part, args.ranks, args.microbatch)
    print(
        "\nmean over the steps (the worst step); bars: a dealt step <= 1.03 vision, 1.08 attention"
    )


if __name__ == "__main__":
    main()
