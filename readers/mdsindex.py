"""The shards of an MDS dataset: what `index.json` says of them, found, checked, unpacked, rebuilt.

Laws (tests/readers/test_mds.py):
    1. A shard that is missing, or has another size than the index says, is an error at the start.
    2. No path leaves the folder of its index. A folder of shards that no index covers is an error.
    3. A compressed shard gives exactly as many bytes as the index says, or an error.

Imports: errors, stores, readers.{files, mdsvalues, rowtable}. Used by: readers.mds.
"""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import pyarrow as pa

from zephon_mm.errors import DatasetError
from zephon_mm.readers.files import PathLike, Paths, damage_named, inflated
from zephon_mm.readers.mdsvalues import is_known
from zephon_mm.readers.rowtable import Field
from zephon_mm.stores import local

INDEX = "index.json"

_CODECS = {"zstd": "zstd", "gz": "gzip", "br": "brotli", "bz2": "bz2", "snappy": "snappy"}
_SNAPPY_RATIO = 32  # no snappy stream grows that much
_REBUILD = (
    "Restore the data, or remove the index and make it anew: "
    "`python -c 'from zephon_mm.readers.mdsindex import rebuild_index; rebuild_index(\"{}\")'`."
)


class MDSShard(NamedTuple):
    """A shard. `path` is its file, which is compressed if there is a `codec`; `num_bytes` is not.

    `name` is the uncompressed file's, from the dataset's top folder.
    """

    name: str
    path: str
    num_rows: int
    num_bytes: int
    columns: tuple[Field, ...]
    hashes: tuple[tuple[str, str], ...]
    codec: str


def find_mds(path: Paths) -> tuple[MDSShard, ...]:
    """Return the shards of a folder with an index, of a tree of such folders, or of a list.

    Streams are in the order of their folders' names; lists keep theirs.

    Raises:
        DatasetError: An index or a shard is missing or damaged.
    """
    roots = folders_of(path)
    top = os.path.commonpath(roots or [""])
    shards = tuple(s for root in roots for folder in _streams(root) for s in _load(folder, top))
    if len({shard.path for shard in shards}) < len(shards):
        raise DatasetError(f"{path} has a shard twice. Repeat data by its weight in the mixture.")
    return shards


def folders_of(path: Paths) -> list[str]:
    """Return the absolute paths of the folders, of which one may be named by its index."""
    paths = [path] if isinstance(path, str | os.PathLike) else path
    roots = (os.path.abspath(os.path.expanduser(os.fspath(one))) for one in paths)
    return [os.path.dirname(root) if os.path.basename(root) == INDEX else root for root in roots]


def _streams(root: str) -> Iterator[str]:
    """Yield the folders that have an index; one inside of another is a part of that."""
    found = False
    for folder, inner, files in os.walk(root, followlinks=True):
        inner.sort()
        if INDEX in files:
            found = True
            inner.clear()
            yield folder
        elif any(".mds" in name for name in files):
            problem = f"{folder} has MDS shards and no {INDEX}"
            raise DatasetError(f"{problem}. {_REBUILD.format(folder)}")
    if not found:
        raise DatasetError(f"{root} has no {INDEX}. Check `path`: it should be a folder of shards.")


def _load(folder: str, top: str) -> list[MDSShard]:
    path, shards = os.path.join(folder, INDEX), list[MDSShard]()
    with open(path, "rb") as file:
        data = file.read()
    try:
        for entry in json.loads(data)["shards"]:
            shards.append(_shard(folder, top, entry))  # not extended: the error says how many
        if not shards:
            raise ValueError("it lists no shards")
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        what = f"there is no {error}" if isinstance(error, KeyError) else error
        where = f"{path} ({len(data)} bytes), after {len(shards)} shards"
        raise DatasetError(f"{where}: {what}. {_REBUILD.format(folder)}") from None
    return shards


