"""Datasets by name and place: format detection, the registry of readers, the bytes of blobs.

Laws (tests/test_io.py):
    1. A format is recognised by content. None, or more than one, is an error that lists them.
    2. This module knows no format: readers are entry points of the group `zephon_mm.readers`. A
       reader class is called as `cls(path, *, cache_dir, progress, **options)` and has a class
       method `detect(path) -> bool`.
    3. `read_blob` gives the blob's bytes or an error, never fewer bytes.

Imports: errors, protocols, records. Used by: work, engine, cli.
"""

import itertools
import os
import sys
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from inspect import signature
from io import BufferedReader, BytesIO, RawIOBase
from pathlib import Path
from typing import Any, BinaryIO, Literal

from zephon_mm import stores
from zephon_mm.errors import ConfigError, DatasetError
from zephon_mm.protocols import Reader
from zephon_mm.records import Blob, FileBlob, RowBlob, ShardInfo

PathLike = str | os.PathLike[str]
Paths = PathLike | Sequence[PathLike]
Missing = Literal["skip", "error", "keep"]
Schema = str | Callable[..., Any] | None

_GROUP = "zephon_mm.readers"
_OPEN_FILES = 64


class Dataset:
    """A named collection of shards in one format.

    Args:
        name: Used in mixtures, keys and messages; not empty, without "/".
        reader: Gives its rows.
        schema: How rows become documents; applied by the measure stage.
        missing: What the measure stage does with rows that lack a field.
        version: Change it when the meaning of a schema function changes; without one a dataset with
            a schema function has no index.
        path: Where it came from.
        fmt: Name of the format, for messages.
        cache_dir: Folder for what is derived from the data; None for nowhere.

    Raises:
        ConfigError: A bad name or `missing`.
        DatasetError: There are no rows.
    """

    def __init__(
        self,
        name: str,
        reader: Reader,
        *,
        schema: Schema = None,
        missing: Missing = "skip",
        version: str = "",
        path: str = "",
        fmt: str = "",
        cache_dir: Path | None = None,
    ) -> None:
        if not name or "/" in name:
            raise ConfigError(f"a dataset's name must be nonempty, without '/', got {name!r}")
        if schema is not None and not isinstance(schema, str) and not callable(schema):
            raise ConfigError(f"schema must be a name or a function, got {schema!r}")
        if missing not in ("skip", "error", "keep"):
            raise ConfigError(f"missing must be 'skip', 'error' or 'keep', got {missing!r}")
        self.name = name
        self.reader = reader
        self.schema = schema
        self.missing = missing
        self.version = version
        self.cache_dir = cache_dir
        self.path = path or type(reader).__name__
        self.fmt = fmt or type(reader).__name__
        ends = itertools.accumulate(shard.num_rows for shard in reader.shards)
        self._starts = [0, *ends]
        self._num_rows = self._starts[-1]
        self.mirrors: Sequence[str] = ()  # of its stores, if that is where it came from
        _opened.cache_clear()  # a file may have been replaced since an earlier dataset read it
        self._digest: str | None = None
        if not self._num_rows:
            raise DatasetError(
                f"dataset {name!r} is empty: {self.path} has {len(reader.shards)} shards and no "
                f"row that reads as {self.fmt}. Check path and fmt."
            )

    @classmethod
    def from_path(  # noqa: PLR0913 - one call says all about a dataset
        cls,
        name: str,
        path: Paths,
        fmt: str | None = None,
        schema: Schema = None,
        *,
        missing: Missing = "skip",
        version: int | str = "",
        cache_dir: PathLike | None = None,
        cache_bytes: int = 64 << 30,
        progress: bool = True,
        **reader_options: Any,
    ) -> "Dataset":
        """Open a dataset from files, local or in a store.

        Args:
            name: Of the dataset.
            path: A file, a folder, a pattern such as `s-{000..120}.tar`, or a list of these. Each
                may be a URL: `s3://`, `gs://`, `az://`, `https://` (which cannot list folders), or
                `hf://owner/name/config/split`, of which config and split may be left out.
                Credentials are those of the environment.
            fmt: Name of the format; None recognises it by content.
            schema: How rows become documents.
            missing: What to do with rows that lack a field.
            version: Of a schema function, for the index and the fingerprint; without one, of the
                data, where a format has versions: a number or a tag of Lance.
            cache_dir: Folder for index caches; None is `zephon_mm` in `$XDG_CACHE_HOME`, by default
                `~/.cache`. A folder beside the data serves all machines that mount it.
            cache_bytes: What shards of stores may take in `cache_dir`. They are downloaded whole,
                ahead of need, and leave when others need the space. tar and JSON Lines are
                downloaded once to be indexed.
            progress: Show a bar on stderr while many shards are indexed.
            **reader_options: For the format's reader, such as `split="last_dot"`.

        Raises:
            ConfigError: The format is unknown, not recognised, or ambiguous; a bad option.
            DatasetError: Shards are missing or damaged, or there are no rows.
        """
        if not path:
            raise ConfigError(f"path is {path!r}. Name at least one file or folder.")
        directory = index_dir(cache_dir)
        place, from_url = _mirrored(path, fmt, directory, cache_bytes)
        reader_options = from_url | reader_options
        fmt, reader_class = (fmt, reader_classes(fmt)[fmt]) if fmt else _detect(place, path)
        if version and not callable(schema) and "version" in signature(reader_class).parameters:
            reader_options["version"] = version
        try:
            reader = reader_class(place, cache_dir=directory, progress=progress, **reader_options)
        except TypeError as error:
            if not reader_options:
                raise
            raise ConfigError(
                f"dataset {name!r}, fmt={fmt!r}: {error}. Check its options."
            ) from error
        dataset = cls(
            name,
            reader,
            schema=schema,
            missing=missing,
            version=str(version),
            path=_shown(path),
            fmt=fmt,
            cache_dir=directory,
        )
        places = [place] if isinstance(place, str | os.PathLike) else place
        dataset.mirrors = [os.fspath(one) for one in places if stores.is_mirror(os.fspath(one))]
        return dataset

    @classmethod
    def from_rows(
        cls,
        name: str,
        rows: Iterable[Mapping[str, Any]],
        schema: Schema = None,
        *,
        missing: Missing = "skip",
        version: str = "",
    ) -> "Dataset":
        """Make a dataset of rows that are in memory.

        All rows are kept, pictures encoded (arrays and `PIL.Image` as PNG); a pool of workers gets
        them once, with its context. For more than memory holds, write files.

        Args:
            name: Of the dataset.
            rows: Mappings of field -> str, number, None, a picture (encoded bytes, `PIL.Image`, a
                uint8 array of shape (height, width, 3), the path of a file as `os.PathLike`), or
                lists and mappings of these.
            schema: How rows become documents.
            missing: What to do with rows that lack a field.
            version: Of a schema function, for the fingerprint.

        Raises:
            ConfigError: A row is no mapping, or holds a value of another type.
            DatasetError: There are no rows, or a path is no file.
        """
        reader_class = _load(EntryPoint("memory", "zephon_mm.readers.memory:MemoryReader", _GROUP))
        reader = reader_class(rows)
        return cls(name, reader, schema=schema, missing=missing, version=version, fmt="memory")

    @property
    def shards(self) -> Sequence[ShardInfo]:
        """The shards in the order of the data."""
        return self.reader.shards

    def __len__(self) -> int:
        """Return the rows of all shards."""
        return self._num_rows

    def __repr__(self) -> str:
        return f"Dataset({self.name!r}, {self.path!r}, fmt={self.fmt!r}, rows={self._num_rows})"

    def digest(self) -> str:
        """Return hex digits that change when any shard's name, size or row count does."""
        if self._digest is None:
            self._digest = self.reader.digest()
        return self._digest

    def key(self, shard: int, row: int) -> str:
        """Return a sample's name in a batch: the dataset's, and the row's number over all shards.

        It is `captions/1017` in any format and any division into shards; see `locate`.
        """
        return f"{self.name}/{self._starts[shard] + row}"

    def locate(self, key: str) -> tuple[int, int]:
        """Return shard and row of a sample, by its name in a batch.

        Raises:
            KeyError: It is no sample of this dataset.
        """
        name, _, number = key.rpartition("/")
        if name != self.name or not number.isdigit() or int(number) >= len(self):
            raise KeyError(f"{key!r} is none of the {len(self)} samples of {self.name!r}")
        shard = bisect_right(self._starts, int(number)) - 1
        return shard, int(number) - self._starts[shard]

    def row_name(self, shard: int, row: int) -> str:
        """Return a sample's name for people, such as `captions/shard-000000.tar/17`."""
        return f"{self.name}/{self.shards[shard].name}/{row}"


