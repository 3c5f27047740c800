"""Decode an encoded image to one upright RGB picture.

Laws (tests/processors/test_image.py and test_image_scaled.py hold a test for each):
    1. The same bytes give the same pixels, in every process and thread, and `probe` knows their
       size from the header.
    2. JPEG is decoded by simplejpeg, which equals Pillow bit for bit; what it refuses, CMYK, and
       every other format is Pillow's, whose answer is final.
    3. EXIF orientation is applied; alpha is composited on white; 16-bit samples are `>> 8`, but
       those of a colour PPM are rounded; CMYK follows Adobe's polarity, with or without the marker;
       an animation is its first frame; a colour profile and gamma are ignored.
    4. Damaged or cut data is a `SampleError`, never grey filling. A JPEG that lacks only its end
       marker counts as cut: a decoder cannot tell it from one that lacks pixels.
    5. Metadata loses no picture: broken EXIF, profiles and text chunks are not read at all.
    6. Scaled decoding refuses the same bytes as exact decoding, looks like the whole picture made
       smaller, and moves nothing: sides are divided without a remainder.

A JPEG holds blocks of 8 x 8 frequencies, of which libjpeg can transform the low ones alone: a
picture of 1/2, 1/4 or 1/8 the sides. Where it may, that pays at any size: 1.4 to 1.6 times at 4 to
12 megapixels, 1.1 if progressive (benchmarks/decode.py). Of libjpeg's other fractions 5/8 to 7/8
are as slow as the whole picture or slower, and 3/8 is as fast as 1/2 and further from it. Without
the remainder rule a side of 2065 would be 1033, half a pixel too far: 2.2 levels instead of 0.5.

Cost: what the codec takes, and 10 us. Imports: errors, formats, header. Used by: the processors.
"""

import math
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, ImageFile, TiffImagePlugin

from zephon_mm.errors import ConfigError, SampleError
from zephon_mm.processors.formats import open_pillow
from zephon_mm.processors.header import (
    MAX_PIXELS,
    ImageHeader,
    header_of,
    is_frame_header,
    jpeg_segments,
    png_chunks,
    probe,
)

__all__ = ["MAX_PIXELS", "ImageHeader", "decode", "probe"]

Pixels = NDArray[np.uint8]
Change = Callable[[Pixels], Pixels]
"""What an augmentation does to a decoded picture."""

_WHITE = (255, 255, 255, 255)
_ALPHA_MODES = ("LA", "PA", "RGBA", "RGBa")
_KEEP_JPEG = (0xE0, 0xEE)  # JFIF and Adobe markers, which say how the colours are stored
_SCALES = (2, 4, 8)  # sides of a scaled JPEG are divided by one of these
_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type
_TIFF_TAGS = {"BitsPerSample": 258, "PhotometricInterpretation": 262, "PlanarConfiguration": 284}
# The passes of an interlaced PNG: first column and row, step in columns and rows.
_ADAM7 = (
    *((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4)),
    *((0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)),
)


def unchanged(pixels: Pixels) -> Pixels:
    """Return the picture as it is."""
    return pixels


