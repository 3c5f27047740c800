"""Packed sequences, and the records that an index or a worker keeps in columns.

Imports: records. Used by: everything from the operators on.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Values
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from zephon_mm.errors import ConfigError
from zephon_mm.records import ImageSlot, Record, Runs, SampleRef, Skip


def extents_of(record: "AnyRecord") -> list[int]:
    """Return all of a record but its tokens as integers, for `parsed`."""
    found = [len(record.trained_runs), len(record.images)]
    for _, start, num_tokens, shape, grid, media, part, video, patches, marks in record.images:
        found += (start, num_tokens, media, part, video, patches)
        found += (len(shape), *shape, len(grid), *grid, len(marks), *marks)
    for run in (*record.trained_runs, *record.uncut):
        found += run
    return found


def parsed(extents: Values[int]) -> tuple[tuple[ImageSlot, ...], Runs, Runs]:
    """Return images, trained runs and uncut ranges out of `extents_of` a record."""
    num_trained, num_images = extents[:2]
    images, at = [], 2
    for _ in range(num_images):
        start, num_tokens, media, part, video, patches = extents[at : at + 6]
        at += 6
        lists = []
        for _ in range(3):
            end = at + 1 + extents[at]
            lists.append(tuple(extents[at + 1 : end]))
            at = end
        shape, grid, marks = lists
        more = (grid, media, part, bool(video), patches, marks)
        images.append(ImageSlot(None, start, num_tokens, shape, *more))
    runs = tuple(zip(extents[at::2], extents[at + 1 :: 2], strict=True))
    return tuple(images), runs[:num_trained], runs[num_trained:]


class Store(Protocol):
    """Where an index keeps what rows became."""

    def extents(self, at: int) -> Values[int]:
        """Return the `extents_of` the record at a position."""
        ...

    def skip(self, at: int, ref: SampleRef) -> "Skip":
        """Return why the row at a position gives no record."""
        ...


class IndexedRecord:
    """A record out of an index: all that a `Record` has, but its tokens and its blobs.

    The tokens are made where the sequence is delivered, from the sample itself.

    Args:
        counts: Tokens, images, tokens that carry loss, patches: as in `Record`.
        store: Where its extents are.
        at: At which position there.
        refs: (n, 3) int64, with the columns of `SampleRef`.
        number: Which of them is its own.
    """

    __slots__ = (
        *("_at", "_number", "_parsed", "_refs", "_store"),
        *("num_images", "num_patches", "num_tokens", "num_valid_tokens"),
    )

    def __init__(
        self,
        counts: tuple[int, int, int, int],
        store: Store,
        at: int,
        refs: NDArray[np.int64],
        number: int,
    ) -> None:
        self.num_tokens, self.num_images, self.num_valid_tokens, self.num_patches = counts
        self._store = store
        self._at = at
        self._refs = refs
        self._number = number
        self._parsed: tuple[tuple[ImageSlot, ...], Runs, Runs] | None = None

    @property
    def ref(self) -> SampleRef:
        """Where the sample is stored."""
        return SampleRef._make(self._refs[self._number].tolist())

    @property
    def images(self) -> tuple[ImageSlot, ...]:
        """As in `Record`; their blobs are None."""
        return self._parts()[0]

    @property
    def trained_runs(self) -> Runs:
        """As in `Record`."""
        return self._parts()[1]

    @property
    def uncut(self) -> Runs:
        """As in `Record`."""
        return self._parts()[2]

    @property
    def text_ids(self) -> NDArray[np.int32]:
        """Raise a ConfigError: an index keeps no tokens."""
        raise ConfigError(
            "a record out of an index has counts and positions, no token ids: they are made when "
            "the sequence is delivered. If an operator needs them, set options(index='off')."
        )

    token_ids = text_ids

    def _parts(self) -> tuple[tuple[ImageSlot, ...], Runs, Runs]:
        if self._parsed is None:
            self._parsed = parsed(self._store.extents(self._at))
        return self._parsed


AnyRecord = Record | IndexedRecord
"""What accumulators see."""


class Block:
    """What an index knows of a chunk's rows: counts in columns, a record only when asked for one.

    Most records are planned by ranks that do not deliver them, so a packer that takes blocks makes
    those alone that go into a sequence.

    Args:
        refs: (n, 3) int64, with the columns of `SampleRef`.
        columns: (6, n) int64: tokens (0 or below for a row without a record, `UNKNOWN` for one that
            the index does not know), images, tokens that carry loss, patches, which of the stores,
            and the position there.
        stores: Where the rest is.
    """

    UNKNOWN = -2

    def __init__(
        self, refs: NDArray[np.int64], columns: NDArray[np.int64], stores: Values[Store]
    ) -> None:
        self._refs = refs
        self._stores = stores
        self.num_tokens: list[int]
        self.num_tokens, self.num_images, self.num_valid, *rest = columns.tolist()
        self.num_patches, self._which, self._at = rest
        self.gaps: list[int] = np.flatnonzero(columns[0] <= 0).tolist()
        """Rows without a record, ascending."""

    def __len__(self) -> int:
        """Return the rows."""
        return len(self.num_tokens)

    def dataset(self, row: int) -> int:
        """Return the dataset of a row."""
        return int(self._refs[row, 0])

    def __iter__(self) -> Iterator[Any]:
        """Yield what each row became."""
        return (self[row] for row in range(len(self)))

    def __getitem__(self, row: int) -> Any:
        """Return what a row became; None if that is not known."""
        size = self.num_tokens[row]
        if size == self.UNKNOWN:
            return None
        store, at = self._stores[self._which[row]], self._at[row]
        if size <= 0:
            return store.skip(at, SampleRef._make(self._refs[row].tolist()))
        counts = size, self.num_images[row], self.num_valid[row], self.num_patches[row]
        return IndexedRecord(counts, store, at, self._refs, row)


class Piece(NamedTuple):
    """The tokens `[start, stop)` of a record, as a part of a sequence."""

    record: AnyRecord
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        """Tokens of this piece."""
        return self.stop - self.start

    @property
    def num_valid_tokens(self) -> int:
        """Tokens that carry loss; the first one has nothing to be predicted from."""
        if self.stop - self.start == self.record.num_tokens:
            return self.record.num_valid_tokens
        return sum(
            max(min(stop, self.stop) - max(start, self.start + 1), 0)
            for start, stop in self.record.trained_runs
        )

    @property
    def num_images(self) -> int:
        """Images that lie inside the piece."""
        if self.stop - self.start == self.record.num_tokens:
            return self.record.num_images
        return sum(1 for _ in self.images())

    @property
    def num_patches(self) -> int:
        """Patches of the images inside the piece."""
        if self.stop - self.start == self.record.num_tokens:
            return self.record.num_patches
        return sum([image.patches for image in self.images()])

    def images(self) -> Iterator[ImageSlot]:
        """Yield the images that lie inside the piece, in order."""
        for image in self.record.images:
            if self.start <= image.start and image.start + image.num_tokens <= self.stop:
                yield image


def _piece(block: Any, row: int, size: int) -> Piece:
    return Piece(block[row], 0, size) if isinstance(block, Block) else block[row]


class Sequence:
    """One packed training example: pieces in order, at most `max_length` tokens in all.

    Args:
        pieces: In order.
        rows: Or what pieces are made of when they are asked for, which only the rank does that
            delivers them: a block, a row of it, and its tokens, again and again; in place of a
            block also a list of pieces.
    """

    __slots__ = ("_pieces", "_rows")

    def __init__(self, pieces: tuple[Piece, ...] = (), *, rows: Values[Any] = ()) -> None:
        self._pieces = None if rows else pieces
        self._rows = rows

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces, in order."""
        if self._pieces is None:
            self._pieces = tuple([_piece(*one) for one in self._each()])
        return self._pieces

    @property
    def num_tokens(self) -> int:
        """Tokens of all pieces, without padding."""
        if self._pieces is None:
            return sum(self._rows[2::3])
        return sum([piece.stop - piece.start for piece in self._pieces])

    @property
    def num_valid_tokens(self) -> int:
        """Tokens that carry loss."""
        if self._pieces is not None:
            return sum([piece.num_valid_tokens for piece in self._pieces])
        total = 0
        for block, row, _ in self._each():
            known = isinstance(block, Block)
            total += block.num_valid[row] if known else block[row].num_valid_tokens
        return total

    @property
    def num_images(self) -> int:
        """Images of all pieces."""
        return sum([piece.num_images for piece in self.pieces])

    @property
    def num_patches(self) -> int:
        """Patches of all images."""
        return sum([piece.num_patches for piece in self.pieces])

    def __eq__(self, other: object) -> bool:
        """Compare the pieces."""
        return isinstance(other, Sequence) and self.pieces == other.pieces

    __hash__ = None  # type: ignore[assignment]  # like a list of its pieces

    def __repr__(self) -> str:
        """Show the pieces."""
        return f"Sequence({self.pieces!r})"

    def _each(self) -> Iterator[tuple[Any, int, int]]:
        rows = self._rows
        return zip(rows[::3], rows[1::3], rows[2::3], strict=True)
