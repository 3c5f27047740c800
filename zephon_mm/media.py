"""The images of a batch, or the frames of its videos: where each lies, before and after decoding.

Three layouts, by the processor's attributes (see `protocols.ImageProcessor`): pictures of one
shape, (N, *shape); patches padded to a fixed number, (N, P, *unit_shape); or the units of all
images one after the other, (units, *unit_shape), with `cu_units`.

Laws (tests/test_media.py):
    1. Each image has a region of its own, in the order of the tokens; regions of the parts of one
       image are neighbours, so that one task writes them all.
    2. Nothing that an image does not write reaches the model: padding and invalid images are zero
       after normalising.

Imports: records. Used by: batch, engine.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from zephon_mm.errors import ConfigError
from zephon_mm.records import ImageSlot

# 1 x 1 pixels, white: what stands for the image of a batch without one.
_DUMMY = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63f8ffff"
    "3f0005fe02fe0def46b80000000049454e44ae426082"
)
_GRID_SIZES = {"spatial_shapes": 2, "image_sizes": 2, "image_grid_thw": 3, "video_grid_thw": 3}
VISION_KEYS = frozenset(_GRID_SIZES) | {
    *("pixel_values", "pixel_values_videos", "pixel_attention_mask", "image_cu_seqlens")
}
"""What a batch without images or videos lacks, and another of the same pipeline may have."""


class MediaLayout(NamedTuple):
    """How a processor's arrays lie in a batch; see `protocols.ImageProcessor`."""

    unit_shape: tuple[int, ...] | None = None
    pad_to: int | None = None

    @classmethod
    def of(cls, processor: Any) -> "MediaLayout":
        """Return the layout of a processor; None has pictures of no size."""
        unit = getattr(processor, "unit_shape", None)
        size = getattr(processor, "height_width", (0, 0))
        if unit is None and (processor is None or hasattr(processor, "height_width")):
            unit = (3, *size)
        return cls(unit, getattr(processor, "pad_to", None))


