"""Qwen-VL's pictures: native aspect ratio, patches in the order in which the model merges them.

Laws (tests/processors/test_qwen.py):
    1. backend "torchvision" equals transformers' Qwen2VLImageProcessor bit for bit, "pillow" its
       Qwen2VLImageProcessorPil: grids, the uint8 patches and the normalised float32 values.
    2. The grid is known from the header, and `write` fills the shape that `measure` gives.

A patch is (channel, frame, row, column), a still picture fills all frames of it; patches that
become one token are neighbours: (row, column, row in the token, column in the token).

Cost: a 640 x 480 JPEG takes 1.5 ms of one core: 1.0 to decode, 0.5 to resize and cut.
Imports: errors, records, image, resize, shrink. Used by: qwenvideo; the engine's tasks, through
`protocols.ImageProcessor`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch

from zephon_mm.errors import ConfigError, SampleError
from zephon_mm.processors.image import MAX_PIXELS, Change, Pixels, decode, probe, unchanged
from zephon_mm.processors.resize import (
    BICUBIC,
    Backend,
    backend_fingerprint,
    check_resize,
    normalize,
    resized,
)
from zephon_mm.processors.shrink import STEPS, grid_with, shrunk
from zephon_mm.records import MediaShape

MAX_ASPECT = 200
"""The longer side over the shorter one, at most, inclusive."""

_HALF = (0.5, 0.5, 0.5)
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
# Published checkpoints: patch size, least and most pixels, mean, std.
_PRESETS = {
    "qwen2.5-vl": (14, 56 * 56, 16384 * 28 * 28, _CLIP_MEAN, _CLIP_STD),
    "qwen3-vl": (16, 64 * 32 * 32, 16384 * 32 * 32, _HALF, _HALF),
}


def smart_resize(
    height: int, width: int, *, factor: int, limits: tuple[int, int], clip: tuple[int, int] = (1, 1)
) -> tuple[int, int]:
    """Return (height, width) in multiples of `factor`, near to the picture's.

    The rule, to the order of its roundings, is that of transformers' function of this name.

    Args:
        height: In pixels; of the upright picture.
        width: Likewise.
        factor: Pixels along a token.
        limits: Pixels. A smaller picture is enlarged to the first, or more; a larger one is reduced
            to the second, or fewer, but not below one token a side.
        clip: How many frames share the limits, and the same rounded to temporal patches.

    Raises:
        SampleError: `extreme_aspect`: one side is over 200 times the other.
    """
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise SampleError(
            "extreme_aspect",
            f"found {width} x {height} pixels, Qwen-VL takes pictures whose sides differ by a "
            f"factor of {MAX_ASPECT} at most: crop it, or leave it out",
        )
    rows, cols = round(height / factor), round(width / factor)
    pixels, rounded = clip[0] * height * width, clip[1] * rows * cols * factor**2
    if rounded > limits[1]:
        shrink = math.sqrt(pixels / limits[1])
        rows = max(1, math.floor(height / shrink / factor))
        cols = max(1, math.floor(width / shrink / factor))
    elif rounded < limits[0]:
        grow = math.sqrt(limits[0] / pixels)
        rows, cols = math.ceil(height * grow / factor), math.ceil(width * grow / factor)
    return rows * factor, cols * factor


@dataclass(frozen=True)
class QwenVLProcessor:
    """Turns an encoded image into (patches, 3 x frames x side x side) uint8, for Qwen-VL.

    Args:
        patch_size: Side of a patch in pixels.
        merge_size: Patches along a side of the square that becomes one token.
        temporal_patch_size: Frames of a patch.
        min_pixels: A smaller image is enlarged to as many.
        max_pixels: A larger one is reduced to as many: 16384 tokens of 32 x 32.
        mean: Subtracted from pixels that were scaled to [0, 1], for red, green and blue.
        std: Divides what is left.
        backend: Whose arithmetic resizes: "torchvision", or "pillow" for the same on every CPU.
        decode_limit_px: An image with more pixels is refused, from its header.

    Raises:
        ConfigError: A value that no image can be processed with.
    """

    patch_size: int = 16
    merge_size: int = 2
    temporal_patch_size: int = 2
    min_pixels: int = 64 * 32 * 32
    max_pixels: int = 16384 * 32 * 32
    mean: tuple[float, float, float] = _HALF
    std: tuple[float, float, float] = _HALF
    backend: Backend = "torchvision"
    decode_limit_px: int = MAX_PIXELS

    pad_to: ClassVar[None] = None
    grid_key: ClassVar[str] = "image_grid_thw"
    shrink_steps: ClassVar[int] = STEPS

    def __post_init__(self) -> None:
        sizes = (self.patch_size, self.merge_size, self.temporal_patch_size, self.decode_limit_px)
        if min(sizes) < 1:
            names = "patch_size, merge_size, temporal_patch_size and decode_limit_px"
            raise ConfigError(f"{names} must be at least 1, got {sizes}")
        if not self.factor**2 <= self.max_pixels >= self.min_pixels >= 1:
            raise ConfigError(
                f"expected 1 <= min_pixels <= max_pixels, and one token, {self.factor**2} pixels, "
                f"within max_pixels; got {self.min_pixels} and {self.max_pixels}"
            )
        if not len(self.mean) == len(self.std) == 3 or min(self.std) <= 0:
            raise ConfigError(
                f"mean and std are three numbers each, std above 0, got {self.mean}, {self.std}"
            )
        check_resize(BICUBIC, self.backend)

    @classmethod
    def preset(
        cls, name: str, *, max_pixels: int | None = None, backend: Backend = "torchvision"
    ) -> Self:
        """Return the processor of the published checkpoints of a model.

        Args:
            name: "qwen2.5-vl" or "qwen3-vl".
            max_pixels: Replaces theirs, 16384 tokens, which few sequences have room for; if it is
                below their least pixels, those too.
            backend: As in the constructor.

        Raises:
            ConfigError: There is no such preset.
        """
        if name not in _PRESETS:
            raise ConfigError(f"{name!r} is no preset, expected one of {', '.join(_PRESETS)}")
        patch_size, least, most, mean, std = _PRESETS[name]
        most = most if max_pixels is None else max_pixels
        return cls(patch_size, 2, 2, min(least, most), most, mean, std, backend)

    @property
    def factor(self) -> int:
        """Pixels along a token."""
        return self.patch_size * self.merge_size

    @property
    def unit_shape(self) -> tuple[int]:
        """Values of a patch."""
        return (3 * self.temporal_patch_size * self.patch_size**2,)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of patches of an upright picture; as `smart_resize`."""
        limits = (self.min_pixels, self.max_pixels)
        size = smart_resize(height, width, factor=self.factor, limits=limits)
        return size[0] // self.patch_size, size[1] // self.patch_size

    def measure(self, read: Callable[[int], bytes], step: int = STEPS) -> MediaShape:
        """Return the token count, the shape (patches, values) and the grid (1, rows, columns).

        Args:
            read: `read(n)` gives the first n bytes of the image; `read(-1)` all of it.
            step: A lower one gives a smaller version; see `shrink`.

        Raises:
            SampleError: As `image.probe` and `smart_resize`.
        """
        header = probe(read, max_pixels=self.decode_limit_px)
        grid = self.grid(header.height_px, header.width_px)
        rows, cols = shrunk(grid, step, self.merge_size)
        tokens = rows * cols // self.merge_size**2
        return MediaShape(tokens, (rows * cols, *self.unit_shape), grid=(1, rows, cols))

    def write(self, encoded: bytes, out: Pixels, change: Change = unchanged) -> None:
        """Decode and resize an image into the patches `out`.

        Args:
            encoded: The complete bytes of the image.
            out: (patches, values) uint8, C-contiguous and writable; of any version.
            change: Changes the decoded picture, (h, w, 3) uint8, and keeps its shape.

        Raises:
            SampleError: As `image.decode`. `out` is then untouched.
        """
        pixels = change(decode(encoded, max_pixels=self.decode_limit_px))
        grid = grid_with(len(out), self.grid(*pixels.shape[:2]), self.merge_size)
        self.place(pixels, out, grid, slice(None))

    def place(self, pixels: Pixels, out: Pixels, grid: tuple[int, int], frames: slice) -> None:
        """Resize a picture to a grid of patches and write it as the given frames of them.

        Args:
            pixels: (height, width, 3) uint8.
            out: (rows * columns, values) uint8, C-contiguous.
            grid: Rows and columns of patches.
            frames: Of `temporal_patch_size`.
        """
        (rows, cols), side, merge = grid, self.patch_size, self.merge_size
        # The filter is fastest with the channels last; a patch's row is copied as one item.
        how: dict[str, Any] = {"resample": BICUBIC, "backend": self.backend}
        picture = resized(pixels, rows * side, cols * side, **how)
        lines = np.ascontiguousarray(picture.transpose(2, 0, 1)).view(f"V{side}")
        squares = lines.reshape(3, rows // merge, merge, side, cols // merge, merge)
        patches = squares.transpose(1, 4, 2, 5, 0, 3)[:, :, :, :, :, None]
        target = out.view(f"V{side}").reshape(*patches.shape[:5], self.temporal_patch_size, side)
        target[:, :, :, :, :, frames] = patches

    def normalize(self, pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Map patches to the model's range: (pixels / 255 - mean) / std, computed in float32.

        Args:
            pixels: (..., values) uint8, on any device.
            dtype: The type of the result.
        """
        shape = (3, self.temporal_patch_size * self.patch_size, self.patch_size)
        planes = pixels.reshape(*pixels.shape[:-1], *shape)
        found = normalize(planes, dtype, mean=self.mean, std=self.std, backend=self.backend)
        return found.flatten(-3)

    def fingerprint(self) -> Mapping[str, Any]:
        """Return everything that the pixels depend on, JSON-serialisable."""
        found = {"kind": "qwen-vl", **asdict(self), **backend_fingerprint(self.backend)}
        return {**found, "mean": list(self.mean), "std": list(self.std)}
