"""Rows behind a table of where they are, as MDS shards and LitData chunks hold them.

A file is a count, where the rows begin and the last ends (uint32 all), and the rows, behind what
else there is. A row is the sizes of its fields that vary, uint32, and its fields.

Laws (tests/readers/test_mds.py, tests/readers/test_litdata.py):
    1. No size in a file is believed: a row whose sizes do not add up is the defect of that row, a
       table that leaves the file is an error.
    2. Blobs are regions of the file, or, of a copy that may go away, places to be fetched.

Cost: one `pread` for rows that are small and lie together; else one for the sizes of each row, and
one for each value that is no blob.

Imports: errors, records, readers.{files, mdsvalues}. Used by: readers.{litdata, mds}.
"""

import os
from collections.abc import Callable, Collection, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zephon_mm.errors import DatasetError, SampleError
from zephon_mm.readers.files import ShardFile, read_pieces, read_regions
from zephon_mm.readers.mdsvalues import LISTS, as_image, items
from zephon_mm.records import Blob, Column, FileBlob, RowBlob

THE_ROW = -1
"""Size of a field that is all of its row, without a size in front."""


class Field(NamedTuple):
    """A field: `size` is that of each value, in bytes, None if it varies, or `THE_ROW`."""

    name: str
    kind: str
    size: int | None


class Kinds(NamedTuple):
    """What the kinds of a format's fields are, but for lists of pictures.

    `blobs` are read as blobs; of `stored`, text and bytes, a column can be made; of the others
    `decode(name, kind, data)` makes a value.
    """

    blobs: Collection[str]
    stored: Collection[str]
    decode: Callable[[str, str, bytes], Any]


