"""A batch: packed sequences as torch tensors, what a model is given of it, and its digests.

Laws (tests/test_batch.py):
    1. No label crosses a document: the first token of every segment has label -100.
    2. A row's digest depends on the row alone, not on the batch that it came in.
    3. `to_training` never lets an invalid image's or padding's pixels reach the model.

Imports: records, protocols, shm.layout. Used by: engine, pipeline.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from zephon_mm.errors import ConfigError
from zephon_mm.protocols import ImageProcessor
from zephon_mm.records import ImageSlot, IndexedRecord, Record
from zephon_mm.records import Sequence as PackedSequence
from zephon_mm.shm.layout import Layout

IGNORE = -100
"""The label of a token that carries no loss, as in torch's cross entropy."""

Attention = Literal["varlen", "block", "sdpa"]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """B packed sequences of L = `max_length` tokens, and the N images inside them.

    The tensors may be views of shared memory: they stay valid as long as any of them is alive.
    Treat them as read-only.

    Attributes:
        input_ids: (B, L) int64; padding holds the tokenizer's pad id.
        labels: (B, L) int64, not shifted: position i holds token i, or -100 on images, padding,
            untrained text, the first token of a segment, and documents with an invalid image.
        position_ids: (B, L) int64, from 0 in every document and in the padding.
        segment_ids: (B, L) int32, 1..n along a row; 0 is padding.
        cu_seqlens: (segments + 1,) int32 over the flattened B x L; padding is a segment too.
        max_seqlen: Longest segment, in tokens.
        pixel_values: (N, 3, H, W) uint8, ordered by row, then token; not normalised.
        image_index: (N, 3) int64: row, first placeholder token, number of placeholder tokens.
        image_valid: (N,) bool; False where the image could not be decoded (its pixels are zero).
        sequence_ids: (B,) int64, the global numbers of the rows.
        keys: For each row, the samples in it, as of `Dataset.key`: `captions/1017`.
        num_valid_tokens: Labels that are not -100.
        step_valid_tokens: That of the whole global step, over all ranks, as planned (images that
            turn out to be broken come off it later); None where this rank does not plan whole
            steps: an endless source without `balance`. Sum `num_valid_tokens` over ranks there.
        delivered: Global sequences delivered, over all ranks, once this batch is.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    segment_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    pixel_values: torch.Tensor
    image_index: torch.Tensor
    image_valid: torch.Tensor
    sequence_ids: torch.Tensor
    keys: tuple[tuple[str, ...], ...]
    num_valid_tokens: int
    delivered: int
    step_valid_tokens: int | None = None
    image_processor: ImageProcessor | None = None

    def to_training(
        self,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        attention: Attention = "varlen",
        shift_labels: bool = False,
        rename: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Return exactly the keyword arguments of a packed-sequence model, and nothing else.

        Args:
            device: Where the tensors go; None leaves them where they are.
            dtype: Of the normalised `pixel_values`.
            attention: How the model keeps documents apart.
                `varlen`: `input_ids`, `labels`, `position_ids` as (1, B * L), with
                `cu_seq_lens_q`, `cu_seq_lens_k` (int32) and `max_length_q`, `max_length_k` (int):
                the names that transformers' flash attention takes. `use_cache` is False: with
                other attention implementations transformers tells packed documents apart by their
                positions, but only without a cache, and attends across them otherwise.
                `sdpa`: (B, L) tensors and `attention_mask`, (B, 1, L, L) bool, True where a query
                may attend: causal, inside its own segment. For attn_implementation="sdpa" only:
                "eager" would add a bool mask to the scores.
                `block`: (B, L) tensors and `attention_mask`, a flex-attention `BlockMask` of the
                same rule.
            shift_labels: Give labels[i] = token i + 1 of the same document, for trainers that do
                not shift. transformers' models shift by themselves: leave it off for those.
            rename: Key -> the name that your model uses for it.

        Returns:
            The tensors above, and `pixel_values` (N, 3, H, W) in `dtype`, normalised by the image
            processor, all zero for invalid images; absent in a pipeline without images.

        Raises:
            ConfigError: Unknown `attention`, no floating `dtype`, or `rename` names a key that is
                not there or gives two keys one name.
        """
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ConfigError(f"dtype must be a floating torch.dtype, got {dtype!r}")
        labels = _shifted(self.labels) if shift_labels else self.labels
        tensors: dict[str, Any] = {
            "input_ids": self.input_ids,
            "labels": labels,
            "position_ids": self.position_ids,
        }
        if attention == "varlen":
            tensors = {name: value.reshape(1, -1) for name, value in tensors.items()}
            tensors["cu_seq_lens_q"] = tensors["cu_seq_lens_k"] = self.cu_seqlens
        elif attention not in ("sdpa", "block"):
            raise ConfigError(f"attention must be varlen, block or sdpa, got {attention!r}")
        tensors = {name: value.to(device) for name, value in tensors.items()}
        if attention == "varlen":
            tensors["max_length_q"] = tensors["max_length_k"] = self.max_seqlen
            tensors["use_cache"] = False
        else:
            make = _dense_mask if attention == "sdpa" else _block_mask
            tensors["attention_mask"] = make(self.segment_ids.to(device))
        if self.image_processor is not None:
            pixels = self.image_processor.normalize(self.pixel_values.to(device), dtype)
            keep = self.image_valid.to(device).view(-1, *[1] * (pixels.dim() - 1))
            tensors["pixel_values"] = torch.where(keep, pixels, pixels.new_zeros(()))
        return _renamed(tensors, rename or {})

    def row_sha256(self) -> tuple[str, ...]:
        """Return one digest a row: its tokens, labels, positions, segments, images and keys."""
        index = self.image_index
        return tuple(
            self._row_digest(row, (index[:, 0] == row).nonzero().flatten().tolist())
            for row in range(len(self.keys))
        )

    def sha256(self) -> str:
        """Return the digest of the batch: that of its rows' digests in global order."""
        return step_sha256(dict(zip(self.sequence_ids.tolist(), self.row_sha256(), strict=True)))

    def _row_digest(self, row: int, images: Sequence[int]) -> str:
        sha = hashlib.sha256()
        for tensor in (self.input_ids, self.labels, self.position_ids, self.segment_ids):
            sha.update(_bytes(tensor[row]))
        sha.update(_bytes(self.image_index[images, 1:]))
        for image in images:
            pixels = self.pixel_values[image]
            sha.update(f"{tuple(pixels.shape)} {bool(self.image_valid[image])}".encode())
            sha.update(_bytes(pixels))
        sha.update(json.dumps(self.keys[row]).encode())
        return sha.hexdigest()


