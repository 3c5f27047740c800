"""Pack records into sequences of a fixed length, from integers alone.

Laws (tests/ops/test_pack.py holds one test for each):
    1. No sequence exceeds `max_length` tokens, `max_images` images or `max_patches` patches.
    2. Every record lands exactly once, whole or cut by the declared policy, or is reported; `flush`
       leaves nothing.
    3. Sequences depend on the order of `push` alone. Inside a sequence, pieces keep that order.
    4. Nothing cuts inside an `uncut` range: an image stays with its start and end tokens.

`best_fit` holds records sorted by length, up to half of those that came and at most `lookahead`,
so that the first sequence does not wait for a full buffer. Over that it builds one sequence: a
first record, then again and again the longest that still fits. The first is in turn the oldest,
without which what is held drifts to middling lengths that fit nothing, and the longest, which is
hardest to place. Where a gap remains, as among nearly equal lengths, the first is joined with the
shortest instead, which are then exchanged for longer ones. At the flush the longest always comes
first: that is first-fit-decreasing over all that is held.

With `max_patches` it takes what uses both capacities evenly (`ops.choose.evenly`): the longest
first would use up the texts, and leave pictures that run out of patches in half empty sequences.
`knapsack` is the same, but where a gap remains it searches for the set that fills best.

Seen: sequences of offline best-fit-decreasing / of `best_fit`, to 4,096 tokens, in windows of 2,048
and 16,384 records: 0.9995, 0.9982 for lengths log-uniform in 40..3000; 0.9983, 0.9970 uniform;
0.9992, 0.9989 for a mix of text and images; 1.037, 1.037 for 731 tokens of image with a caption of
20..120. With two budgets, and for `knapsack`, see benchmarks/README.md.

Cost: O(log lookahead) comparisons a record; 240,000 to 520,000 records/s seen. With `max_patches`
20 us a record. `knapsack` 10 to 30 us a record, with `max_patches` 90 to 140 us. Holds no payload.

Imports: errors, records, tables, ops.{choose, fit, inorder}. Used by: stages, builder.
"""

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence as Values
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from zephon_mm.errors import ConfigError
from zephon_mm.ops.choose import evenly, fullest
from zephon_mm.ops.fit import NO_LIMIT, Report, Room, ignore, pieces_of
from zephon_mm.ops.inorder import KeepPacker, WrapPacker
from zephon_mm.packed import AnyRecord, Block, Piece, Sequence
from zephon_mm.records import Policy
from zephon_mm.tables import check_types

# A key sorts by length, then by arrival, first one last: (length << _BITS) + (_MASK - arrival).
_BITS = 40
_MASK = (1 << _BITS) - 1
_MIN_RECORDS = 16  # held before the first sequence closes,
_MIN_HELD = 4  # as are this many sequences' worth of tokens
_CANDIDATES = 64  # records that a knapsack is filled from

LOOKAHEAD = 4096
Algorithm = Literal["best_fit", "knapsack", "wrap"]
Order = Literal["any", "keep"]


@dataclass(frozen=True, slots=True)
class PackConfig:
    """How records become sequences.

    Args:
        max_length: Tokens of a sequence, at least 1.
        algorithm: `best_fit` and `knapsack` keep documents whole, `wrap` cuts them between images.
        max_images: Images of a sequence, where each tile of a picture and each frame of a video
            counts; None for no limit.
        overlong: What happens to a document that no sequence can hold: `drop`; `truncate` to its
            longest beginning within all limits; `split` where a trained text ends; or `downscale`,
            which makes its images smaller until it fits, and drops it where they cannot be small
            enough. Without a token to train on, a beginning is dropped.
        lookahead: Records that are chosen from; more pad less and wait longer.
        max_patches: Patches of a sequence, as the vision encoder takes them; None for no limit.
        order: `keep` fills each sequence with the documents that come next, and pads more.
    """

    max_length: int
    algorithm: Algorithm = "best_fit"
    max_images: int | None = None
    overlong: Policy = "drop"
    lookahead: int = LOOKAHEAD
    max_patches: int | None = None
    order: Order = "any"

    def __post_init__(self) -> None:
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        check_types(PackConfig, "pack", **values)
        for name in ("max_length", "lookahead", "max_patches"):
            if values[name] is not None and values[name] < 1:
                raise ConfigError(f"pack: {name} must be at least 1, got {values[name]}")
        if self.max_images is not None and self.max_images < 0:
            raise ConfigError(f"pack: max_images must be None or >= 0, got {self.max_images}")
        if self.algorithm == "knapsack" and self.order == "keep":
            raise ConfigError("pack: algorithm='knapsack' chooses documents, order='keep' does not")

    @property
    def room(self) -> Room:
        """What a sequence holds."""
        limits = (NO_LIMIT if one is None else one for one in (self.max_images, self.max_patches))
        return Room(self.max_length, *limits)


