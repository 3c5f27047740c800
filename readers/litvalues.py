"""The values that LitData's serializers store: bytes in, Python values out.

Laws (tests/readers/test_litdata.py):
    1. What litdata wrote is what comes back; a tensor as an array, bfloat16 exactly as float32.
    2. Damaged bytes are a SampleError. No size in a header is believed before it is checked.
    3. Nothing is unpickled unless that is allowed.

Imports: errors, readers.mdsvalues. Used by: readers.{litdata, litindex}.
"""

import json
import pickle
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zephon_mm.errors import SampleError
from zephon_mm.readers.mdsvalues import pickle_refused

TEXTS = frozenset({"str", "text"})
_MEDIA = frozenset({"jpeg", "image", "tifffile", "tiff", "video", "audio", "nifti", "mesh", "pdf"})
BLOBS = _MEDIA | {"bytes", "file"}
"""Serializers that store a file's bytes as they are."""

IMAGES = frozenset({"jpeg", "image", "pil", "tifffile", "tiff"})

_NUMPY = ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "?")
_TORCH = (
    *("f4", "f4", "f8", "f8", "c8", "c8", "c16", "c16", "f2", "f2", "bf16", "u1", "i1"),
    *("i2", "i2", "i4", "i4", "i8", "i8", "?", "u2"),
)
_DAMAGED = (
    *(ValueError, LookupError, TypeError, AttributeError, ImportError, EOFError, RecursionError),
    *(struct.error, pickle.UnpicklingError),
)


def decode(place: str, kind: str, data: bytes, *, allow_pickle: bool) -> Any:
    """Return a stored value.

    Args:
        place: In the row, for messages.
        kind: Of the serializer, as in `data_format`: "int", "no_header_numpy:8", ...
        data: What it stored.
        allow_pickle: Run what a pickle asks for.

    Raises:
        SampleError: `pickle_refused`, `unknown_serializer`, or `bad_value`: it does not decode.
    """
    name, _, option = kind.partition(":")
    if name == "pickle" and not allow_pickle:
        raise pickle_refused(place)
    if name not in _DECODERS:
        message = f"field {place!r} was written by {kind!r}, not by one of {', '.join(_DECODERS)}."
        raise SampleError("unknown_serializer", message)
    try:
        return _DECODERS[name](data, option)
    except _DAMAGED as error:
        message = f"field {place!r} is no valid {kind}: {error}"
        raise SampleError("bad_value", message) from None


def _array(data: bytes, dtypes: tuple[str, ...]) -> NDArray[Any]:
    # Litdata changed the byte order of its tensors' header; the rank is small in the right one.
    order = min("<>", key=lambda order: struct.unpack_from(f"{order}I", data, 4))
    number, rank = struct.unpack_from(f"{order}II", data)
    shape = struct.unpack_from(f"{order}{rank}I", data, 8)
    return _flat(data[8 + 4 * rank :], dtypes[number]).reshape(shape)


def _flat(data: bytes, dtype: str) -> NDArray[Any]:
    if dtype == "bf16":  # the upper half of a float32
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, dtype).copy()


class _Nested:
    """Reads a tree of lists and mappings in litdata's compact form: a tag, a count, the items."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def value(self) -> Any:
        """Return the next value."""
        tag = self._take("B")
        if tag in (11, 16):
            return None
        if tag in (7, 17):
            return self._text()
        if tag in (8, 9, 10, 18, 19, 20):
            return self._take("qd?"[(tag - 8) % 10])
        size = self._take("I")
        if tag == 0:
            return json.loads(self._bytes(size))
        if tag == 1:
            return [self._text() for _ in range(size)]
        if tag in (2, 3, 4):
            array = f"<{size}{'qd?'[tag - 2]}"
            return list(struct.unpack(array, self._bytes(struct.calcsize(array))))
        if tag == 5:
            return {self._text(): self.value() for _ in range(size)}
        keys = [self._text() for _ in range(self._take("I"))] if tag == 6 else []
        if not keys:
            raise ValueError(f"tag {tag} with {size} items")
        return [{key: self.value() for key in keys} for _ in range(size)]

    def _take(self, code: str) -> Any:
        return struct.unpack("<" + code, self._bytes(struct.calcsize("<" + code)))[0]

    def _bytes(self, size: int) -> bytes:
        self._at += size
        if self._at > len(self._data):
            raise ValueError(f"it ends {self._at - len(self._data)} bytes early")
        return self._data[self._at - size : self._at]

    def _text(self) -> str:
        return self._bytes(self._take("I")).decode()


_DECODERS: dict[str, Callable[[bytes, str], Any]] = {
    "str": lambda data, _: data.decode(),
    "text": lambda data, _: data.decode(),
    "bool": lambda data, _: data[0] != 0,
    "int": lambda data, _: struct.unpack("<q", data)[0],
    "float": lambda data, _: struct.unpack("<d", data)[0],
    "numpy": lambda data, _: _array(data, _NUMPY),
    "no_header_numpy": lambda data, number: _flat(data, _NUMPY[int(number)]),
    "tensor": lambda data, _: _array(data, _TORCH),
    "no_header_tensor": lambda data, number: _flat(data, _TORCH[int(number)]),
    "json": lambda data, _: json.loads(data) if data[:1] > b" " else _Nested(data).value(),
    "pickle": lambda data, _: pickle.loads(data),
}
