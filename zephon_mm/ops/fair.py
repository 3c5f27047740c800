"""Pack documents of several datasets so that each leaves in the proportion in which it came.

A packer that chooses by length alone holds back short documents until its window ends, and so whole
datasets: of two halves, one of 3,000 tokens a document and one of 500, it was 60 sequences behind.

Laws (tests/ops/test_fair.py):
    1. As those of `ops.pack`.
    2. At any time each dataset's share of what left is its share of what came, to within about a
       sequence.

It fills a sequence as its base does, but takes each document from the dataset of which the
smallest part has left, if one of it fits. It keeps to `max_patches`, and does not choose by it.

Seen, on eight mixes of lengths: 0.6 to 2.6 sequences off, where the base is 2 to 85; up to 1 % more
sequences, mostly as many; half the base's speed, 40,000 to 80,000 records/s.

Imports: ops.{fit, pack}, records. Used by: stages.
"""

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping

from zephon_mm.ops.fit import Report, Room
from zephon_mm.ops.inorder import WrapPacker
from zephon_mm.ops.pack import _BITS, _MASK, BestFitPacker, KnapsackPacker, PackConfig, make_packer
from zephon_mm.packed import Block, Sequence
from zephon_mm.records import Policy


def make_fair_packer(config: PackConfig, report: Report) -> BestFitPacker | WrapPacker:
    """Return a new packer for one window; those that keep the order are fair as they are."""
    if config.algorithm == "wrap" or config.order == "keep":
        return make_packer(config, report)
    kind = FairPacker if config.algorithm == "best_fit" else FairKnapsackPacker
    return kind(config.room, config.overlong, report, config.lookahead)


class FairPacker(BestFitPacker):
    """As its base; arguments too."""

    def __init__(self, room: Room, policy: Policy, report: Report, lookahead: int) -> None:
        super().__init__(room, policy, report, lookahead)
        self._datasets: list[int] = []  # by arrival
        # By dataset: the keys of what is held, ascending; what arrived; tokens that came and left.
        self._pools: defaultdict[int, list[int]] = defaultdict(list)
        self._lines: defaultdict[int, deque[int]] = defaultdict(deque)
        self._came: defaultdict[int, int] = defaultdict(int)
        self._gone: defaultdict[int, int] = defaultdict(int)

    def _add(self, size: int) -> Sequence | None:
        arrival = len(self._sizes)
        block, row = self._blocks[-1], arrival - self._offsets[-1]
        dataset = block.dataset(row) if isinstance(block, Block) else block[row].record.ref.dataset
        self._datasets.append(dataset)
        self._came[dataset] += size
        self._lines[dataset].append(arrival)
        insort(self._pools[dataset], (size << _BITS) + _MASK - arrival)
        return super()._add(size)

    def _close(self, first: int) -> Sequence:
        """Begin with another record than the base would: of the dataset that is furthest behind."""
        insort(self._keys, first)
        dataset = self._furthest([one for one, keys in self._pools.items() if keys], self._gone)
        key, line = self._pools[dataset][-1], self._lines[dataset]
        if self._oldest_first:
            while not self._sizes[line[0]]:
                line.popleft()
            key = (self._sizes[line[0]] << _BITS) + _MASK - line[0]
        del self._keys[bisect_left(self._keys, key)]
        return super()._close(key)

    def _fill(self, first: int) -> tuple[list[int], int]:
        """Take the longest that fits of the dataset that is furthest behind, again and again."""
        left, gone = self._beside([first]), self._gone.copy()
        gone[self._datasets[_MASK - (first & _MASK)]] += first >> _BITS
        ends = {dataset: len(keys) for dataset, keys in self._pools.items()}
        taken: list[int] = []
        while ends:
            dataset = self._furthest(ends, gone)
            keys = self._pools[dataset]
            at = min(ends[dataset], bisect_left(keys, (left.tokens + 1) << _BITS)) - 1
            if at < 0:
                del ends[dataset]
                continue
            ends[dataset] = at
            room = self._beside([first, *taken, keys[at]]) if self._limited else left
            if keys[at] != first and min(room) >= 0:
                taken.append(keys[at])
                left = left._replace(tokens=left.tokens - (keys[at] >> _BITS))
                gone[dataset] += keys[at] >> _BITS
        for key in taken:
            del self._keys[bisect_left(self._keys, key)]
        return taken, left.tokens

    def _release(self, arrival: int) -> tuple[object, int, int]:
        dataset, size = self._datasets[arrival], self._sizes[arrival]
        keys = self._pools[dataset]
        del keys[bisect_left(keys, (size << _BITS) + _MASK - arrival)]
        self._gone[dataset] += size
        return super()._release(arrival)

    def _furthest(self, datasets: Iterable[int], gone: Mapping[int, int]) -> int:
        """Return the dataset of which the smallest part has left."""
        return min([(gone[dataset] / self._came[dataset], dataset) for dataset in datasets])[1]


class FairKnapsackPacker(FairPacker, KnapsackPacker):
    """As `KnapsackPacker`, where `FairPacker` leaves a gap."""
