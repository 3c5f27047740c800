"""Scaled against exact decoding of large JPEGs: `python -m benchmarks.decode`.

Each line is `SigLIPProcessor.write` (decode and resize to 384 x 384) of one 4:3 picture, exact and
scaled in turn: the sides that are decoded, the median CPU times of one thread, exact / scaled, and
how far the pixels are from the exact ones, in levels. Where all is decoded the ratio is noise;
elsewhere, below 1 it would be a size at which "scaled" does not pay.

"sharp" is a mosaic of the photographs in scikit-image and scikit-learn, pixel by pixel: more detail
than a camera gives; "smooth" is one of them enlarged, which is less.

Imports: processors. Writes nothing.
"""

import io
import time
from statistics import median

import numpy as np
import skimage.data
import torch
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_sample_images

from zephon_mm.processors import SigLIPProcessor
from zephon_mm.processors.image import decode

SIDE_PX = 384
TILE_PX = 400
ROUNDS = 5
MEGAPIXELS = (2, 4, 6, 8, 12, 24)
EXACT, SCALED = (SigLIPProcessor(SIDE_PX, decode=how) for how in ("exact", "scaled"))


def sharp(height: int, width: int) -> NDArray[np.uint8]:
    """Return a mosaic of photographs, (height, width, 3) uint8."""
    photos = [getattr(skimage.data, name)() for name in ("astronaut", "coffee", "rocket", "retina")]
    tiles = [photo[:TILE_PX, :TILE_PX] for photo in (*photos, *load_sample_images().images)]
    rows, columns = -(-height // TILE_PX), -(-width // TILE_PX)
    lines = [
        np.hstack([tiles[(4 * row + column) % len(tiles)] for column in range(columns)])
        for row in range(rows)
    ]
    return np.vstack(lines)[:height, :width]


def smooth(height: int, width: int) -> NDArray[np.uint8]:
    """Return one photograph enlarged, (height, width, 3) uint8."""
    photo = Image.fromarray(load_sample_images().images[0])
    return np.asarray(photo.resize((width, height), Image.Resampling.BICUBIC))


def measure(encoded: bytes) -> tuple[float, float, float]:
    """Return the median milliseconds, exact and scaled, and the mean difference in levels."""
    pixels = np.zeros((2, 3, SIDE_PX, SIDE_PX), dtype=np.uint8)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for processor, out, found in zip((EXACT, SCALED), pixels, times, strict=True):
            start = time.process_time()
            processor.write(encoded, out)
            found.append((time.process_time() - start) * 1e3)
    levels = float(np.abs(np.diff(pixels.astype(int), axis=0)).mean())
    return median(times[0]), median(times[1]), levels


def report(name: str, megapixels: int, *, progressive: bool) -> None:
    """Print a line."""
    height = round((megapixels * 1e6 * 3 / 4) ** 0.5 / 8) * 8
    picture = {"sharp": sharp, "smooth": smooth}[name](height, round(height / 6) * 8)
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "JPEG", quality=90, progressive=progressive)
    encoded = buffer.getvalue()
    shape = decode(encoded, at_least=(2 * SIDE_PX, 2 * SIDE_PX)).shape
    exact, scaled, levels = measure(encoded)
    print(
        f"{name:6}  {'progressive' if progressive else 'baseline':11}  {megapixels:2}  "
        f"{shape[1]:4} x {shape[0]:4}  {exact:8.1f}  {scaled:9.1f}  {exact / scaled:5.2f}  "
        f"{levels:6.2f}"
    )


def main() -> None:
    """Print a table."""
    torch.set_num_threads(1)
    print("picture              MP  decoded      exact ms  scaled ms  ratio  levels")
    for name, progressive in (("sharp", False), ("smooth", False), ("sharp", True)):
        for megapixels in MEGAPIXELS:
            report(name, megapixels, progressive=progressive)


if __name__ == "__main__":
    main()
