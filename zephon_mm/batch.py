"""A batch: packed sequences as torch tensors, what a model is given of it, and its digests.

Laws (tests/test_batch.py):
    1. No label crosses a document: the first token of every segment has label -100.
    2. A row's digest depends on the row alone, not on the batch that it came in.
    3. `to_training` never lets an invalid image's or padding's pixels reach the model.

Imports: media, mrope. Used by: engine, pipeline.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch

from zephon_mm.errors import ConfigError
from zephon_mm.media import VISION_KEYS, Media, bytes_of, named_for_videos
from zephon_mm.mrope import mrope_positions

IGNORE = -100
"""The label of a token that carries no loss, as in torch's cross entropy."""

PIXELS, VIDEO_PIXELS = "pixel_values", "pixel_values_videos"
"""The names of a batch's pixel arrays: of images, of videos."""

Attention = Literal["varlen", "block", "sdpa", "full"]
ATTENTIONS = get_args(Attention)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """B packed sequences of L = `max_length` tokens, and the N images and videos inside them.

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
        images: Pixels and places of the images, and the documents' boxes and points in them;
            `pixel_values`, `image_index`, `image_valid` and what patches need are properties that
            show its fields.
        videos: The same of the frames (or temporal patches) of the videos.
        sequence_ids: (B,) int64, the global numbers of the rows.
        keys: For each row, the samples in it, as of `Dataset.key`: `captions/1017`.
        num_valid_tokens: Labels that are not -100.
        step_valid_tokens: That of the whole global step, over all ranks, as planned (images that
            turn out to be broken come off it later); None where this rank does not plan whole
            steps: an endless source without `balance`. Sum `num_valid_tokens` over ranks there.
        delivered: Global sequences delivered, over all ranks, once this batch is.
        loss_weights: (B, L) float32, of the loss of predicting each token, 0 where its label is
            -100; None without `.interleave(loss_weights=)`. Divide the sum of weighted losses by
            the sum of weights, both over all ranks.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    segment_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    images: Media
    videos: Media
    sequence_ids: torch.Tensor
    keys: tuple[tuple[str, ...], ...]
    num_valid_tokens: int
    delivered: int
    step_valid_tokens: int | None = None
    loss_weights: torch.Tensor | None = None

    @property
    def pixel_values(self) -> torch.Tensor:
        """(N, 3, H, W) uint8, ordered by row, then token; not normalised.

        NaFlex: (N, P, 768), or (patches, 768) when packed; Qwen-VL: (patches, 1536).
        """
        return self.images.pixel_values

    @property
    def image_index(self) -> torch.Tensor:
        """(N, 3) int64: row, first placeholder token, number of placeholder tokens."""
        return self.images.index

    @property
    def image_valid(self) -> torch.Tensor:
        """(N,) bool; False where the image could not be decoded (its pixels are zero)."""
        return self.images.valid

    @property
    def image_cu_seqlens(self) -> torch.Tensor:
        """(N + 1,) int32: image i has the patches (or tiles) [i], [i + 1) of packed ones."""
        return self.images.cu_units

    @property
    def spatial_shapes(self) -> torch.Tensor:
        """(N, 2) int64, NaFlex: rows and columns of patches."""
        return self.images.grids

    @property
    def image_grid_thw(self) -> torch.Tensor:
        """(N, 3) int64, Qwen-VL: temporal, rows and columns of patches, before merging."""
        return self.images.grids

    @property
    def pixel_attention_mask(self) -> torch.Tensor:
        """(N, P) int32, NaFlex padded: 1 where there is a patch."""
        return self.images.attention_mask

    def mrope_position_ids(self) -> torch.Tensor:
        """(4, B, L) int64, Qwen-VL: the text positions, then those of the three rotary axes.

        transformers tells packed documents apart by the first of the four.
        """
        index = torch.cat([self.images.index, self.videos.index]).numpy()
        grids = np.zeros((len(index), 4), dtype=np.int64)
        for media, rows in ((self.images, grids), (self.videos, grids[len(self.images) :])):
            rows[: len(media), : media.grids.shape[1]] = media.grids.numpy()
        processor = self.images.processor or self.videos.processor
        axes = mrope_positions(
            self.position_ids.numpy(),
            index,
            grids,
            merge_size=processor.merge_size,
            tokens_per_second=getattr(self.videos.processor, "tokens_per_second", None),
        )
        return torch.cat([self.position_ids[None], torch.from_numpy(axes)])

    def to_training(
        self,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        attention: Attention = "varlen",
        shift_labels: bool = False,
        rename: Mapping[str, str] | None = None,
        *,
        dummy_image: bool = False,
        pad_images_to: int | None = None,
        omit_empty: bool = False,
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
                same rule; transformers' Qwen-VL models have no flex attention.
                `full`: `input_ids` with neither mask nor labels, for rows of one document whose
                tokens all attend to each other: `SiglipModel` and `.pair` (the text tower is
                trained to attend to the padding too). Rows of padding alone are left out, or come
                last where `pad_images_to` asks for more pictures: text i is that of picture i.
            shift_labels: Give labels[i] = token i + 1 of the same document, for trainers that do
                not shift. transformers' models shift by themselves: leave it off for those.
            rename: Key -> the name that your model uses for it.
            dummy_image: Give one image of zeros where the batch has none, and one frame where the
                pipeline has videos and the batch none, so that sharded models do not wait for this
                rank's encoder. It has no tokens: `image_index` is empty then. transformers' Qwen-VL
                refuses what has no tokens: run its `visual` on it, and add 0 times the sum.
            pad_images_to: Give so many images (patches, where these are packed; their boundaries
                and grids are still as many as there are images), the last ones zero, for models
                compiled for one shape. Not for Qwen-VL and LLaVA-NeXT, whose models take no
                padding, nor for videos.
            omit_empty: Leave `pixel_values` and what belongs to it out where the batch has no
                image: transformers' models fail on tensors without rows. Otherwise the keys are the
                same in each batch.

        Returns:
            The tensors above, `loss_weights` where the batch has some (shaped and shifted as the
            labels), and `pixel_values` in `dtype`, normalised by the image processor, all
            zero for invalid images and padding; absent in a pipeline without images. NaFlex adds
            `spatial_shapes`, and `pixel_attention_mask` or (packed) `image_cu_seqlens`; Qwen-VL
            `image_grid_thw`, and its `position_ids` are (4, B, L). Videos, where a batch has some,
            come as `pixel_values_videos`, with `video_grid_thw` for Qwen-VL.

        Raises:
            ConfigError: Unknown `attention`, no floating `dtype`, `rename` names a key that there
                never is or gives two keys one name, or `pad_images_to` cannot be met.
        """
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ConfigError(f"dtype must be a floating torch.dtype, got {dtype!r}")
        images = self.images.training(
            device, dtype, dummy=dummy_image, pad_to=pad_images_to, omit=omit_empty
        )
        labels = _shifted(self.labels) if shift_labels else self.labels
        tensors: dict[str, Any] = {
            "input_ids": self.input_ids,
            "labels": labels,
            "position_ids": self.position_ids,
        }
        if self.loss_weights is not None:
            weights = self.loss_weights
            tensors["loss_weights"] = _shifted(weights, 0) if shift_labels else weights
        if hasattr(self.images.processor or self.videos.processor, "merge_size"):
            tensors["position_ids"] = self.mrope_position_ids()
        if attention == "full":
            if int(self.segment_ids.max()) > 1:
                raise ConfigError("attention='full' is for rows of one document: use .pair")
            tensors = {"input_ids": self.input_ids[self._rows_of(len(images.get(PIXELS, ())))]}
        elif attention == "varlen":
            tensors = {k: v.reshape(*v.shape[:-2], 1, -1) for k, v in tensors.items()}
            tensors["cu_seq_lens_q"] = tensors["cu_seq_lens_k"] = self.cu_seqlens
        elif attention not in ("sdpa", "block"):
            raise ConfigError(f"attention must be {', '.join(ATTENTIONS)}, got {attention!r}")
        tensors = {name: value.to(device) for name, value in tensors.items()}
        if attention == "varlen":
            tensors["max_length_q"] = tensors["max_length_k"] = self.max_seqlen
            tensors["use_cache"] = False
        elif attention != "full":
            make = _dense_mask if attention == "sdpa" else _block_mask
            tensors["attention_mask"] = make(self.segment_ids.to(device))
        videos = self.videos.training(device, dtype, dummy=dummy_image, omit=True)
        return _renamed(tensors | images | named_for_videos(videos), rename or {})

    def _rows_of(self, pictures: int) -> torch.Tensor:
        """Return the rows that hold something, then as much padding as there are more pictures."""
        is_padding = (self.segment_ids[:, 0] == 0).int()
        return is_padding.argsort(stable=True)[: max(int((1 - is_padding).sum()), pictures)]

    def show(
        self, rows: Sequence[int] | None = None, *, decode: Callable[[list[int]], str] | None = None
    ) -> Any:
        """Return a matplotlib figure: documents, images, loss and padding over the tokens of rows.

        Args:
            rows: Numbers of rows; None shows the first ones.
            decode: Token ids to text, such as a tokenizer's `decode`: labels documents by their
                text, not by their keys.

        Raises:
            ConfigError: There is no such row, or no matplotlib.
        """
        from zephon_mm.show import draw_batch  # loads matplotlib, which training has no use for

        return draw_batch(self, rows, decode)

    def show_row(self, row: int = 0, *, decode: Callable[[list[int]], str] | None = None) -> Any:
        """Return a matplotlib figure of one row: as `show`, with positions and attention.

        Args:
            row: Its number.
            decode: As in `show`.

        Raises:
            ConfigError: As `show`.
        """
        from zephon_mm.show import draw_row

        return draw_row(self, row, decode)

    def row_sha256(self) -> tuple[str, ...]:
        """Return one digest a row: its tokens, labels, positions, segments, images and keys."""
        return tuple(self._row_digest(row) for row in range(len(self.keys)))

    def sha256(self) -> str:
        """Return the digest of the batch: that of its rows' digests in global order."""
        return step_sha256(dict(zip(self.sequence_ids.tolist(), self.row_sha256(), strict=True)))

    def _row_digest(self, row: int) -> str:
        sha = hashlib.sha256()
        tokens = (self.input_ids, self.labels, self.position_ids, self.segment_ids)
        for tensor in (*tokens, self.loss_weights):
            if tensor is not None:
                sha.update(bytes_of(tensor[row]))
        self.images.update_digest(sha, row)
        if self.videos.processor is not None:
            self.videos.update_digest(sha, row)
        sha.update(json.dumps(self.keys[row]).encode())
        return sha.hexdigest()


def step_sha256(rows: Mapping[int, str]) -> str:
    """Return the digest of a global step from its rows' digests, keyed by sequence id."""
    return hashlib.sha256("".join(rows[number] for number in sorted(rows)).encode()).hexdigest()


def _shifted(labels: torch.Tensor, filler: int = IGNORE) -> torch.Tensor:
    """Move labels one to the left; no label crosses, since a segment's first one is -100."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=filler)


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
    if unknown := sorted(set(rename) - set(tensors) - VISION_KEYS):
        raise ConfigError(f"rename has no such keys: {unknown}; there are {sorted(tensors)}")
    renamed = {rename.get(name, name): value for name, value in tensors.items()}
    if len(renamed) < len(tensors):
        raise ConfigError(f"rename gives two keys one name: {dict(rename)}")
    return renamed