def reader_classes(*formats: str) -> Mapping[str, Any]:
    """Return format name -> reader class for the named formats, or all that are installed.

    Raises:
        ConfigError: A format is not installed, or its class cannot be imported.
    """
    found = entries_of(_GROUP)
    if unknown := [fmt for fmt in formats if fmt not in found]:
        raise ConfigError(f"fmt={unknown[0]!r} is not one of {', '.join(found) or 'no formats'}")
    return {fmt: _load(found[fmt]) for fmt in formats or found}


def index_dir(cache_dir: PathLike | None = None) -> Path | None:
    """Return the folder for index caches, made if needed; None, with a warning, if it cannot be."""
    if cache_dir is None:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        cache_dir = Path(base) / "zephon_mm"
    path = Path(cache_dir).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        usable = os.access(path, os.W_OK | os.X_OK)
    except OSError:
        usable = False
    if usable:
        return path
    warnings.warn(
        f"{path} cannot be written: indexes are made anew in each run. Set cache_dir.",
        stacklevel=3,
    )
    return None


def read_blob(dataset: Dataset, blob: Blob, size: int = -1) -> bytes:
    """Return the first `size` bytes of a blob, fewer if it is shorter; all for -1.

    Raises:
        OSError: The environment failed; the same call may succeed later.
        DatasetError: The file ends before the blob does.
        SampleError: A blob inside a row does not decode.
    """
    if isinstance(blob, RowBlob):
        data = dataset.reader.fetch(blob)
        return data if size < 0 else data[:size]
    wanted = blob.size if size < 0 else min(size, blob.size)
    data = _read(blob.path, blob.offset, wanted)
    if len(data) < wanted:
        raise DatasetError(
            f"{blob.path} gave {len(data)} of {wanted} bytes at {blob.offset}: it is shorter than "
            "when it was indexed. Restore the file, or start again to rebuild the index."
        )
    return data