def step_sha256(rows: Mapping[int, str]) -> str:
    """Return the digest of a global step from its rows' digests, keyed by sequence id."""
    return hashlib.sha256("".join(rows[number] for number in sorted(rows)).encode()).hexdigest()


def token_fields(rows: int, length: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype of a batch's token arrays, for its layout."""
    shape = (rows, length)
    return {
        "input_ids": (shape, "int64"),
        "labels": (shape, "int64"),
        "position_ids": (shape, "int64"),
        "segment_ids": (shape, "int32"),
    }


TOKEN_DTYPES = tuple(np.dtype(dtype) for _, dtype in token_fields(1, 1).values())
"""Of `input_ids`, `labels`, `position_ids` and `segment_ids`."""


def write_piece(
    record: Record, start: int, stop: int, segment: int, arrays: Sequence[NDArray[Any]]
) -> None:
    """Write tokens `[start, stop)` of a record, the n-th segment of its row.

    Args:
        record: With its tokens.
        start: As in `Piece`.
        stop: As in `Piece`.
        segment: n, from 1.
        arrays: Where its ids, labels, positions and segment numbers go, (stop - start,) each.
    """
    ids, labels, positions, segments = arrays
    record.write_tokens(start, stop, ids)
    labels[:] = IGNORE
    for first, last in record.trained_runs:
        run = slice(max(first - start, 1), max(last - start, 0))
        labels[run] = ids[run]
    positions[:] = np.arange(stop - start)
    segments[:] = segment


class Text(NamedTuple):
    """The place of a piece whose tokens are not known yet: row, first column, n-th of the row."""

    row: int
    start: int
    segment: int


class Assembly:
    """The token side of a batch, filled by the driver while workers write the pixels.

    Args:
        sequences: The batch's rows, in order.
        max_length: L, in tokens.
        image_shape: Shape of one image's array when there is none to take it from.
    """

    def __init__(
        self,
        sequences: Sequence[PackedSequence],
        *,
        max_length: int,
        image_shape: tuple[int, ...] = (3, 0, 0),
    ) -> None:
        self._sequences: Sequence[PackedSequence] = sequences
        self._length = max_length
        self.images: list[ImageSlot] = []
        self.texts: list[Text] = []
        self.image_index: list[tuple[int, int, int]] = []
        self._documents: list[tuple[int, int, int]] = []  # for each image: row, start, stop
        for row, sequence in enumerate(sequences):
            self._find_images(row, sequence)
        shape = self.images[0].shape if self.images else image_shape
        pixels = (len(self.images), *shape)
        self.layout = Layout(
            token_fields(len(sequences), max_length) | {"pixel_values": (pixels, "uint8")}
        )

    def _find_images(self, row: int, sequence: PackedSequence) -> None:
        at = 0
        for piece in sequence.pieces:
            size = piece.stop - piece.start
            for image in piece.images():
                self.images.append(image)
                first = at + image.start - piece.start
                self.image_index.append((row, first, image.num_tokens))
                self._documents.append((row, at, at + size))
            at += size

    def fill_tokens(self, arrays: Mapping[str, NDArray[Any]], *, pad_id: int) -> None:
        """Write every token array in full, for slabs carry old bytes; but not `texts`."""
        tokens = [arrays[name] for name in token_fields(0, 0)]
        ids, labels, positions, segments = tokens
        boundaries = [0]
        for row, sequence in enumerate(self._sequences):
            at = 0
            for number, piece in enumerate(sequence.pieces, start=1):
                end = at + piece.stop - piece.start
                if isinstance(piece.record, IndexedRecord):
                    self.texts.append(Text(row, at, number))
                else:
                    place = [array[row, at:end] for array in tokens]
                    write_piece(piece.record, piece.start, piece.stop, number, place)
                boundaries.append(row * self._length + end)
                at = end
            ids[row, at:] = pad_id
            labels[row, at:] = IGNORE
            positions[row, at:] = np.arange(self._length - at)
            segments[row, at:] = 0
            if at < self._length:
                boundaries.append((row + 1) * self._length)
        self.cu_seqlens = np.array(boundaries, dtype=np.int32)

    def write_text(self, arrays: Mapping[str, NDArray[Any]], text: Text, values: Any) -> None:
        """Write the token arrays of a piece that a worker returned."""
        for name, value in zip(token_fields(0, 0), values, strict=True):
            arrays[name][text.row, text.start : text.start + len(value)] = value

    def release(self) -> None:
        """Forget the sequences: what is left serves `invalidate`."""
        self._sequences, self.images, self.image_index = (), [], []

    def invalidate(
        self, batch: Batch, arrays: Mapping[str, NDArray[Any]], invalid: Sequence[int]
    ) -> Batch:
        """Zero the pixels of invalid images, mask the labels of their documents, in place.

        Returns:
            The batch with `image_valid` and `num_valid_tokens` as they are now.
        """
        for image in invalid:
            arrays["pixel_values"][image] = 0
            row, start, stop = self._documents[image]
            arrays["labels"][row, start:stop] = IGNORE
            batch.image_valid[image] = False
        return replace(batch, num_valid_tokens=_count_valid(arrays))

    def batch(
        self,
        arrays: Mapping[str, NDArray[Any]],
        *,
        numbers: Sequence[int],
        keys: tuple[tuple[str, ...], ...],
        delivered: int,
        image_processor: ImageProcessor | None,
        step_valid_tokens: int | None = None,
    ) -> Batch:
        """Return the batch: views of the arrays and small tensors of its own; all images valid."""
        valid = np.ones(len(self.images), dtype=np.bool_)
        named = {name: torch.from_numpy(array) for name, array in arrays.items()}
        index = np.array(self.image_index, dtype=np.int64).reshape(-1, 3)
        return Batch(
            **named,
            cu_seqlens=torch.from_numpy(self.cu_seqlens),
            max_seqlen=int((self.cu_seqlens[1:] - self.cu_seqlens[:-1]).max()),
            image_index=torch.from_numpy(index),
            image_valid=torch.from_numpy(valid),
            sequence_ids=torch.from_numpy(np.array(numbers, dtype=np.int64)),
            keys=keys,
            num_valid_tokens=sum(sequence.num_valid_tokens for sequence in self._sequences),
            delivered=delivered,
            step_valid_tokens=step_valid_tokens,
            image_processor=image_processor,
        )


def _bytes(tensor: torch.Tensor) -> memoryview:
    return np.ascontiguousarray(tensor.numpy()).data


def _count_valid(arrays: Mapping[str, NDArray[Any]]) -> int:
    return int(np.count_nonzero(arrays["labels"] != IGNORE))


def _shifted(labels: torch.Tensor) -> torch.Tensor:
    """Move labels one to the left; no label crosses, since a segment's first one is -100."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE)


def _dense_mask(segment_ids: torch.Tensor) -> torch.Tensor:
    length = segment_ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=segment_ids.device).tril()
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    return (same & causal)[:, None]


def _block_mask(segment_ids: torch.Tensor) -> Any:
    # Imported here because it pulls in sympy: 0.5 s that a first batch should not wait for.
    from torch.nn.attention.flex_attention import create_block_mask

    def same_document(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (segment_ids[batch, query] == segment_ids[batch, key]) & (query >= key)

    rows, length = segment_ids.shape
    device = str(segment_ids.device)
    return create_block_mask(same_document, rows, None, length, length, device=device)


def _renamed(tensors: dict[str, Any], rename: Mapping[str, str]) -> dict[str, Any]:
    if unknown := sorted(set(rename) - set(tensors)):
        raise ConfigError(f"rename has no such keys: {unknown}; there are {sorted(tensors)}")
    renamed = {rename.get(name, name): value for name, value in tensors.items()}
    if len(renamed) < len(tensors):
        raise ConfigError(f"rename gives two keys one name: {dict(rename)}")
    return renamed
