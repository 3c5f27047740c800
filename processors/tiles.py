"""Pictures cut into square tiles beside a global view: Idefics3, SmolVLM, nanoVLM, LLaVA-NeXT.

Laws (tests/processors/test_tiles.py):
    1. Tiles, their order and pixels equal transformers' Idefics3, SmolVLM and LlavaNext processors
       bit for bit on both backends; nanoVLM's tiles its own, its global view but for rounding.
    2. The texts of the parts equal those of transformers' Idefics3 and SmolVLM up to the closing
       token; the tokens of a LLaVA-NeXT picture are as many as its model packs.
    3. `write` fills what `measure` gives from the header alone, for every picture.

Idefics3 and its kin see each tile as an image of its own: `TileProcessor` gives parts, each with a
text that names its place. LLaVA-NeXT joins the tiles' features to one run of tokens without the
padding, a newline behind each row: `AnyResProcessor` gives one part of several units.

Cost: a 640 x 480 JPEG takes 36 ms of one core as SmolVLM's 13 tiles of 512 px (207 by Pillow), 11
as LLaVA-NeXT's 5 of 336 px. Imports: errors, records, image, resize. Used by: the engine's tasks.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, Self, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from zephon_mm.errors import ConfigError
from zephon_mm.processors.image import MAX_PIXELS, Change, Pixels, decode, probe, unchanged
from zephon_mm.processors.resize import (
    BICUBIC,
    BILINEAR,
    LANCZOS,
    Backend,
    Constant,
    backend_fingerprint,
    check_resize,
    normalize,
    resize,
    resized,
)
from zephon_mm.records import MediaShape

Fit = Literal["idefics3", "nanovlm", "nanovlm-max"]
Size = tuple[int, int]
"""(height, width) in pixels."""

_PINPOINTS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))

_PRESETS: dict[str, dict[str, Any]] = {
    "idefics3": {"size": 364, "max_side": 1456, "patch_size": 14, "scale_factor": 2},
    "smolvlm-2.2b": {"size": 384, "max_side": 1536, "patch_size": 14, "scale_factor": 3},
    "smolvlm-256m": {"size": 512, "max_side": 2048, "patch_size": 16, "scale_factor": 4},
    "nanovlm": {
        **{"fit": "nanovlm-max", "resample": BICUBIC, "backend": "pillow", "mean": 0.0, "std": 1.0},
        **{"tile_text": "<row_{row}_col_{col}>", "global_text": "<|global_image|>"},
        **{"row_break": "", "global_first": True, "closing_text": ""},
    },
}


@dataclass(frozen=True, kw_only=True)
class _Squares:
    """What both processors share: units of (3, size, size), resized and normalised alike.

    Args:
        size: Side of a tile in pixels.
        patch_size: Side of the encoder's patches in pixels; beyond the last whole one is no token.
        resample: PIL's integer: 1 Lanczos, 2 bilinear, 3 bicubic.
        backend: Whose arithmetic resizes: "torchvision", or "pillow" for the same on every CPU.
        mean: Subtracted from pixels that were scaled to [0, 1]; one, or one per channel.
        std: Divides what is left.
        max_pixels: An image with more is refused, from its header.

    Raises:
        ConfigError: A value that no picture can be processed with.
    """

    size: int = 512
    patch_size: int = 16
    resample: int = LANCZOS
    backend: Backend = "torchvision"
    mean: Constant = 0.5
    std: Constant = 0.5
    max_pixels: int = MAX_PIXELS

    pad_to: ClassVar[None] = None
    grid_key: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        check_resize(self.resample, self.backend, filters=(LANCZOS, BILINEAR, BICUBIC))
        if not 1 <= self.patch_size <= self.size or self.max_pixels < 1 or np.min(self.std) <= 0:
            raise ConfigError(f"expected 1 <= patch_size <= size, max_pixels >= 1, std > 0: {self}")

    @property
    def unit_shape(self) -> tuple[int, int, int]:
        """Shape of a tile: (3, size, size)."""
        return 3, self.size, self.size

    def normalize(self, pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Map (..., 3, size, size) uint8 to the model's range, as `resize.normalize`."""
        return normalize(pixels, dtype, mean=self.mean, std=self.std, backend=self.backend)

    def fingerprint(self) -> Mapping[str, Any]:
        """Return everything that the pixels depend on, JSON-serialisable."""
        return {"kind": type(self).__name__, **asdict(self), **backend_fingerprint(self.backend)}

    def _resized(self, pixels: Pixels, height: int, width: int) -> Pixels:
        return resized(pixels, height, width, resample=self.resample, backend=self.backend)


