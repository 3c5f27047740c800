"""Lance datasets: a folder or URI of fragments, at one version of its history.

Laws (tests/readers/test_lance.py, tests/contracts/reader.py):
    1. The version that was opened is pinned: every process reads it, whatever is written later, and
       a dataset that was replaced under the same name is an error.
    2. Rows count live rows by position. Row ids and addresses are never used: a deleted row moves
       the rows behind it up and leaves no gap.
    3. `read` loads no payload but those of lists of plain binaries, whose lengths lie among them.
    4. A blob that points outside the dataset is refused, not read.
    5. Forked and spawned processes read the same (test_lance_processes.py, readers.lancesource).

A column holds images if its type says so: binary, a Lance blob, a struct of `bytes` and `path`, or
a list of binaries or structs. A null among plain binaries, or structs without a path, looks like an
image until it is fetched, because Lance stores nulls among the payloads; then it is `no_image`.

Cost: one take for a block of rows; one for an image (0.4 ms), and the last few stay in memory.

Imports: errors, records, stores, readers.{arrowtable, files, lancesource}. Used by: io (by entry
point).
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray

from zephon_mm.errors import ConfigError, DatasetError, SampleError
from zephon_mm.readers.arrowtable import bytes_at, to_column
from zephon_mm.readers.files import KEYS, Fields, Samples, Sharded
from zephon_mm.readers.lancesource import blobs, describe, run, take
from zephon_mm.records import Column, RowBlob
from zephon_mm.stores import is_mirror

pc: Any = pyarrow.compute  # it makes its functions when it is imported: no type checker sees them

_MANIFEST_END = b"LANC"
_CELLS = 16  # rows' images kept by a process: a header is asked for first, then all of the image

Rows = NDArray[np.int64]


class LanceReader(Sharded):
    """Random access to the live rows of one version of a Lance dataset.

    Args:
        path: The dataset's folder, or a URI such as `s3://bucket/name.lance`. Credentials are those
            that pylance finds in the environment.
        cache_dir: Unused: there is nothing to index.
        progress: Unused.
        version: A number or a tag; None is the newest when the reader is made.

    Raises:
        ConfigError: There is no such version, or `path` is a list.
        DatasetError: No Lance dataset, or a data file of it is missing or cut.
    """

    opens_urls = True  # pylance has its own way to stores

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        cache_dir: str | os.PathLike[str] | None = None,
        progress: bool = True,
        version: int | str | None = None,
    ) -> None:
        if not isinstance(path, str | os.PathLike):
            raise ConfigError(f"a Lance dataset is one folder or URI, got {path!r}")
        text = os.fspath(path)
        uri = text if "://" in text else os.path.abspath(os.path.expanduser(text))
        try:
            found = run(describe, uri, version)
        except ValueError as error:
            raise (DatasetError if version is None else ConfigError)(
                f"{uri} cannot be opened as a Lance dataset, version={version!r}: {error}. Check "
                "path and version."
            ) from None
        self._source, self._fragments, self.shards, self._holders = found
        self.kind = f"lance-{self._source.version}"
        self._starts = list(accumulate((shard.num_rows for shard in self.shards), initial=0))
        named = (name for name in KEYS if name in self._holders)
        self._key = next((n for n in named if self._holders[n].kind in ("text", "value")), None)

    @classmethod
    def detect(cls, path: Any) -> bool:
        """Whether a folder holds a Lance manifest in `_versions`, or a URI ends in `.lance`.

        Raises:
            DatasetError: Such a folder in a store, where pylance itself has to read.
        """
        if not isinstance(path, str | os.PathLike):
            return False
        text = os.path.expanduser(os.fspath(path))
        if "://" in text:
            return text.rstrip("/").endswith(".lance")
        with suppress(OSError, ValueError):  # ValueError: a NUL in the path
            for manifest in Path(text, "_versions").glob("*.manifest"):
                if is_mirror(text):
                    raise DatasetError("this is a Lance dataset in a store: set fmt='lance'.")
                if manifest.read_bytes().endswith(_MANIFEST_END):
                    return True
        return False

    def digest(self) -> str:
        """Return hex digits over version, fragments and the names of their files, not the place."""
        return self._source.digest

    def read(self, shard: int, rows: Sequence[int], fields: Fields = None) -> Samples:
        """Return the rows: images as blobs, other columns as Python values, with `__key__`.

        Raises:
            IndexError: No such row.
            OSError: The store failed.
            DatasetError: A file is damaged, the version is gone, or the dataset was replaced.
        """
        numbers = self.numbers(shard, rows)
        names = [name for name in self._holders if fields is None or name in fields]
        asked = dict.fromkeys(
            self._holders[name].projection for name in (*names, self._key) if name
        )
        table = self._take(shard, numbers, [name for name in asked if name])
        columns = [self._values(shard, numbers.tolist(), name, table) for name in names]
        keys = table[self._key].to_pylist() if self._key else [None] * numbers.size
        columns.append(["" if key is None else str(key) for key in keys])
        names.append("__key__")
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]

    def fetch(self, blob: RowBlob) -> bytes:
        """Return an image.

        Raises:
            SampleError: `no_image`: it is null; `path_outside_root`: it is stored elsewhere.
        """
        name, _, item = blob.field.partition(".")
        data: bytes | None = bytes_at(_cell(self, blob.shard, blob.row, name), [item] * bool(item))
        if data is None:
            where = f"{self.shards[blob.shard].name}/{blob.row}, {blob.field}"
            raise SampleError("no_image", f"{where} is null. Store the image's bytes in it.")
        return data

    def columns(self, shard: int, rows: Rows, fields: Sequence[str]) -> dict[str, Column]:
        """Return the stored bytes of text and image fields, row after row.

        A null image is no value. Other fields are left out, and blobs if one is stored elsewhere.
        """
        numbers = self.numbers(shard, rows)
        kinds = {name: self._holders[name].kind for name in fields if name in self._holders}
        plain = [name for name, kind in kinds.items() if kind in ("text", "bytes", "struct")]
        table = self._take(shard, numbers, plain)
        arrays = {name: table[name].combine_chunks() for name in plain}
        for name in (name for name, kind in kinds.items() if kind == "blob"):
            with suppress(SampleError):  # `fetch` tells which row it is
                arrays[name] = self._blobs(shard, numbers, name)
        for name in (name for name, kind in kinds.items() if kind == "struct"):
            arrays[name] = pc.struct_field(arrays[name], "bytes")
        columns = {name: to_column(array) for name, array in arrays.items()}
        return {name: column for name, column in columns.items() if column is not None}

    def _take(self, shard: int, rows: Rows, columns: list[str]) -> pa.Table:
        """Return columns of rows in the order asked; a blob's are descriptors."""
        if not columns:
            return pa.table({})
        if any(self._holders[name].kind == "blob" for name in columns if name in self._holders):
            # A fragment's own take fails on blobs (pylance 14); this one costs time per fragment.
            at = (rows + self._starts[shard]).tolist()
            return run(take, self._source, None, at, columns)
        unique, places = np.unique(rows, return_inverse=True)  # as a fragment's take demands
        fragment = self._fragments[shard]
        table = run(take, self._source, fragment, unique.tolist(), columns)
        return table if np.array_equal(unique, rows) else table.take(places)

    def _values(self, shard: int, rows: list[int], name: str, table: pa.Table) -> list[Any]:
        """Return a column's values, images as blobs."""
        kind, projection = self._holders[name]
        if kind in ("text", "value"):
            return list(table[name].to_pylist())
        if projection is None:
            return [RowBlob(shard, row, name) for row in rows]
        if kind in ("blob", "struct"):
            pairs = zip(rows, pc.is_valid(table[name]).to_pylist(), strict=True)
            return [RowBlob(shard, row, name) if there else None for row, there in pairs]
        counts = pc.list_value_length(table[name]).to_pylist()
        items = iter(pc.is_valid(pc.list_flatten(table[name])).to_pylist())
        lists: list[Any] = []
        for row, count in zip(rows, counts, strict=True):
            found = (RowBlob(shard, row, f"{name}.{i}") for i in range(count or 0))
            lists.append(None if count is None else [b if next(items) else None for b in found])
        return lists

    def _blobs(self, shard: int, rows: Rows, name: str) -> pa.Array:
        """Return the payloads of a blob column.

        Raises:
            SampleError: One is stored outside the dataset.
        """
        stored = self._take(shard, rows, [name])[name].to_pylist()
        for uri in (blob["blob_uri"] for blob in stored if blob and blob.get("blob_uri")):
            raise SampleError(
                "path_outside_root",
                f"{self.shards[shard].name}, {name} points to {uri}. Write the bytes into the "
                'dataset, with external_blob_mode="ingest".',
            )
        at = (rows + self._starts[shard]).tolist()
        return pa.array(run(blobs, self._source, at, name), pa.large_binary())


@lru_cache(maxsize=_CELLS)
def _cell(reader: LanceReader, shard: int, row: int, name: str) -> pa.Scalar:
    """Return the images of one column of a row."""
    rows = reader.numbers(shard, [row])
    if reader._holders[name].kind == "blob":
        return reader._blobs(shard, rows, name)[0]
    return reader._take(shard, rows, [name])[name][0]
