"""Read an image's format, upright size and orientation from its first bytes.

Laws (tests/processors/test_header.py):
    1. The size is that of the picture that `image.decode` gives, so token counts are right.
    2. A prefix gives the same answer as the whole file, or asks for more bytes.

The orientation is that of EXIF alone (JPEG APP1, PNG eXIf before the pixels, WebP EXIF, AVIF's
rotation); values outside 1..8 and broken EXIF mean 1. XMP and PNG text are ignored, as browsers do.
JPEG, PNG and WebP are parsed here, which is cheap and reads no other metadata; the others are
opened by Pillow.

Cost: 4 us for a JPEG, 25 us through Pillow. Imports: errors, formats. Used by: image.
"""

import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from PIL import ExifTags, WebPImagePlugin

from zephon_mm.errors import SampleError
from zephon_mm.processors.formats import format_of, open_pillow

MAX_PIXELS = 2**26
"""Default limit of an image, 67 megapixels: 201 MB decoded, and below Pillow's own limit."""

_PREFIXES = (4096, 65536, -1)  # bytes read in turn until the header is whole; -1 is all
_SWAPPED = (5, 6, 7, 8)  # EXIF orientations that exchange width and height


class ImageHeader(NamedTuple):
    """What the header says about an image.

    `width_px` and `height_px` are those of the upright picture, after `orientation` (EXIF, 1..8)
    has been applied. `components` counts the colour components of a JPEG, and is 0 elsewhere.
    """

    format: str
    width_px: int
    height_px: int
    orientation: int = 1
    components: int = 0


def probe(read: Callable[[int], bytes], *, max_pixels: int = MAX_PIXELS) -> ImageHeader:
    """Return an image's header, reading as little of it as possible.

    Args:
        read: `read(n)` gives the first n bytes of the image (fewer when it is shorter);
            `read(-1)` gives all of it.
        max_pixels: The most pixels that an image may have, inclusive.

    Raises:
        SampleError: `empty_image`, `not_an_image`, `no_codec`, `broken_image`, `too_many_pixels`.
    """
    data = b""
    for count in _PREFIXES:
        data = read(count)
        complete = count < 0 or len(data) < count
        header = _parse(data, complete=complete)
        if header is not None:
            return _within(header, max_pixels)
        if complete:
            break
    raise SampleError(
        "broken_image",
        f"the file ends inside its header, after {len(data)} bytes: it was cut, store it again",
    )


def header_of(encoded: bytes, *, max_pixels: int = MAX_PIXELS) -> ImageHeader:
    """Return the header of a complete encoded image. Raises as `probe`."""
    return probe(lambda count: encoded, max_pixels=max_pixels)


def jpeg_segments(jpeg: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (marker, start, end) of a JPEG's segments; `end` may lie beyond the data."""
    position = 2
    while 0 <= position <= len(jpeg) - 4:
        marker = jpeg[position + 1]
        if jpeg[position] != 0xFF:  # garbage between segments, which decoders skip as well
            position = jpeg.find(b"\xff", position)
        elif marker == 0xFF:
            position += 1
        elif marker in (0x00, 0x01) or 0xD0 <= marker <= 0xD8:  # markers without a length
            position += 2
        else:
            end = position + 2 + int.from_bytes(jpeg[position + 2 : position + 4])
            yield marker, position, end
            position = end


def is_frame_header(marker: int) -> bool:
    """Say whether a JPEG marker starts the frame header (SOF), which holds the size."""
    return 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC)


