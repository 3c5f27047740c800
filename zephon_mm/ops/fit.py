"""What a sequence holds, and what becomes of a document that is more than that.

Laws (tests/ops/test_pack.py, tests/ops/test_pack_fit.py):
    1. No piece is over the limits, and none cuts an `uncut` range: an image stays with its start
       and end tokens, and with its pixels.
    2. The pieces of a record, one after the other, are the record, or what `truncate` left of it;
       or there are none, and that is reported.

Cost: 0.5 us for a record that fits. Imports: records. Used by: ops.pack, ops.inorder.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

from zephon_mm.packed import AnyRecord, Piece
from zephon_mm.records import Policy

Report = Callable[[str, AnyRecord], None]
"""`report(reason, record)`: a record was dropped (`overlong`, `too_many_images`,
`too_many_patches`), `truncated` or `split`."""

NO_LIMIT = 1 << 62


def ignore(reason: str, record: AnyRecord) -> None:
    """Report nothing."""


class Span(NamedTuple):
    """An `uncut` range of a record, with the images inside it and their patches."""

    start: int
    stop: int
    num_tokens: int
    num_images: int
    num_patches: int


class Room(NamedTuple):
    """Tokens, images and patches that a sequence holds, or what is left of them."""

    tokens: int
    images: int = NO_LIMIT
    patches: int = NO_LIMIT

    def lacking(self, piece: AnyRecord | Piece | Span) -> str:
        """Return the reason why there is no room for it; "" if there is."""
        if piece.num_tokens > self.tokens:
            return "overlong"
        if self.images != NO_LIMIT and piece.num_images > self.images:
            return "too_many_images"
        if self.patches != NO_LIMIT and piece.num_patches > self.patches:
            return "too_many_patches"
        return ""

    def without(self, piece: Piece) -> "Room":
        """Return the room beside a piece."""
        tokens, images, patches = self
        images -= 0 if images == NO_LIMIT else piece.num_images
        patches -= 0 if patches == NO_LIMIT else piece.num_patches
        return Room(tokens - piece.num_tokens, images, patches)


def spans_of(record: AnyRecord) -> list[Span]:
    """Return the ranges of a record that may not be cut."""
    found, at, images = [], 0, record.images
    for start, stop in record.uncut:
        first = at
        while at < len(images) and images[at].start < stop:
            at += 1
        patches = sum([image.patches for image in images[first:at]])
        found.append(Span(start, stop, stop - start, at - first, patches))
    return found


def pieces_of(record: AnyRecord, room: Room, policy: Policy, report: Report) -> list[Piece]:
    """Return what of a record goes into sequences, which have `room`; report if it is not all.

    `truncate` keeps the longest beginning that has a trained token. `split` cuts where a trained
    text ends; what is longer than a sequence from there on, where the sequence is full. Such pieces
    may have no trained token: a question longer than a sequence is delivered as well.
    """
    reason = room.lacking(record)
    if not reason:
        return [Piece(record, 0, record.num_tokens)]
    pieces: list[Piece] = []
    if policy == "truncate":
        stop = cut(spans_of(record), 0, record.num_tokens, room)
        if is_useful(record, 0, stop):
            reason, pieces = "", [Piece(record, 0, stop)]
    elif policy == "split":
        spans = spans_of(record)
        reason = next(filter(None, map(room.lacking, spans)), "")
        pieces = [] if reason else [Piece(record, *ends) for ends in pairwise(_cuts(record, room))]
    report(reason or ("split" if policy == "split" else "truncated"), record)
    return pieces


def _cuts(record: AnyRecord, room: Room) -> Iterator[int]:
    """Yield where the pieces of a record begin, and its end.

    A cut is moved back to where a trained text ended last, so that an answer keeps its question and
    a caption its image; unless what is behind must be cut anyway.
    """
    spans, end = spans_of(record), record.num_tokens
    borders = sorted({stop for _, stop in record.trained_runs} | {end})
    start = 0
    while start < end:
        yield start
        stop = cut(spans, start, end, room)
        at = bisect_right(borders, stop)
        if stop < end and at and borders[at - 1] > start:
            border = borders[at - 1]
            stop = border if borders[at] - border <= room.tokens else stop
        start = stop
    yield end


def cut(spans: list[Span], start: int, end: int, room: Room) -> int:
    """Return where the longest piece of a record from `start` that fits `room` stops.

    Args:
        spans: Of the record.
        start: In no span.
        end: Where it stops at the latest.
        room: `start` is returned where there is none for the next image.
    """
    stop = min(end, start + room.tokens)
    images, patches = room.images, room.patches
    for span in spans:
        if span.start >= stop:
            break
        if span.start >= start:
            images -= span.num_images
            patches -= span.num_patches
            if span.stop > stop or images < 0 or patches < 0:
                return span.start
    return stop


def is_useful(record: AnyRecord, start: int, stop: int) -> bool:
    """Return whether the tokens `[start, stop)` of a record have one to train on, but the first."""
    runs = record.trained_runs
    return any(max(first, start + 1) < min(last, stop) for first, last in runs)