NO_MEDIA = MediaLayout()
NO_MARKS = np.zeros((0, 4), dtype=np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Media:
    """What a batch holds of its N images, or of the N frames of its videos.

    Attributes:
        pixel_values: uint8, not normalised, in one of the three layouts; ordered by row, then
            token.
        index: (N, 3) int64: row, first placeholder token, number of placeholder tokens.
        valid: (N,) bool; False where it could not be decoded (its pixels are zero).
        cu_units: (N + 1,) int32: image i has the units [cu_units[i], cu_units[i + 1]).
        grids: (N, G) int64: as in `MediaShape`.
        layout: Of `pixel_values`.
        ragged: Whether an image has units of its own number, not padded.
        processor: Which made them; None in a pipeline without.
        marks: (M, 4) float32: the boxes and points of the documents, as fractions, 0 to 1, of what
            the image shows (`processors.marks`): left, top, right, bottom; of a point x, y, x, y.
            Zero where the image is not valid.
        mark_index: (M, 3) int64: image (of a picture in tiles the whole view), number among its
            boxes or points, 0 for a box or 1 for a point; ordered by image, kind, number.
    """

    pixel_values: torch.Tensor
    index: torch.Tensor
    valid: torch.Tensor
    cu_units: torch.Tensor
    grids: torch.Tensor
    layout: MediaLayout
    ragged: bool
    processor: Any
    marks: torch.Tensor
    mark_index: torch.Tensor

    def __len__(self) -> int:
        """Return N."""
        return len(self.valid)

    def pixels_of(self, number: int) -> torch.Tensor:
        """Return the pixels of one image, without padding."""
        first, last = self.cu_units[number : number + 2].tolist()
        if self.ragged:
            return self.pixel_values[first:last]
        pixels = self.pixel_values[number]
        return pixels if self.layout.pad_to is None else pixels[: last - first]

    @property
    def boxes(self) -> torch.Tensor:
        """(boxes, 4) float32: left, top, right, bottom; cut at the edges of what is shown."""
        return self.marks[self.mark_index[:, 2] == 0]

    @property
    def boxes_index(self) -> torch.Tensor:
        """(boxes, 2) int64: image, number in the document's list for it."""
        return self.mark_index[self.mark_index[:, 2] == 0, :2]

    @property
    def points(self) -> torch.Tensor:
        """(points, 2) float32: x, y; outside 0 to 1 where they are not shown."""
        return self.marks[self.mark_index[:, 2] == 1, :2]

    @property
    def points_index(self) -> torch.Tensor:
        """(points, 2) int64: image, number in the document's list for it."""
        return self.mark_index[self.mark_index[:, 2] == 1, :2]

    @property
    def attention_mask(self) -> torch.Tensor:
        """(N, P) int32, 1 where a padded image has a patch."""
        counts = self.cu_units[1:] - self.cu_units[:-1]
        return (torch.arange(self.pixel_values.shape[1]) < counts[:, None]).to(torch.int32)

    def training(
        self,
        device: Any,
        dtype: torch.dtype,
        *,
        dummy: bool = False,
        pad_to: int | None = None,
        omit: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Return what a model takes: pixels, and mask, grids or boundaries where there are some.

        Args:
            device: Where the tensors go.
            dtype: Of the normalised pixels.
            dummy: Give one zero image where there is none.
            pad_to: Give as many images (patches, where they are not padded), the last ones zero.
            omit: Give nothing where there is no image, and none is asked for.
        """
        if self.processor is None or (omit and not (len(self) or dummy or pad_to is not None)):
            return {}
        media = self._dummy() if dummy and not len(self) else self
        pixels = media.processor.normalize(media.pixel_values.to(device), dtype)
        found: dict[str, torch.Tensor] = {}
        key = getattr(media.processor, "grid_key", None)
        if media.layout.pad_to is not None:
            mask = media.attention_mask
            found["pixel_attention_mask"] = mask
            keep = mask.bool() & media.valid[:, None]
        else:
            counts = (media.cu_units[1:] - media.cu_units[:-1]).to(torch.int64)
            keep = media.valid.repeat_interleave(counts)
        keep = keep.to(device).view(*keep.shape, *[1] * (pixels.dim() - keep.dim()))
        found["pixel_values"] = torch.where(keep, pixels, pixels.new_zeros(()))
        if key is not None:
            found[key] = media.grids[:, :3]
        if key == "spatial_shapes" and media.layout.pad_to is None:
            found["image_cu_seqlens"] = media.cu_units
        found = {name: value.to(device) for name, value in found.items()}
        return found if pad_to is None else media.padded(found, pad_to)

    def padded(self, found: dict[str, torch.Tensor], size: int) -> dict[str, torch.Tensor]:
        """Return what `training` gives with `size` images, for models compiled for one shape."""
        have = len(found["pixel_values"])
        if self.ragged and "image_cu_seqlens" not in found:
            raise ConfigError(
                "pad_images_to needs images that can be told from padding; this processor's model "
                "takes the patches of all images in one row: leave it out"
            )
        if have > size:
            kind = "patches" if self.ragged else "images"
            raise ConfigError(
                f"pad_images_to={size}, but the batch has {have} {kind}: raise it, or set "
                f"pack_flat(max_{kind}=...) so that rows * max_{kind} is at most that"
            )
        result = {}
        for name, value in found.items():
            if name == "image_cu_seqlens":
                result[name] = torch.cat([value, value.new_full((int(have < size),), size)])
                continue
            if self.ragged and name != "pixel_values":
                result[name] = value
                continue
            # A model divides by grids and attends to masks: padding is one patch of zeros.
            filler = value.new_full((size - have, *value.shape[1:]), name == "spatial_shapes")
            if name == "pixel_attention_mask":
                filler[:, :1] = 1
            result[name] = torch.cat([value, filler])
        return result

    def _dummy(self) -> "Media":
        """Return one invalid image: a model without input would leave collectives waiting."""
        merge, unit = getattr(self.processor, "merge_size", 0), self.layout.unit_shape
        if unit and merge:  # patches of one token, of an image or a video
            slot = ImageSlot(None, 0, 0, (merge**2, *unit), (1, merge, merge))
        elif unit and getattr(self.processor, "grid_key", None) is None:
            slot = ImageSlot(None, 0, 0, unit)
        else:
            shape = self.processor.measure(lambda size: _DUMMY[:size] if size >= 0 else _DUMMY)
            slot = ImageSlot(None, 0, 0, shape.shape, shape.grid)
        plan = MediaPlan(self.layout)
        plan.add(slot, (0, 0, 0), (0, 0, 0))
        pixels = np.zeros(plan.shape, dtype=np.uint8)
        media = plan.media(pixels, self.processor)
        media.valid[:] = False
        return media

    def update_digest(self, sha: Any, row: int) -> None:
        """Add the images of a row to its digest."""
        numbers = (self.index[:, 0] == row).nonzero().flatten().tolist()
        sha.update(bytes_of(self.index[numbers, 1:]))
        if self.grids.shape[1]:
            sha.update(bytes_of(self.grids[numbers]))
        for number in numbers:
            pixels = self.pixels_of(number)
            sha.update(f"{tuple(pixels.shape)} {bool(self.valid[number])}".encode())
            sha.update(bytes_of(pixels))
            if len(self.marks) and (mine := self.mark_index[:, 0] == number).any():
                sha.update(bytes_of(self.mark_index[mine, 1:]))
                sha.update(bytes_of(self.marks[mine]))


@dataclass(slots=True)
class MediaPlan:
    """The images of a batch while it is laid out: `add` each in order."""

    layout: MediaLayout
    slots: list[ImageSlot] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    index: list[tuple[int, int, int]] = field(default_factory=list)
    owners: list[tuple[int, int, int]] = field(default_factory=list)
    ends: list[int] = field(default_factory=lambda: [0])
    marks: list[tuple[int, int, int]] = field(default_factory=list)

    def add(
        self, slot: ImageSlot, place: tuple[int, int, int], owner: tuple[int, int, int]
    ) -> None:
        """Take the next image.

        Args:
            slot: The image.
            place: Its row, first token and number of tokens.
            owner: Its document: row, first token, token after the last.
        """
        if self.layout.unit_shape is None:
            self.layout = self.layout._replace(unit_shape=slot.shape)
        if slot.marks:
            self.marks += [
                (len(self.slots), n, kind) for kind in (0, 1) for n in range(slot.marks[kind])
            ]
        self.slots.append(slot)
        self.parts.append(slot.part)
        self.index.append(place)
        self.owners.append(owner)
        self.ends.append(self.ends[-1] + self._units(slot))

    def _units(self, slot: ImageSlot) -> int:
        return slot.shape[0] if len(slot.shape) > len(self.unit_shape) else 1

    @property
    def unit_shape(self) -> tuple[int, ...]:
        """Shape of a unit; that of the first image where the processor does not say."""
        return self.layout.unit_shape or (3, 0, 0)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of `pixel_values`."""
        if self.layout.pad_to is not None:
            return (len(self.slots), self.layout.pad_to, *self.unit_shape)
        return (self.ends[-1], *self.unit_shape)

    def region(self, first: int, count: int) -> tuple[int, int]:
        """Return where neighbouring images are: offset and size in bytes of `pixel_values`."""
        unit, pad_to = math.prod(self.unit_shape), self.layout.pad_to
        if pad_to is not None:
            return first * pad_to * unit, count * pad_to * unit
        start, stop = self.ends[first], self.ends[first + count]
        return start * unit, (stop - start) * unit

    def whole(self, numbers: set[int]) -> list[int]:
        """Return images, and the other parts of the pictures and videos that they belong to."""
        found: set[int] = set()
        for number in numbers:
            first = last = number
            while self.parts[first] > 0:
                first -= 1
            while last + 1 < len(self.parts) and self.parts[last + 1] > 0:
                last += 1
            found.update(range(first, last + 1))
        return sorted(found)

    def release(self) -> None:
        """Forget the slots."""
        self.slots = []

    def zero(self, pixels: NDArray[Any], number: int) -> None:
        """Zero the pixels of an image."""
        offset, size = self.region(number, 1)
        pixels.reshape(-1)[offset : offset + size] = 0

    def media(
        self, pixels: NDArray[Any], processor: Any, marks: NDArray[np.float32] = NO_MARKS
    ) -> Media:
        """Return the images as tensors; all valid."""
        if processor is None and not self.slots:
            return NO_IMAGES
        grids = np.array([slot.grid for slot in self.slots], dtype=np.int64)
        if not self.slots:
            grids = grids.reshape(0, _GRID_SIZES.get(getattr(processor, "grid_key", ""), 0))
        # Without images, a grid tells: those that have one are cut.
        key = None if self.slots else getattr(processor, "grid_key", None)
        cut = key or any(len(slot.shape) > len(self.unit_shape) for slot in self.slots)
        return Media(
            pixel_values=torch.from_numpy(pixels),
            index=torch.from_numpy(np.array(self.index, dtype=np.int64).reshape(-1, 3)),
            valid=torch.from_numpy(np.ones(len(self.slots), dtype=np.bool_)),
            cu_units=torch.from_numpy(np.array(self.ends, dtype=np.int32)),
            grids=torch.from_numpy(grids),
            layout=self.layout,
            ragged=bool(cut) and self.layout.pad_to is None,
            processor=processor,
            marks=torch.from_numpy(marks) if self.marks else NO_IMAGES.marks,
            mark_index=torch.tensor(self.marks) if self.marks else NO_IMAGES.mark_index,
        )


NO_IMAGES = Media(
    pixel_values=torch.zeros((0, 3, 0, 0), dtype=torch.uint8),
    index=torch.zeros((0, 3), dtype=torch.int64),
    valid=torch.zeros(0, dtype=torch.bool),
    cu_units=torch.zeros(1, dtype=torch.int32),
    grids=torch.zeros((0, 0), dtype=torch.int64),
    layout=NO_MEDIA,
    ragged=False,
    processor=None,
    marks=torch.from_numpy(NO_MARKS),
    mark_index=torch.zeros((0, 3), dtype=torch.int64),
)
"""Of a pipeline without."""


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes, in the order of its elements."""
    return np.ascontiguousarray(tensor.numpy()).data


def named_for_videos(found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what `Media.training` gives under the names of videos."""
    return {name.replace("pixel_values", "pixel_values_videos"): v for name, v in found.items()}
