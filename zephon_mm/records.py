"""What crosses a boundary: references, blobs, documents, measured records, packed sequences.

All are immutable. Those that a run makes by the million are named tuples, because they pickle
several times faster than frozen dataclasses; the others are frozen, slotted dataclasses.

Imports: errors. Used by: everything.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray


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
    """The stored bytes of one field of many rows: text as UTF-8, images as encoded.

    `data` is (bytes,) uint8, `ends` (n,) int64: where each row's bytes end in it. `valid` is (n,)
    bool: False where a row lacks the field; its bytes are none. `starts` is (n,) int64, from a
    reader that leaves the bytes where they lie; without it a row begins where the one before ends.
    """

    data: NDArray[np.uint8]
    ends: NDArray[np.int64]
    valid: NDArray[np.bool_]
    starts: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """A text segment of a document. `train` says whether its tokens carry loss."""

    text: str
    train: bool = True


@dataclass(frozen=True, slots=True)
class Image:
    """An image segment of a document: a pointer to its compressed bytes.

    `weight` is the loss weight of the text that follows, up to the next image or video.

    `boxes` are (left, top, right, bottom), `points` (x, y), in pixels from the outer corner of the
    first: pixel i is [i, i + 1). They are of the picture as it is stored, before EXIF turns it;
    where they were drawn on what a viewer shows, set `upright`.
    """

    blob: Blob
    weight: float = 1.0
    boxes: tuple[tuple[float, ...], ...] = ()
    points: tuple[tuple[float, ...], ...] = ()
    upright: bool = False


@dataclass(frozen=True, slots=True)
class Video:
    """A video segment of a document: a pointer to its file; `weight` as of an image."""

    blob: Blob
    weight: float = 1.0


Segment = Text | Image | Video


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    `role` is a chat template's word, such as "user". `fields` are what else the template may use,
    such as `("tool_calls", [...])`, as JSON values. Which roles carry loss is the pipeline's
    setting: `Text.train` is not looked at.
    """

    role: str
    segments: tuple[Segment, ...]
    fields: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Document:
    """One sample: an ordered list of segments, or a conversation, which has messages instead.

    `key` is the name it has in its data, if any; `tools` are a conversation's functions, as JSON.
    `weight` is the loss weight of its tokens; that of an image comes on top.
    """

    segments: tuple[Segment, ...]
    key: str = ""
    messages: tuple[Message, ...] = ()
    tools: tuple[Any, ...] = ()
    weight: float = 1.0

    @property
    def media(self) -> list[Image | Video]:
        """All images and videos, in order."""
        segments = [*self.segments, *(one for turn in self.messages for one in turn.segments)]
        return [segment for segment in segments if not isinstance(segment, Text)]


class MediaShape(NamedTuple):
    """What an image or video will become: placeholder tokens, and uint8 arrays.

    `num_tokens` and `shape` are those of one part. `parts` are the control texts in front of the
    tiles of a picture or the frames of a video, `closing` the one behind the last; empty: there is
    one part, without a text. `grid` is what a model must know of its patches: (rows, columns).
    """

    num_tokens: int
    shape: tuple[int, ...]
    parts: tuple[str, ...] = ()
    grid: tuple[int, ...] = ()
    closing: str = ""


def patches_of(media: MediaShape, patch_size: int | None) -> int:
    """Return the patches that the vision encoder takes for one part, before any merging.

    Args:
        media: Its `shape` is (k, values) for k patches, else that of pictures, (..., 3, H, W).
        patch_size: Their side in pixels; None where a processor does not say it, and pictures count
            as many patches as tokens.
    """
    sides = list(media.shape)
    if len(sides) < 3:
        return sides[0]
    if patch_size is None:
        return media.num_tokens
    *pictures, _, height, width = sides
    return math.prod(pictures) * (height // patch_size) * (width // patch_size)


class ImageSlot(NamedTuple):
    """What the encoder takes for an image inside a record: an image, a tile, a frame of a video.

    Its placeholders are the record's tokens `[start, start + num_tokens)`, without the start and
    end tokens around them. `shape` is that of the uint8 array to write, `grid` as in `MediaShape`.
    `blob` is None in a record out of an index. `media` counts the document's images and videos,
    `part` the parts of one; -1: it has no parts. `patches` is as in `patches_of`. `marks` are the
    numbers of boxes and points, if any, in the part that shows the whole picture.
    """

    blob: Blob | None
    start: int
    num_tokens: int
    shape: tuple[int, ...]
    grid: tuple[int, ...] = ()
    media: int = 0
    part: int = -1
    video: bool = False
    patches: int = 0
    marks: tuple[int, ...] = ()


Runs = tuple[tuple[int, int], ...]
"""Half-open ranges of a record's tokens, ascending, disjoint."""


class Record(NamedTuple):
    """A measured document.

    Image placeholders are most of a document's tokens and all the same, so they are not stored:
    `text_ids` is int32, all tokens but those. `trained_runs` are the tokens that carry loss.
    `uncut` are the ranges that may not be cut: each image or video with its start and end tokens.
    `weights` are the loss weights of `trained_runs`; empty in a pipeline without.
    """

    ref: SampleRef
    num_tokens: int
    text_ids: NDArray[np.int32]
    trained_runs: Runs
    images: tuple[ImageSlot, ...]
    uncut: Runs
    image_id: int
    video_id: int = -1
    weights: tuple[float, ...] = ()

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
            out[image.start - start : at - start] = self.video_id if image.video else self.image_id
        out[at - start :] = self.text_ids[stored : stored + stop - at]

    @property
    def num_images(self) -> int:
        """Images of the whole record."""
        return len(self.images)

    @property
    def num_patches(self) -> int:
        """Patches of all of them."""
        return sum([image.patches for image in self.images])

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


class Skip(NamedTuple):
    """A sample that gives no record, and why. `defect` is False for a user's own filter."""

    ref: SampleRef
    reason: str
    message: str
    defect: bool


State = tuple[int | str, ...]
"""A work source's position in one lane: a few integers (or short strings), JSON-serialisable."""


class Chunk(NamedTuple):
    """The references that a work source emits at once.

    `refs` is (n, 3) int64 with the columns of `SampleRef`; n may be below `chunk_size`, or 0, only
    where a finite lane ends or its mixture changes.
    """

    refs: NDArray[np.int64]


Policy = Literal["drop", "truncate", "split", "downscale"]
"""What happens to a document that is over the limits of a sequence."""
