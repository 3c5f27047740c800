"""LitData chunks, as `litdata.optimize` writes them, without its library.

Laws (tests/readers/test_litdata.py, tests/contracts/reader.py):
    1. A row has the fields of the sample that was stored, nested as it was. One that was no mapping
       has `image` and `text`, where there is one of these, and else the position as a name.
    2. A chunk is used if it ends where its own table says. Sizes in `index.json` decide nothing.
    3. What is compressed is unpacked once a machine, into the file cache; the source never changes.
    4. `read` touches no picture's bytes.

Cost: opening a dataset, one `stat` a chunk. Reading a block of rows: one `pread` for neighbours
that are small, else one for a row's sizes and one for each value that is no blob.

Imports: errors, filecache, records, rng, readers.{files, imagerefs, litchunks, litindex, litvalues,
mdsvalues}. Used by: io (by entry point).
"""

import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zephon_mm.errors import SampleError
from zephon_mm.filecache import FileCache, cache_folder
from zephon_mm.protocols import Sample
from zephon_mm.readers.files import (
    PathLike,
    Paths,
    ShardFile,
    open_shard,
    read_regions,
    row_numbers,
)
from zephon_mm.readers.imagerefs import Place, place_name
from zephon_mm.readers.litchunks import ArrowRows, Places, form_of, locate, unpack
from zephon_mm.readers.litindex import LitIndex, is_litdata, load
from zephon_mm.readers.litvalues import BLOBS, TEXTS, decode
from zephon_mm.readers.mdsvalues import as_image, items
from zephon_mm.records import Blob, Column, FileBlob, RowBlob, ShardInfo
from zephon_mm.rng import digest

_KEYS = ("__key__", "id", "key")


class LitDataReader:
    """Random access to the rows of LitData chunks.

    Args:
        path: A folder with an `index.json`.
        cache_dir: Compressed chunks are unpacked below it; None takes the temporary folder.
        progress: Nothing takes long enough to show it.
        allow_pickle: Load values that are pickles, which can run any code.

    Raises:
        ConfigError: `path` is not one folder.
        DatasetError: The index or a chunk is missing, unfinished, or not what it should be.
    """

    def __init__(
        self,
        path: Paths,
        *,
        cache_dir: PathLike | None = None,
        progress: bool = True,
        allow_pickle: bool = False,
    ) -> None:
        self._index = load(path)
        self._cache = FileCache(cache_folder(cache_dir))
        self._allow_pickle = allow_pickle
        kinds = {n: self._index.kinds[i] for n, i in self._index.leaves.items()}
        self._key = next((n for n in _KEYS if kinds.get(n) in {*TEXTS, "int"}), None)
        self.kind = f"litdata-{digest(json.dumps([kinds, self._index.fields, allow_pickle]))[:16]}"
        self.shards = tuple(
            ShardInfo(file.name, chunk.num_rows, file.num_bytes)
            for file, chunk in zip(self._index.files, self._index.chunks, strict=True)
        )

    @classmethod
    def detect(cls, path: Paths) -> bool:
        """Whether an index.json has `chunks` and `config`, or litdata left chunks without one."""
        return is_litdata(path)

    def digest(self) -> str:
        """Return hex digits that change with a chunk's name, size or rows, and with the fields."""
        return digest(self.kind, *(value for shard in self.shards for value in shard))

    def read(
        self, shard: int, rows: Sequence[int], fields: Sequence[str] | None = None
    ) -> list[Sample | SampleError]:
        """Return the rows: values, blobs for bytes and pictures, and `__key__`.

        Raises:
            IndexError: No such row.
            OSError: A file cannot be read.
            DatasetError: The chunk is damaged, or not the one that was indexed.
        """
        with self._opened(shard, rows) as block:
            found = block.samples(None if fields is None else {*fields, self._key})
        samples: list[Sample | SampleError] = []
        for row, sample in zip(rows, found, strict=True):
            if isinstance(sample, SampleError):
                where = f"{self.shards[shard].name}/{row}"
                samples.append(SampleError(sample.reason, f"{where}: {sample.message}"))
                continue
            key = sample.get(self._key) if self._key else None
            asked = {n: v for n, v in sample.items() if fields is None or n in fields}
            samples.append({**asked, "__key__": str(row if key is None else key)})
        return samples

    def fetch(self, blob: RowBlob) -> bytes:
        """Return a picture, or other bytes, of a row; raw pixels as an image.

        Raises:
            SampleError: The row is damaged.
        """
        with self._opened(blob.shard, [blob.row]) as block:
            return block.fetch(blob.field)

    def columns(
        self, shard: int, rows: NDArray[np.int64], fields: Sequence[str]
    ) -> dict[str, Column]:
        """Return the stored bytes of texts, bytes and pictures, as `ColumnReader` says.

        Raises: as `read`.
        """
        with self._opened(shard, rows) as block:
            return block.columns(fields)

    @contextmanager
    def _opened(
        self, shard: int, rows: Sequence[int] | NDArray[np.int64]
    ) -> Iterator["ArrowRows | _PlainRows"]:
        """Yield rows of a chunk, which is unpacked if need be."""
        file, chunk = self._index.files[shard], self._index.chunks[shard]
        numbers = row_numbers(file.name, chunk.num_rows, rows)
        form = form_of(file, chunk.num_rows)
        plain = file
        if is_packed := form in ("zstd", "frames"):
            path = self._cache.get(f"litdata {file[1:]}", partial(unpack, file, chunk))
            plain = ShardFile(file.name, path, os.path.getsize(path), 0)
        with open_shard(plain) as descriptor:
            place = (file, descriptor, shard, numbers)
            if form == "arrow":
                yield ArrowRows(*place, chunk.num_rows)
            else:
                num_values = len(self._index.kinds) if chunk.num_tokens is None else 0
                at = locate(descriptor, file.path, numbers, num_values)
                make = partial(decode, allow_pickle=self._allow_pickle)
                yield _PlainRows(*place, self._index, at, make, is_stable=not is_packed)


