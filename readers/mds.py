"""MDS shards, as Mosaic Streaming writes them, without its library.

Laws (tests/readers/test_mds.py, tests/contracts/reader.py):
    1. All streams below a path are one dataset: no row is padded, repeated or left out.
    2. Pictures are passed on as they are stored: regions of the shard, or, of a compressed shard,
       of its copy in the file cache. `read` touches none of them.
    3. A dataset has one digest, whether its shards are compressed or not.

Cost: opening a dataset, one `stat` a shard. Reading a field that is no blob, two `pread`s for each
row; for rows that are small and lie together, two for all of them.

Imports: errors, filecache, records, rng, stores, readers.{files, mdsindex, mdsvalues}.
Used by: io (by entry point).
"""

import hashlib
import importlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from itertools import islice, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zephon_mm.errors import ConfigError, DatasetError, SampleError
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
from zephon_mm.readers.mdsindex import INDEX, MDSShard, find_mds, unpack
from zephon_mm.readers.mdsvalues import BLOBS, LISTS, as_image, decode, items
from zephon_mm.records import Blob, Column, FileBlob, RowBlob, ShardInfo
from zephon_mm.rng import digest
from zephon_mm.stores import local

_SEARCHED_FOLDERS = 64
_AS_STORED = frozenset({"str", "bytes", "jpeg", "png"})
_FORMAT = re.compile(rb'"format"\s*:\s*"mds"')


class MDSReader:
    """Random access to the rows of MDS shards.

    Args:
        path: A folder with an `index.json`, a tree of such folders (streams), or a list.
        cache_dir: Compressed shards are unpacked below it; None takes the temporary folder.
        progress: Nothing takes long enough to show it.
        check_hashes: Compare a shard with its hashes in `index.json` when a process opens it.
        allow_pickle: Load `pkl` values, which can run any code.

    Raises:
        ConfigError: There are no hashes to check, or no package that computes them.
        DatasetError: An index or a shard is missing, or is not what it should be.
    """

    def __init__(
        self,
        path: Paths,
        *,
        cache_dir: PathLike | None = None,
        progress: bool = True,
        check_hashes: bool = False,
        allow_pickle: bool = False,
    ) -> None:
        self._shards = find_mds(path)
        self._check_hashes = check_hashes
        self._allow_pickle = allow_pickle
        self._cache = FileCache(cache_folder(cache_dir))
        self.shards = tuple(ShardInfo(s.name, s.num_rows, s.num_bytes) for s in self._shards)
        for shard in self._shards if check_hashes else ():
            if not shard.hashes:
                raise ConfigError(f"check_hashes=True, but {INDEX} has no hash of {shard.name}.")
            for name, _ in shard.hashes:
                _hash(name)

    @classmethod
    def detect(cls, path: Paths) -> bool:
        """Whether the first folder has an index.json that lists MDS shards, or .mds files."""
        first = path if isinstance(path, str | os.PathLike) else next(iter(path), "")
        folders = os.walk(os.path.expanduser(first), followlinks=True)
        for folder, _, files in islice(folders, _SEARCHED_FOLDERS):
            if any(".mds" in name for name in files):
                return True
            with suppress(OSError), open(os.path.join(folder, INDEX), "rb") as file:
                return bool(_FORMAT.search(file.read(1 << 16)))
        return False

    @property
    def kind(self) -> str:
        """Format and options that the rows depend on: a key of what is derived from them."""
        return "mds-pickle" if self._allow_pickle else "mds"

    def digest(self) -> str:
        """Return hex digits over kind, names, uncompressed sizes and row counts."""
        return digest(self.kind, *(value for shard in self.shards for value in shard))

    def read(
        self, shard: int, rows: Sequence[int], fields: Sequence[str] | None = None
    ) -> list[Sample | SampleError]:
        """Return the rows: values, blobs for bytes and pictures, and `__key__`.

        Raises:
            IndexError: No such row.
            OSError: A file cannot be read.
            DatasetError: The shard is not the one that the index describes.
        """
        if not len(rows):
            return []
        with self._opened(shard, rows) as block:
            names = [n for n in block.columns if fields is None or n in fields or n == "__key__"]
            cells = [block.values(name, self._allow_pickle) for name in names]
        samples: list[Sample | SampleError] = []
        for row, defect, *values in zip(rows, block.defects, *cells, strict=True):
            error = next((v for v in (defect, *values) if isinstance(v, SampleError)), None)
            if error is None:
                samples.append({"__key__": str(row), **dict(zip(names, values, strict=True))})
            else:
                where = f"{self.shards[shard].name}/{row}"
                samples.append(SampleError(error.reason, f"{where}: {error.message}"))
        return samples

    def fetch(self, blob: RowBlob) -> bytes:
        """Return a picture, or other bytes, of a row.

        Raises:
            SampleError: The row is damaged.
        """
        with self._opened(blob.shard, [blob.row]) as block:
            return block.blob_bytes(blob.field)

    def columns(
        self, shard: int, rows: NDArray[np.int64], fields: Sequence[str]
    ) -> dict[str, Column]:
        """Return the stored bytes of text, bytes and encoded pictures, as `ColumnReader` says.

        Args:
            shard: Index into `shards`.
            rows: (n,) int64, n > 0.
            fields: Names; others than these kinds are left out.

        Raises:
            As `read`.
        """
        with self._opened(shard, rows) as block:
            stored = [n for n in fields if block.columns.get(n, (0, ""))[1] in _AS_STORED]
            return {name: block.column(name) for name in stored}

    @contextmanager
    def _opened(self, number: int, rows: Sequence[int] | NDArray[np.int64]) -> Iterator["_Rows"]:
        shard = self._shards[number]
        numbers = row_numbers(shard.name, shard.num_rows, rows)
        path = shard.path
        if shard.codec:
            stat = os.stat(path)
            key = f"{path} {stat.st_size} {stat.st_mtime_ns} {shard.num_bytes}"
            path = self._cache.get(key, partial(unpack, shard=shard))
        with open_shard(ShardFile(shard.name, path, shard.num_bytes, 0)) as descriptor:
            stat = os.fstat(descriptor)
            _check(shard, path, (stat.st_ino, stat.st_mtime_ns), self._check_hashes)
            yield _Rows(number, shard, descriptor, numbers)


