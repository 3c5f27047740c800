"""SigLIP 2 NaFlex: one image, its aspect ratio kept, as a sequence of patches.

Laws (tests/processors/test_naflex.py):
    1. Grids, pixels and normalised patches equal transformers' Siglip2ImageProcessor bit for bit
       with backend "torchvision", its Siglip2ImageProcessorPil with "pillow".
    2. `write` fills the shape that `measure` gives: at least one patch each way, and never more
       than `max_num_patches`.
    3. No state: the same bytes give the same patches in any order, thread and process.

A small image is enlarged and a large one reduced, until one more step would need too many patches;
both sides are then rounded up to whole patches.

Cost: 15 us to measure; a 640 x 480 JPEG takes 1.5 ms of one core at 256 patches, 1.0 to decode.
Imports: errors, records, image, resize, shrink.
Used by: the engine's tasks, through `protocols.ImageProcessor`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray

from zephon_mm.errors import ConfigError, SampleError
from zephon_mm.processors.image import MAX_PIXELS, Change, decode, probe, unchanged
from zephon_mm.processors.resize import (
    BILINEAR,
    Backend,
    backend_fingerprint,
    check_resize,
    normalize,
    resized,
)
from zephon_mm.processors.shrink import STEPS, grid_with, shrunk
from zephon_mm.records import MediaShape

PRESETS = ("siglip2-base-patch16-naflex", "siglip2-so400m-patch16-naflex")
"""The published checkpoints, which want the same patches."""

# Where big_vision and transformers look for the scale of an image, and how finely. It shows: no
# image is enlarged more than 100 times, so 1 x 1 pixel becomes at most 7 x 7 patches.
_SMALLEST, _LARGEST, _PRECISION = 1e-5 / 10, 100.0, 1e-5


@dataclass(frozen=True)
class NaFlexProcessor:
    """Turns an encoded image into (rows * cols, patch_size**2 * 3) uint8, as SigLIP 2 NaFlex wants.

    Patches are in raster order, the values of one in order of row, column and channel.

    Args:
        max_num_patches: The most patches, and tokens, that an image becomes.
        patch_size: Side of a patch in pixels.
        resample: PIL's integer: 2 bilinear, 3 bicubic.
        backend: Whose arithmetic resizes: "torchvision", or "pillow" for the same on every CPU.
        packed: The layout of a batch, never its patches: those of all images one after the other,
            (sum, 768), instead of each image padded to `max_num_patches`.
        max_pixels: An image with more is refused, from its header.

    Raises:
        ConfigError: A value that no image can be processed with.
    """

    max_num_patches: int = 256
    patch_size: int = 16
    resample: int = BILINEAR
    backend: Backend = "torchvision"
    packed: bool = False
    max_pixels: int = MAX_PIXELS

    grid_key: ClassVar[str] = "spatial_shapes"
    shrink_steps: ClassVar[int] = STEPS

    def __post_init__(self) -> None:
        for name in ("max_num_patches", "patch_size", "max_pixels"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name}={value!r} is not possible, expected an integer >= 1")
        check_resize(self.resample, self.backend)

    @classmethod
    def preset(
        cls,
        name: str,
        max_num_patches: int = 256,
        *,
        backend: Backend = "torchvision",
        packed: bool = False,
    ) -> Self:
        """Return the processor of a published checkpoint, such as `siglip2-so400m-patch16-naflex`.

        Args:
            name: The checkpoint's name, with or without the `google/` in front.
            max_num_patches: As in the constructor; these models take any.
            backend: As in the constructor.
            packed: As in the constructor.

        Raises:
            ConfigError: The name is not that of a NaFlex checkpoint.
        """
        if name.removeprefix("google/") not in PRESETS:
            raise ConfigError(
                f"{name!r} is no NaFlex preset, expected one of {', '.join(PRESETS)}; "
                "SigLIPProcessor.preset knows the checkpoints of a fixed size"
            )
        return cls(max_num_patches, backend=backend, packed=packed)

    @property
    def unit_shape(self) -> tuple[int]:
        """Shape of one patch: (patch_size * patch_size * 3,)."""
        return (self.patch_size**2 * 3,)

    @property
    def pad_to(self) -> int | None:
        """Patches that each image has in a batch; None where they are packed."""
        return None if self.packed else self.max_num_patches

    def grid(self, height_px: int, width_px: int) -> tuple[int, int]:
        """Return (rows, cols) of an image's patches: each at least 1, together at most the limit.

        Bisection in float64, step by step as in transformers, because for extreme sizes the result
        depends on where it stops.

        Raises:
            SampleError: `too_many_patches`: a side of millions of pixels for a handful of patches.
        """

        def scaled(scale: float) -> tuple[int, int]:
            rows = math.ceil(height_px * scale / self.patch_size)
            cols = math.ceil(width_px * scale / self.patch_size)
            return max(rows, 1), max(cols, 1)

        low, high = _SMALLEST, _LARGEST
        while high - low >= _PRECISION:
            scale = (low + high) / 2
            if math.prod(scaled(scale)) <= self.max_num_patches:
                low = scale
            else:
                high = scale
        rows, cols = scaled(low)
        if rows * cols > self.max_num_patches:
            raise SampleError(
                "too_many_patches",
                f"{height_px} x {width_px} pixels need {rows} x {cols} patches at the smallest "
                f"scale, expected at most {self.max_num_patches}: raise `max_num_patches`",
            )
        return rows, cols

    def measure(self, read: Callable[[int], bytes], step: int = STEPS) -> MediaShape:
        """Return the token count, the shape (rows * cols, 768) and the grid (rows, cols).

        Args:
            read: `read(n)` gives the first n bytes of the image; `read(-1)` all of it.
            step: A lower one gives a smaller version; see `shrink`.

        Raises:
            SampleError: As `image.probe` and `grid`.
        """
        header = probe(read, max_pixels=self.max_pixels)
        rows, cols = shrunk(self.grid(header.height_px, header.width_px), step)
        return MediaShape(rows * cols, (rows * cols, *self.unit_shape), grid=(rows, cols))

    def write(self, encoded: bytes, out: NDArray[np.uint8], change: Change = unchanged) -> None:
        """Decode and resize an image, and write its patches into `out`.

        Args:
            encoded: The complete bytes of the image.
            out: (rows * cols, patch_size**2 * 3) uint8, C-contiguous and writable; of any version.
            change: Changes the decoded picture, (h, w, 3) uint8, and keeps its shape.

        Raises:
            SampleError: As `image.decode` and `grid`. `out` is then untouched.
        """
        pixels = change(decode(encoded, max_pixels=self.max_pixels))
        (rows, cols), side = grid_with(len(out), self.grid(*pixels.shape[:2])), self.patch_size
        how: dict[str, Any] = {"resample": self.resample, "backend": self.backend}
        picture = resized(pixels, rows * side, cols * side, **how)
        patches = picture.reshape(rows, side, cols, side, 3).swapaxes(1, 2)
        np.copyto(out.reshape(patches.shape), patches)

    def normalize(self, pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Map uint8 patches of any shape, on any device, to [-1, 1], computed in float32."""
        return normalize(pixels, dtype, mean=0.5, std=0.5, backend=self.backend)

    def fingerprint(self) -> Mapping[str, Any]:
        """Return everything that the patches depend on, JSON-serialisable."""
        settings = asdict(self)
        del settings["packed"]  # the layout of a batch
        return {"kind": "naflex", **settings, **backend_fingerprint(self.backend)}