class TableRows:
    """Rows of one open file.

    Args:
        file: The shard, for blobs and messages.
        shard: Its number.
        descriptor: Of its plain form.
        rows: (n,) int64.
        fields: Of a row, in order.
        kinds: Of the format.
        is_plain: The file is its plain form: blobs may be regions of it.

    Raises:
        DatasetError: The table is damaged.
    """

    def __init__(
        self,
        file: ShardFile,
        shard: int,
        descriptor: int,
        rows: NDArray[np.int64],
        fields: Mapping[str, Field],
        kinds: Kinds,
        *,
        is_plain: bool,
    ) -> None:
        self._file, self._shard, self._descriptor, self._rows = file, shard, descriptor, rows
        self._fields, self._kinds, self._is_plain = fields, kinds, is_plain
        self._numbers = {name: number for number, name in enumerate(fields, 1)}
        begins, ends = self._words(4 + 4 * rows, 2).T
        fixed = [field.size for field in fields.values()]
        varying = [number for number, size in enumerate(fixed, 1) if size is None]
        head = 4 * len(varying)
        if (ends - begins < head).any() or (ends > os.fstat(descriptor).st_size).any():
            raise DatasetError(f"{file.path}: its table of rows is damaged. Restore the file.")
        sizes = np.tile([head, *(size or 0 for size in fixed)], (len(rows), 1))
        sizes[:, varying] = self._words(begins, len(varying))
        if THE_ROW in fixed:
            sizes[:, 1] = ends - begins
        self._fits = begins + sizes.sum(axis=1) == ends
        sizes[~self._fits] = 0
        self._sizes, self._starts = sizes, begins[:, None] + np.cumsum(sizes, axis=1) - sizes

    def samples(self, tree: Mapping[str, Any]) -> list[dict[str, Any] | SampleError]:
        """Return the rows, or what is wrong with them, which names them.

        Args:
            tree: Their structure: mappings and lists, with names of fields in the place of values.
        """
        samples: list[dict[str, Any] | SampleError] = []
        for row, fits, sample in zip(self._rows, self._fits, self._part(tree), strict=True):
            found = sample if fits else _MISFIT
            if isinstance(found, SampleError):
                where = f"{self._file.name}/{row}"
                found = SampleError(found.reason, f"{where}: {found.message}")
            samples.append(found)
        return samples

    def fetch(self, field: str) -> bytes:
        """Return the bytes of a blob of the first row; `field` is a name, or `name/item`.

        Raises:
            SampleError: The row is damaged.
        """
        name, _, item = (field, "", "") if field in self._fields else field.rpartition("/")
        if name not in self._fields:
            raise DatasetError(f"{self._file.path} has no field {field!r}.")
        if not self._fits[0]:
            raise SampleError(_MISFIT.reason, _MISFIT.message)
        kind = self._fields[name].kind
        _, start, size = self._spans(name)[0]
        if item:
            start, size = self._items(name, kind, start, size)[int(item)]
        return as_image(name, kind, self._pread(start, size))

    def columns(self, names: Collection[str]) -> dict[str, Column]:
        """Return the stored bytes of texts, bytes and pictures; other fields are left out."""
        columns = {}
        for name in names:
            if name in self._fields and _base(self._fields[name].kind) in self._kinds.stored:
                starts, sizes = self._places(name)
                columns[name] = Column(self._read(starts, sizes), np.cumsum(sizes), self._fits)
        return columns

    def _part(self, tree: Any) -> list[Any]:
        """Return a part of each row, or what is wrong with it."""
        if isinstance(tree, str):
            return self._values(self._fields[tree])
        steps = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        columns = {step: self._part(inner) for step, inner in steps}
        parts: list[Any] = []
        for row in range(len(self._rows)):
            part = {step: column[row] for step, column in columns.items()}
            defect = next((one for one in part.values() if isinstance(one, SampleError)), None)
            parts.append(defect or (part if isinstance(tree, Mapping) else [*part.values()]))
        return parts

    def _values(self, field: Field) -> list[Any]:
        """Return one value of each row, blobs or decoded, or what is wrong with it."""
        name, kind, _ = field
        is_blob = _base(kind) in self._kinds.blobs
        if is_blob or kind in LISTS:
            make = self._blob if is_blob else self._list
            return [_caught(make, name, kind, *span) for span in self._spans(name)]
        pieces = read_pieces(self._descriptor, self._file.path, *self._places(name))
        return [_caught(self._kinds.decode, name, kind, piece) for piece in pieces]

    def _blob(self, name: str, kind: str, row: int, start: int, size: int) -> Blob:
        if not self._is_plain or "pil" in kind:
            return RowBlob(self._shard, row, name)
        return FileBlob(self._file.path, start, size)

    def _list(self, name: str, kind: str, row: int, start: int, size: int) -> list[Blob]:
        spans = enumerate(self._items(name, kind, start, size))
        return [self._blob(f"{name}/{item}", kind, row, *span) for item, span in spans]

    def _items(self, name: str, kind: str, start: int, size: int) -> list[tuple[int, int]]:
        edges = items(name, kind, size, lambda at, count: self._pread(start + at, count))
        return [(start + a, b - a) for a, b in pairwise(edges)]

    def _spans(self, name: str) -> list[tuple[int, int, int]]:
        """Return row, first byte and size of each row's value."""
        arrays = self._rows, *self._places(name)
        return list(zip(*(array.tolist() for array in arrays), strict=True))

    def _places(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return first byte and size of each row's value."""
        number = self._numbers[name]
        return self._starts[:, number], self._sizes[:, number]

    def _words(self, starts: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        data = self._read(starts, np.full(len(starts), 4 * count))
        return data.view("<u4").reshape(len(starts), count).astype(np.int64)

    def _pread(self, start: int, size: int) -> bytes:
        return self._read(np.array([start]), np.array([size])).tobytes()

    def _read(self, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.uint8]:
        return read_regions(self._descriptor, self._file.path, starts, sizes)


_MISFIT = SampleError(
    "bad_row", "the sizes of its fields do not add up to its own. Restore the file."
)


def _base(kind: str) -> str:
    return kind.partition(":")[0]


def _caught(make: Callable[..., Any], *arguments: Any) -> Any:
    """Return what `make` does, or the defect that it finds."""
    try:
        return make(*arguments)
    except SampleError as error:
        return error
