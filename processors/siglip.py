"""SigLIP's fixed-size input: one image, squashed to height x width, no crop.

Laws (tests/processors/test_siglip.py):
    1. backend "torchvision" equals transformers' SiglipImageProcessor bit for bit, "pillow" its
       SiglipImageProcessorPil: the resized uint8 pixels and the normalised float32 values.
    2. `write` fills the shape that `measure` gives, for every image.
    3. No state: the same bytes give the same pixels in any order, thread and process.

Cost: a 640 x 480 JPEG takes 1.8 ms of one core: 1.0 to decode, 0.7 to resize.
Imports: errors, records, image, resize.
Used by: the engine's tasks, through `protocols.ImageProcessor`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from zephon_mm.errors import ConfigError
from zephon_mm.processors.image import MAX_PIXELS, Change, decode, probe, unchanged
from zephon_mm.processors.resize import (
    BICUBIC,
    BILINEAR,
    Backend,
    backend_fingerprint,
    check_resize,
    normalize,
    resize,
)
from zephon_mm.records import MediaShape

Decoding = Literal["exact", "scaled"]

# Published checkpoints: model -> (resample, sizes by patch size).
_PRESETS: dict[str, tuple[int, dict[int, tuple[int, ...]]]] = {
    "siglip-base": (BICUBIC, {16: (224, 256, 384, 512)}),
    "siglip-large": (BICUBIC, {16: (256, 384)}),
    "siglip-so400m": (BICUBIC, {14: (224, 384)}),
    "siglip2-base": (BILINEAR, {32: (256,), 16: (224, 256, 384, 512)}),
    "siglip2-large": (BILINEAR, {16: (256, 384, 512)}),
    "siglip2-so400m": (BILINEAR, {14: (224, 384), 16: (256, 384, 512)}),
    "siglip2-giant-opt": (BILINEAR, {16: (256, 384)}),
}


def preset_names() -> dict[str, tuple[int, int, int]]:
    """Return every fixed-size checkpoint: name -> (size in pixels, patch size, resample)."""
    return {
        f"{model}-patch{patch}-{size}": (size, patch, resample)
        for model, (resample, by_patch) in _PRESETS.items()
        for patch, sizes in by_patch.items()
        for size in sizes
    }


@dataclass(frozen=True)
class SigLIPProcessor:
    """Turns an encoded image into (3, height, width) uint8, as SigLIP and SigLIP 2 want it.

    Args:
        size: Side of the square in pixels, or (height, width).
        patch_size: Side of a patch in pixels; what is beyond the last whole patch has no token.
        resample: PIL's integer: 2 bilinear (SigLIP 2), 3 bicubic (SigLIP).
        backend: Whose arithmetic resizes: "torchvision", or "pillow" for the same on every CPU.
        mean: Subtracted from pixels that were scaled to [0, 1].
        std: Divides what is left.
        max_pixels: An image with more is refused, from its header.
        decode: "scaled" decodes a JPEG at 1/2, 1/4 or 1/8 of its sides where both stay at least
            twice the output's: faster for large ones, and other pixels by some 0.3 levels.

    Raises:
        ConfigError: A value that no image can be processed with.
    """

    size: int | tuple[int, int] = 384
    patch_size: int = 14
    resample: int = BICUBIC
    backend: Backend = "torchvision"
    mean: float = 0.5
    std: float = 0.5
    max_pixels: int = MAX_PIXELS
    decode: Decoding = "exact"

    pad_to: ClassVar[None] = None
    grid_key: ClassVar[None] = None

    def __post_init__(self) -> None:
        sides = self.size if isinstance(self.size, tuple) else (self.size, self.size)
        if len(sides) != 2 or not all(type(n) is int for n in (*sides, self.patch_size)):
            raise ConfigError(
                f"size must be an integer or (height, width), patch_size an integer, got "
                f"{self.size!r} and {self.patch_size!r}"
            )
        height, width = sides
        if self.patch_size < 1 or min(height, width) < self.patch_size:
            raise ConfigError(
                f"size {height} x {width} holds no patch of patch_size={self.patch_size}: "
                f"expected 1 <= patch_size <= size, such as size=384, patch_size=14"
            )
        check_resize(self.resample, self.backend)
        if self.std <= 0 or self.max_pixels < 1 or self.decode not in get_args(Decoding):
            raise ConfigError(
                f"expected std > 0, max_pixels >= 1 and decode one of {get_args(Decoding)}, got "
                f"std={self.std}, max_pixels={self.max_pixels} and decode={self.decode!r}"
            )

    @classmethod
    def preset(cls, name: str, *, backend: Backend = "torchvision") -> Self:
        """Return the processor of a published checkpoint, such as `siglip2-so400m-patch16-384`.

        Args:
            name: The checkpoint's name, with or without the `google/` in front.
            backend: As in the constructor.

        Raises:
            ConfigError: The name is not that of a fixed-size SigLIP checkpoint.
        """
        known = preset_names()
        short = name.removeprefix("google/")
        if short.endswith("-naflex"):
            raise ConfigError(
                f"{name!r} keeps aspect ratios: use NaFlexProcessor.preset({short!r}), or a "
                "checkpoint of a fixed size"
            )
        if short not in known:
            raise ConfigError(f"{name!r} is no preset, expected one of {', '.join(sorted(known))}")
        size, patch_size, resample = known[short]
        return cls(size, patch_size, resample, backend)

    @property
    def height_width(self) -> tuple[int, int]:
        """Height and width of the output in pixels."""
        return (self.size, self.size) if isinstance(self.size, int) else self.size

    @property
    def unit_shape(self) -> tuple[int, int, int]:
        """Shape of an image's pixels: (3, height, width)."""
        return (3, *self.height_width)

    def measure(self, read: Callable[[int], bytes]) -> MediaShape:
        """Return the token count and the shape (3, height, width), equal for all images.

        The header is read all the same, so that a file that is no image, or too large, is found
        before it takes a place in a sequence.

        Args:
            read: `read(n)` gives the first n bytes of the image; `read(-1)` all of it.

        Raises:
            SampleError: As `image.probe`.
        """
        probe(read, max_pixels=self.max_pixels)
        height, width = self.height_width
        tokens = (height // self.patch_size) * (width // self.patch_size)
        return MediaShape(tokens, self.unit_shape)

    def write(self, encoded: bytes, out: NDArray[np.uint8], change: Change = unchanged) -> None:
        """Decode and resize an image into `out`.

        Args:
            encoded: The complete bytes of the image.
            out: (3, height, width) uint8, C-contiguous and writable.
            change: Changes the decoded picture, (h, w, 3) uint8, and keeps its shape.

        Raises:
            SampleError: As `image.decode`. `out` is then untouched.
        """
        at_least = (2 * out.shape[1], 2 * out.shape[2]) if self.decode == "scaled" else None
        pixels = change(decode(encoded, max_pixels=self.max_pixels, at_least=at_least))
        resize(pixels, out, resample=self.resample, backend=self.backend)

    def normalize(self, pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Map pixels to the model's range: (pixels / 255 - mean) / std, computed in float32.

        Args:
            pixels: Any shape, uint8, on any device.
            dtype: The type of the result.
        """
        return normalize(pixels, dtype, mean=self.mean, std=self.std, backend=self.backend)

    def fingerprint(self) -> Mapping[str, Any]:
        """Return everything that the pixels depend on, JSON-serialisable."""
        return {
            "kind": "siglip",
            "size": list(self.height_width),
            "patch_size": self.patch_size,
            "resample": self.resample,
            "backend": self.backend,
            "mean": self.mean,
            "std": self.std,
            "max_pixels": self.max_pixels,
            "decode": self.decode,
            **backend_fingerprint(self.backend),
        }