def _shard(folder: str, top: str, entry: Any) -> MDSShard:
    if (entry["format"], entry["version"]) != ("mds", 2):
        raise ValueError(f"format {entry['format']} {entry['version']}, expected mds 2")
    described = (entry[f"column_{part}"] for part in ("names", "encodings", "sizes"))
    columns = tuple(Field(n, e, s or None) for n, e, s in zip(*described, strict=True))
    for column in columns:
        if not is_known(column.kind) or (column.size or 0) < 0:
            raise ValueError(f"{column} has an encoding or a size that no known version writes")
    raw, zipped = entry["raw_data"], entry["zip_data"]
    rows, size = int(entry["samples"]), int(raw["bytes"])
    if not 0 <= 4 * rows < size < 1 << 32:
        raise ValueError(f"{rows} rows cannot be in {size} bytes")
    path = _inside(folder, raw["basename"])
    name, codec, wanted = os.path.relpath(path, top), "", size
    if zipped and _size(path) != size:
        path, wanted = _inside(folder, zipped["basename"]), int(zipped["bytes"])
        codec = _CODECS[entry["compression"].partition(":")[0]]
    if (found := _size(path)) != wanted:
        has = f"has {found} bytes" if found is not None else "is missing"
        raise ValueError(f"{path} {has}, expected {wanted} bytes")
    hashes = tuple(sorted((raw["hashes"] or {}).items()))
    return MDSShard(name, path, rows, size, columns, hashes, codec)


def _inside(folder: str, basename: str) -> str:
    path = os.path.normpath(os.path.join(folder, basename))
    if not path.startswith(os.path.join(folder, "")):
        raise ValueError(f"{basename!r} lies outside of {folder}")
    return path


def _size(path: str) -> int | None:
    with suppress(FileNotFoundError):
        return os.stat(path).st_size
    return None


def unpack(target: str, *, shard: MDSShard) -> None:
    """Write a compressed shard's contents to a file.

    Args:
        target: The file.
        shard: One with a `codec`.

    Raises:
        OSError: The environment failed.
        DatasetError: The shard does not unpack, or not to the size that the index says.
    """
    with open(local(shard.path), "rb") as source:
        data = source.read()
    with (
        damage_named(shard.path, f"does not unpack ({shard.codec})"),
        open(target, "wb") as file,
    ):
        file.writelines(_chunks(data, shard))
        if file.tell() != shard.num_bytes:
            raise ValueError(f"it gives {file.tell()} bytes, {INDEX} says {shard.num_bytes}")


def _chunks(data: bytes, shard: MDSShard) -> Iterator[bytes]:
    if shard.codec == "snappy":
        size = min(shard.num_bytes, _SNAPPY_RATIO * len(data))
        yield pa.decompress(data, size, codec="snappy", asbytes=True)
        return
    yield from inflated(data, shard.codec, shard.num_bytes)


def rebuild_index(folder: PathLike) -> int:
    """Write the lost index of a folder of uncompressed shards; return how many rows it has.

    Each shard carries its own description. Hashes are left out: they would fit any damage.

    Raises:
        DatasetError: There is an index, no shard, or a shard that is none.
    """
    path = os.path.join(folder, INDEX)
    names = sorted(name for name in os.listdir(folder) if name.endswith(".mds"))
    if os.path.exists(path) or not names:
        raise DatasetError(f"{folder} has {len(names)} .mds files, or an {INDEX} to remove first.")
    entries = [_describe(os.path.join(folder, name)) for name in names]
    with open(f"{path}.new", "w") as file:
        json.dump({"version": 2, "shards": entries}, file)
    os.replace(file.name, path)
    return sum(entry["samples"] for entry in entries)


def _describe(path: str) -> dict[str, Any]:
    """Return a shard's entry of an index, from the description between its offsets and rows."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        count, start = (int.from_bytes(file.read(4), "little") for _ in range(2))
        file.seek(4 * (count + 2))
        text = file.read(max(min(start, size) - file.tell(), 0))
    raw = {"basename": os.path.basename(path), "bytes": size, "hashes": {}}
    lost = {"samples": count, "raw_data": raw, "zip_data": None, "hashes": [], "compression": None}
    try:
        return {**json.loads(text), **lost}
    except (ValueError, TypeError) as error:
        raise DatasetError(f"{path} is no MDS shard: {error}. Restore or remove it.") from None