@lru_cache(maxsize=4096)
def _check(shard: MDSShard, path: str, stamp: tuple[int, int], with_hashes: bool) -> None:
    """Compare a file with what the index says: once for each process and state of the file."""
    with open(local(path), "rb") as file:
        count = int.from_bytes(file.read(4), "little")
        file.seek(4 * (shard.num_rows + 1))
        end = int.from_bytes(file.read(4), "little")
        wanted: dict[str, int | str] = {"rows": shard.num_rows, "bytes": shard.num_bytes}
        found: dict[str, int | str] = {"rows": count, "bytes": end}
        for name, value in shard.hashes if with_hashes else ():
            file.seek(0)
            wanted[name] = value
            found[name] = hashlib.file_digest(file, _hash(name)).hexdigest()
    if found != wanted:
        raise DatasetError(f"{shard.path} has {found}, {INDEX} says {wanted}. Restore the shard.")


def _hash(name: str) -> Callable[[], Any]:
    """Return what computes a hash."""
    try:
        known = name in hashlib.algorithms_guaranteed
        return getattr(hashlib if known else importlib.import_module("xxhash"), name)  # type: ignore[no-any-return]
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f'{INDEX} has {name} hashes ({error}): `pip install "zephon-mm[mds]"`, or leave out '
            "check_hashes."
        ) from None


