"""The files that a path stands for, as the shards of a dataset; their bytes, unpacked if need be.

Laws (tests/readers/test_rowindex.py, tests/readers/test_files.py):
    1. A file that is named and missing is an error at the start, also one inside a brace pattern.
    2. Names are unique in a dataset and printable: they go to logs, JSON states and digests.
    3. A compressed file is unpacked once a machine, into the file cache, up to a limit; one that is
       cut or damaged is an error that names it.

Imports: errors, filecache, records, rng, stores, braceexpand, pyarrow (codecs).
Used by: the readers.
"""

import glob
import json
import os
import re
import struct
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from braceexpand import braceexpand
from numpy.typing import NDArray

from zephon_mm.errors import DatasetError, SampleError
from zephon_mm.filecache import FileCache, cache_folder
from zephon_mm.protocols import Sample
from zephon_mm.records import Column, RowBlob, ShardInfo
from zephon_mm.rng import digest
from zephon_mm.stores import local

PathLike = str | os.PathLike[str]
Paths = PathLike | Sequence[PathLike]
Numbers = NDArray[np.int64]
Rows = Sequence[int] | Numbers
Fields = Sequence[str] | None
Samples = list[Sample | SampleError]

_CODECS = {".gz": "gzip", ".tgz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
_MAX_EXPANSION, _ALWAYS_BYTES = 200, 1 << 30  # a file may grow that many times, or to that size
KEYS = ("__key__", "id", "key")
"""Fields that hold a sample's name, the best first."""

_BLOCK_BYTES = 8 << 20
_ONE_OF = re.compile(r"(.*-)\d+(-of-(\d+)\.[^/]*)")
_DENSE_BYTES = 4096  # regions that lie closer together are read at once
_TOLD = (OSError, ValueError, LookupError, RuntimeError, struct.error, pa.ArrowException)


class ShardFile(NamedTuple):
    """A shard on disk. `name` is unique in its dataset, `path` is absolute."""

    name: str
    path: str
    num_bytes: int
    mtime_ns: int


def list_files(path: Paths, suffixes: tuple[str, ...]) -> list[str]:
    """Return the absolute paths that a file, folder, list, brace pattern or glob stands for.

    A folder gives its files with one of the suffixes, at any depth, sorted; lists and patterns keep
    their order. Hidden files are left out.

    Raises:
        DatasetError: A file that is named, also by a brace pattern, does not exist.
    """
    if not isinstance(path, str | os.PathLike):
        return [file for one in path for file in list_files(one, suffixes)]
    text = os.path.abspath(os.path.expanduser(os.fspath(path)))
    if os.path.isdir(text):
        found = (p for p in Path(text).rglob("*") if p.name.lower().endswith(suffixes))
        return sorted(str(p) for p in found if not p.name.startswith(".") and p.is_file())
    if os.path.exists(text):
        return [text]
    if "{" in text:
        files = list(braceexpand(text))
        missing = [file for file in files if file != text and not glob.glob(file)]
        if len(files) > 1 and not missing:
            return list_files(files, suffixes)
        raise DatasetError(
            f"{len(missing)} of the {len(files)} files of {text} do not exist, first "
            f"{(missing or [text])[0]}. Restore them, or name only the shards that exist."
        )
    if matches := sorted(glob.glob(text, recursive=True)):
        return list_files(matches, suffixes)
    raise DatasetError(f"{text} does not exist or matches nothing. Check `path`.")


def is_first(
    path: Paths, suffixes: tuple[str, ...], looks_right: Callable[[bytes], bool], size: int
) -> bool:
    """Whether the first file of a path has one of the suffixes, or its first bytes look right."""
    files = list_files(path, suffixes)
    if not files or files[0].lower().endswith(suffixes):
        return bool(files)
    with open(local(files[0]), "rb") as file:
        return looks_right(file.read(size))


def find_shards(path: Paths, suffixes: tuple[str, ...]) -> list[ShardFile]:
    """Return the shards of a dataset in the order of the data.

    Raises:
        DatasetError: None was found, one is missing, or one is listed twice.
    """
    files = list_files(path, suffixes)
    if not files:
        raise DatasetError(f"{path} holds no {' or '.join(suffixes)} file. Check path and fmt.")
    if len(set(files)) < len(files):
        raise DatasetError(f"{path} names a file twice. Repeat data by its weight in the mixture.")
    top = os.path.commonpath([os.path.dirname(file) for file in files])
    names = [os.path.basename(file) for file in files]
    if isinstance(path, str | os.PathLike) and os.path.isdir(path):
        top, names = os.path.abspath(path), []
    if len(set(names)) < len(files):
        names = [os.path.relpath(file, top) for file in files]
    _warn_of_lacking(files)
    stats = [os.stat(file) for file in files]
    return [
        ShardFile(printable(os.fsencode(name)), file, stat.st_size, stat.st_mtime_ns)
        for name, file, stat in zip(names, files, stats, strict=True)
    ]


def _warn_of_lacking(files: Sequence[str]) -> None:
    """Warn of files that the names of others tell of; somebody may want a part of a dataset."""
    there = set(files)
    for head, tail, total in {match.groups() for match in map(_ONE_OF.fullmatch, files) if match}:
        names = (f"{head}{number:0{len(total)}}{tail}" for number in range(int(total)))
        if lacking := [name for name in names if name not in there]:
            warnings.warn(
                f"{len(lacking)} of {total} shards are not there, first {lacking[0]}. Restore "
                "them, or go on without.",
                stacklevel=4,
            )


class Sharded:
    """What readers of shards have in common.

    Attributes:
        kind: Format and options that the rows depend on: a key of what is derived from them.
        shards: In the order of the data.
    """

    kind: str
    shards: Sequence[ShardInfo]

    def digest(self) -> str:
        """Return hex digits over kind, names, sizes and row counts; not over paths or times."""
        return digest(self.kind, *(value for shard in self.shards for value in shard))

    def numbers(self, shard: int, rows: Rows) -> Numbers:
        """Return row numbers of a shard as an array.

        Raises:
            IndexError: One of them is not a row of the shard.
        """
        name, num_rows, _ = self.shards[shard]
        numbers = np.asarray(rows, dtype=np.int64)
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < num_rows:
            raise IndexError(f"{name} has rows 0 to {num_rows - 1}, asked for {numbers.tolist()}")
        return numbers


class BlockReader(Sharded):
    """A reader whose `_opened` gives a block: some rows of a shard, and how to read them."""

    def _opened(self, shard: int, rows: Rows) -> AbstractContextManager[Any]:
        raise NotImplementedError

    def fetch(self, blob: RowBlob) -> bytes:
        """Return a picture, or other bytes, of a row.

        Raises:
            SampleError: The row is damaged.
        """
        with self._opened(blob.shard, [blob.row]) as block:
            return block.fetch(blob.field)  # type: ignore[no-any-return]

    def columns(self, shard: int, rows: Rows, fields: Sequence[str]) -> dict[str, Column]:
        """Return the stored bytes of text, bytes and encoded pictures, as `ColumnReader` says.

        Raises: as `read`.
        """
        with self._opened(shard, rows) as block:
            return block.columns(fields)  # type: ignore[no-any-return]


def inflated(data: bytes | memoryview, codec: str, limit: int) -> Iterator[bytes]:
    """Yield blocks of what compressed bytes hold.

    Raises:
        ValueError: They hold more than `limit` bytes.
        OSError: They do not unpack; without an `errno`, unlike those of the environment.
    """
    size = 0
    with pa.CompressedInputStream(pa.BufferReader(data), codec) as stream:
        while block := stream.read(_BLOCK_BYTES):
            if (size := size + len(block)) > limit:
                raise ValueError(f"it gives over {limit} bytes, more than is said of it")
            yield block


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON: write null, or a number")


parse_json = json.JSONDecoder(parse_constant=_refuse).decode
"""Returns the value of JSON text. NaN and Infinity, which Python would take, are ValueErrors."""


@contextmanager
def damage_named(path: str, what: str = "is damaged") -> Iterator[None]:
    """Turn what a library says of data into an error that names the file.

    Raises:
        OSError: The environment failed: its errors have a number, those of the data have none.
        DatasetError: All else.
    """
    try:
        yield
    except _TOLD as error:
        if getattr(error, "errno", None) is not None:
            raise
        text = str(error).partition("\n")[0]
        if "(os error" in text:  # as libraries in Rust tell the number
            raise OSError(f"{path}: {text}") from None
        message = f"{path} {what}: {text}. Restore it, or write it again."
        raise DatasetError(message) from None


def printable(name: bytes) -> str:
    """Return a name as text that any log or JSON state can hold, bad UTF-8 as escapes."""
    return name.decode("utf-8", "backslashreplace")


@contextmanager
def open_shard(file: ShardFile, cache_dir: PathLike | None = None) -> Iterator[int]:
    """Yield a descriptor of a shard that still has the size that was indexed.

    Args:
        file: The shard. That of a compressed one is of its contents.
        cache_dir: The dataset's; compressed shards are unpacked into its file cache.

    Raises:
        DatasetError: The size differs, or it does not unpack.
    """
    source = local(file.path)
    descriptor = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor).st_size
        if found != file.num_bytes:
            raise DatasetError(
                f"{file.path} has {found} bytes, {file.num_bytes} when it was indexed. "
                "Restore the file, or start again so that it is indexed anew."
            )
        if codec := codec_of(file.path):
            os.close(descriptor)
            descriptor = -1
            cache = _file_cache(cache_dir if cache_dir is None else os.fspath(cache_dir))
            path = cache.get(f"unpacked {file[1:]}", partial(_unpack, file, source, codec))
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        yield descriptor
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def codec_of(path: str) -> str | None:
    """Return how a file is compressed, by its suffix; None if it is not."""
    return _CODECS.get(os.path.splitext(path)[1].lower())


