"""`wids` index files: JSON beside WebDataset shards that lists them and their numbers of samples.

Laws (tests/readers/test_wids.py):
    1. A shard is looked for below the folder of its index alone: where its URL and the index's
       `base` say, then by its base name, so that an index of remote shards serves their copies.
    2. A shard that is listed and missing, or has another number of samples, is an error at the
       start. Listed shards are a dataset in the order of the list; a folder keeps all its shards.

Imports: errors, records, readers.files. Used by: readers.webdataset.
"""

import glob
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress

from zephon_mm.errors import DatasetError
from zephon_mm.readers.files import Paths
from zephon_mm.records import ShardInfo

_HEAD_BYTES = 4096  # within which an index names its list

Listed = Mapping[str, tuple[int, str]]
"""Absolute path of a shard -> its number of samples, and the index that says so."""


def find_indexes(path: Paths) -> list[str]:
    """Return the index that a path is, or those that lie in the folder that it is."""
    if not isinstance(path, str | os.PathLike):
        return []
    text = os.path.abspath(os.path.expanduser(os.fspath(path)))
    files = sorted(glob.glob(f"{glob.escape(text)}/*.json")) if os.path.isdir(text) else [text]
    return [file for file in files if file.lower().endswith(".json") and _is_index(file)]


def resolve(path: Paths) -> tuple[Paths, Listed]:
    """Return the shards that an index lists, for a path that is one, and what indexes say of them.

    Raises:
        DatasetError: An index is damaged, or a shard that it lists is not there.
    """
    listed: dict[str, tuple[int, str]] = {}
    for index in find_indexes(path):
        listed.update(_read(index))
    if listed and isinstance(path, str | os.PathLike) and not os.path.isdir(path):
        return list(listed), listed
    return path, listed


def require_counts(listed: Listed, files: Iterable[str], shards: Iterable[ShardInfo]) -> None:
    """Compare the shards that are there with what indexes say.

    Raises:
        DatasetError: A shard has other samples.
    """
    for path, shard in zip(files, shards, strict=True):
        count, index = listed.get(path, (shard.num_rows, ""))
        if count != shard.num_rows:
            raise DatasetError(
                f"{path} has {shard.num_rows} samples, {index} says {count}. Restore the shard, or "
                "make the index anew with `wids-index create`."
            )


def _read(index: str) -> dict[str, tuple[int, str]]:
    try:
        with open(index, "rb") as file:
            value = json.load(file)
        base = str(value.get("base") or "")
        listed = [(str(shard["url"]), int(shard["nsamples"])) for shard in value["shardlist"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DatasetError(
            f"{index} is no wids index ({error!r}). Expected an object with `shardlist`, a list of "
            "objects with `url` and `nsamples`. Write it again with `wids-index create`."
        ) from None
    return {_local(index, base, url): (count, index) for url, count in listed}


def _is_index(path: str) -> bool:
    with suppress(OSError), open(path, "rb") as file:
        return is_wids(file.read(_HEAD_BYTES))
    return False


def is_wids(head: bytes) -> bool:
    """Whether a file that begins so is an index."""
    return b'"shardlist"' in head


def _local(index: str, base: str, url: str) -> str:
    folder = os.path.dirname(index)
    for place in (os.path.join(base, url), os.path.basename(url)):
        path = os.path.normpath(os.path.join(folder, place))
        if path.startswith(folder.rstrip("/") + "/") and os.path.isfile(path):
            return path
    raise DatasetError(
        f"{index} lists {url!r}, which is not below {folder}. Restore or download it there, or "
        "give path= the shards themselves."
    )
