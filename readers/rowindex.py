"""Where the rows of a dataset of files are: found once, kept as arrays, cached as one file.

Laws (tests/readers/test_rowindex.py):
    1. An index never outlives its shard: a shard whose size or mtime changed is indexed again, the
       others are copied from the old cache. A damaged cache is the same as none.
    2. A cache appears whole or not at all, so any number of processes may build one at once.
    3. Unpickling maps the cache file: all processes of a machine share its pages.

Cost: one sequential pass of the format's own scanner over new shards. No Python object per row.

Imports: arrayfile, errors, records, rng, readers.files. Used by: readers of single files.
"""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from zephon_mm.arrayfile import ArrayFile
from zephon_mm.errors import DatasetError
from zephon_mm.readers.files import PathLike, Paths, Sharded, ShardFile, find_shards, printable
from zephon_mm.records import ShardInfo
from zephon_mm.rng import digest
from zephon_mm.stores import prefetch

_SHARDS_AHEAD = 4  # that are fetched, if they are in a store
_QUIET_SHARDS = 3  # indexing up to this many shows no progress bar


class Part(NamedTuple):
    """The index of one shard: JSON-serialisable `meta`, and arrays with shard-local values.

    All parts of an index have the same array names, each with one dtype, all one-dimensional.
    """

    num_rows: int
    meta: Mapping[str, Any]
    arrays: Mapping[str, NDArray[Any]]


class RowIndex(Sharded):
    """The parts of all shards of a dataset, in one buffer: memory, or a mapped cache file.

    Args:
        path: As for `list_files`.
        suffixes: Of the shards in a folder.
        kind: Format and options that the parts depend on; in the cache's key and the digest.
        index_shard: Scans one shard; picklable.
        cache_dir: Folder for the cache; None keeps the index in memory.
        progress: Show a bar on stderr, if that is a terminal, when many shards must be scanned.

    Raises:
        DatasetError: Shards are missing, or `index_shard` refuses one.
    """

    def __init__(
        self,
        path: Paths,
        suffixes: tuple[str, ...],
        *,
        kind: str,
        index_shard: Callable[[ShardFile], Part],
        cache_dir: PathLike | None = None,
        progress: bool = True,
    ) -> None:
        self.files = find_shards(path, suffixes)
        self.kind = kind
        self._index_shard = index_shard
        self._cache: str | None = None
        if cache_dir is not None:
            # Keyed by what was asked for: shards that join a folder extend its cache.
            asked = [path] if isinstance(path, str | os.PathLike) else path
            place = [printable(os.fsencode(os.path.abspath(one))) for one in asked]
            self._cache = os.path.join(cache_dir, f"{digest(kind, *place)}.index")
        self._adopt(self._current(progress=progress))

    def part(self, shard: int) -> Part:
        """Return the index of one shard, its arrays as read-only views."""
        return _part(self._image, shard)

    def __getstate__(self) -> dict[str, Any]:
        """Leave a mapped image out: the other process maps the same file."""
        image = self._image if self._cache is None else self._image.checksum
        return {**self.__dict__, "_image": image}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Map the cache again; when it is gone, scan the shards again."""
        self.__dict__.update(state)
        if self._cache is None:
            return
        image = ArrayFile.load(self._cache)
        if image is None or image.checksum != state["_image"]:
            before = self.digest()
            self._adopt(self._current(progress=False))
            if self.digest() != before:
                raise DatasetError(f"the shards of {self._cache} changed during the run. Restart.")
        else:
            self._image = image

    def _adopt(self, image: ArrayFile) -> None:
        self._image = image
        self.shards = tuple(
            ShardInfo(file.name, row[3], file.num_bytes)
            for file, row in zip(self.files, image.header["shards"], strict=True)
        )

    def _current(self, *, progress: bool) -> ArrayFile:
        """Return the cached image, if it is whole and of these shards, or make it anew."""
        old = ArrayFile.load(self._cache) if self._cache is not None else None
        known: dict[tuple[str, int, int], int] = {}
        if old is not None and old.is_intact():
            known = {tuple(row[:3]): number for number, row in enumerate(old.header["shards"])}
            if [*known] == [file[1:] for file in self.files]:
                return old
        new = sum(file[1:] not in known for file in self.files)
        hidden = None if progress and new > _QUIET_SHARDS else True
        parts = []
        shown = tqdm(self.files, desc=f"index {self.kind}", unit="shard", disable=hidden)
        for number, file in enumerate(shown, start=1):
            coming = self.files[number : number + _SHARDS_AHEAD]
            prefetch(one.path for one in coming if one[1:] not in known)
            at = known.get(file[1:])
            parts.append(self._index_shard(file) if old is None or at is None else _part(old, at))
        return self._kept(_image_of(self.files, parts))

    def _kept(self, image: ArrayFile) -> ArrayFile:
        if self._cache is None:
            return image
        try:
            return image.save(self._cache)
        except OSError as error:
            warnings.warn(
                f"cannot keep an index at {self._cache} ({error}): it will be made anew in each "
                "run. Set cache_dir to a folder that can be written.",
                stacklevel=5,
            )
            self._cache = None
            return image


def _image_of(files: Sequence[ShardFile], parts: Sequence[Part]) -> ArrayFile:
    """Lay the parts out; the arrays of one name follow one another."""
    rows = [[*file[1:], p.num_rows, p.meta] for file, p in zip(files, parts, strict=True)]
    bounds, arrays = {}, {}
    for name in parts[0].arrays:
        column = [part.arrays[name] for part in parts]
        bounds[name] = np.cumsum([0] + [array.size for array in column]).tolist()
        arrays[name] = np.concatenate(column)
    return ArrayFile.encode({"shards": rows, "bounds": bounds}, arrays)


def _part(image: ArrayFile, shard: int) -> Part:
    """Return one shard's part; its arrays are views."""
    *_, num_rows, meta = image.header["shards"][shard]
    bounds = image.header["bounds"]
    arrays = {
        name: array[bounds[name][shard] : bounds[name][shard + 1]]
        for name, array in image.arrays.items()
    }
    return Part(num_rows, meta, arrays)
