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
from zephon_mm.readers.files import PathLike, Paths, ShardFile, find_shards, printable, row_numbers
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


class RowIndex:
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
        self._kind = kind
        self._index_shard = index_shard
        self._cache: str | None = None
        if cache_dir is not None:
            # Keyed by what was asked for: shards that join a folder extend its cache.
            asked = [path] if isinstance(path, str | os.PathLike) else path
            place = [printable(os.fsencode(os.path.abspath(one))) for one in asked]
            self._cache = os.path.join(cache_dir, f"{digest(kind, *place)}.index")
        self._adopt(self._cached() or self._build(progress=progress))

    @property
    def kind(self) -> str:
        """Format and options that the rows depend on."""
        return self._kind

    def digest(self) -> str:
        """Return hex digits over kind, names, sizes and row counts; not over paths or times."""
        return digest(self._kind, *(value for shard in self.shards for value in shard))

    def part(self, shard: int) -> Part:
        """Return the index of one shard, its arrays as read-only views."""
        return self._image.part(shard)

    def rows(self, shard: int, rows: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return row numbers as an array.

        Raises:
            IndexError: One of them is not a row of the shard.
        """
        name, num_rows, _ = self.shards[shard]
        return row_numbers(name, num_rows, rows)

    def __getstate__(self) -> dict[str, Any]:
        """Leave a mapped image out: the other process maps the same file."""
        state = dict(self.__dict__)
        if self._cache is not None:
            state["_image"] = self._image.file.checksum
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Map the cache again; when it is gone, scan the shards again."""
        self.__dict__.update(state)
        if self._cache is None:
            return
        image = _Image.load(self._cache)
        if image is None or image.file.checksum != state["_image"]:
            before = self.digest()
            self._adopt(self._cached() or self._build(progress=False))
            if self.digest() != before:
                raise DatasetError(f"the shards of {self._cache} changed during the run. Restart.")
        else:
            self._image = image

    def _adopt(self, image: "_Image") -> None:
        self._image = image
        self.shards = tuple(
            ShardInfo(file.name, num_rows, file.num_bytes)
            for file, num_rows in zip(self.files, image.num_rows(), strict=True)
        )

    def _cached(self) -> "_Image | None":
        image = _Image.load(self._cache) if self._cache is not None else None
        fits = image is not None and image.stamps() == [file[1:] for file in self.files]
        return image if image is not None and fits and image.file.is_intact() else None

    def _build(self, *, progress: bool) -> "_Image":
        old = _Image.load(self._cache) if self._cache is not None else None
        known = {}
        if old is not None and old.file.is_intact():
            known = {stamp: i for i, stamp in enumerate(old.stamps())}
        new = sum(file[1:] not in known for file in self.files)
        hidden = None if progress and new > _QUIET_SHARDS else True
        parts = []
        shown = tqdm(self.files, desc=f"index {self._kind}", unit="shard", disable=hidden)
        for number, file in enumerate(shown, start=1):
            coming = self.files[number : number + _SHARDS_AHEAD]
            prefetch(one.path for one in coming if one[1:] not in known)
            at = known.get(file[1:])
            parts.append(self._index_shard(file) if old is None or at is None else old.part(at))
        image = _Image.encode(self.files, parts)
        if self._cache is None:
            return image
        try:
            return image.save(self._cache)
        except OSError as error:
            warnings.warn(
                f"cannot keep an index at {self._cache} ({error}): it will be made anew in each "
                "run. Set cache_dir to a folder that can be written.",
                stacklevel=4,
            )
            self._cache = None
            return image


class _Image:
    """The parts of all shards in one array file.

    Args:
        file: What `encode` made.
    """

    def __init__(self, file: ArrayFile) -> None:
        self.file = file

    @classmethod
    def load(cls, path: str) -> "_Image | None":
        """Map a file; None if there is none, or it is no index."""
        file = ArrayFile.load(path)
        return None if file is None else cls(file)

    @classmethod
    def encode(cls, files: Sequence[ShardFile], parts: Sequence[Part]) -> "_Image":
        """Lay the parts out; the arrays of one name follow one another."""
        rows = [[*f[1:], p.num_rows, p.meta] for f, p in zip(files, parts, strict=True)]
        bounds, arrays = {}, {}
        for name in parts[0].arrays:
            column = [part.arrays[name] for part in parts]
            bounds[name] = np.cumsum([0] + [array.size for array in column]).tolist()
            arrays[name] = np.concatenate(column)
        return cls(ArrayFile.encode({"shards": rows, "bounds": bounds}, arrays))

    def save(self, path: str) -> "_Image":
        """Write whole or not at all; return the same image, mapped from the file."""
        return _Image(self.file.save(path))

    def stamps(self) -> list[tuple[str, int, int]]:
        """Return (path, bytes, mtime in ns) of each shard."""
        return [(path, size, mtime) for path, size, mtime, *_ in self.file.header["shards"]]

    def num_rows(self) -> list[int]:
        """Return the rows of each shard."""
        return [row[3] for row in self.file.header["shards"]]

    def part(self, shard: int) -> Part:
        """Return one shard's part; its arrays are views."""
        *_, num_rows, meta = self.file.header["shards"][shard]
        bounds = self.file.header["bounds"]
        arrays = {
            name: array[bounds[name][shard] : bounds[name][shard + 1]]
            for name, array in self.file.arrays.items()
        }
        return Part(num_rows, meta, arrays)
