"""Change a picture at random, the same way each time for the same key: crop, flip, colours.

Laws (tests/processors/test_augment.py):
    1. What is drawn depends on the settings and the key alone, and one setting does not change
       what is drawn for another. The pixels depend on nothing else, not on the number of threads.
    2. A picture keeps its size: a crop is enlarged again. So token counts and shapes stay what
       they were measured from the header.

Boxes and points follow in `marks`. Pixels are changed by torchvision's v2 operators, except
contrast, whose mean is summed here in integers: torchvision's depends on the number of threads
(seen).

Cost: a megapixel takes 8 ms to crop, 10 a colour, 90 hue; the first picture a second, to import
torchvision. Imports: errors, rng. Used by: marks, ops.interleave, the engine's tasks.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from zephon_mm.errors import ConfigError
from zephon_mm.rng import Stream

Size = tuple[int, int]
"""Height and width in pixels."""

_LUMA = (299, 587, 114)  # of red, green and blue


class Drawn(NamedTuple):
    """What happens to one picture, in this order; the defaults change nothing.

    `side` is the share of both sides that is kept, in (0, 1]; `x` and `y`, in [0, 1), say where.
    `brightness`, `contrast` and `saturation` are factors; `hue` is a turn of the colour circle.
    """

    side: float = 1.0
    x: float = 0.0
    y: float = 0.0
    flip: bool = False
    brightness: float = 1.0
    contrast: float = 1.0
    saturation: float = 1.0
    hue: float = 0.0


@dataclass(frozen=True)
class Augment:
    """What may happen to a picture; the defaults change nothing.

    Args:
        crop: Least and greatest share of the area that is kept, 0 < least <= greatest <= 1. The
            aspect ratio stays.
        flip: Chance of being mirrored, left to right.
        brightness: Its factor is drawn from [1 - brightness, 1 + brightness]; in [0, 1].
        contrast: Likewise.
        saturation: Likewise.
        hue: Its turn is drawn from [-hue, hue]; in [0, 0.5], where 0.5 is half the circle.

    Raises:
        ConfigError: A value outside its range.
    """

    crop: tuple[float, float] = (1.0, 1.0)
    flip: float = 0.0
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0

    def __post_init__(self) -> None:
        least, greatest = self.crop
        shares = (self.flip, self.brightness, self.contrast, self.saturation, 2 * self.hue)
        if not 0 < least <= greatest <= 1 or not all(0 <= share <= 1 for share in shares):
            raise ConfigError(
                f"found {self}, expected crop=(least, greatest) with 0 < least <= greatest <= 1, "
                "hue in [0, 0.5] and all others in [0, 1]"
            )

    def draw(self, *key: int | str) -> Drawn:
        """Return what happens to the picture of this key, such as `(seed, pass, shard, row)`."""
        area, x, y, mirror, *turns = Stream("augment", *key).uniform(8).tolist()
        side = math.sqrt(self.crop[0] + area * (self.crop[1] - self.crop[0]))
        strengths = (self.brightness, self.contrast, self.saturation, self.hue)
        turns = [by * (2 * turn - 1) for by, turn in zip(strengths, turns, strict=True)]
        return Drawn(
            side, x, y, mirror < self.flip, 1 + turns[0], 1 + turns[1], 1 + turns[2], turns[3]
        )

    def fingerprint(self) -> Mapping[str, Any]:
        """Return everything that the pixels depend on, JSON-serialisable."""
        return {
            "kind": "augment",
            **vars(self),
            "crop": list(self.crop),
            "torchvision": version("torchvision"),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        }


def apply(pixels: NDArray[np.uint8], drawn: Drawn) -> NDArray[np.uint8]:
    """Return the changed picture, of the same shape; a view of it where nothing changes.

    Args:
        pixels: (h, w, 3) uint8 RGB, writable; it is not written to.
        drawn: What `Augment.draw` gave.
    """
    # Imported here, as it takes a second that only those pay who augment.
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.v2 import functional

    image, size = torch.from_numpy(pixels).permute(2, 0, 1), (pixels.shape[0], pixels.shape[1])
    kept = window(size, drawn)
    if kept != (0, 0, *size):  # bicubic, as its result in bytes is the same on every CPU
        image = functional.resized_crop(image, *kept, list(size), InterpolationMode.BICUBIC)
    if drawn.flip:
        image = functional.horizontal_flip(image)
    for change, factor, neutral in (
        (functional.adjust_brightness, drawn.brightness, 1),
        (_adjust_contrast, drawn.contrast, 1),
        (functional.adjust_saturation, drawn.saturation, 1),
        (functional.adjust_hue, drawn.hue, 0),
    ):
        image = image if factor == neutral else change(image, factor)
    return np.ascontiguousarray(image.permute(1, 2, 0).numpy())


def _adjust_contrast(image: torch.Tensor, factor: float) -> torch.Tensor:
    sums = image.sum(dim=(1, 2), dtype=torch.int64).tolist()
    mean = float(np.dot(sums, _LUMA)) / (sum(_LUMA) * image[0].numel())
    return image.mul(factor).add_((1 - factor) * mean).clamp_(0, 255).to(torch.uint8)


def window(size: Size, drawn: Drawn) -> tuple[int, int, int, int]:
    """Return top, left, height and width of what is kept of a picture, in its pixels."""
    height, width = (max(1, round(side * drawn.side)) for side in size)
    top, left = int(drawn.y * (size[0] - height + 1)), int(drawn.x * (size[1] - width + 1))
    return top, left, height, width
