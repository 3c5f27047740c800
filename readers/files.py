"""The files that a path stands for, as the shards of a dataset.

Laws (tests/readers/test_rowindex.py):
    1. A file that is named and missing is an error at the start, also one inside a brace pattern.
    2. Names are unique in a dataset and printable: they go to logs, JSON states and digests.

Imports: errors, webdataset (brace patterns). Used by: readers.rowindex, readers of single files.
"""

import glob
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from webdataset.shardlists import expand_urls

from zephon_mm.errors import DatasetError

PathLike = str | os.PathLike[str]
Paths = PathLike | Sequence[PathLike]


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
        files = expand_urls(text)
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
    stats = [os.stat(file) for file in files]
    return [
        ShardFile(printable(os.fsencode(name)), file, stat.st_size, stat.st_mtime_ns)
        for name, file, stat in zip(names, files, stats, strict=True)
    ]


def printable(name: bytes) -> str:
    """Return a name as text that any log or JSON state can hold, bad UTF-8 as escapes."""
    return name.decode("utf-8", "backslashreplace")


@contextmanager
def open_shard(file: ShardFile) -> Iterator[int]:
    """Yield a descriptor of a shard that still has the size that was indexed.

    Raises:
        DatasetError: The size differs.
    """
    descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor).st_size
        if found != file.num_bytes:
            raise DatasetError(
                f"{file.path} has {found} bytes, {file.num_bytes} when it was indexed. "
                "Restore the file, or start again so that it is indexed anew."
            )
        yield descriptor
    finally:
        os.close(descriptor)
