"""The order of one dataset's rows, pass by pass and lane by lane, permuted by the seed.

Laws (tests/test_work.py):
    1. Each pass gives every row exactly once over all lanes, for any rows, shards and lanes. Lane l
       of L owns one of L contiguous ranges of the pass's row space, whose sizes differ by one at
       most; a range moves on by one lane each pass, so that every lane meets rows at last.
    2. Rows are a function of (lane, pass, position); what was asked before does not show.

Cost: below a microsecond a row; nothing is built that is as large as a dataset.

Imports: records, rng. Used by: work.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zephon_mm.records import ShardInfo
from zephon_mm.rng import Stream

Rows = NDArray[np.int64]


class RowOrder:
    """The order of one dataset's rows, pass by pass and lane by lane. Picklable, thread-safe."""

    def __init__(
        self, name: str, shards: Sequence[ShardInfo], seed: int, *, shuffle: bool, block_rows: int
    ) -> None:
        self.num_rows = sum(shard.num_rows for shard in shards)
        self.shuffle = shuffle
        self.block_rows = block_rows
        self._name = name
        self._seed = seed
        self._sizes = np.array([shard.num_rows for shard in shards], dtype=np.int64)
        self._base = Stream(seed, "offset", name).integer(1 << 32) if shuffle else 0
        self._remember()

    def _remember(self) -> None:
        """Keep the arrays used last."""
        self._shards = lru_cache(8)(self._shard_order)
        self._block_of = lru_cache(512)(self._build_block)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the arrays out."""
        return {k: v for k, v in self.__dict__.items() if k not in ("_shards", "_block_of")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Remember anew."""
        self.__dict__.update(state)
        self._remember()

    def size(self, lane: int, num_lanes: int, epoch: int) -> int:
        """Return how many rows of a pass a lane owns."""
        low, high = self._range(lane, num_lanes, epoch)
        return high - low

    def left(self, lane: int, num_lanes: int, epoch: int, position: int, max_epochs: int) -> int:
        """Return how many rows a lane has before it ends."""
        rounds, rest = divmod(max_epochs - epoch, num_lanes)  # a lane gets all rows in L passes
        sizes = (self.size(lane, num_lanes, epoch + i) for i in range(rest))
        return rounds * self.num_rows + sum(sizes) - position

    def take(
        self, lane: int, num_lanes: int, epoch: int, position: int, count: int
    ) -> tuple[Rows, tuple[int, int]]:
        """Return the next `count` rows of a lane and its (pass, position) after them.

        Passes in which the lane owns nothing are gone through; there are at most
        `num_lanes - 1` of them in a row, since ranges move on by one lane each pass.

        Returns:
            (count, 2) int64 of (shard, row), and the position.
        """
        parts: list[Rows] = []
        while count:
            size = self.size(lane, num_lanes, epoch)
            if position == size:
                epoch, position = epoch + 1, 0
                continue
            block = position // self.block_rows
            rows = self._block(lane, num_lanes, epoch, block)
            start = position - block * self.block_rows
            part = rows[start : start + count]
            parts.append(part)
            position += len(part)
            count -= len(part)
        return np.concatenate(parts), (epoch, position)

    def sample(self, count: int) -> list[tuple[int, int]]:
        """Return up to `count` different (shard, row), keyed by the seed, ascending."""
        if count < self.num_rows:
            uniform = Stream(self._seed, "estimate", self._name).uniform(count)
            chosen = np.unique((uniform * self.num_rows).astype(np.int64))
        else:
            chosen = np.arange(self.num_rows)
        rows = _locate(chosen, np.arange(len(self._sizes)), np.cumsum(self._sizes))
        return [(int(shard), int(row)) for shard, row in rows]

    def _range(self, lane: int, num_lanes: int, epoch: int) -> tuple[int, int]:
        rank = (lane + self._base + epoch) % num_lanes
        return rank * self.num_rows // num_lanes, (rank + 1) * self.num_rows // num_lanes

    def _block(self, lane: int, num_lanes: int, epoch: int, block: int) -> Rows:
        """Return the rows of one block in order, (n, 2) int64."""
        low, high = self._range(lane, num_lanes, epoch)
        return self._block_of(low, high, epoch, block)

    def _build_block(self, low: int, high: int, epoch: int, block: int) -> Rows:
        start = low + block * self.block_rows
        stop = min(start + self.block_rows, high)
        rows = np.arange(start, stop, dtype=np.int64)
        if self.shuffle:
            key = (self._seed, "rows", self._name, epoch, low, high, block)
            rows = rows[Stream(*key).permutation(len(rows))]
        shards = self._shards(epoch)
        return _locate(rows, shards, np.cumsum(self._sizes[shards]))

    def _shard_order(self, epoch: int) -> Rows:
        if not self.shuffle:
            return np.arange(len(self._sizes))
        return Stream(self._seed, "shards", self._name, epoch).permutation(len(self._sizes))


def _locate(rows: Rows, shards: Rows, ends: Rows) -> Rows:
    """Turn positions in a row space into (shard, row), (n, 2) int64.

    Args:
        rows: (n,) int64 positions in the shards' concatenation.
        shards: (s,) int64, the shards in their order there.
        ends: (s,) int64, where each of them ends there.
    """
    at = np.searchsorted(ends, rows, side="right")
    starts = np.concatenate(([0], ends[:-1]))
    return np.stack((shards[at], rows - starts[at]), axis=1)