@lru_cache
def _file_cache(cache_dir: str | None) -> FileCache:
    return FileCache(cache_folder(cache_dir))


def _unpack(file: ShardFile, path: str, codec: str, target: str) -> None:
    limit = max(_MAX_EXPANSION * file.num_bytes, _ALWAYS_BYTES)
    with (
        damage_named(file.path, f"does not unpack as {codec}"),
        pa.input_stream(path, compression=codec) as source,
        open(target, "wb") as out,
    ):
        while (block := source.read(_BLOCK_BYTES)) and out.tell() <= limit:
            out.write(block)
    if block:
        raise DatasetError(
            f"{file.path} unpacks to over {limit} bytes, {limit // file.num_bytes} times its size. "
            "If that is right, unpack it and use the unpacked file."
        )


def read_pieces(descriptor: int, path: str, starts: Numbers, sizes: Numbers) -> list[bytes]:
    """Return the bytes of each region; arguments and errors as for `read_regions`."""
    data = read_regions(descriptor, path, starts, sizes).tobytes()
    return [data[start:stop] for start, stop in pairwise([0, *np.cumsum(sizes).tolist()])]


def read_regions(descriptor: int, path: str, starts: Numbers, sizes: Numbers) -> NDArray[np.uint8]:
    """Return the bytes of a file's regions, one after the other, (sum of sizes,) uint8.

    Args:
        descriptor: Read with `pread` only.
        path: For messages.
        starts: (n,) int64, in bytes, in any order.
        sizes: (n,) int64, in bytes.

    Raises:
        DatasetError: The file ends before a region does.
    """
    first = int(starts.min(initial=1 << 62))
    span, wanted = int((starts + sizes).max(initial=first)) - first, int(sizes.sum())
    if span <= _DENSE_BYTES * sizes.size:
        block = memoryview(os.pread(descriptor, span, first))
        places = zip((starts - first).tolist(), (starts - first + sizes).tolist(), strict=True)
        data = np.frombuffer(b"".join([block[start:stop] for start, stop in places]), np.uint8)
        found = data.size
    else:  # each into its place: joining them costs twice as much
        data, found, at = np.empty(wanted, np.uint8), 0, 0
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
            found += os.preadv(descriptor, [data.data[at : at + size]], start)
            at += size
    if found < wanted:
        raise DatasetError(
            f"{path} gave {found} of {wanted} bytes up to byte {first + span}: it was cut after it "
            "was indexed. Restore it and start again."
        )
    return data