def decode(
    encoded: bytes, *, max_pixels: int = MAX_PIXELS, at_least: tuple[int, int] | None = None
) -> Pixels:
    """Return the upright picture, (height, width, 3) uint8 RGB, contiguous and writable.

    Args:
        encoded: The complete bytes of one image.
        max_pixels: The most pixels that it may have, inclusive; checked before memory is taken.
        at_least: (height, width) that suffice, upright, from 1. A JPEG that stays as large when its
            sides are divided by 8, 4 or 2, without a remainder, is decoded so. None: in full.

    Raises:
        SampleError: As `probe`, or `broken_image`, `unsupported_pixels`.
    """
    header = header_of(encoded, max_pixels=max_pixels)
    scale = 1 if at_least is None else _scale_of(header, at_least)
    pixels = _upright(_stored(encoded, header, scale), header.orientation)
    height, width = header.height_px, header.width_px
    if pixels.shape[:2] not in ((height, width), (height // scale, width // scale)):
        raise SampleError(
            "broken_image",
            f"the {header.format} header promises {header.width_px} x {header.height_px} pixels, "
            f"its body gives {pixels.shape[1]} x {pixels.shape[0]}",
        )
    return pixels


def _scale_of(header: ImageHeader, at_least: tuple[int, int]) -> int:
    """Return what the sides may be divided by: 1, 2, 4 or 8."""
    if header.format != "JPEG":
        return 1
    most = min(header.height_px // at_least[0], header.width_px // at_least[1])
    sides = math.gcd(header.height_px, header.width_px)
    return max((scale for scale in _SCALES if scale <= most and sides % scale == 0), default=1)


def _stored(encoded: bytes, header: ImageHeader, scale: int) -> Pixels:
    """Return the pixels as they are stored, before they are turned upright."""
    if header.format == "JPEG" and header.components in (1, 3):
        least = (header.height_px // scale, header.width_px // scale) if scale > 1 else (0, 0)
        height, width = least[::-1] if header.orientation >= 5 else least
        try:
            pixels: Pixels = simplejpeg.decode_jpeg(
                encoded, "RGB", min_height=height, min_width=width, min_factor=scale
            )
        except ValueError:
            pass  # it is strict; Pillow decides
        else:
            return pixels
    if ImageFile.LOAD_TRUNCATED_IMAGES:
        raise ConfigError(
            "PIL.ImageFile.LOAD_TRUNCATED_IMAGES is True, which fills damaged images with grey; "
            "set it to False: damaged images are skipped and counted by zephon_mm"
        )
    try:
        with open_pillow(_without_metadata(encoded, header.format), header.format) as image:
            image.load()
            if header.format == "PNG":
                _check_whole_png(image, encoded)
            return _rgb(image, encoded)
    except (MemoryError, SampleError):
        raise
    except Exception as error:  # plug-ins raise anything; the bytes are complete
        raise SampleError(
            "broken_image", f"the {header.format} image does not decode: {error!r}"
        ) from error


def _without_metadata(encoded: bytes, image_format: str) -> bytes:
    """Return the image without the parts that hold no pixels, on which Pillow warns or raises."""
    view = memoryview(encoded)
    if image_format == "PNG":
        # An upper-case letter marks a chunk that pixels depend on. Without its control chunks an
        # APNG is its default picture, the first frame.
        kept = [
            view[start:end]
            for kind, start, end in png_chunks(encoded)
            if kind[0] < ord("a") or kind == b"tRNS"
        ]
        return b"".join([view[:8], *kept])
    if image_format == "JPEG":
        kept = [view[:2]]
        for marker, start, end in jpeg_segments(encoded):
            if is_frame_header(marker):
                return b"".join([*kept, view[start:]])
            if not 0xE0 <= marker <= 0xEF or marker in _KEEP_JPEG:
                kept.append(view[start:end])
    return encoded


def _check_whole_png(image: Image.Image, encoded: bytes) -> None:
    """Raise for a PNG whose pixel stream ends early in good order, which Pillow fills with zeros.

    Only where one of the last two rows is zero is the stream inflated again and counted; in an
    interlaced image the last pass holds one of them.
    """
    bottom = np.asarray(image.crop((0, max(0, image.height - 2), image.width, image.height)))
    if bottom.reshape(len(bottom), -1).any(axis=1).all():
        return
    width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", encoded[16:29])
    wanted = 0
    for column, row, column_step, row_step in _ADAM7 if interlaced else ((0, 0, 1, 1),):
        columns = (width - column + column_step - 1) // column_step
        rows = (height - row + row_step - 1) // row_step
        if columns > 0:
            wanted += rows * (1 + (columns * depth * _PNG_CHANNELS[colour] + 7) // 8)
    chunks = png_chunks(encoded)
    stream = b"".join(
        encoded[start + 8 : end - 4] for kind, start, end in chunks if kind == b"IDAT"
    )
    found = len(zlib.decompressobj().decompress(stream, wanted))
    if found < wanted:
        raise SampleError(
            "broken_image", f"the PNG's pixels end after {found} of {wanted} bytes: it was cut"
        )


def _rgb(image: Image.Image, encoded: bytes) -> Pixels:
    """Return a loaded Pillow image as RGB, composited on white where it has alpha."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        return _gray16(image)
    if image.mode in ("I", "F"):
        raise SampleError(
            "unsupported_pixels",
            f"found 32-bit or signed samples ({image.format} mode {image.mode}), which have no "
            f"fixed range, expected 8 or 16 bits: convert the image",
        )
    # Pillow would read the two bytes of a sample as two pixels.
    if _tag(image, "BitsPerSample", (8,))[0] > 8 and _tag(image, "PlanarConfiguration") == 2:
        raise SampleError(
            "unsupported_pixels",
            "the TIFF has 16-bit colours in planes, expected them interleaved: convert the image",
        )
    if image.mode in _ALPHA_MODES or (image.mode == "P" and image.has_transparency_data):
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, _WHITE)
        return np.array(Image.alpha_composite(white, rgba).convert("RGB"))
    key = image.info.pop("transparency", None)  # popped, as conversion would warn or convert it
    pixels = np.array(image.convert("RGB"))
    if key is not None:
        depth = encoded[24] if image.format == "PNG" else 8
        shown = np.array(key) >> 8 if depth == 16 else np.array(key) * 255 // (2**depth - 1)
        pixels[(pixels == shown).all(axis=2)] = 255
    return pixels


def _tag(image: Image.Image, name: str, default: Any = None) -> Any:
    """Return a TIFF's field; the default where it has none, and of other formats."""
    tags = image.tag_v2 if isinstance(image, TiffImagePlugin.TiffImageFile) else {}
    return tags.get(_TIFF_TAGS[name], default)


def _gray16(image: Image.Image) -> Pixels:
    samples = np.asarray(image)
    if _tag(image, "PhotometricInterpretation") == 0:  # white is 0; Pillow turns 8 bits alone
        samples = ~samples
    pixels = (samples >> 8).astype(np.uint8)
    if "transparency" in image.info:
        pixels[samples == image.info["transparency"]] = 255
    return np.repeat(pixels[..., None], 3, axis=2)


def _upright(pixels: Pixels, orientation: int) -> Pixels:
    """Turn stored pixels upright by their EXIF orientation, 1..8."""
    if orientation == 1:
        return pixels
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels.copy()  # not ascontiguousarray: a side of 1 would keep its negative stride