def png_chunks(png: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield (type, start, end) of a PNG's chunks; `end` may lie beyond the data."""
    position = 8
    while position + 8 <= len(png):
        end = position + 12 + int.from_bytes(png[position : position + 4])
        yield png[position + 4 : position + 8], position, end
        position = end


def exif_orientation(exif: bytes) -> int:
    """Return the orientation, 1..8, that an EXIF block asks for; 1 where it is broken."""
    while exif.startswith(b"Exif\0\0"):
        exif = exif[6:]
    if exif[:4] not in (b"II*\0", b"MM\0*"):
        return 1

    def number(start: int, size: int) -> int:
        return int.from_bytes(exif[start : start + size], "little" if exif[:1] == b"I" else "big")

    first = number(4, 4) + 2
    last = min(first + 12 * number(first - 2, 2), len(exif))
    for entry in range(first, last - 11, 12):
        if number(entry, 2) == ExifTags.Base.Orientation:
            size = {1: 1, 3: 2, 4: 4}.get(number(entry + 2, 2), 0)  # byte, short, long
            value = number(entry + 8, size)
            return value if 1 <= value <= 8 else 1
    return 1


def _within(header: ImageHeader, max_pixels: int) -> ImageHeader:
    pixels = header.width_px * header.height_px
    if pixels > max_pixels:
        raise SampleError(
            "too_many_pixels",
            f"the {header.format} image is {header.width_px} x {header.height_px} = {pixels} "
            f"pixels, expected at most {max_pixels}: scale it down, or raise the image "
            f"processor's `max_pixels` (`decode_limit_px` of Qwen-VL's)",
        )
    return header


def _parse(data: bytes, *, complete: bool) -> ImageHeader | None:
    """Return the header, or None when it needs more bytes."""
    image_format = format_of(data)
    if image_format == "JPEG":
        return _parse_jpeg(data)
    if image_format == "PNG":
        return _parse_png(data)
    if image_format == "WEBP":
        return _parse_webp(data)
    # A part of a TIFF makes Pillow warn; AVIF may place its header anywhere.
    if image_format in ("TIFF", "AVIF") and not complete:
        return None
    try:
        with open_pillow(data, image_format) as image:
            width, height = image.size
            exif = image.info.get("exif", b"") if image_format == "AVIF" else b""
    except MemoryError:
        raise
    except Exception as error:  # plug-ins raise anything on damaged bytes
        if not complete:
            return None
        raise SampleError(
            "broken_image", f"the {image_format} header is damaged: {error!r}"
        ) from error
    return _upright_header(image_format, width, height, exif_orientation(exif))


def _upright_header(
    image_format: str, width: int, height: int, orientation: int, components: int = 0
) -> ImageHeader:
    if width < 1 or height < 1:
        raise SampleError(
            "broken_image", f"the {image_format} header gives a size of {width} x {height} pixels"
        )
    if orientation in _SWAPPED:
        width, height = height, width
    return ImageHeader(image_format, width, height, orientation, components)


def _parse_jpeg(data: bytes) -> ImageHeader | None:
    exif = b""
    for marker, start, end in jpeg_segments(data):
        if is_frame_header(marker):
            if len(data) < start + 10:
                return None
            height, width = data[start + 5 : start + 7], data[start + 7 : start + 9]
            return _upright_header(
                "JPEG",
                int.from_bytes(width),
                int.from_bytes(height),
                exif_orientation(exif),
                data[start + 9],
            )
        if marker == 0xE1 and not exif and data[start + 4 : start + 10] == b"Exif\0\0":
            exif = data[start + 10 : end]
        elif marker in (0xD9, 0xDA):
            raise SampleError("broken_image", "the JPEG has no frame header before its pixels")
    return None


def _parse_png(data: bytes) -> ImageHeader | None:
    exif = b""
    for kind, start, end in png_chunks(data):
        if start == 8:
            checksum = int.from_bytes(data[29:33])
            if len(data) >= 33 and (kind != b"IHDR" or zlib.crc32(data[12:29]) != checksum):
                raise SampleError("broken_image", "the PNG's header chunk is damaged")
        elif kind == b"eXIf" and not exif:
            exif = data[start + 8 : end - 4]
        elif kind == b"IDAT":
            width, height = int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
            return _upright_header("PNG", width, height, exif_orientation(exif))
    return None


def _parse_webp(data: bytes) -> ImageHeader | None:
    if not WebPImagePlugin.SUPPORTED:
        raise SampleError("no_codec", "found a WebP image, but this Pillow was built without WebP")
    if len(data) < 30:
        return None
    kind, orientation = data[12:16], 1
    if kind == b"VP8X":
        width = 1 + int.from_bytes(data[24:27], "little")
        height = 1 + int.from_bytes(data[27:30], "little")
        if data[20] & 8:  # EXIF follows the pixels
            if len(data) < 8 + int.from_bytes(data[4:8], "little"):
                return None
            orientation = exif_orientation(_webp_exif(data))
    elif kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    else:
        width = int.from_bytes(data[26:28], "little") & 0x3FFF
        height = int.from_bytes(data[28:30], "little") & 0x3FFF
    return _upright_header("WEBP", width, height, orientation)


def _webp_exif(data: bytes) -> bytes:
    position = 12
    while position + 8 <= len(data):
        size = int.from_bytes(data[position + 4 : position + 8], "little")
        if data[position : position + 4] == b"EXIF":
            return data[position + 8 : position + 8 + size]
        position += 8 + size + (size & 1)
    return b""