def open_blob(dataset: Dataset, blob: Blob) -> BinaryIO:
    """Return a blob as a file that can be sought; a region of a file is read where it is asked for.

    Raises:
        OSError: As `read_blob`, also when the file is read.
    """
    if isinstance(blob, RowBlob):
        return BytesIO(dataset.reader.fetch(blob))
    return BufferedReader(_Region(dataset, blob), 1 << 16)


class _Region(RawIOBase):
    """A region of a local file, as a file of its own."""

    def __init__(self, dataset: Dataset, blob: FileBlob) -> None:
        self._dataset = dataset
        self._blob = blob
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._blob.size}[whence]
        self._at = max(start + offset, 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        size = max(min(len(buffer), self._blob.size - self._at), 0)
        part = FileBlob(self._blob.path, self._blob.offset + self._at, size)
        buffer[:size] = read_blob(self._dataset, part)
        self._at += size
        return size


class _OpenFile:
    """A descriptor, closed when the table and all readers have let go of it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


@lru_cache(_OPEN_FILES)
def _opened(path: str) -> _OpenFile:
    """Return a file; those that were read last are shared by all threads of a process.

    The table has no lock that a forked child could find held, and `pread` uses no file position: a
    child may go on with its parent's descriptors.
    """
    return _OpenFile(os.open(stores.local(path), os.O_RDONLY | os.O_CLOEXEC))


def _read(path: str, offset: int, size: int) -> bytes:
    """Return up to `size` bytes; fewer only where the file ends."""
    file = _opened(path)
    try:
        data = os.pread(file.descriptor, size, offset)
        # Linux gives at most 2 GiB at once.
        while len(data) < size and (
            more := os.pread(file.descriptor, size - len(data), offset + len(data))
        ):
            data += more
    except OSError:
        _opened.cache_clear()  # a stale network handle would fail for ever
        raise
    return data


def _mirrored(
    path: Paths, fmt: str | None, cache_dir: Path | None, max_bytes: int
) -> tuple[Any, dict[str, str]]:
    """Return the local path or paths, and the reader's options that were in a URL."""
    if not isinstance(path, str | os.PathLike):
        return [_mirrored(one, fmt, cache_dir, max_bytes)[0] for one in path], {}
    if not stores.is_remote(path) or _opens_urls(os.fspath(path), fmt):
        return path, {}
    return stores.mirror(os.fspath(path), cache_dir, max_bytes)


def _opens_urls(path: str, fmt: str | None) -> bool:
    """Whether the format's reader, or one that knows a URL by its name, opens URLs itself."""
    for name, entry in entries_of(_GROUP).items():
        if fmt not in (None, name):
            continue
        with suppress(ConfigError):
            reader_class = _load(entry)
            if getattr(reader_class, "opens_urls", False) and (fmt or reader_class.detect(path)):
                return True
    return False


def _shown(path: Paths) -> str:
    """Return a path, or the first of a list and how many more there are."""
    if isinstance(path, str | os.PathLike):
        return os.fspath(path)
    paths = [os.fspath(one) for one in path]
    return " and ".join(paths[:1] + [f"{len(paths) - 1} more"] * (len(paths) > 1))


def entries_of(group: str) -> Mapping[str, EntryPoint]:
    """Return the entry points of a group by name, sorted, of all packages that are installed."""
    return _installed(group, *(os.stat(one).st_mtime_ns for one in sys.path if os.path.isdir(one)))


@lru_cache
def _installed(group: str, *_changed_ns: int) -> Mapping[str, EntryPoint]:
    """Read a file of each package, which takes 10 ms; again when one was installed."""
    return {entry.name: entry for entry in sorted(entry_points(group=group), key=lambda e: e.name)}


def _load(entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except Exception as error:  # third-party code may fail in any way
        raise ConfigError(
            f"the reader {entry.name!r} = {entry.value} cannot be imported: {error!r}. "
            "Reinstall or remove the package that brings it."
        ) from error


def _detect(path: Paths, told: Paths) -> tuple[str, Any]:
    """Return name and class of the one format that recognises a path, which was told so.

    A reader that cannot be imported matters only when no other one recognises the path.
    """
    found: dict[str, Any] = {}
    broken: list[ConfigError] = []
    entries = entries_of(_GROUP)
    for fmt, entry in entries.items():
        try:
            reader_class = _load(entry)
        except ConfigError as error:
            broken.append(error)
            continue
        if reader_class.detect(path):
            found[fmt] = reader_class
    if len(found) == 1:
        return found.popitem()
    if found:
        raise ConfigError(f"{_shown(told)} fits {' and '.join(found)}. Choose one with fmt=.")
    looked = "; ".join(_looked_for(fmt, entries[fmt]) for fmt in entries) or "no format installed"
    problems = "".join(f" Also: {error}" for error in broken)
    raise ConfigError(
        f"{_shown(told)} is none of the known formats. Looked for: {looked}. Check the path, or "
        f"name the format with fmt=.{problems}"
    )


def _looked_for(fmt: str, entry: EntryPoint) -> str:
    """Return a format and the first line of what its `detect` looks for."""
    with suppress(ConfigError):
        if text := _load(entry).detect.__doc__:
            return f"{fmt} ({text.strip().splitlines()[0].rstrip('.')})"
    return fmt
