"""How full sequences of 4,096 tokens are: `python -m benchmarks.packing`.

The first table is about windows. "Of offline" is the sequences that best-fit-decreasing makes of a
window, all of whose lengths it knows, divided by those that the packer makes of it, which sees one
record after another. "Flush loss" is the share of the packer's sequences that it would not have
made without windows: of those of a stream in windows, what is more than of the same stream in one
window; below 0 where flushing makes good what the packer let drift. "Padding" is the share of
positions that hold no token.

The second compares ways of packing, in windows of 2,048, also with a limit of patches besides that
of tokens. The bound is the number of sequences that nothing can go below: all tokens, or all
patches, divided by what a sequence holds. The table shows the bound / the sequences made. "First
fit" puts each record, as it comes, into the first sequence of the window that has room, and keeps
all of them open. "Decreasing" is best fit over everything: it knows and sorts all records before it
begins, without windows. "wrap" cuts documents.

The data are lengths: "mixed" is captions, interleaved documents and texts in equal shares of
tokens, "half images" half interleaved documents and half texts. The bars are for these two. An
image has 729 patches, and as many tokens, or 81 where it is "pooled".

Imports: ops.pack, benchmarks.lengths. Writes nothing.
"""

import argparse
import time
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.lengths import IMAGE_TOKENS, MIXED, TABLE_ROWS, record, table
from zephon_mm.ops.pack import PackConfig, make_packer
from zephon_mm.records import Record, SampleRef
from zephon_mm.rng import Stream

MAX_LENGTH = 4_096
WINDOWS = (2_048, 16_384)
MIXES = {
    "mixed": MIXED,
    "half images": {"interleaved": 0.5, "text": 0.5},
    **{kind: {kind: 1.0} for kind in MIXED},
}
BARS = {2_048: 0.003, 16_384: 0.0005}
POOLED = 81
BUDGETS = (  # data, tokens of an image, max_patches
    *(("mixed", IMAGE_TOKENS, most) for most in (None, 2_916, 3_645)),
    *(("half images", POOLED, most) for most in (None, 5_000, 7_500)),
)
PACKERS: dict[str, dict[str, Any]] = {
    "wrap": {"algorithm": "wrap"},
    "keep": {"order": "keep"},
    "best fit": {},
    "knapsack": {"algorithm": "knapsack"},
}


def stream(
    shares: Mapping[str, float], count: int, seed: int, image_tokens: int = IMAGE_TOKENS
) -> list[Record]:
    """Return so many records, drawn from the kinds in their shares."""
    tables = [table(kind) for kind in shares]
    ends = np.cumsum(list(shares.values()))[:-1]
    kinds = np.searchsorted(ends, Stream(seed, "kinds").uniform(count), side="right")
    draws = Stream(seed, "rows").bits(count) % np.uint64(TABLE_ROWS)
    rows = [tables[kind][row] for kind, row in zip(kinds.tolist(), draws.tolist(), strict=True)]
    where = SampleRef(0, 0, 0)
    return [record(where, tokens, n, image_tokens=image_tokens) for tokens, n in rows]


def packed(records: Sequence[Record], config: PackConfig) -> int:
    """Return how many sequences the packer makes of one window."""
    packer = make_packer(config)
    closed = sum(len(packer.push(one)) for one in records)
    return closed + len(packer.flush())


def offline(records: Sequence[Record]) -> int:
    """Return how many sequences best-fit-decreasing makes: longest first, where least is left."""
    free: list[int] = []  # ascending
    for tokens in sorted((one.num_tokens for one in records), reverse=True):
        at = bisect_left(free, tokens)
        left = free.pop(at) if at < len(free) else MAX_LENGTH
        insort(free, left - tokens)
    return len(free)


def placed(records: Sequence[Record], max_patches: int | None, *, decreasing: bool) -> int:
    """Return how many sequences first fit, or decreasing best fit, makes within two budgets."""
    capacity = np.array((MAX_LENGTH, max_patches or np.inf))
    needs = np.array([(one.num_tokens, one.num_patches) for one in records]) / capacity
    if decreasing:
        needs = needs[np.argsort(-needs.max(axis=1), kind="stable")]
    free = np.ones((len(needs), 2))
    used = 0
    for need in needs:
        left = free[: used + 1] - need  # the last one is empty
        score = left.sum(axis=1) if decreasing else np.arange(used + 1)
        at = int(np.where((left >= -1e-12).all(axis=1), score, np.inf).argmin())
        free[at] = left[at]
        used += at == used
    return used


def windows(records: Sequence[Record], size: int) -> Iterator[Sequence[Record]]:
    """Yield the windows of a stream."""
    return (records[at : at + size] for at in range(0, len(records), size))


def report(name: str, records: Sequence[Record], lookahead: int) -> None:
    """Print a line for each length of the window."""
    config = PackConfig(MAX_LENGTH, lookahead=lookahead)
    whole = packed(records, config)
    tokens = sum(one.num_tokens for one in records)
    for window in WINDOWS:
        ours = sum(packed(part, config) for part in windows(records, window))
        of_offline = sum(offline(part) for part in windows(records, window)) / ours
        print(
            f"{name:12} {window:7,}  {of_offline:11.4f}  {(ours - whole) / ours:11.5f}  "
            f"{1 - tokens / (ours * MAX_LENGTH):9.5f}"
        )


def compare(name: str, image_tokens: int, most: int | None, count: int, seed: int) -> None:
    """Print a line: how near each way of packing comes to the bound, and what it costs."""
    size = WINDOWS[0]
    records = stream(MIXES[name], count, seed, image_tokens)
    records = [one for one in records if one.num_tokens <= MAX_LENGTH]
    tokens, patches = (sum(r.num_tokens for r in records), sum(r.num_patches for r in records))
    bound = max(tokens / MAX_LENGTH, patches / most if most else 0)
    made = {}
    for kind, options in PACKERS.items():
        config = PackConfig(MAX_LENGTH, max_patches=most, **options)
        began = time.process_time()
        found = sum(packed(part, config) for part in windows(records, size))
        spent_us = 1e6 * (time.process_time() - began) / len(records)
        made[kind] = f"{bound / found:.4f} {spent_us:3.0f} us"
    first_fit = sum(placed(part, most, decreasing=False) for part in windows(records, size))
    made["first fit"] = f"{bound / first_fit:.4f}"
    made["decreasing"] = f"{bound / placed(records, most, decreasing=True):.4f}"
    columns = ("wrap", "keep", "first fit", "best fit", "knapsack", "decreasing")
    kind = f"{name}{', pooled' * (image_tokens == POOLED)}"
    print(f"{kind:20} {most or 'none':>11}  " + "  ".join(f"{made[one]:>13}" for one in columns))


def main() -> None:
    """Parse the command line, print two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=10 * 16_384)
    parser.add_argument("--compared", type=int, default=4 * 2_048, help="of the second table")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lookahead", type=int, default=PackConfig(MAX_LENGTH).lookahead)
    args = parser.parse_args()
    print("data          window   of offline   flush loss    padding")
    for name, shares in MIXES.items():
        report(name, stream(shares, args.records, args.seed), args.lookahead)
    bars = ", ".join(f"<= {bar} at {window:,}" for window, bar in BARS.items())
    print(f"bars, mixed and half images: of offline >= 0.995; flush loss {bars}\n")
    print("data                 max_patches           wrap           keep      first fit", end="")
    print("       best fit       knapsack     decreasing")
    for name, image_tokens, most in BUDGETS:
        compare(name, image_tokens, most, args.compared, args.seed)
    print("bound / sequences made, and CPU time a record")


if __name__ == "__main__":
    main()