@dataclass(frozen=True, slots=True)
class _PlainRows:
    """Rows of an open chunk of the form "plain".

    Attributes:
        file: The chunk.
        descriptor: Of its plain form.
        shard: The chunk's number.
        rows: (n,) int64.
        index: Of the dataset.
        at: Where their values are.
        make: Decodes a value of a serializer.
        is_stable: The file is the plain one: blobs may be regions of it.
    """

    file: ShardFile
    descriptor: int
    shard: int
    rows: NDArray[np.int64]
    index: LitIndex
    at: Places
    make: Callable[[str, bytes, str], Any]
    is_stable: bool

    def samples(self, wanted: Collection[str | None] | None) -> list[dict[str, Any] | SampleError]:
        """Return the wanted fields of each row, or all for None; or what is wrong with it."""
        fields = self.index.fields.items()
        found = self._column({n: f for n, f in fields if wanted is None or n in wanted}, ())
        pairs = zip(found, self.at.fits, strict=True)
        return [sample if fits else _MISFIT for sample, fits in pairs]

    def _column(self, part: Any, place: Place) -> list[Any]:
        """Return a part of each row, or what is wrong with it."""
        if isinstance(part, int):
            return self._values(place_name(place), part)
        steps = part.items() if isinstance(part, dict) else enumerate(part)
        columns = {step: self._column(inner, (*place, step)) for step, inner in steps}
        rows = [
            {step: column[i] for step, column in columns.items()} for i in range(len(self.rows))
        ]
        values = rows if isinstance(part, dict) else [[*row.values()] for row in rows]
        defects = (next(filter(_is_defect, row.values()), None) for row in rows)
        return [defect or value for defect, value in zip(defects, values, strict=True)]

    def fetch(self, field: str) -> bytes:
        """Return the bytes of a blob of the first row."""
        if not self.at.fits[0]:
            raise SampleError(_MISFIT.reason, _MISFIT.message)
        is_item = field not in self.index.leaves
        place, _, item = field.rpartition("/") if is_item else (field, "", "")
        number = self.index.leaves[place]
        start, size = (int(array[0, number]) for array in self.at[:2])
        if is_item:
            edges = self._edges(place, start, size)
            start, size = edges[int(item)], edges[int(item) + 1] - edges[int(item)]
        data = self._read(np.array([start]), np.array([size])).tobytes()
        return as_image(field, self.index.kinds[number], data)

    def columns(self, names: Collection[str]) -> dict[str, Column]:
        """Return stored texts and bytes."""
        columns = {}
        for name in names:
            number = self.index.leaves.get(name)
            if number is not None and self._kind(number) in BLOBS | TEXTS:
                sizes = np.where(self.at.fits, self.at.sizes[:, number], 0)
                data = self._read(self.at.starts[:, number], sizes)
                columns[name] = Column(data, np.cumsum(sizes), self.at.fits)
        return columns

    def _kind(self, number: int) -> str:
        return self.index.kinds[number].partition(":")[0]

    def _read(self, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.uint8]:
        return read_regions(self.descriptor, self.file.path, starts, sizes)

    def _values(self, place: str, number: int) -> list[Any]:
        """Return one value of each row, blobs or decoded, or what is wrong with it."""
        sizes = np.where(self.at.fits, self.at.sizes[:, number], 0)
        starts, kind = self.at.starts[:, number], self._kind(number)
        if kind in BLOBS or kind in ("pil", "jpeg_array"):
            make = self._blobs if kind == "jpeg_array" else self._blob
            spans = zip(self.rows.tolist(), starts.tolist(), sizes.tolist(), strict=True)
            return [_attempt(make, place, kind, *span) for span in spans]
        data = self._read(starts, sizes).tobytes()
        stops, full = np.cumsum(sizes).tolist(), self.index.kinds[number]
        pieces = (data[a:b] for a, b in zip([0, *stops], stops, strict=False))
        return [_attempt(self.make, full, piece, place) for piece in pieces]

    def _blob(self, place: str, kind: str, row: int, start: int, size: int) -> Blob:
        if kind == "pil" or not self.is_stable:
            return RowBlob(self.shard, row, place)
        return FileBlob(self.file.path, start, size)

    def _blobs(self, place: str, kind: str, row: int, start: int, size: int) -> list[Blob]:
        edges = self._edges(place, start, size)
        spans = enumerate(zip(edges, np.diff(edges).tolist(), strict=False))
        return [self._blob(f"{place}/{item}", kind, row, *span) for item, span in spans]

    def _edges(self, place: str, start: int, size: int) -> list[int]:
        """Return where the pictures of a list are in the file, and where the last ends."""

        def read(at: int, length: int) -> bytes:
            return os.pread(self.descriptor, length, start + at)

        return [start + edge for edge in items(place, "jpeg_array", size, read)]


_MISFIT = SampleError("bad_row", "its sizes do not add up to its length. Restore the chunk.")


def _attempt(make: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return make(*arguments)
    except SampleError as error:
        return error


def _is_defect(value: Any) -> bool:
    return isinstance(value, SampleError)
