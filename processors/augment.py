"""Change a picture at random, the same way each time for the same key: crop, flip, colours.

Laws (tests/processors/test_augment.py):
    1. What is drawn depends on the settings and the key alone, and one setting does not change
       what is drawn for another. The pixels depend on nothing else, not on the number of threads.
    2. A picture keeps its size: a crop is enlarged again. So token counts and shapes stay what
       they were measured from the header.
    3. Boxes and points move with what they mark.

Places are in pixels of the picture, x before y, from the outer corner of the first pixel: pixel i
is [i, i + 1). Pixels are changed by torchvision's v2 operators, except contrast, whose mean is
summed here in integers: torchvision's depends on the number of threads (seen).

Cost: a megapixel takes 8 ms to crop, 10 a colour, 90 hue; the first picture a second, to import
torchvision. Imports: errors, rng. Used by: image processors.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from zephon_mm.errors import ConfigError
from zephon_mm.rng import Stream

Size = tuple[int, int]
"""Height and width in pixels."""
Places = NDArray[np.float64]

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


def move_points(points: ArrayLike, size: Size, drawn: Drawn) -> Places:
    """Return where `apply` moves points, (n, 2) float64; outside the picture if cut away.

    Args:
        points: (n, 2), x and y.
        size: Of the picture.
        drawn: What `Augment.draw` gave.
    """
    top, left, height, width = window(size, drawn)
    x, y = np.asarray(points, dtype=np.float64).reshape(-1, 2).T
    x, y = (x - left) * (size[1] / width), (y - top) * (size[0] / height)
    return np.stack((size[1] - x if drawn.flip else x, y), axis=1)


def move_boxes(boxes: ArrayLike, size: Size, drawn: Drawn) -> Places:
    """Return where `apply` moves boxes, (n, 4) float64, cut at the edges of the picture.

    A box that is cut away has no width or no height.

    Args:
        boxes: (n, 4), left, top, right and bottom.
        size: Of the picture.
        drawn: What `Augment.draw` gave.
    """
    moved = _boxes(move_points(boxes, size, drawn))
    return np.clip(moved, 0, (size[1], size[0], size[1], size[0]))


def turn_points(points: ArrayLike, stored_size: Size, orientation: int) -> Places:
    """Return points of a stored picture in the upright one, (n, 2) float64.

    Args:
        points: (n, 2), x and y.
        stored_size: Of the picture before it is turned.
        orientation: EXIF's, 1..8, as in `ImageHeader`.
    """
    x, y = np.asarray(points, dtype=np.float64).reshape(-1, 2).T
    height, width = stored_size
    if orientation >= 5:
        x, y, height, width = y, x, width, height
    if orientation in (3, 4, 7, 8):
        y = height - y
    if orientation in (2, 3, 6, 7):
        x = width - x
    return np.stack((x, y), axis=1)


def turn_boxes(boxes: ArrayLike, stored_size: Size, orientation: int) -> Places:
    """Return boxes of a stored picture in the upright one, (n, 4) float64; as `turn_points`."""
    return _boxes(turn_points(boxes, stored_size, orientation))


def scale_places(places: ArrayLike, size: Size, new_size: Size) -> Places:
    """Return points (n, 2) or boxes (n, 4) of a picture in the same one resized, float64."""
    found: Places = np.array(places, dtype=np.float64)
    found[:, 0::2] *= new_size[1] / size[1]
    found[:, 1::2] *= new_size[0] / size[0]
    return found


def _boxes(corners: Places) -> Places:
    """Return boxes, (n, 4), of two opposite corners each, (2 n, 2)."""
    pairs = corners.reshape(-1, 2, 2)
    return np.concatenate((pairs.min(axis=1), pairs.max(axis=1)), axis=1)
