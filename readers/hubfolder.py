"""The splits of a Hugging Face dataset folder: as downloaded, or by `Dataset.save_to_disk`.

Laws (tests/readers/test_hubfolder.py):
    1. Splits never mix unless asked: a folder with several is an error that lists them.
    2. No pattern of a README leaves the folder.
    3. A file that `save_to_disk` wrote and that is not there is an error.

The splits are told by the `configs` of README.md, else by names: the folders beside a
`dataset_dict.json`, or words and numbers as in `train-00000-of-00010.parquet` and `test/0.parquet`.

Imports: errors, readers.files, yaml. Used by: readers.parquet.
"""

import glob
import json
import os
import re
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any, TypeVar

import yaml  # type: ignore[import-untyped]

from zephon_mm.errors import ConfigError, DatasetError
from zephon_mm.readers.files import list_files

_MATTER = re.compile(r"---\s*\n(.*?)^---\s*$", re.DOTALL | re.MULTILINE)
_NUMBERED = re.compile(r"(?!data-|part-|shard-|chunk-)(.+)-\d{5}-of-\d{5}")
_WORDS = re.compile(r"(?:^|[-_./])(train|test|validation|valid|val|dev)(?=[-_./]|$)")

T = TypeVar("T")
Splits = dict[str, list[str]]


def split_files(
    folder: str, suffixes: tuple[str, ...], *, config: str | None, split: str | None
) -> list[str]:
    """Return the files of one split of a folder, or of all; none if it holds none.

    Args:
        folder: Absolute.
        suffixes: Of the files.
        config: Name of a configuration in README.md; None for the only or the default one.
        split: Name; "all" for all of them; None for the only one.

    Raises:
        ConfigError: No such configuration or split, or several and none was chosen.
        DatasetError: README.md names files outside the folder, or a saved file is missing.
    """
    splits = _told_by_readme(folder, suffixes, config) or _told_by_names(folder, suffixes)
    if split == "all" or (split is None and len(splits) < 2):
        return [file for files in splits.values() for file in files]
    return _chosen(folder, "split", splits, split)


def _chosen(folder: str, what: str, found: dict[str, T], name: str | None) -> T:
    if name is None or name not in found:
        names = ", ".join(sorted(found)) or f"no {what}"
        raise ConfigError(f"{folder} has {names}, asked for {what}={name!r}. Choose one of them.")
    return found[name]


def _told_by_readme(folder: str, suffixes: tuple[str, ...], config: str | None) -> Splits:
    found = {one.get("config_name", "default"): one for one in _configs(folder)}
    if not found and config is None:
        return {}
    default = next((name for name, one in found.items() if one.get("default")), "default")
    name = config or (default if len(found) > 1 else next(iter(found)))
    told = _chosen(folder, "config", found, name).get("data_files") or []
    splits: Splits = {}
    for entry in told if isinstance(told, list) else [told]:
        one = entry if isinstance(entry, dict) else {"path": entry}
        paths = one.get("path") or []
        for pattern in paths if isinstance(paths, list) else [paths]:
            if files := _matching(folder, str(pattern), suffixes):
                splits.setdefault(str(one.get("split", "train")), []).extend(files)
    return splits


def _configs(folder: str) -> list[dict[str, Any]]:
    with suppress(OSError, yaml.YAMLError, AttributeError):  # no README, or one that tells nothing
        text = Path(folder, "README.md").read_text("utf-8", "replace")
        matter = _MATTER.match(text)
        told = yaml.safe_load(matter[1]).get("configs") if matter else None
        return [one for one in told or [] if isinstance(one, dict)]
    return []


def _matching(folder: str, pattern: str, suffixes: tuple[str, ...]) -> list[str]:
    if os.path.isabs(pattern) or ".." in PurePath(pattern).parts:
        raise DatasetError(f"{folder}/README.md names {pattern!r}, outside the folder. Mend it.")
    matches = glob.glob(os.path.join(glob.escape(folder), pattern), recursive=True)
    return sorted(path for path in matches if path.lower().endswith(suffixes))


def _told_by_names(folder: str, suffixes: tuple[str, ...]) -> Splits:
    for state in glob.glob(f"{glob.escape(folder)}/**/state.json", recursive=True):
        _require_saved(state)
    by_folder = os.path.isfile(os.path.join(folder, "dataset_dict.json"))
    splits: Splits = {}
    for path in list_files(folder, suffixes):
        place = os.path.relpath(path, folder)
        numbered = _NUMBERED.match(os.path.basename(place))
        name = (_WORDS.findall(place) or ["train"])[-1]
        if by_folder:
            name = place.partition(os.sep)[0]
        elif numbered:
            name = numbered[1]
        if not os.path.basename(path).startswith("cache-"):  # what `Dataset.map` left there
            splits.setdefault(name, []).append(path)
    return splits


def _require_saved(state: str) -> None:
    """Refuse a split of which `save_to_disk` wrote more files than are there."""
    with suppress(OSError, ValueError, LookupError, TypeError):  # another file of that name
        names = [one["filename"] for one in json.loads(Path(state).read_text())["_data_files"]]
        there = os.listdir(os.path.dirname(state))
        for name in (name for name in names if name not in there):
            raise DatasetError(f"{state} lists {name}, which is not there. Restore it.")
