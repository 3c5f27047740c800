"""The token side of a batch, laid out and filled by the driver while workers write the pixels.

Laws (tests/test_batch.py):
    1. Every element of every array is written, by the driver or by a task: slabs carry old bytes.
    2. A token without loss, padding, and the document of an invalid image have the weight 0.

Cost: 2 us a document. Imports: batch, media, packed, records, shm.layout. Used by: engine.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from zephon_mm.batch import IGNORE, PIXELS, VIDEO_PIXELS, Batch
from zephon_mm.media import NO_MEDIA, MediaLayout, MediaPlan
from zephon_mm.packed import IndexedRecord
from zephon_mm.packed import Sequence as PackedSequence
from zephon_mm.protocols import ImageProcessor, VideoProcessor
from zephon_mm.records import ImageSlot, Record
from zephon_mm.shm.layout import Layout

MARKS = "marks"
"""The name of the array of the images' boxes and points."""


def pixels_name(slot: ImageSlot) -> str:
    """Return the name of the array that an image's pixels, or a frame's, go to."""
    return VIDEO_PIXELS if slot.video else PIXELS


TOKEN_FIELDS: dict[str, np.dtype[Any]] = {
    "input_ids": np.dtype(np.int64),
    "labels": np.dtype(np.int64),
    "loss_weights": np.dtype(np.float32),
}
"""A batch's (B, L) arrays of what a text says, in the order of `write_piece`: `token_fields`."""
EMPTY = (0, IGNORE, 0)
"""What they hold where nothing is written."""
PLACE_FIELDS: dict[str, np.dtype[Any]] = {
    "position_ids": np.dtype(np.int64),
    "segment_ids": np.dtype(np.int32),
}
"""Those of where it is."""


def token_fields(*, weighted: bool) -> list[str]:
    """Return which of `TOKEN_FIELDS` a batch has."""
    return [*TOKEN_FIELDS][: None if weighted else -1]


def write_piece(record: Record, start: int, stop: int, arrays: Sequence[NDArray[Any]]) -> None:
    """Write tokens `[start, stop)` of a record where no label and no weight is yet.

    Args:
        record: With its tokens.
        start: As in `Piece`.
        stop: As in `Piece`.
        arrays: Where its ids and labels go, (stop - start,) each, and its loss weights, if the
            batch has some.
    """
    ids, labels, *others = arrays
    record.write_tokens(start, stop, ids)
    for number, (first, last) in enumerate(record.trained_runs):
        run = slice(max(first - start, 1), max(last - start, 0))
        labels[run] = ids[run]
        for weights in others:
            weights[run] = record.weights[number]


class Text(NamedTuple):
    """The place of a piece whose tokens are not known yet: row, first column."""

    row: int
    start: int


