"""What crosses a boundary: references, blobs, documents, measured records, packed sequences.

All are immutable. Those that a run makes by the million are named tuples, because they pickle
several times faster than frozen dataclasses; the others are frozen, slotted dataclasses.

Imports: errors. Used by: everything.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Values
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from zephon_mm.errors import ConfigError


class SampleRef(NamedTuple):
    """Where a sample is stored. `dataset` is its position in the source's list of datasets."""

    dataset: int
    shard: int
    row: int


class FileBlob(NamedTuple):
    """Compressed bytes that are a region of a local file.

    `path` is absolute; `offset` and `size` are in bytes.
    """

    path: str
    offset: int
    size: int


class RowBlob(NamedTuple):
    """Compressed bytes that only a dataset's reader can fetch again, by shard, row and field."""

    shard: int
    row: int
    field: str


Blob = FileBlob | RowBlob


class ShardInfo(NamedTuple):
    """One shard: its name (unique in its dataset), its rows, its size in bytes."""

    name: str
    num_rows: int
    num_bytes: int


class Column(NamedTuple):
    """The stored bytes of one field of many rows, row after row: text as UTF-8, images as encoded.

    `data` is (bytes,) uint8, `ends` (n,) int64: where each row's bytes end in it. `valid` is (n,)
    bool: False where a row lacks the field; its bytes are none.
    """

    data: NDArray[np.uint8]
    ends: NDArray[np.int64]
    valid: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Text:
    """A text segment of a document. `train` says whether its tokens carry loss."""

    text: str
    train: bool = True


@dataclass(frozen=True, slots=True)
class Image:
    """An image segment of a document: a pointer to its compressed bytes."""

    blob: Blob


Segment = Text | Image


@dataclass(frozen=True, slots=True)
class Document:
    """One sample as an ordered list of segments. `key` is the name it has in its data, if any."""

    segments: tuple[Segment, ...]
    key: str = ""


class MediaShape(NamedTuple):
    """What an image will become: its placeholder tokens and the shape of its uint8 array."""

    num_tokens: int
    shape: tuple[int, ...]


class ImageSlot(NamedTuple):
    """An image inside a record.

    `start` is the position of its first placeholder token in the record; the placeholders are
    `[start, start + num_tokens)`, without the start and end tokens around them. `shape` is that of
    the uint8 array that materializing will write. `blob` is None in a record out of an index.
    """

    blob: Blob | None
    start: int
    num_tokens: int
    shape: tuple[int, ...]


Runs = tuple[tuple[int, int], ...]
"""Half-open ranges of a record's tokens, ascending, disjoint."""


class Record(NamedTuple):
    """A measured document.

    Image placeholders are most of a document's tokens and all the same, so they are not stored:
    `text_ids` is int32, all tokens but those. `trained_runs` are the tokens that carry loss.
    `uncut` are the ranges that may not be cut: each image with its start and end tokens.
    """

    ref: SampleRef
    num_tokens: int
    text_ids: NDArray[np.int32]
    trained_runs: Runs
    images: tuple[ImageSlot, ...]
    uncut: Runs
    image_id: int

    def write_tokens(self, start: int, stop: int, out: NDArray[Any]) -> None:
        """Write tokens `[start, stop)`, which cut no image, into `out` of that length."""
        at = start
        stored = start - sum(i.num_tokens for i in self.images if i.start < start)
        for image in self.images:
            if not start <= image.start < stop:
                continue
            before = image.start - at
            out[at - start : image.start - start] = self.text_ids[stored : stored + before]
            stored += before
            at = image.start + image.num_tokens
            out[image.start - start : at - start] = self.image_id
        out[at - start :] = self.text_ids[stored : stored + stop - at]

    @property
    def num_images(self) -> int:
        """Images of the whole record."""
        return len(self.images)

    @property
    def num_valid_tokens(self) -> int:
        """Tokens that carry loss; the first one has nothing to be predicted from."""
        return sum(max(stop - max(start, 1), 0) for start, stop in self.trained_runs)

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """All tokens, (num_tokens,) int32."""
        tokens = np.empty(self.num_tokens, dtype=np.int32)
        self.write_tokens(0, self.num_tokens, tokens)
        return tokens

    @property
    def trained(self) -> NDArray[np.bool_]:
        """Which tokens carry loss, (num_tokens,) bool."""
        mask = np.zeros(self.num_tokens, dtype=np.bool_)
        for start, stop in self.trained_runs:
            mask[start:stop] = True
        return mask


