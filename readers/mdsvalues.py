"""What the bytes of an MDS column mean: numbers, text, JSON, arrays, pictures, lists of pictures.

Laws (tests/readers/test_mds.py):
    1. Stored JPEG and PNG bytes are passed on as they are. Raw pixels (`pil`) become PNG, or TIFF
       for modes that PNG has not: no pixel changes.
    2. No memory is taken for a size that the bytes at hand do not bear out.
    3. A pickle is not loaded unless that was allowed.

Imports: errors, readers.files. Used by: readers.{litvalues, mds, mdsindex, rowtable}.
"""

import io
import pickle
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from zephon_mm.errors import SampleError
from zephon_mm.readers.files import parse_json

BLOBS = frozenset({"bytes", "jpeg", "png", "pil"})
"""Encodings whose values are read as blobs."""

LISTS = {"list[jpeg]": 8, "list[png]": 8, "list[pil]": 8, "jpeg_array": 4, "jpegarray": 4}
"""Encodings of lists of pictures, and the bytes in front of the sizes; the last 4 are a count."""

_NUMBERS = (
    *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64"),
)
_FORMATS: dict[str, str] = dict.fromkeys(("1", "L", "LA", "RGB", "RGBA", "I;16"), "PNG")
_FORMATS |= dict.fromkeys(("CMYK", "YCbCr", "LAB", "I", "F"), "TIFF")
_DEFECTS = (ValueError, LookupError, ArithmeticError, RecursionError, TypeError, EOFError)
_PICKLE_DEFECTS = (pickle.UnpicklingError, AttributeError, ImportError)


def is_known(encoding: str) -> bool:
    """Whether values of an encoding can be read."""
    kind = encoding.partition(":")[0]
    return kind in BLOBS or kind in LISTS or kind in _DECODERS


def decode(name: str, encoding: str, data: bytes, *, allow_pickle: bool) -> Any:
    """Return the value of a field that is no blob.

    Args:
        name: Of the field, for messages.
        encoding: One that `is_known`.
        data: As it is stored.
        allow_pickle: Whether `pkl` may run the code that its pickle names.

    Raises:
        SampleError: `bad_utf8`, `bad_json`, `bad_value`, or `pickle_refused`.
    """
    kind, *arguments = encoding.split(":")
    if kind == "pkl" and not allow_pickle:
        raise pickle_refused(name)
    try:
        return _DECODERS[kind](data, *arguments)
    except (*_DEFECTS, *_PICKLE_DEFECTS) as error:
        reason = "bad_json" if kind == "json" else "bad_value"
        reason = "bad_utf8" if isinstance(error, UnicodeDecodeError) else reason
        raise SampleError(reason, f"field {name!r} is no valid {encoding}: {error}") from None


def pickle_refused(name: str) -> SampleError:
    """Return the error of a field that would run code."""
    return SampleError(
        "pickle_refused",
        f"field {name!r} is a pickle, which can run any code. If you trust who wrote it, set "
        "allow_pickle=True.",
    )


def _array(data: bytes, dtype: str = "", shape: str = "") -> NDArray[Any]:
    at = 0
    if not dtype:
        dtype, at = f"{'uif'[data[0] & 7]}{data[0] >> 3}", 1
    dims = [int(size) for size in shape.split(",")] if shape else None
    if dims is None:
        count, size = data[at] >> 2, 1 << (data[at] & 3)
        dims = np.frombuffer(data, f"u{size}", count, at + 1).tolist()
        at += 1 + count * size
    return np.frombuffer(data, dtype, offset=at).reshape(dims).copy()


def _number(data: bytes, *, dtype: str) -> Any:
    (value,) = np.frombuffer(data, dtype).tolist()
    return value


_DECODERS: dict[str, Callable[..., Any]] = {
    "str": bytes.decode,
    "int": partial(_number, dtype="int64"),
    "str_int": int,
    "str_float": float,
    "str_decimal": lambda data: Decimal(data.decode()),
    "json": lambda data: parse_json(data.decode()),
    "ndarray": _array,
    "pkl": pickle.loads,
    **{name: partial(_number, dtype=name) for name in _NUMBERS},
}


def items(name: str, encoding: str, size: int, read: Callable[[int, int], bytes]) -> list[int]:
    """Return where the pictures of a list are in it: the first byte of each, and the last's end.

    Args:
        name: Of the field, for messages.
        encoding: One of `LISTS`.
        size: Of the list, in bytes.
        read: `read(at, size)` returns bytes of the list.

    Raises:
        SampleError: `bad_value`: the sizes do not add up.
    """
    head = LISTS[encoding]
    count = int.from_bytes(read(head - 4, 4), "little") if size >= head else size
    body = head + 4 * count
    if body <= size:
        edges: list[int] = np.cumsum([body, *np.frombuffer(read(head, 4 * count), "u4")]).tolist()
        if edges[-1] == size:
            return edges
    message = f"field {name!r} is no valid {encoding}: {size} bytes do not hold its {count} items."
    raise SampleError("bad_value", message)


def as_image(name: str, encoding: str, data: bytes) -> bytes:
    """Return the bytes of an encoded image; those of a `pil` encoding, which are raw, as a new one.

    Raises:
        SampleError: `not_an_image`: raw pixels do not fit their header.
    """
    if "pil" not in encoding:
        return data
    width, height, length = np.frombuffer(data[:12].ljust(12, b"\0"), "u4").tolist()
    mode, pixels = data[12 : 12 + length].decode("latin-1"), data[12 + length :]
    file = io.BytesIO()
    try:
        # At least a bit a pixel: memory is taken for what is there.
        if not 0 < width * height <= 8 * len(pixels):
            raise ValueError(f"{len(pixels)} bytes of pixels")
        image = Image.frombytes(mode, (width, height), pixels)
        image.save(file, _FORMATS[mode], compress_level=1)
    except (ValueError, KeyError, OSError) as error:
        message = f"field {name!r} is no image of {width} x {height} {mode[:8]!r} pixels: {error}"
        raise SampleError("not_an_image", message) from None
    return file.getvalue()
