"""Named arrays and a JSON header in one file: written whole or not at all, mapped to be read.

Laws (tests/test_arrayfile.py):
    1. What was saved is what is loaded; a file that is cut, overwritten or another's is no file.
    2. A file appears whole, so any number of processes may write the same one at once, and one
       that another process replaces or deletes stays as it was for those who have it.

Imports: nothing from the package. Used by: readers.rowindex, index.
"""

import json
import os
import struct
import tempfile
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MAGIC = b"ZMMARR1\0"
_PREFIX = struct.Struct("<8sQQ")  # magic, bytes of the JSON header, CRC-32 of all that follows
_ALIGN = 64  # bytes; views of any dtype then lie on its boundary


class ArrayFile:
    """A header and arrays, in memory or in a mapped file.

    Args:
        buffer: (bytes,) uint8: what `encode` laid out.

    Attributes:
        header: What was given, out of JSON.
        arrays: Name -> one-dimensional array, a view; read-only in a mapped file.
        checksum: CRC-32 of the contents.
    """

    def __init__(self, buffer: NDArray[np.uint8]) -> None:
        self._buffer = buffer
        magic, length, self.checksum = _PREFIX.unpack(buffer[: _PREFIX.size].tobytes())
        if magic != _MAGIC:
            raise ValueError("not an array file")
        start = _PREFIX.size + length
        self.header, columns = json.loads(buffer[_PREFIX.size : start].tobytes())
        self.arrays: dict[str, NDArray[Any]] = {}
        for name, dtype, at, size in columns:
            part = buffer[start + at : start + at + size]
            if part.size < size:
                raise ValueError("cut short")
            self.arrays[name] = part.view(np.dtype(dtype))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "ArrayFile | None":
        """Map a file; None if there is none, or it is no array file."""
        try:
            return cls(np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray))
        except (OSError, ValueError, struct.error):
            return None  # absent, empty, cut or overwritten: the same as none

    @classmethod
    def encode(cls, header: Any, arrays: Mapping[str, NDArray[Any]]) -> "ArrayFile":
        """Lay header and arrays out in memory."""
        columns, chunks, at = [], [], 0
        for name, array in arrays.items():
            data = array.tobytes()
            columns.append([name, array.dtype.str, at, len(data)])
            chunks.append(data + bytes(-len(data) % _ALIGN))
            at += len(chunks[-1])
        text = json.dumps([header, columns]).encode()
        text += b" " * (-(len(text) + _PREFIX.size) % _ALIGN)
        body = b"".join([text, *chunks])
        prefix = _PREFIX.pack(_MAGIC, len(text), zlib.crc32(body))
        return cls(np.frombuffer(prefix + body, dtype=np.uint8))

    def save(self, path: str | os.PathLike[str]) -> "ArrayFile":
        """Write whole or not at all; return the same arrays, mapped from the file.

        Raises:
            OSError: The file cannot be written.
        """
        folder = os.path.dirname(path)
        os.makedirs(folder, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=folder, suffix=".new")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(self._buffer.data)
            # Mapped before it gets its name: another process may replace it at any time.
            mapped = ArrayFile(np.memmap(temporary, dtype=np.uint8, mode="r").view(np.ndarray))
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        return mapped

    def is_intact(self) -> bool:
        """Whether the checksum fits: reads every byte."""
        return bool(zlib.crc32(self._buffer[_PREFIX.size :].data) == self.checksum)

    @property
    def num_bytes(self) -> int:
        """Size of the file, in bytes."""
        return int(self._buffer.size)