def make_packer(config: PackConfig, report: Report = ignore) -> "BestFitPacker | WrapPacker":
    """Return a new packer for one window."""
    room = config.room
    if config.algorithm == "wrap" or config.order == "keep":
        ordered = WrapPacker if config.algorithm == "wrap" else KeepPacker
        return ordered(room, config.overlong, report)
    kind = BestFitPacker if config.algorithm == "best_fit" else KnapsackPacker
    return kind(room, config.overlong, report, config.lookahead)


class BestFitPacker:
    """Packs whole documents, nearly as tightly as if all were known.

    Args:
        room: What a sequence holds.
        policy: What happens to a document that is more.
        report: Told of every record that is dropped or cut.
        lookahead: Records that are held at most.
    """

    _gap_shifts = 6, 6  # a gap above 1/64 is worth a second try, without and with `max_patches`

    def __init__(self, room: Room, policy: Policy, report: Report, lookahead: int) -> None:
        self._room = room
        self._max_length = room.tokens
        self._gap = room.tokens >> self._gap_shifts[room.patches != NO_LIMIT]
        self._limited = room[1:] != (NO_LIMIT, NO_LIMIT)
        self._weights = (1.0, 0.0)  # what a token and a patch are worth
        self._policy: Policy = policy
        self._report = report
        self._lookahead = lookahead
        self._keys: list[int] = []  # ascending
        self._sizes: list[int] = []  # by arrival: tokens of what is held, else 0
        self._images, self._patches = array("q"), array("q")  # by arrival, of pieces
        self._oldest = 0  # no arrival before it is held
        self._tokens = 0  # of all that is held
        self._oldest_first = True
        # Records by arrival: block n has those from starts[n] on, at arrival - offsets[n].
        self._blocks: list[Block | Values[Piece]] = []
        self._starts: list[int] = []
        self._offsets: list[int] = []

    def push(self, record: AnyRecord) -> list[Sequence]:
        """Place one record; return the sequences that close, usually none."""
        closed = []
        for piece in pieces_of(record, self._room, self._policy, self._report):
            self._begin([piece], 0)
            if self._limited:
                self._images.append(piece.num_images)
                self._patches.append(piece.num_patches)
            if (sequence := self._add(piece.num_tokens)) is not None:
                closed.append(sequence)
        return closed

    def push_block(self, block: Block, start: int, stop: int) -> list[Sequence]:
        """Place the rows `[start, stop)` of a block, all of them records; return what closes."""
        closed = []
        max_length, max_images, max_patches = self._room
        limited = self._limited
        self._begin(block, start)
        for row in range(start, stop):
            size = block.num_tokens[row]
            if limited:
                images, patches = block.num_images[row], block.num_patches[row]
                if images > max_images or patches > max_patches:
                    size = NO_LIMIT
                elif size <= max_length:
                    self._images.append(images)
                    self._patches.append(patches)
            if size > max_length:
                closed += self.push(block[row])
                self._begin(block, row + 1)
            elif (sequence := self._add(size)) is not None:
                closed.append(sequence)
        return closed

    def _begin(self, block: Block | Values[Piece], row: int) -> None:
        """Take a block whose row `row` arrives next."""
        self._blocks.append(block)
        self._starts.append(len(self._sizes))
        self._offsets.append(len(self._sizes) - row)

    def _add(self, size: int) -> Sequence | None:
        """Hold what arrives next, its first `size` tokens; return what closes, if anything."""
        insort(self._keys, (size << _BITS) + _MASK - len(self._sizes))
        self._sizes.append(size)
        self._tokens += size
        # Below a few sequences' worth of tokens even the best choice fills badly.
        if self._tokens < _MIN_HELD * self._max_length:
            return None
        held = len(self._keys)
        if held <= _MIN_RECORDS + len(self._sizes) // 2 and held <= self._lookahead:
            return None
        self._oldest_first = not self._oldest_first
        return self._close(self._take_oldest() if self._oldest_first else self._keys.pop())

    def flush(self) -> list[Sequence]:
        """Return all that is held, packed with nothing left to wait for."""
        sequences = []
        while self._keys:
            sequences.append(self._close(self._keys.pop()))
        return sequences

    def _close(self, first: int) -> Sequence:
        """Build the best sequence that contains a record, whose key is taken already."""
        taken, free = self._fill(first)
        if self._keys and free > self._gap:
            for key in taken:
                insort(self._keys, key)
            other = self._second(first)
            if self._worth([first, *other]) > self._worth([first, *taken]):
                taken = other
            for key in taken:
                del self._keys[bisect_left(self._keys, key)]
        arrivals = sorted([_MASK - (key & _MASK) for key in (first, *taken)])
        self._tokens -= (first >> _BITS) + sum([key >> _BITS for key in taken])
        rows: list[Any] = []
        for arrival in arrivals:
            rows += self._release(arrival)
        return Sequence(rows=rows)

    def _take_oldest(self) -> int:
        """Take the key of what is held longest."""
        while not self._sizes[self._oldest]:
            self._oldest += 1
        key = (self._sizes[self._oldest] << _BITS) + _MASK - self._oldest
        return self._keys.pop(bisect_left(self._keys, key))

    def _release(self, arrival: int) -> tuple[Any, int, int]:
        """Return block, row and tokens of what is held, and hold it no longer."""
        number = bisect_right(self._starts, arrival) - 1
        block = self._blocks[number]
        if type(block) is list:
            self._blocks[number] = ()  # its one piece may go
        size, self._sizes[arrival] = self._sizes[arrival], 0
        return block, arrival - self._offsets[number], size

    def _fill(self, first: int) -> tuple[list[int], int]:
        """Take the longest that fits beside `first`, again and again; return keys, free tokens."""
        if self._room.patches != NO_LIMIT:
            return self._fill_evenly(first)
        keys, limited = self._keys, self._room.images != NO_LIMIT
        free = self._max_length - (first >> _BITS)
        images_left = self._beside([first]).images if limited else NO_LIMIT
        taken: list[int] = []
        at = bisect_left(keys, (free + 1) << _BITS) - 1
        while at >= 0:
            num_images = self._images[_MASK - (keys[at] & _MASK)] if limited else 0
            if num_images <= images_left:
                images_left -= num_images
                taken.append(keys.pop(at))
                free -= taken[-1] >> _BITS
            at = min(at, bisect_left(keys, (free + 1) << _BITS)) - 1
        return taken, free

    def _fill_evenly(self, first: int) -> tuple[list[int], int]:
        """Take what uses both capacities evenly, the scarce one first; as `_fill`."""
        held = np.array(self._keys, dtype=np.int64)
        arrivals = _MASK - (held & _MASK)
        loads = [np.frombuffer(one, np.int64)[arrivals] for one in (self._images, self._patches)]
        room, left = self._room, self._beside([first])
        # How many sequences' worth of each is held, for each token and patch of a sequence.
        shares = self._tokens / room.tokens, int(loads[1].sum()) / room.patches
        self._weights = shares[0] / room.tokens, shares[1] / room.patches
        squares = self._weights[0] / room.tokens, self._weights[1] / room.patches
        taken = held[evenly(np.stack((held >> _BITS, *loads)), left, squares)].tolist()
        for key in taken:
            del self._keys[bisect_left(self._keys, key)]
        return taken, self._beside([first, *taken]).tokens

    def _second(self, first: int) -> list[int]:
        """Return as many of the shortest as fit beside `first`, exchanged for longer ones."""
        free = self._max_length - (first >> _BITS)
        count = 0
        while count < len(self._keys) and self._keys[count] >> _BITS <= free:
            free -= self._keys[count] >> _BITS
            count += 1
        shortest, keys = self._keys[:count], self._keys[count:]
        taken = []
        for short in reversed(shortest):
            size = short >> _BITS
            at = bisect_left(keys, (size + free + 1) << _BITS) - 1
            if at >= 0 and keys[at] >> _BITS > size:
                taken.append(keys.pop(at))
                insort(keys, short)
                free -= (taken[-1] >> _BITS) - size
            else:
                taken.append(short)
        return taken

    def _beside(self, keys: list[int]) -> Room:
        """Return the room that is left beside records; below 0 where they are too many."""
        tokens = self._room.tokens - sum([key >> _BITS for key in keys])
        if not self._limited:
            return Room(tokens)
        arrivals = [_MASK - (key & _MASK) for key in keys]
        images = self._room.images - sum([self._images[at] for at in arrivals])
        patches = self._room.patches - sum([self._patches[at] for at in arrivals])
        return Room(tokens, images, patches)

    def _worth(self, keys: list[int]) -> float:
        """Return what records in one sequence are worth; -1 where they are too many."""
        left, room = self._beside(keys), self._room
        used = room.tokens - left.tokens, room.patches - left.patches
        return self._weights[0] * used[0] + self._weights[1] * used[1] if min(left) >= 0 else -1.0


class KnapsackPacker(BestFitPacker):
    """As `BestFitPacker`, but where that leaves a gap the best set is searched for."""

    # One budget: to fill smaller gaps takes the short documents that are needed later.
    _gap_shifts = 8, 62

    def _second(self, first: int) -> list[int]:
        """Return the best set of some of the records beside `first`: the longest, others evenly."""
        room = self._beside([first])
        fits = self._keys[: bisect_left(self._keys, (room.tokens + 1) << _BITS)]
        half, limited = _CANDIDATES // 2, self._room.patches != NO_LIMIT
        some = fits[: -half - 1 : -1] + fits[-half - 1 :: -max(1, len(fits) // half)]
        sizes = [key >> _BITS for key in some]
        loads = [self._patches[_MASK - (key & _MASK)] if limited else 0 for key in some]
        chosen = fullest(sizes, loads, (room.tokens, room.patches), self._weights)
        return [some[number] for number in chosen]
