"""Resize pictures and map pixels to a model's range, exactly as transformers' processors do.

Laws (tests/processors/test_siglip.py, test_naflex.py):
    1. backend "torchvision" equals transformers' processors on torchvision bit for bit, "pillow"
       its `...Pil` processors: the resized uint8 pixels and the normalised float32 values.
    2. The layout of `out` does not change the pixels.

"torchvision" is 5 times faster; its bilinear filter depends on the CPU's vector instructions, so
those are part of the fingerprint. "pillow" is integer arithmetic, the same on every CPU.

The operators of PyTorch that torchvision ends up in are called directly: they read the decoder's
(height, width, 3) array in place and write planes where the batch wants them, without a copy, and
importing torchvision takes a second.

Cost: 0.7 ms from 640 x 480 to 384 x 384; an `out` whose memory is (height, width, 3) saves 20 %.
Imports: errors. Used by: the processors of this folder.
"""

import platform
from typing import Literal, get_args

import numpy as np
import PIL
import simplejpeg
import torch
from numpy.typing import NDArray
from PIL import Image

from zephon_mm.errors import ConfigError

Backend = Literal["torchvision", "pillow"]
Constant = float | tuple[float, float, float]

LANCZOS = int(Image.Resampling.LANCZOS)
BILINEAR = int(Image.Resampling.BILINEAR)
BICUBIC = int(Image.Resampling.BICUBIC)

_FILTERS = {LANCZOS: "lanczos", BILINEAR: "bilinear", BICUBIC: "bicubic"}


def check_resize(
    resample: int, backend: str, *, filters: tuple[int, ...] = (BILINEAR, BICUBIC)
) -> None:
    """Refuse settings that a processor with these filters does not have.

    Raises:
        ConfigError: An unknown filter or backend, or a PyTorch that lacks the filter.
    """
    if resample not in filters:
        known = ", ".join(f"{one} ({_FILTERS[one]})" for one in filters)
        raise ConfigError(f"resample={resample!r} is not supported, expected one of {known}")
    if backend not in get_args(Backend):
        raise ConfigError(f"backend={backend!r} is unknown, expected one of {get_args(Backend)}")
    if backend == "torchvision" and not hasattr(torch.ops.aten, _operator(resample)):
        raise ConfigError(
            f"PyTorch {torch.__version__} cannot filter with resample={resample}: install a newer "
            "one, or set backend='pillow'"
        )


def resize(
    pixels: NDArray[np.uint8], out: NDArray[np.uint8], *, resample: int, backend: Backend
) -> None:
    """Resize a picture into `out`, without crop, with antialias; of equal size, copy it.

    Args:
        pixels: (h, w, 3) uint8, writable, of any strides that are not negative.
        out: (3, height, width) uint8, likewise; a region of a larger array costs a copy. For pixels
            with the channels last give the transpose(2, 0, 1) of a (height, width, 3) array.
        resample: PIL's integer: 1 Lanczos, 2 bilinear, 3 bicubic.
        backend: "torchvision" or "pillow".
    """
    height, width = out.shape[1:]
    if pixels.shape[:2] == (height, width):
        out[...] = pixels.transpose(2, 0, 1)
    elif backend == "pillow":
        resized = Image.fromarray(pixels).resize((width, height), resample)
        out[...] = np.asarray(resized).transpose(2, 0, 1)
    else:
        _resize_torch(pixels, out, resample)


def resized(
    pixels: NDArray[np.uint8], height: int, width: int, *, resample: int, backend: Backend
) -> NDArray[np.uint8]:
    """Return a picture of (height, width, 3), the layout that is resized fastest; as `resize`."""
    found = np.empty((height, width, 3), dtype=np.uint8)
    resize(pixels, found.transpose(2, 0, 1), resample=resample, backend=backend)
    return found


def normalize(
    pixels: torch.Tensor, dtype: torch.dtype, *, mean: Constant, std: Constant, backend: Backend
) -> torch.Tensor:
    """Return (pixels / 255 - mean) / std, computed in float32 as the backend's processors do.

    Args:
        pixels: uint8 on any device: any shape, or (..., 3, height, width) with three constants.
        dtype: The type of the result.
        mean: Subtracted from pixels that were scaled to [0, 1]; one, or one per channel.
        std: Divides what is left.
        backend: "torchvision" or "pillow".
    """

    # Constants are tensors on the device: by a Python number CUDA multiplies with a rounded
    # reciprocal instead of dividing. `full` does not wait for the device, `tensor` would.
    def constant(value: Constant) -> torch.Tensor:
        if isinstance(value, tuple):
            return torch.stack([constant(one).expand(1, 1) for one in value])
        return torch.full((), value, dtype=torch.float32, device=pixels.device)

    if backend == "pillow":
        values = pixels.to(torch.float64).mul_(1 / 255).to(torch.float32)
        return values.sub_(constant(mean)).div_(constant(std)).to(dtype)
    values = pixels.to(torch.float32)
    return values.sub_(constant(mean).mul_(255)).div_(constant(std).mul_(255)).to(dtype)


def backend_fingerprint(backend: Backend) -> dict[str, str]:
    """Return the versions that decoded and resized pixels depend on, and the CPU's class."""
    found = {"pillow": PIL.__version__, "simplejpeg": simplejpeg.__version__}
    if backend == "torchvision":
        found["torch"] = str(torch.__version__)
        found["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    return found


def _resize_torch(pixels: NDArray[np.uint8], out: NDArray[np.uint8], resample: int) -> None:
    source = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    target = torch.from_numpy(out)[None]
    operator = getattr(torch.ops.aten, _operator(resample))
    in_bytes = resample != BILINEAR or _resizes_bytes()
    # Into a region of a larger array the byte kernels would write across its borders.
    dense = target.is_contiguous() or target.is_contiguous(memory_format=torch.channels_last)
    if in_bytes and dense:
        operator.out(source, out.shape[1:], False, None, None, out=target)
        return
    if not in_bytes:
        source = source.to(torch.float32, memory_format=torch.contiguous_format)
    target.copy_(operator(source, out.shape[1:], False, None, None).round_())


def _operator(resample: int) -> str:
    return f"_upsample_{_FILTERS[resample]}2d_aa"


def _resizes_bytes() -> bool:
    """Say whether torchvision filters bilinearly in uint8 here, rather than in float32."""
    fast = ("AVX2", "AVX512", "aarch64", "arm64")
    return torch.backends.cpu.get_cpu_capability() in fast or platform.machine() in fast