@dataclass(frozen=True, kw_only=True)
class TileProcessor(_Squares):
    """Cuts a picture into rows x cols tiles with a global view; each is a part with its own text.

    A picture that fits one tile is the global view alone. Further settings are `_Squares`'.
    transformers' Idefics3 and SmolVLM take `pixel_values[None]`, and leave out pictures that are
    all zero, as invalid ones are: give those another value, so that tokens and patches agree.

    Args:
        max_side: The longest side in pixels, a multiple of `size`, at most 4,096.
        scale_factor: Side of the square of patches that pixel shuffle makes one token.
        fit: "idefics3" resizes the long side to `max_side`, then each side to whole tiles, and the
            result to the global view. "nanovlm" resizes once, the long side up to whole tiles, at
            most `max_side`, and the global view bilinearly; "nanovlm-max" always to `max_side`.
        global_first: Whether the global view comes before the tiles.
        tile_text: Control text before a tile; `{row}` and `{col}` count from 1.
        global_text: Control text before the global view.
        closing_text: Control text behind the last of all.
        row_break: Text between two rows of tiles; twice between the tiles and the global view.

    Raises:
        ConfigError: A value that no image can be processed with.
    """

    max_side: int = 2048
    scale_factor: int = 4
    fit: Fit = "idefics3"
    global_first: bool = False
    tile_text: str = "<fake_token_around_image><row_{row}_col_{col}>"
    global_text: str = "<fake_token_around_image><global-img>"
    closing_text: str = "<fake_token_around_image>"
    row_break: str = "\n"

    def __post_init__(self) -> None:
        super().__post_init__()
        # Idefics3 scales what is longer than 4,096 px down again.
        if self.max_side % self.size or self.max_side % 2 or not 0 < self.max_side <= 4096:
            raise ConfigError(
                f"max_side={self.max_side}: set a multiple of {self.size}, even, <= 4096"
            )
        patches = self.size // self.patch_size
        if self.scale_factor < 1 or patches % self.scale_factor:
            raise ConfigError(
                f"scale_factor={self.scale_factor}: set a divisor of {patches} patches"
            )
        if self.fit not in get_args(Fit):
            raise ConfigError(f"fit={self.fit!r} is unknown, expected one of {get_args(Fit)}")

    @classmethod
    def preset(cls, name: str, *, backend: Backend | None = None) -> Self:
        """Return the processor of a published model.

        Args:
            name: "idefics3", "smolvlm-2.2b", "smolvlm-256m" (also the 500M) or "nanovlm".
            backend: None for the one that the model's authors use.

        Raises:
            ConfigError: There is no such preset.
        """
        if name not in _PRESETS:
            raise ConfigError(f"{name!r} is no preset, expected one of {', '.join(_PRESETS)}")
        changed: dict[str, Any] = {} if backend is None else {"backend": backend}
        return cls(**_PRESETS[name] | changed)

    def measure(self, read: Callable[[int], bytes]) -> MediaShape:
        """Return the tokens and shape of a tile, and the texts of all, from the header alone.

        Raises:
            SampleError: As `image.probe`.
        """
        header = probe(read, max_pixels=self.max_pixels)
        height, width = self._sizes(header.height_px, header.width_px)[-1]
        tokens = (self.size // self.patch_size // self.scale_factor) ** 2
        texts = self._texts(height // self.size, width // self.size)
        return MediaShape(tokens, self.unit_shape, texts, (), self.closing_text)

    def write(self, encoded: bytes, out: NDArray[np.uint8], change: Change = unchanged) -> None:
        """Decode a picture and write its tiles and global view in the order of their texts.

        Args:
            encoded: The complete bytes of the image.
            out: (parts, 3, size, size) uint8, C-contiguous and writable.
            change: Changes the decoded picture, (h, w, 3) uint8, and keeps its shape.

        Raises:
            SampleError: As `image.decode`. `out` is then untouched.
        """
        pixels = change(decode(encoded, max_pixels=self.max_pixels))
        for height, width in self._sizes(*pixels.shape[:2]):
            pixels = self._resized(pixels, height, width)
        view = 0 if self.global_first else len(out) - 1
        resample = self.resample if self.fit == "idefics3" else BILINEAR
        resize(pixels, out[view], resample=resample, backend=self.backend)
        if len(out) > 1:
            _cut(pixels, out[1:] if self.global_first else out[:-1])

    def _sizes(self, height: int, width: int) -> list[Size]:
        """Return the sizes to which a picture is resized one after another, the last in tiles."""
        wide, side = width >= height, self.max_side
        if self.fit == "idefics3":
            short = int(side / (width / height) if wide else side * (width / height))
            short = max(short + short % 2, 1)
            # The aspect is taken again, which may lose a pixel, and with it a row of tiles.
            again = int(side / (side / short) if wide else side * (short / side))
            sizes = [(short, side), (math.ceil(again / self.size) * self.size, side)]
        else:
            long, short = max(height, width), min(height, width)
            if self.fit == "nanovlm":
                side = min(side, math.ceil(long / self.size) * self.size)
            sizes = [(math.ceil(short * (side / long) / self.size) * self.size, side)]
        return sizes if wide else [(width, height) for height, width in sizes]

    def _texts(self, rows: int, cols: int) -> tuple[str, ...]:
        texts = [
            self.tile_text.replace("{row}", str(row + 1)).replace("{col}", str(col + 1))
            for row, col in np.ndindex(rows, cols)
        ]
        if len(texts) == 1:
            return (self.global_text,)
        texts[cols::cols] = [self.row_break + text for text in texts[cols::cols]]
        if self.global_first:
            return (self.global_text, 2 * self.row_break + texts[0], *texts[1:])
        return (*texts, 2 * self.row_break + self.global_text)


@dataclass(frozen=True, kw_only=True)
class AnyResProcessor(_Squares):
    """LLaVA-NeXT's "anyres": the picture squashed to a square, then tiles of it padded with black.

    Each patch is one token. Further settings are `_Squares`', with CLIP's defaults.

    Args:
        grid_pinpoints: (height, width) in pixels, multiples of `size`, of which a picture takes the
            one that shows most of it; of equal ones the smallest, then the first.

    Raises:
        ConfigError: A value that no image can be processed with.
    """

    size: int = 336
    patch_size: int = 14
    resample: int = BICUBIC
    mean: Constant = (0.48145466, 0.4578275, 0.40821073)
    std: Constant = (0.26862954, 0.26130258, 0.27577711)
    grid_pinpoints: tuple[Size, ...] = _PINPOINTS

    grid_key: ClassVar[str | None] = "image_sizes"

    def __post_init__(self) -> None:
        super().__post_init__()
        sides = [side for pinpoint in self.grid_pinpoints for side in pinpoint]
        if not sides or any(side < 1 or side % self.size for side in sides):
            raise ConfigError(f"grid_pinpoints={self.grid_pinpoints}: set multiples of {self.size}")

    def measure(self, read: Callable[[int], bytes]) -> MediaShape:
        """Return tokens, shape (1 + tiles, 3, size, size) and (height, width) from the header.

        Raises:
            SampleError: As `image.probe`.
        """
        header = probe(read, max_pixels=self.max_pixels)
        height, width = header.height_px, header.width_px
        rows, cols = (side // self.size for side in self._pinpoint(height, width))
        tokens = self._tokens(height, width, rows, cols)
        return MediaShape(tokens, (1 + rows * cols, *self.unit_shape), grid=(height, width))

    def write(self, encoded: bytes, out: NDArray[np.uint8], change: Change = unchanged) -> None:
        """Decode a picture and write the squashed view, then its tiles, row by row.

        Args:
            encoded: The complete bytes of the image.
            out: (1 + tiles, 3, size, size) uint8, C-contiguous and writable.
            change: Changes the decoded picture, (h, w, 3) uint8, and keeps its shape.

        Raises:
            SampleError: As `image.decode`. `out` is then untouched.
        """
        pixels = change(decode(encoded, max_pixels=self.max_pixels))
        resize(pixels, out[0], resample=self.resample, backend=self.backend)
        height, width = pixels.shape[:2]
        rows, cols = self._pinpoint(height, width)
        scale = min(rows / height, cols / width)
        height, width = min(math.ceil(height * scale), rows), min(math.ceil(width * scale), cols)
        top, left = (rows - height) // 2, (cols - width) // 2
        canvas = np.zeros((rows, cols, 3), np.uint8)
        canvas[top : top + height, left : left + width] = self._resized(pixels, height, width)
        _cut(canvas, out[1:])

    def _pinpoint(self, height: int, width: int) -> Size:
        """Return the pinpoint that shows most pixels; of equal ones the one that wastes least."""

        def rank(target: Size) -> Size:
            scale = min(target[1] / width, target[0] / height)
            shown = min(int(width * scale) * int(height * scale), width * height)
            return -shown, target[0] * target[1]

        return min(self.grid_pinpoints, key=rank)

    def _tokens(self, height: int, width: int, rows: int, cols: int) -> int:
        """Return the patches of the view, those of the tiles without padding, and newlines."""
        patches = self.size // self.patch_size
        rows, cols = rows * patches, cols * patches
        # The model removes an even number of rows or columns, rounded as here.
        if width / height > cols / rows:
            rows -= (rows - int(round(height * (cols / width), 7))) // 2 * 2
        else:
            cols -= (cols - int(round(width * (rows / height), 7))) // 2 * 2
        return patches**2 + rows * (cols + 1)


def _cut(pixels: Pixels, out: NDArray[np.uint8]) -> None:
    """Write the tiles of (h, w, 3) pixels row by row into `out`, (tiles, 3, size, size)."""
    size = out.shape[-1]
    tiles = pixels.reshape(-1, size, pixels.shape[1] // size, size, 3).transpose(0, 2, 4, 1, 3)
    out.reshape(tiles.shape)[...] = tiles
