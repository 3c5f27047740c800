"""LitData chunks, as `litdata.optimize` writes them, without its library.

Laws (tests/readers/test_litdata.py, tests/contracts/reader.py):
    1. A row has the fields of the sample that was stored, nested as it was. One that was no mapping
       has `image` and `text`, where there is one of these, and else the position as a name.
    2. A chunk is used if it ends where its own table says. Sizes in `index.json` decide nothing.
    3. What is compressed is unpacked once a machine, into the file cache; the source never changes.
    4. `read` touches no picture's bytes.

Cost: opening a dataset, one `stat` a chunk; reading is that of `readers.rowtable`.

Imports: errors, filecache, records, rng, readers.{files, litchunks, litindex, litvalues, rowtable}.
Used by: io (by entry point).
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from zephon_mm.errors import SampleError
from zephon_mm.filecache import FileCache, cache_folder
from zephon_mm.readers import files
from zephon_mm.readers.litchunks import ArrowRows, form_of, unpack
from zephon_mm.readers.litindex import is_litdata, load
from zephon_mm.readers.litvalues import BLOBS, TEXTS, decode
from zephon_mm.readers.rowtable import THE_ROW, Kinds, TableRows
from zephon_mm.records import ShardInfo
from zephon_mm.rng import digest


class LitDataReader(files.BlockReader):
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
        path: files.Paths,
        *,
        cache_dir: files.PathLike | None = None,
        progress: bool = True,
        allow_pickle: bool = False,
    ) -> None:
        self._index = load(path)
        self._cache = FileCache(cache_folder(cache_dir))
        self._allow_pickle = allow_pickle
        kinds = {name: field.kind for name, field in self._index.fields.items()}
        self._key = next((n for n in files.KEYS if kinds.get(n) in {*TEXTS, "int"}), None)
        self.kind = f"litdata-{digest(json.dumps([kinds, self._index.tree, allow_pickle]))[:16]}"
        self.shards = tuple(
            ShardInfo(file.name, chunk.num_rows, file.num_bytes)
            for file, chunk in zip(self._index.files, self._index.chunks, strict=True)
        )

    @classmethod
    def detect(cls, path: files.Paths) -> bool:
        """Whether an index.json has `chunks` and `config`, or litdata left chunks without one."""
        return is_litdata(path)

    def read(self, shard: int, rows: Sequence[int], fields: files.Fields = None) -> files.Samples:
        """Return the rows: values, blobs for bytes and pictures, and `__key__`.

        Raises:
            IndexError: No such row.
            OSError: A file cannot be read.
            DatasetError: The chunk is damaged, or not the one that was indexed.
        """
        wanted = None if fields is None else {*fields, self._key}
        tree = self._index.tree.items()
        with self._opened(shard, rows) as block:
            if isinstance(block, ArrowRows):
                found = block.samples(wanted)
            else:
                found = block.samples({n: p for n, p in tree if wanted is None or n in wanted})
        samples: files.Samples = []
        for row, sample in zip(rows, found, strict=True):
            if isinstance(sample, SampleError):
                samples.append(sample)
                continue
            key = sample.get(self._key) if self._key else None
            asked = {n: v for n, v in sample.items() if fields is None or n in fields}
            samples.append({**asked, "__key__": str(row if key is None else key)})
        return samples

    @contextmanager
    def _opened(self, shard: int, rows: files.Rows) -> Iterator[ArrowRows | TableRows]:
        """Yield rows of a chunk, which is unpacked if need be."""
        file, chunk = self._index.files[shard], self._index.chunks[shard]
        numbers = self.numbers(shard, rows)
        form = form_of(file, chunk.num_rows)
        plain = file
        if is_packed := form in ("zstd", "frames"):
            path = self._cache.get(f"litdata {file[1:]}", partial(unpack, file, chunk))
            plain = files.ShardFile(file.name, path, os.path.getsize(path), 0)
        with files.open_shard(plain) as descriptor:
            if form == "arrow":
                yield ArrowRows(file, descriptor, shard, numbers, chunk.num_rows)
                return
            fields = self._index.fields
            if chunk.num_tokens is not None:
                fields = {name: field._replace(size=THE_ROW) for name, field in fields.items()}
            made = partial(decode, allow_pickle=self._allow_pickle)
            kinds = Kinds(BLOBS | {"pil"}, BLOBS | TEXTS, made)
            yield TableRows(file, shard, descriptor, numbers, fields, kinds, is_plain=not is_packed)
