"""The image formats that are read, told apart by their first bytes, never by a file's name.

Laws (tests/processors/test_formats.py):
    1. Bytes that are no image are named: an HTML page, a Git LFS pointer, zeros, ...
    2. Only the formats of this list are read, each by its own Pillow plug-in. Pillow's
       `Image.open` would try some 40 formats, and warns or raises by a process-wide pixel limit.

Imports: errors. Used by: header, image.
"""

import io

from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    ImageFile,
    Jpeg2KImagePlugin,
    JpegImagePlugin,
    PngImagePlugin,
    PpmImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from zephon_mm.errors import SampleError

_PLUGINS: dict[str, type[ImageFile.ImageFile]] = {
    "JPEG": JpegImagePlugin.JpegImageFile,  # not its factory, so that MPO is its first picture
    "PNG": PngImagePlugin.PngImageFile,
    "WEBP": WebPImagePlugin.WebPImageFile,
    "AVIF": AvifImagePlugin.AvifImageFile,
    "GIF": GifImagePlugin.GifImageFile,
    "BMP": BmpImagePlugin.BmpImageFile,
    "TIFF": TiffImagePlugin.TiffImageFile,
    "JPEG2000": Jpeg2KImagePlugin.Jpeg2KImageFile,
    "PPM": PpmImagePlugin.PpmImageFile,
}
_SIGNATURES = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "TIFF"),
    (b"MM\0+", "TIFF"),
    (b"\xff\x4f\xff\x51", "JPEG2000"),
    (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG2000"),
    *((b"P%d%c" % (kind, space), "PPM") for kind in range(1, 7) for space in b" \t\r\n"),
)
_HEIC_BRANDS = (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1")
_NOT_IMAGES = (
    (b"version https://git-lfs", "a Git LFS pointer (run `git lfs pull` in the dataset's folder)"),
    (b"<!doctype html", "an HTML page"),
    (b"<html", "an HTML page"),
    (b"<?xml", "an XML or SVG file"),
    (b"<svg", "an SVG file"),
    (b"<", "a page of markup"),
    (b"{", "JSON"),
    (b"[", "JSON"),
    (b"%pdf", "a PDF file"),
    (b"\x1f\x8b", "gzip data"),
    (b"pk\x03\x04", "a ZIP archive"),
)


def format_of(data: bytes) -> str:
    """Return the format by its signature, or raise an error that names what was found."""
    for signature, image_format in _SIGNATURES:
        if data.startswith(signature):
            return image_format
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data[4:8] == b"ftyp":
        return _format_of_brand(data)
    if not data:
        raise SampleError("empty_image", "found an empty file of 0 bytes, expected an image")
    raise SampleError(
        "not_an_image",
        f"found {_name_of(data)}, expected an image ({', '.join(sorted(_PLUGINS))}): "
        f"remove the sample, or download it again",
    )


def open_pillow(encoded: bytes, image_format: str) -> ImageFile.ImageFile:
    """Open an image with the Pillow plug-in of its format, without Pillow's global limits."""
    return _PLUGINS[image_format](io.BytesIO(encoded))


def _format_of_brand(data: bytes) -> str:
    """Tell AVIF from HEIC and video by the brands of an ISO media file."""
    brands = data[8 : max(12, min(int.from_bytes(data[:4]), 256))]
    major = data[8:12]
    if b"avif" in brands or b"avis" in brands:
        if not AvifImagePlugin.SUPPORTED:
            raise SampleError("no_codec", "found an AVIF image, but this Pillow has no AVIF codec")
        return "AVIF"
    if major in _HEIC_BRANDS:
        raise SampleError(
            "no_codec",
            f"found a HEIC image (brand {major.decode('latin-1')!r}), which has no codec here: "
            f"convert it to JPEG or PNG",
        )
    raise SampleError(
        "not_an_image", f"found a video or other media file of brand {major!r}, expected an image"
    )


def _name_of(data: bytes) -> str:
    """Say in words what bytes are that are no image."""
    size = f"{len(data)} byte" + "s" * (len(data) > 1)
    if not data.strip(b"\0"):
        return f"nothing but zeros in the first {size}"
    start = data[:256].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for prefix, name in _NOT_IMAGES:
        if start.startswith(prefix):
            return f"{name}, which begins {data[:40]!r}"
    return f"{size} of an unknown kind that begin {data[:16]!r}"