class _Rows:
    """Rows of one open shard, and where their fields are.

    Args:
        number: Of the shard.
        shard: The shard.
        descriptor: Of its uncompressed file.
        rows: (n,) int64, n > 0.
    """

    def __init__(
        self, number: int, shard: MDSShard, descriptor: int, rows: NDArray[np.int64]
    ) -> None:
        self._number = number
        self._shard = shard
        self._descriptor = descriptor
        self._rows = rows
        self.columns = {c.name: (i, c.encoding) for i, c in enumerate(shard.columns, 1)}
        fixed = [column.size for column in shard.columns]
        head = 4 * fixed.count(None)  # bytes in front of a row's fields: the sizes that vary
        begins, ends = self._bounds(head)
        sizes = np.full((len(rows), 1 + len(fixed)), [head, *(size or 0 for size in fixed)])
        varying = [i for i, size in enumerate(fixed, 1) if size is None]
        heads = self._gather(begins, sizes[:, 0]).view("u4")
        sizes[:, varying] = heads.reshape(len(rows), len(varying))
        is_bad = begins + sizes.sum(axis=1) != ends
        sizes[is_bad] = 0
        self._sizes, self._starts = sizes, begins[:, None] + np.cumsum(sizes, axis=1) - sizes
        message = "the sizes of its fields do not add up to its own. Restore the shard."
        error = SampleError("bad_row", message)
        self.defects = [error if bad else None for bad in is_bad.tolist()]

    def _bounds(self, least: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where the rows begin and end, out of the table at the shard's start."""
        low, high = int(self._rows.min()), int(self._rows.max())
        table = np.frombuffer(self._pread(4 * (low + 1), 4 * (high - low + 2)), "u4")
        begins, ends = (table[self._rows - low + i].astype(np.int64) for i in (0, 1))
        if (ends - begins < least).any() or (ends > self._shard.num_bytes).any():
            rows = f"rows {low} to {high}"
            message = f"{self._shard.path}: offsets of {rows} are damaged. Restore the shard."
            raise DatasetError(message)
        return begins, ends

    def _gather(self, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.uint8]:
        return read_regions(self._descriptor, self._shard.path, starts, sizes)

    def _pread(self, start: int, size: int) -> bytes:
        return self._gather(np.array([start]), np.array([size])).tobytes()

    def _pieces(self, i: int) -> list[bytes]:
        starts, sizes = self._starts[:, i], self._sizes[:, i]
        data = self._gather(starts, sizes).tobytes()
        return [data[a:b] for a, b in pairwise([0, *np.cumsum(sizes).tolist()])]

    def values(self, name: str, allow_pickle: bool) -> list[Any]:
        """Return a column's values or blobs, or what is wrong with them."""
        i, encoding = self.columns[name]
        if encoding not in BLOBS and encoding not in LISTS:
            read = partial(decode, name, encoding, allow_pickle=allow_pickle)
            return [_caught(read, piece) for piece in self._pieces(i)]
        make = partial(self._blob if encoding in BLOBS else self._list, name, encoding)
        spans = (self._rows.tolist(), self._starts[:, i].tolist(), self._sizes[:, i].tolist())
        return [_caught(make, *span) for span in zip(*spans, strict=True)]

    def _blob(self, field: str, encoding: str, row: int, start: int, size: int) -> Blob:
        if self._shard.codec or "pil" in encoding:
            return RowBlob(self._number, row, field)
        return FileBlob(self._shard.path, start, size)

    def _list(self, field: str, encoding: str, row: int, start: int, size: int) -> list[Blob]:
        spans = enumerate(self._items(field, encoding, start, size))
        return [self._blob(f"{field}/{item}", encoding, row, *span) for item, span in spans]

    def _items(self, field: str, encoding: str, start: int, size: int) -> list[tuple[int, int]]:
        edges = items(field, encoding, size, lambda at, count: self._pread(start + at, count))
        return [(start + a, b - a) for a, b in pairwise(edges)]

    def blob_bytes(self, field: str) -> bytes:
        """Return the bytes of a blob of the first row; `field` is a column, or `column/item`."""
        name, slash, item = (field, "", "") if field in self.columns else field.rpartition("/")
        if name not in self.columns or self.defects[0]:
            raise self.defects[0] or DatasetError(f"{self._shard.path} has no field {field!r}.")
        i, encoding = self.columns[name]
        span = int(self._starts[0, i]), int(self._sizes[0, i])
        if slash:
            span = self._items(name, encoding, *span)[int(item)]
        return as_image(name, encoding, self._pread(*span))

    def column(self, name: str) -> Column:
        """Return a column's stored bytes."""
        i, _ = self.columns[name]
        starts, sizes = self._starts[:, i], self._sizes[:, i]
        valid = np.array([defect is None for defect in self.defects])
        return Column(self._gather(starts, sizes), np.cumsum(sizes), valid)


def _caught(make: Callable[..., Any], *args: Any) -> Any:
    """Return what `make` does, or the defect that it finds."""
    try:
        return make(*args)
    except SampleError as error:
        return error
