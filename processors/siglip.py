"""SigLIP's fixed-size input: one image, squashed to height x width, no crop.

Laws (tests/processors/test_siglip.py):
    1. backend "torchvision" equals transformers' SiglipImageProcessor bit for bit, "pillow" its
       SiglipImageProcessorPil: the resized uint8 pixels and the normalised float32 values.
    2. `write` fills the shape that `measure` gives, for every image.
    3. No state: the same bytes give the same pixels in any order, thread and process.

"torchvision" is 5 times faster; its bilinear filter depends on the CPU's vector instructions, so
those are part of the fingerprint. "pillow" is integer arithmetic, the same on every CPU.

The operators of PyTorch that torchvision ends up in are called directly: they read the decoder's
(height, width, 3) array in place and write planes where the batch wants them, without a copy, and
importing torchvision takes a second.

Cost: a 640 x 480 JPEG takes 1.8 ms of one core: 1.0 to decode, 0.7 to resize.
Imports: errors, records, image. Used by: the engine's tasks, through `protocols.ImageProcessor`.
"""

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import numpy as np
import PIL
import simplejpeg
import torch
from numpy.typing import NDArray
from PIL import Image

from zephon_mm.errors import ConfigError
from zephon_mm.processors.image import MAX_PIXELS, decode, probe
from zephon_mm.records import MediaShape

Backend = Literal["torchvision", "pillow"]

BILINEAR = int(Image.Resampling.BILINEAR)
BICUBIC = int(Image.Resampling.BICUBIC)

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
        if self.resample not in (BILINEAR, BICUBIC):
            raise ConfigError(
                f"resample={self.resample!r} is not supported, expected {BILINEAR} (bilinear, "
                f"SigLIP 2) or {BICUBIC} (bicubic, SigLIP)"
            )
        if self.backend not in get_args(Backend):
            raise ConfigError(
                f"backend={self.backend!r} is unknown, expected one of {get_args(Backend)}"
            )
        if self.std <= 0 or self.max_pixels < 1:
            raise ConfigError(
                f"expected std > 0 and max_pixels >= 1, got std={self.std} and "
                f"max_pixels={self.max_pixels}"
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
                f"{name!r} keeps aspect ratios (NaFlex), which is not supported yet: use a preset "
                "of a fixed size"
            )
        if short not in known:
            raise ConfigError(f"{name!r} is no preset, expected one of {', '.join(sorted(known))}")
        size, patch_size, resample = known[short]
        return cls(size, patch_size, resample, backend)

    @property
    def height_width(self) -> tuple[int, int]:
        """Height and width of the output in pixels."""
        return (self.size, self.size) if isinstance(self.size, int) else self.size

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
        return MediaShape(tokens, (3, height, width))

    def write(self, encoded: bytes, out: NDArray[np.uint8]) -> None:
        """Decode and resize an image into `out`.

        Args:
            encoded: The complete bytes of the image.
            out: (3, height, width) uint8, C-contiguous and writable.

        Raises:
            SampleError: As `image.decode`. `out` is then untouched.
        """
        pixels = decode(encoded, max_pixels=self.max_pixels)
        if pixels.shape[:2] == out.shape[1:]:
            out[...] = pixels.transpose(2, 0, 1)
        elif self.backend == "pillow":
            height, width = out.shape[1:]
            resized = Image.fromarray(pixels).resize((width, height), self.resample)
            out[...] = np.asarray(resized).transpose(2, 0, 1)
        else:
            _resize_torch(pixels, out, self.resample)

    def normalize(self, pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Map pixels to the model's range: (pixels / 255 - mean) / std, computed in float32.

        Args:
            pixels: Any shape, uint8, on any device.
            dtype: The type of the result.
        """

        # Constants are tensors on the device: by a Python number CUDA multiplies with a rounded
        # reciprocal instead of dividing.
        def constant(value: float) -> torch.Tensor:
            return torch.full((), value, dtype=torch.float32, device=pixels.device)

        if self.backend == "pillow":
            values = pixels.to(torch.float64).mul_(1 / 255).to(torch.float32)
            return values.sub_(constant(self.mean)).div_(constant(self.std)).to(dtype)
        values = pixels.to(torch.float32)
        mean, std = constant(self.mean).mul_(255), constant(self.std).mul_(255)
        return values.sub_(mean).div_(std).to(dtype)

    def fingerprint(self) -> Mapping[str, Any]:
        """Return everything that the pixels depend on, JSON-serialisable."""
        found: dict[str, Any] = {
            "kind": "siglip",
            "size": list(self.height_width),
            "patch_size": self.patch_size,
            "resample": self.resample,
            "backend": self.backend,
            "mean": self.mean,
            "std": self.std,
            "max_pixels": self.max_pixels,
            "pillow": PIL.__version__,
            "simplejpeg": simplejpeg.__version__,
        }
        if self.backend == "torchvision":
            found["torch"] = str(torch.__version__)
            found["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
        return found


def _resize_torch(pixels: NDArray[np.uint8], out: NDArray[np.uint8], resample: int) -> None:
    """Resize (h, w, 3) into (3, height, width) as torchvision does on CPU, with antialias."""
    source = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    target = torch.from_numpy(out)[None]
    size = list(out.shape[1:])
    if resample == BICUBIC:
        torch.ops.aten._upsample_bicubic2d_aa.out(source, size, False, None, None, out=target)
    elif _resizes_bytes():
        torch.ops.aten._upsample_bilinear2d_aa.out(source, size, False, None, None, out=target)
    else:
        values = source.to(torch.float32, memory_format=torch.contiguous_format)
        scaled = torch.ops.aten._upsample_bilinear2d_aa(values, size, False, None, None)
        target.copy_(scaled.round_())


def _resizes_bytes() -> bool:
    """Say whether torchvision filters bilinearly in uint8 here, rather than in float32."""
    fast = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return fast or platform.machine() in ("aarch64", "arm64")
