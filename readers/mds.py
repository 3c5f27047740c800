"""MDS shards, as Mosaic Streaming writes them, without its library.

Laws (tests/readers/test_mds.py, tests/contracts/reader.py):
    1. All streams below a path are one dataset: no row is padded, repeated or left out.
    2. Pictures are passed on as they are stored: regions of the shard, or, of a compressed shard,
       of its copy in the file cache. `read` touches none of them.
    3. A dataset has one digest, whether its shards are compressed or not.

Cost: opening a dataset, one `stat` a shard; reading is that of `readers.rowtable`.

Imports: errors, filecache, records, rng, stores, readers.{files, mdsindex, mdsvalues, rowtable}.
Used by: io (by entry point).
"""

import hashlib
import importlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from itertools import islice
from typing import Any

from zephon_mm.errors import ConfigError, DatasetError, SampleError
from zephon_mm.filecache import FileCache, cache_folder
from zephon_mm.readers import files
from zephon_mm.readers.mdsindex import INDEX, MDSShard, find_mds, folders_of, unpack
from zephon_mm.readers.mdsvalues import BLOBS, decode
from zephon_mm.readers.rowtable import Kinds, TableRows
from zephon_mm.records import ShardInfo
from zephon_mm.stores import local

_SEARCHED_FOLDERS = 64
_AS_STORED = frozenset({"str", "bytes", "jpeg", "png"})
_FORMAT = re.compile(rb'"format"\s*:\s*"mds"')


class MDSReader(files.BlockReader):
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
        path: files.Paths,
        *,
        cache_dir: files.PathLike | None = None,
        progress: bool = True,
        check_hashes: bool = False,
        allow_pickle: bool = False,
    ) -> None:
        self._shards = find_mds(path)
        self.kind = "mds-pickle" if allow_pickle else "mds"
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
    def detect(cls, path: files.Paths) -> bool:
        """Whether the first folder has an index.json that lists MDS shards, or .mds files."""
        first = next(iter(folders_of(path)), "")
        folders = os.walk(first, followlinks=True)
        for folder, _, names in islice(folders, _SEARCHED_FOLDERS):
            if any(".mds" in name for name in names):
                return True
            with suppress(OSError), open(os.path.join(folder, INDEX), "rb") as file:
                return bool(_FORMAT.search(file.read(1 << 16)))
        return False

    def read(self, shard: int, rows: Sequence[int], fields: files.Fields = None) -> files.Samples:
        """Return the rows: values, blobs for bytes and pictures, and `__key__`.

        Raises:
            IndexError: No such row.
            OSError: A file cannot be read.
            DatasetError: The shard is not the one that the index describes.
        """
        names = [column.name for column in self._shards[shard].columns]
        wanted = {n: n for n in names if fields is None or n in fields or n == "__key__"}
        with self._opened(shard, rows) as block:
            found = block.samples(wanted)
        return [
            sample if isinstance(sample, SampleError) else {"__key__": str(row), **sample}
            for row, sample in zip(rows, found, strict=True)
        ]

    @contextmanager
    def _opened(self, shard: int, rows: files.Rows) -> Iterator[TableRows]:
        told = self._shards[shard]
        numbers = self.numbers(shard, rows)
        path = told.path
        if told.codec:
            stat = os.stat(path)
            key = f"{path} {stat.st_size} {stat.st_mtime_ns} {told.num_bytes}"
            path = self._cache.get(key, partial(unpack, shard=told))
        file = files.ShardFile(told.name, told.path, told.num_bytes, 0)
        with files.open_shard(file._replace(path=path)) as descriptor:
            stat = os.fstat(descriptor)
            _check(told, path, (stat.st_ino, stat.st_mtime_ns), self._check_hashes)
            kinds = Kinds(BLOBS, _AS_STORED, partial(decode, allow_pickle=self._allow_pickle))
            fields = {column.name: column for column in told.columns}
            plain = not told.codec
            yield TableRows(file, shard, descriptor, numbers, fields, kinds, is_plain=plain)


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