class Assembly:
    """Lays a batch out, fills its tokens, and makes it.

    Args:
        sequences: The batch's rows, in order.
        max_length: L, in tokens.
        images: How the images' arrays lie.
        videos: How those of videos do.
        weighted: Whether tokens have loss weights.
    """

    def __init__(
        self,
        sequences: Sequence[PackedSequence],
        *,
        max_length: int,
        images: MediaLayout = NO_MEDIA,
        videos: MediaLayout = NO_MEDIA,
        weighted: bool = False,
    ) -> None:
        self._sequences: Sequence[PackedSequence] = sequences
        self._length = max_length
        self.texts: list[Text] = []
        self.media = {PIXELS: MediaPlan(images), VIDEO_PIXELS: MediaPlan(videos)}
        for row, sequence in enumerate(sequences):
            self._find_images(row, sequence)
        self.fields = token_fields(weighted=weighted)
        shape = (len(sequences), max_length)
        arrays: dict[str, tuple[tuple[int, ...], str]]
        fields = TOKEN_FIELDS | PLACE_FIELDS
        arrays = {name: (shape, fields[name].name) for name in (*self.fields, *PLACE_FIELDS)}
        arrays |= {name: (plan.shape, "uint8") for name, plan in self.media.items()}
        arrays[MARKS] = ((len(self.media[PIXELS].marks), 4), "float32")
        self.layout = Layout(arrays)

    def _find_images(self, row: int, sequence: PackedSequence) -> None:
        at = 0
        for piece in sequence.pieces:
            size = piece.stop - piece.start
            for image in piece.images():
                place = (row, at + image.start - piece.start, image.num_tokens)
                self.media[pixels_name(image)].add(image, place, (row, at, at + size))
            at += size

    def fill_tokens(self, arrays: Mapping[str, NDArray[Any]], *, pad_id: int) -> None:
        """Write every token array in full, for slabs carry old bytes; but not `texts`."""
        tokens = [arrays[name] for name in self.fields]
        for array, empty in zip(tokens[1:], EMPTY[1:], strict=False):
            array.fill(empty)
        positions, numbers = (arrays[name] for name in PLACE_FIELDS)
        counted = np.arange(self._length)
        boundaries = [0]
        for row, sequence in enumerate(self._sequences):
            at = 0
            for number, piece in enumerate(sequence.pieces, start=1):
                end = at + piece.stop - piece.start
                if isinstance(piece.record, IndexedRecord):
                    self.texts.append(Text(row, at))
                else:
                    place = [array[row, at:end] for array in tokens]
                    write_piece(piece.record, piece.start, piece.stop, place)
                positions[row, at:end] = counted[: end - at]
                numbers[row, at:end] = number
                boundaries.append(row * self._length + end)
                at = end
            if at < self._length:
                tokens[0][row, at:] = pad_id
                positions[row, at:] = counted[: self._length - at]
                numbers[row, at:] = 0
                boundaries.append((row + 1) * self._length)
        self.cu_seqlens = np.array(boundaries, dtype=np.int32)

    def write_text(self, arrays: Mapping[str, NDArray[Any]], text: Text, values: Any) -> None:
        """Write the token arrays of a piece that a worker returned."""
        for name, value in zip(self.fields, values, strict=True):
            arrays[name][text.row, text.start : text.start + len(value)] = value

    def release(self) -> None:
        """Forget the sequences: what is left serves `invalidate`."""
        self._sequences = ()
        for plan in self.media.values():
            plan.release()

    def invalidate(
        self,
        batch: Batch,
        arrays: Mapping[str, NDArray[Any]],
        invalid: Iterable[tuple[str, int]],
    ) -> Batch:
        """Zero pixels and marks of invalid images, mask the labels of their documents, in place.

        With one tile of a picture or frame of a video all of them are.

        Args:
            batch: The batch.
            arrays: Its arrays.
            invalid: The name of the pixels, and the number there.

        Returns:
            The batch with `image_valid` and `num_valid_tokens` as they are now.
        """
        numbers = list(invalid)
        for name, media in ((PIXELS, batch.images), (VIDEO_PIXELS, batch.videos)):
            plan = self.media[name]
            for image in plan.whole({number for kind, number in numbers if kind == name}):
                plan.zero(arrays[name], image)
                row, start, stop = plan.owners[image]
                arrays["labels"][row, start:stop] = IGNORE
                if batch.loss_weights is not None:
                    batch.loss_weights[row, start:stop] = 0
                media.valid[image] = False
                media.marks[media.mark_index[:, 0] == image] = 0
        return replace(batch, num_valid_tokens=_count_valid(arrays))

    def batch(
        self,
        arrays: Mapping[str, NDArray[Any]],
        *,
        numbers: Sequence[int],
        keys: tuple[tuple[str, ...], ...],
        delivered: int,
        image_processor: ImageProcessor | None,
        video_processor: VideoProcessor | None = None,
        num_valid_tokens: int | None = None,
        step_valid_tokens: int | None = None,
    ) -> Batch:
        """Return the batch: views of the arrays and small tensors of its own; all images valid."""
        names = (*self.fields, *PLACE_FIELDS)
        named: Any = {name: torch.from_numpy(arrays[name]) for name in names}
        if num_valid_tokens is None:
            num_valid_tokens = sum(sequence.num_valid_tokens for sequence in self._sequences)
        return Batch(
            **named,
            images=self.media[PIXELS].media(arrays[PIXELS], image_processor, arrays[MARKS]),
            videos=self.media[VIDEO_PIXELS].media(arrays[VIDEO_PIXELS], video_processor),
            cu_seqlens=torch.from_numpy(self.cu_seqlens),
            max_seqlen=int((self.cu_seqlens[1:] - self.cu_seqlens[:-1]).max()),
            sequence_ids=torch.from_numpy(np.array(numbers, dtype=np.int64)),
            keys=keys,
            num_valid_tokens=num_valid_tokens,
            delivered=delivered,
            step_valid_tokens=step_valid_tokens,
        )


def _count_valid(arrays: Mapping[str, NDArray[Any]]) -> int:
    return int(np.count_nonzero(arrays["labels"] != IGNORE))