def record_of(
    ref: SampleRef,
    token_ids: NDArray[np.int32],
    trained: NDArray[np.bool_],
    images: tuple[ImageSlot, ...] = (),
    uncut: Runs = (),
) -> Record:
    """Return a record from all of its tokens; for user code and tests.

    Args:
        ref: Where the sample is stored.
        token_ids: (n,) int32; the same id wherever an image's placeholders are.
        trained: (n,) bool.
        images: In order.
        uncut: As in `Record`.
    """
    text = np.ones(len(token_ids), dtype=np.bool_)
    for image in images:
        text[image.start : image.start + image.num_tokens] = False
    edges = np.flatnonzero(np.diff(np.concatenate(([0], trained, [0])).astype(np.int8)))
    runs = tuple(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
    image_id = int(token_ids[images[0].start]) if images else -1
    return Record(ref, len(token_ids), token_ids[text], runs, images, uncut, image_id)


def extents_of(record: "AnyRecord") -> list[int]:
    """Return all of a record but its tokens as integers, for `parsed`."""
    found = [len(record.trained_runs), len(record.images)]
    for image in record.images:
        found += (image.start, image.num_tokens, len(image.shape), *image.shape)
    for run in (*record.trained_runs, *record.uncut):
        found += run
    return found


def parsed(extents: Values[int]) -> tuple[tuple[ImageSlot, ...], Runs, Runs]:
    """Return images, trained runs and uncut ranges out of `extents_of` a record."""
    num_trained, num_images = extents[:2]
    images, at = [], 2
    for _ in range(num_images):
        start, num_tokens, dims = extents[at : at + 3]
        at += 3 + dims
        images.append(ImageSlot(None, start, num_tokens, tuple(extents[at - dims : at])))
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
        num_tokens: Of the record.
        num_images: Of the record.
        num_valid_tokens: As in `Record`.
        store: Where its extents are.
        at: At which position there.
        refs: (n, 3) int64, with the columns of `SampleRef`.
        number: Which of them is its own.
    """

    __slots__ = (
        *("_at", "_number", "_parsed", "_refs", "_store"),
        *("num_images", "num_tokens", "num_valid_tokens"),
    )

    def __init__(
        self,
        num_tokens: int,
        num_images: int,
        num_valid_tokens: int,
        store: Store,
        at: int,
        refs: NDArray[np.int64],
        number: int,
    ) -> None:
        self.num_tokens = num_tokens
        self.num_images = num_images
        self.num_valid_tokens = num_valid_tokens
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


class Skip(NamedTuple):
    """A sample that gives no record, and why. `defect` is False for a user's own filter."""

    ref: SampleRef
    reason: str
    message: str
    defect: bool


class Block:
    """What an index knows of a chunk's rows: counts in columns, a record only when asked for one.

    Most records are planned by ranks that do not deliver them, so a packer that takes blocks makes
    those alone that go into a sequence.

    Args:
        refs: (n, 3) int64, with the columns of `SampleRef`.
        columns: (5, n) int64: tokens (0 or below for a row without a record, `UNKNOWN` for one that
            the index does not know), images, tokens that carry loss, which of the stores, and the
            position there.
        stores: Where the rest is.
    """

    UNKNOWN = -2

    def __init__(
        self, refs: NDArray[np.int64], columns: NDArray[np.int64], stores: Values[Store]
    ) -> None:
        self._refs = refs
        self._stores = stores
        self.num_tokens: list[int]
        self.num_tokens, self.num_images, self.num_valid, self._which, self._at = columns.tolist()
        self.gaps: list[int] = np.flatnonzero(columns[0] <= 0).tolist()
        """Rows without a record, ascending."""

    def __len__(self) -> int:
        """Return the rows."""
        return len(self.num_tokens)

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
        valid = self.num_valid[row]
        return IndexedRecord(size, self.num_images[row], valid, store, at, self._refs, row)


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

    def images(self) -> Iterator[ImageSlot]:
        """Yield the images that lie inside the piece, in order."""
        for image in self.record.images:
            if self.start <= image.start and image.start + image.num_tokens <= self.stop:
                yield image


class Sequence:
    """One packed training example: pieces in order, at most `max_length` tokens in all.

    Args:
        pieces: In order.
        rows: Or what pieces are made of when they are asked for, which only the rank does that
            delivers them: a block, a row of it, and how many of the record's tokens are taken,
            again and again.
    """

    __slots__ = ("_pieces", "_rows")

    def __init__(self, pieces: tuple[Piece, ...] = (), *, rows: Values[Any] = ()) -> None:
        self._pieces = None if rows else pieces
        self._rows = rows

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces, in order."""
        if self._pieces is None:
            self._pieces = tuple([Piece(block[row], 0, size) for block, row, size in self._each()])
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
        for block, row, size in self._each():
            if type(block) is Block and block.num_tokens[row] == size:
                total += block.num_valid[row]
            else:
                total += Piece(block[row], 0, size).num_valid_tokens
        return total

    @property
    def num_images(self) -> int:
        """Images of all pieces."""
        return sum([piece.num_images for piece in self.pieces])

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


State = tuple[int | str, ...]
"""A work source's position in one lane: a few integers (or short strings), JSON-serialisable."""


class Chunk(NamedTuple):
    """The references that a work source emits at once.

    `refs` is (n, 3) int64 with the columns of `SampleRef`; n may be below `chunk_size`, or 0, only
    where a finite lane ends or its mixture changes.
    """

    refs: NDArray[np.int64]


Policy = Literal["drop", "truncate"]
