"""LitData's chunk files: is one whole, how is it unpacked, where are its rows.

A chunk is a count, a table of where its rows begin and end (uint32 all), and the rows; a row is the
sizes of its values, and the values. With zstd it is one frame, or frames of some rows each. Rows
that are plain JSON lie behind an empty table as an Arrow file.

Laws (tests/readers/test_litdata.py):
    1. No size in a file is believed: what unpacks to more than is said is damaged.
    2. A damaged chunk is a DatasetError that names it; it never crashes the process.

Imports: errors, records, pyarrow, readers.{arrowtable, files, imagerefs, litindex}.
Used by: readers.litdata.
"""

import mmap
import os
import struct
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from zephon_mm.errors import DatasetError, SampleError
from zephon_mm.readers.arrowtable import ArrowTable, blobs_of, holds_binary, to_column
from zephon_mm.readers.files import ShardFile, damage_named, inflated, open_shard
from zephon_mm.readers.imagerefs import value_at
from zephon_mm.readers.litindex import Chunk
from zephon_mm.records import Column

_ZSTD, _FRAMES, _ARROW = b"\x28\xb5\x2f\xfd", b"LDFZ01\0\0", b"LDARW01\0"


@lru_cache(maxsize=4096)
def form_of(file: ShardFile, num_rows: int) -> str:
    """Return the form of a chunk that is whole as far as its table tells.

    Returns:
        "plain", "arrow", or what is to be unpacked: "zstd", "frames".

    Raises:
        DatasetError: The file is cut, not finished, or another one.
    """
    table = 4 * (num_rows + 2)
    with open_shard(file) as descriptor:
        head = os.pread(descriptor, 8, 0)
        end = int.from_bytes(os.pread(descriptor, 4, table - 4), "little")
        is_arrow = os.pread(descriptor, 8, max(file.num_bytes - 8, 0)) == _ARROW
    if head.startswith((_ZSTD, _FRAMES)):
        return "zstd" if head.startswith(_ZSTD) else "frames"
    found, start = struct.unpack("<II", head.ljust(8, b"\0"))
    fits = found == num_rows and start == table <= end <= file.num_bytes
    if not fits or (end < file.num_bytes and not is_arrow):
        raise DatasetError(
            f"{file.path} has {file.num_bytes} bytes and says: {found} rows, up to byte {end}. "
            f"index.json says {num_rows} rows. It was cut, is not finished, or belongs to another "
            "index. Restore it, or write the dataset again."
        )
    return "arrow" if is_arrow and end == table else "plain"


def unpack(file: ShardFile, chunk: Chunk, target: str) -> None:
    """Write a compressed chunk as a plain one.

    Raises:
        DatasetError: It does not unpack to what it and the index say.
    """
    table = 4 * (chunk.num_rows + 2)
    with damage_named(file.path), open_shard(file) as descriptor, open(target, "w+b") as out:
        with open(descriptor, "rb", closefd=False) as source:
            data = memoryview(source.read())
        if data[:4] == _ZSTD:
            out.writelines(inflated(data, "zstd", chunk.num_bytes + table))
        else:
            _unpack_frames(data, table, out)
        size = out.tell()
        out.seek(0)
        words = np.frombuffer(out.read(table), "<u4")
        if (words[0], words[1], words[-1]) != (chunk.num_rows, table, size):
            raise ValueError(f"{size} bytes with {words[0]} rows, expected {chunk.num_rows}")


def _unpack_frames(data: memoryview, table: int, out: BinaryIO) -> None:
    num_rows, _, num_frames = struct.unpack_from("<III", data, 12)
    ends = np.frombuffer(data, "<u4", table // 4 - 1, 24) + table
    out.write(struct.pack("<I", num_rows) + ends.astype("<u4").tobytes())
    for i in range(num_frames):
        _, _, at, packed, size = struct.unpack_from("<IIQII", data, 20 + table + 24 * i)
        out.writelines(inflated(data[at : at + packed], "zstd", size))


_CHECKED = 65_536
_checked: set[tuple[Any, ...]] = set()  # columns of batches that this process found sound


@dataclass(frozen=True, slots=True)
class ArrowRows:
    """Rows of an open chunk of the form "arrow", which is mapped.

    Attributes:
        file: The chunk.
        descriptor: Of the chunk.
        shard: Its number, for blobs.
        rows: (n,) int64.
        num_rows: Of the chunk.
    """

    file: ShardFile
    descriptor: int
    shard: int
    rows: NDArray[np.int64]
    num_rows: int

    def samples(self, wanted: Collection[str | None] | None) -> list[dict[str, Any] | SampleError]:
        """Return the wanted fields of each row, or all for None; bytes as blobs."""
        columns: dict[str, list[Any]] = {}
        with damage_named(self.file.path):
            table, places = self._table(wanted)
            for name in table.schema.names:
                if holds_binary(table.schema.field(name).type):
                    cells = [table.cell(name, at) for at in places]
                    where = zip(cells, self.rows.tolist(), strict=True)
                    blobs = [blobs_of(c, self.shard, row, (name,), told=False) for c, row in where]
                    columns[name] = blobs
                else:
                    columns[name] = table.take([name], places)[name].to_pylist()
        return [{name: columns[name][i] for name in columns} for i in range(self.rows.size)]

    def fetch(self, field: str) -> bytes:
        """Return the bytes of a blob of the first row."""
        name = field.partition("/")[0].replace("~1", "/").replace("~0", "~")
        with damage_named(self.file.path):
            table, places = self._table({name})
            found = value_at({name: table.cell(name, places[0]).as_py()}, field)
            return found["bytes"] if isinstance(found, dict) else found  # type: ignore[no-any-return]

    def columns(self, names: Collection[str]) -> dict[str, Column]:
        """Return stored texts and bytes."""
        with damage_named(self.file.path):
            table, places = self._table(names)
            taken = table.take(table.schema.names, places)
            found = {name: to_column(array) for name, array in taken.items()}
        return {name: column for name, column in found.items() if column is not None}

    def _table(self, names: Collection[str | None] | None) -> tuple[ArrowTable, NDArray[np.int64]]:
        """Return the record batches that hold the rows, and where the rows are in them."""
        data = pa.py_buffer(mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_READ))
        (size,) = struct.unpack_from("<I", data, data.size - 12)
        data = data.slice(max(data.size - 12 - size, 0), size)
        reader = pa.ipc.open_file(data)  # with `included_fields` it would copy whole batches
        wanted = [n for n in reader.schema.names if names is None or n in names]
        size = max(reader.get_batch(0).num_rows, 1)  # of all batches but the last
        numbers, inverse = np.unique(self.rows // size, return_inverse=True)
        batches = [reader.get_batch(number).select(wanted) for number in numbers.tolist()]
        for number, batch in zip(numbers.tolist(), batches, strict=True):
            checked = (*self.file[1:], number, *wanted)
            if checked not in _checked:
                batch.validate(full=True)  # Arrow believes offsets
                if len(_checked) >= _CHECKED:
                    _checked.clear()
                _checked.add(checked)
            if batch.num_rows != min(size, self.num_rows - number * size):
                raise ValueError(f"batch {number} has {batch.num_rows} of {self.num_rows} rows")
        return ArrowTable(batches), inverse * size + self.rows % size
