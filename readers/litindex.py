"""LitData's index.json: the chunks of a folder, and what a row is made of.

Laws (tests/readers/test_litdata.py):
    1. What litdata left when it was interrupted is named.
    2. No chunk's name leaves the folder.

Imports: errors, readers.{files, imagerefs, litvalues, rowtable}. Used by:
readers.{litchunks, litdata}.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, NamedTuple

from zephon_mm.errors import ConfigError, DatasetError
from zephon_mm.readers.files import PathLike, Paths, ShardFile, find_shards
from zephon_mm.readers.imagerefs import Place, place_name
from zephon_mm.readers.litvalues import IMAGES, TEXTS
from zephon_mm.readers.rowtable import Field

INDEX = "index.json"
_LEFT = re.compile(r"chunk-\d+-\d+\..*bin|\d+[.-]index\.json")


class Chunk(NamedTuple):
    """What the index says of a chunk; `num_bytes` is that of the plain one, or a bit less.

    `num_tokens` is not None in a token stream, whose rows are one value without its size.
    """

    num_rows: int
    num_bytes: int
    num_tokens: int | None


class LitIndex(NamedTuple):
    """A dataset: its chunks, and the values of a row.

    `fields` are the values, by their places, such as "images/0"; `tree` is the rows' structure,
    with those places for values.
    """

    files: Sequence[ShardFile]
    chunks: Sequence[Chunk]
    fields: Mapping[str, Field]
    tree: Mapping[str, Any]


def is_litdata(path: Paths) -> bool:
    """Whether a folder has such an index, or what litdata left without one."""
    if not isinstance(path, str | os.PathLike):
        return False
    with suppress(OSError, ValueError, RecursionError):
        folder, file = _place(path)
        if not os.path.exists(file):
            return any(map(_LEFT.fullmatch, os.listdir(folder)))
        with open(file, "rb") as source:
            return _is_index(json.load(source))
    return False


def load(path: Paths) -> LitIndex:
    """Return the dataset of a folder.

    Raises:
        ConfigError: `path` is not one folder.
        DatasetError: The index or a chunk is missing, unfinished, or not what it should be.
    """
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"LitData takes one folder, not {path}. Mix datasets of one folder each.")
    folder, file = _place(path)
    try:
        with open(file, "rb") as source:
            index = json.load(source)
    except (FileNotFoundError, NotADirectoryError):
        names = os.listdir(folder) if os.path.isdir(folder) else []
        left = ", ".join(sorted(filter(_LEFT.fullmatch, names))[:3]) or "no chunk"
        raise DatasetError(
            f"{file} does not exist, but {left}. If writing was interrupted, write it again."
        ) from None
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{file} is no JSON: {error}. Restore it.") from None
    if not _is_index(index):
        raise DatasetError(
            f"{file} is not LitData's: expected `chunks`, and a `config` of LitData's own format. "
            "Name the format with fmt=, such as fmt='parquet'."
        )
    config = index["config"]
    if config is None:
        raise DatasetError(f"{file} lists no chunks: its writer got no row. Write it again.")
    unread = [name for name in ("encryption", "temporal_schema") if config.get(name)]
    unread += ["sample"] if config.get("compression_level") == "sample" else []
    if unread:
        raise DatasetError(f"{file} has {unread[0]!r}, which is not read. Write it without.")
    try:
        return _parsed(folder, config, index["chunks"])
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        message = f"{file} is damaged: {type(error).__name__} {error}. Restore it."
        raise DatasetError(message) from None


def _parsed(folder: str, config: Any, entries: Any) -> LitIndex:
    kinds, numbers = [str(kind) for kind in config["data_format"]], count()
    parsed = _tree(json.loads(config["data_spec"])[1], numbers)
    if next(numbers) != len(kinds):
        raise ValueError("its fields do not add up")
    fields: dict[str, Field] = {}
    tree = _placed(parsed if isinstance(parsed, dict) else _named(parsed, kinds), (), kinds, fields)
    names = [str(entry["filename"]) for entry in entries]
    chunks = [Chunk(int(e["chunk_size"]), int(e["chunk_bytes"]), e.get("dim")) for e in entries]
    if len(fields) < len(kinds) or any(chunk.num_rows < 0 for chunk in chunks):
        raise ValueError("its fields or chunks do not add up")
    if bad := [name for name in names if os.path.basename(name) != name or name[-4:] != ".bin"]:
        raise ValueError(f"{bad[0]!r} is no chunk in its folder")
    files = find_shards([os.path.join(folder, name) for name in names], (".bin",))
    for file, chunk in zip(files, chunks, strict=True):
        least = max(chunk.num_bytes, 4 * (chunk.num_rows + 2))
        if file.num_bytes < least and not file.path.endswith(f".{config.get('compression')}.bin"):
            raise DatasetError(
                f"{file.path} has {file.num_bytes} bytes, {INDEX} says {least} for its rows. "
                "It was cut, or is not finished. Restore it, or write the dataset again."
            )
    return LitIndex(files, chunks, fields, tree)


def _placed(tree: Any, place: Place, kinds: Sequence[str], fields: dict[str, Field]) -> Any:
    """Return a structure with its values' places for their numbers; add the values to `fields`."""
    if isinstance(tree, int):
        name = place_name(place)
        fields[name] = Field(name, kinds[tree], None)
        return name
    steps = tree.items() if isinstance(tree, dict) else enumerate(tree)
    parts = {step: _placed(part, (*place, step), kinds, fields) for step, part in steps}
    return parts if isinstance(tree, dict) else [*parts.values()]


def _place(path: PathLike) -> tuple[str, str]:
    """Return folder and index file."""
    text = os.path.abspath(os.path.expanduser(os.fspath(path)))
    folder = os.path.dirname(text) if os.path.basename(text) == INDEX else text
    return folder, os.path.join(folder, INDEX)


def _is_index(index: Any) -> bool:
    """Whether parsed JSON is LitData's index of its own chunks."""
    if not isinstance(index, dict) or not isinstance(index.get("chunks"), list):
        return False
    config = index.get("config", "")
    is_empty = config is None and not index["chunks"]  # of a writer that got no row
    return is_empty or (isinstance(config, dict) and config.get("item_loader") != "ParquetLoader")


def _tree(spec: Any, numbers: Iterator[int]) -> Any:
    """Return a sample's structure: mappings and lists of the numbers of its values."""
    if spec["type"] is None:
        return next(numbers)
    parts = [_tree(part, numbers) for part in spec["children_spec"]]
    if not spec["type"].endswith(("dict", "Dict")):
        return parts
    context = spec["context"]  # a text, but of a defaultdict a mapping
    keys = json.loads(context) if isinstance(context, str) else context["dict_context"]
    return dict(zip(map(str, keys), parts, strict=True))


def _named(tree: Any, kinds: Sequence[str]) -> dict[str, Any]:
    """Name the parts of a sample that is no mapping: its only picture, its only text, the rest."""
    parts = tree if isinstance(tree, list) else [tree]
    names = [str(position) for position in range(len(parts))]
    for name, group in (("image", IMAGES), ("text", TEXTS)):
        is_one = [isinstance(p, int) and kinds[p].partition(":")[0] in group for p in parts]
        if is_one.count(True) == 1:
            names[is_one.index(True)] = name
    return dict(zip(names, parts, strict=True))
