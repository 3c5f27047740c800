"""Vortex files: columns of text, numbers and images; every file is a shard.

Laws (tests/readers/test_vortex.py, tests/contracts/reader.py):
    1. `read` asks for no image but those in lists. One that is null looks like an image until it is
       fetched, because Vortex stores nulls among the payloads; then it is `no_image`.
    2. A process never uses a file that its parent opened.

Cost: one scan for a block of rows, one for an image.

Imports: errors, records, rng, stores, readers.{arrowtable, files, imagerefs}; vortex when it is
used. Used by: io (by entry point).
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from zephon_mm.errors import ConfigError, DatasetError, SampleError
from zephon_mm.readers import arrowtable as arrow
from zephon_mm.readers import files
from zephon_mm.readers.imagerefs import place_name
from zephon_mm.records import Column, RowBlob, ShardInfo
from zephon_mm.stores import local

_SUFFIXES, _MAGIC = (".vortex",), b"VTXF"

Rows = NDArray[np.int64]


class VortexReader(files.Sharded):
    """Random access to the rows of Vortex files, whose columns are those of the first.

    Args:
        path: A file, a folder of them, a list, or a pattern.
        cache_dir: Unused: there is nothing to index.
        progress: Unused.

    Raises:
        ConfigError: `vortex-data` is not installed.
        DatasetError: No file, a missing or a damaged one.
    """

    kind = "vortex"

    def __init__(
        self, path: files.Paths, *, cache_dir: files.PathLike | None = None, progress: bool = True
    ) -> None:
        self._files = files.find_shards(path, _SUFFIXES)
        shards = []
        for shard in reversed(self._files):
            with _opened(shard) as file:
                shards.append(ShardInfo(shard.name, len(file), shard.num_bytes))
                self._schema = file.dtype.to_arrow_schema()
        self.shards = shards[::-1]

    @classmethod
    def detect(cls, path: files.Paths) -> bool:
        """Whether the first file is named `.vortex`, or begins as one."""
        return files.is_first(path, _SUFFIXES, _MAGIC.__eq__, len(_MAGIC))

    def read(self, shard: int, rows: Sequence[int], fields: files.Fields = None) -> files.Samples:
        """Return the rows: images as blobs, other columns as Python values, with `__key__`.

        Raises:
            IndexError: No such row.
            OSError: The file cannot be read.
            DatasetError: The file is damaged, or is not the one that was opened.
        """
        lazy = {f.name for f in self._schema if arrow.is_binary(f.type) or arrow.is_picture(f.type)}
        names = [name for name in self._schema.names if fields is None or name in fields]
        key = next((name for name in files.KEYS if name in {*self._schema.names} - lazy), None)
        taken, back = self._take(shard, rows, sorted({*names, key or ""} - lazy - {""}))
        keys = taken[key].to_pylist() if key else []
        samples: files.Samples = []
        for row, at in zip(map(int, rows), back, strict=True):
            sample = {
                n: RowBlob(shard, row, place_name((n,)))
                if n in lazy
                else arrow.blobs_of(taken[n][at], shard, row, (n,), told=False)
                for n in names
            }
            name = keys[at] if key else row
            samples.append({**sample, "__key__": "" if name is None else str(name)})
        return samples

    def columns(self, shard: int, rows: Rows, fields: Sequence[str]) -> dict[str, Column]:
        """Return the stored bytes of texts and images; lists and numbers are left out."""
        names = [f.name for f in self._schema if f.name in fields and arrow.is_stored(f.type)]
        taken, back = self._take(shard, rows, names)
        arrays = (arrow.plain(taken[name].combine_chunks()).take(pa.array(back)) for name in names)
        columns = dict(zip(names, map(arrow.to_column, arrays), strict=True))
        return {name: column for name, column in columns.items() if column is not None}

    def fetch(self, blob: RowBlob) -> bytes:
        """Return an image.

        Raises:
            SampleError: `no_image`: it is null.
        """
        first, *steps = blob.field.split("/")
        name = next(name for name in self._schema.names if place_name((name,)) == first)
        cell = self._take(blob.shard, [blob.row], [name])[0][name][0]
        data = arrow.bytes_at(cell, steps)
        if data is None:
            where = f"{self.shards[blob.shard].name}/{blob.row}"
            raise SampleError("no_image", f"{where}: {blob.field} is null. Leave it out.")
        return bytes(data)

    def _take(self, shard: int, rows: Sequence[int] | Rows, names: list[str]) -> tuple[Any, Rows]:
        """Return a table of the rows, each once, and the place of each row in it."""
        unique, back = np.unique(self.numbers(shard, rows), return_inverse=True)
        with _opened(self._files[shard]) as file:
            indices = import_module("vortex").array(pa.array(unique.astype(np.uint64)))
            return file.scan(names, indices=indices).read_all().to_arrow_table(), back


@lru_cache(256)
def _open(file: files.ShardFile, pid: int) -> Any:
    path = local(file.path)
    if os.stat(path).st_size != file.num_bytes:
        raise DatasetError(f"{file.path} has another size than when it was opened. Restart.")
    return import_module("vortex").open(path)


@contextmanager
def _opened(file: files.ShardFile) -> Iterator[Any]:
    """Yield an open file of this process; what Vortex says of it becomes an error that names it."""
    try:
        with files.damage_named(file.path, "is no whole Vortex file"):
            yield _open(file, os.getpid())
    except ImportError as error:
        raise ConfigError(f'no module {error.name}: pip install "zephon-mm[vortex]"') from None
