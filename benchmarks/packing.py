"""Packing to 4,096 tokens against offline best-fit-decreasing: `python -m benchmarks.packing`.

"Of offline" is the sequences that best-fit-decreasing makes of a window, all of whose lengths it
knows, divided by those that the packer makes of it, which sees one record after another. "Flush
loss" is the share of the packer's sequences that it would not have made without windows: of those
of a stream in windows, what is more than of the same stream in one window; below 0 where flushing
makes good what the packer let drift. "Padding" is the share of positions that hold no token.

The data are lengths: "mixed" is captions, interleaved documents and texts in equal shares of
tokens, "half images" half interleaved documents and half texts. The bars are for these two.

Imports: ops.pack, benchmarks.lengths. Writes nothing.
"""

import argparse
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.lengths import MIXED, TABLE_ROWS, record, table
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


def stream(shares: Mapping[str, float], count: int, seed: int) -> list[Record]:
    """Return so many records, drawn from the kinds in their shares."""
    tables = [table(kind) for kind in shares]
    ends = np.cumsum(list(shares.values()))[:-1]
    kinds = np.searchsorted(ends, Stream(seed, "kinds").uniform(count), side="right")
    draws = Stream(seed, "rows").bits(count) % np.uint64(TABLE_ROWS)
    rows = [tables[kind][row] for kind, row in zip(kinds.tolist(), draws.tolist(), strict=True)]
    return [record(SampleRef(0, 0, 0), tokens, images) for tokens, images in rows]


def packed(records: Sequence[Record], lookahead: int) -> int:
    """Return how many sequences the packer makes of one window."""
    packer = make_packer(PackConfig(MAX_LENGTH, lookahead=lookahead))
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


def report(name: str, records: Sequence[Record], lookahead: int) -> None:
    """Print a line for each length of the window."""
    whole = packed(records, lookahead)
    tokens = sum(one.num_tokens for one in records)
    for window in WINDOWS:
        parts = [records[at : at + window] for at in range(0, len(records), window)]
        ours = sum(packed(part, lookahead) for part in parts)
        of_offline = sum(offline(part) for part in parts) / ours
        print(
            f"{name:12} {window:7,}  {of_offline:11.4f}  {(ours - whole) / ours:11.5f}  "
            f"{1 - tokens / (ours * MAX_LENGTH):9.5f}"
        )


def main() -> None:
    """Parse the command line, print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=10 * 16_384)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lookahead", type=int, default=PackConfig(MAX_LENGTH).lookahead)
    args = parser.parse_args()
    print("data          window   of offline   flush loss    padding")
    for name, shares in MIXES.items():
        report(name, stream(shares, args.records, args.seed), args.lookahead)
    bars = ", ".join(f"<= {bar} at {window:,}" for window, bar in BARS.items())
    print(f"bars, mixed and half images: of offline >= 0.995; flush loss {bars}")


if __name__ == "__main__":
    main()
