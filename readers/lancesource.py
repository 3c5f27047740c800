"""What pylance is asked for: a version's description, rows, blobs; never in a forked process.

Laws (tests/readers/test_lance.py, tests/readers/test_lance_processes.py):
    1. Every process reads the version that was described first, or gets an error.
    2. pylance runs in no process that was forked from one that had loaded it. There it crashes or
       hangs, also with a dataset of its own (seen with pylance 14: 1 child in 10). A fresh
       interpreter runs it instead, and answers over a pipe; it ends with the process it serves.
    3. Importing this module loads no pylance, which warns at every fork from then on.

Cost: in a forked process, half a second once, and a copy of what is read.

Imports: errors, records, rng, readers.{arrowtable, files}, pylance. Used by: readers.lance.
"""

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa

from zephon_mm.errors import DatasetError
from zephon_mm.readers.arrowtable import is_binary, is_list, is_picture, is_text
from zephon_mm.readers.files import damage_named
from zephon_mm.records import ShardInfo
from zephon_mm.rng import digest

T = TypeVar("T")

_forked = False  # from a process that had loaded pylance


class Source(NamedTuple):
    """One version of a dataset; `digest` tells it from another under the same name."""

    uri: str
    version: int
    digest: str


class Holder(NamedTuple):
    """What a column holds, and what of it a sample is made of; None for nothing.

    `kind` is "text", "bytes", "struct", "blob", "list" (of bytes or structs) or "value".
    """

    kind: str
    projection: str | None


class Description(NamedTuple):
    """A version: its fragments' ids, the fragments as shards, its columns."""

    source: Source
    fragments: list[int]
    shards: tuple[ShardInfo, ...]
    holders: dict[str, Holder]


def run(function: Callable[..., T], *args: Any) -> T:
    """Call one of `describe`, `take` and `blobs` where pylance can run.

    Raises:
        OSError: The store failed.
        DatasetError: A file is missing or damaged, or the dataset was removed or replaced.
        ValueError: `describe` found no such dataset or version.
    """
    return _fresh(os.getpid()).run(function, *args) if _forked else function(*args)


def describe(uri: str, version: int | str | None) -> Description:
    """Describe a version of a dataset; None is the newest."""
    import lance

    dataset = lance.dataset(uri, version=version)
    shards, names, ids = [], [], []
    for fragment in dataset.get_fragments():
        name = f"fragment-{fragment.fragment_id}"
        files = fragment.data_files()
        for file in files:
            if "://" not in uri and file.base_id is None:
                _check(os.path.join(uri, "data", file.path), file.file_size_bytes, name)
        size = sum(file.file_size_bytes or 0 for file in files)
        shards.append(ShardInfo(name, fragment.count_rows(), size))
        names += [file.path for file in files]
        ids.append(fragment.fragment_id)
    key = digest(dataset.version, *(value for shard in shards for value in shard), *names)
    holders = {field.name: _holder(field) for field in dataset.schema}
    return Description(Source(uri, dataset.version, key), ids, tuple(shards), holders)


def take(source: Source, fragment: int | None, rows: list[int], columns: list[str]) -> pa.Table:
    """Return columns of live rows; a blob's are descriptors.

    Args:
        source: The dataset.
        fragment: An id, with ascending rows of that fragment; None for rows of the dataset.
        rows: Row numbers.
        columns: Names, or paths into structs.
    """
    dataset = _dataset(source)
    with _damage_named(source, "" if fragment is None else f", fragment-{fragment}"):
        return (dataset if fragment is None else dataset.get_fragment(fragment)).take(rows, columns)


def blobs(source: Source, rows: list[int], column: str) -> list[bytes | None]:
    """Return the payloads of a blob column, by rows of the dataset."""
    dataset = _dataset(source)
    with _damage_named(source, f", column {column}"):
        found = dataset.read_blobs(column, indices=rows, preserve_order=True)
        return [data for _, data in found]


def _damage_named(source: Source, place: str) -> AbstractContextManager[None]:
    """Name what is damaged; of a store, an error without a number may be its own."""
    return nullcontext() if "://" in source.uri else damage_named(source.uri + place)


def _check(path: str, size: int | None, shard: str) -> None:
    found = os.path.getsize(path) if os.path.exists(path) else "no file"
    if found == "no file" or found != (size or found):  # old writers leave the size out
        raise DatasetError(
            f"{path} of {shard} is damaged: found {found}, expected {size} bytes. Restore it, or "
            "choose another version=."
        )


def _holder(field: pa.Field) -> Holder:
    kind, name = field.type, field.name
    is_blob = (field.metadata or {}).get(b"lance-encoding:blob") == b"true"
    if is_blob or getattr(kind, "extension_name", "") == "lance.blob.v2":
        return Holder("blob", name)
    if is_binary(kind):
        return Holder("bytes", None)
    # Paths tell which pictures are there, and load no payload.
    if is_picture(kind):
        return Holder("struct", None if kind.get_field_index("path") < 0 else f"{name}.path")
    if is_list(kind) and (is_binary(kind.value_type) or is_picture(kind.value_type)):
        inner = f"{name}.{kind.value_field.name}.path"
        has_paths = is_picture(kind.value_type) and kind.value_type.get_field_index("path") >= 0
        return Holder("list", inner if has_paths else name)
    return Holder("text" if is_text(kind) else "value", name)


@lru_cache(maxsize=64)
def _dataset(source: Source) -> Any:
    """Return the dataset as this process opened it."""
    import lance

    dataset: Any = None
    try:
        found = describe(source.uri, source.version).source.digest
        dataset = lance.dataset(source.uri, version=source.version)
    except ValueError as error:
        found = str(error)
    if found != source.digest:
        raise DatasetError(
            f"version {source.version} of {source.uri} was replaced or removed since it was "
            f"opened: expected {source.digest}, found {found}. Start again; tag the versions that "
            "runs use."
        )
    return dataset


class _Fresh:
    """An interpreter that runs functions of this module, one after the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        code = f"import sys; sys.path[:] = {sys.path}; from {__name__} import serve; serve()"
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe)

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Return what a function returns, or raise what it raises."""
        calls, answers = self._process.stdin, self._process.stdout
        assert calls is not None
        assert answers is not None
        with self._lock:
            pickle.dump((function, args), calls)
            calls.flush()
            answer: T = pickle.load(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer


@lru_cache
def _fresh(process: int) -> _Fresh:
    """Return the interpreter of a process; a forked one inherits the cache, under another id."""
    return _Fresh()


def serve() -> None:
    """Answer the calls of `_Fresh.run` until its process ends."""
    with open(0, "rb") as calls, open(1, "wb") as answers:
        while calls.peek(1):
            function, args = pickle.load(calls)
            try:
                answer = function(*args)
            except Exception as error:  # noqa: BLE001 - it is raised where it was asked for
                answer = error
            pickle.dump(answer, answers)
            answers.flush()


def _after_fork() -> None:
    global _forked
    _forked = "lance" in sys.modules


os.register_at_fork(after_in_child=_after_fork)
