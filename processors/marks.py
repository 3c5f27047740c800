"""Boxes and points that a document marks in its pictures: checked, counted, moved with the pixels.

What a model is given of them are fractions, 0 to 1, of the picture that it sees: turned upright,
cropped and mirrored as the pixels are. So they hold at any resolution, and for every processor,
since each of ours squashes all of that picture: to a square, to whole patches, to the tiles
together and to the view beside them. Where a picture is cut into tiles, they are fractions of the
view that shows the whole; the black bars of LLaVA-NeXT's tiles, which its model removes, are none
of it.

Laws (tests/processors/test_marks.py):
    1. A mark is where its pixels are, for any orientation, crop, mirroring and processor.
    2. Every mark keeps its place in its list: a box is cut at the edges, to no width or no height
       where nothing of it is left; a point that was cut away lies outside 0 to 1.
    3. The same on every CPU: sums, products and quotients of float64, without a zero's sign.

Cost: for an image with 4 boxes 6 us to count and 20 to move them; the sample is read again where
the image is decoded. Imports: errors, records, augment, header. Used by:
ops.interleave, the engine's tasks.
"""

import numpy as np
from numpy.typing import NDArray

from zephon_mm.errors import SampleError
from zephon_mm.processors.augment import Drawn, Size, window
from zephon_mm.processors.header import ImageHeader
from zephon_mm.records import Image

_FAR = 2.0**32  # that a picture reaches, by far
_SIZES = {"boxes": ("(left, top, right, bottom)", 4), "points": ("(x, y)", 2)}


def count_marks(image: Image) -> tuple[int, ...]:
    """Return how many boxes and points an image has; nothing where it has none.

    Raises:
        SampleError: `bad_field`: some are no finite numbers, or too few, or out of order.
    """
    if not image.boxes and not image.points:
        return ()
    _corners(image)
    return len(image.boxes), len(image.points)


def shown_marks(image: Image, header: ImageHeader, size: Size, drawn: Drawn) -> NDArray[np.float32]:
    """Return where a model sees boxes, and behind them points as boxes without extent.

    Args:
        image: Has some.
        header: Of its bytes.
        size: Of the picture that was augmented: the upright one, or that made smaller.
        drawn: What `Augment.draw` gave.

    Returns:
        (boxes + points, 4) float32: left, top, right and bottom, as fractions.

    Raises:
        SampleError: As `count_marks`.
    """
    x, y = _corners(image).reshape(-1, 2).T
    height, width = header.height_px, header.width_px
    if not image.upright:
        if header.orientation >= 5:
            x, y = y, x
        if header.orientation in (3, 4, 7, 8):
            y = height - y
        if header.orientation in (2, 3, 6, 7):
            x = width - x
    top, left, rows, columns = window(size, drawn)
    x = (x * (size[1] / width) - left) / columns
    y = (y * (size[0] / height) - top) / rows
    pairs = np.stack((1 - x if drawn.flip else x, y), axis=1).reshape(-1, 2, 2)
    found = np.concatenate((pairs.min(axis=1), pairs.max(axis=1)), axis=1)
    boxes = found[: len(image.boxes)]
    np.clip(boxes, 0, 1, out=boxes)
    return found.astype(np.float32) + np.float32(0)


def _corners(image: Image) -> NDArray[np.float64]:
    """Return two opposite corners of each mark, (n, 4): those of a point are the same."""
    found = []
    for name, (form, size) in _SIZES.items():
        given = getattr(image, name)
        if not given:
            continue
        try:
            marks = np.array(given, dtype=np.float64)
        except (TypeError, ValueError, OverflowError):
            marks = np.empty(0)
        sound = marks.shape == (len(given), size) and (np.abs(marks) < _FAR).all()
        if not sound or (marks[:, :2] > marks[:, -2:]).any():
            raise SampleError(
                "bad_field",
                f"found {name} {repr(given)[:200]}, expected each as {form} in pixels, finite "
                "numbers below 2**32, left <= right and top <= bottom",
            )
        found.append(np.concatenate((marks[:, :2], marks[:, -2:]), axis=1))
    return np.concatenate(found)
