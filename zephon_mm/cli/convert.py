"""`zephon-mm convert SRC DST --to FORMAT`: the same rows in another format.

Laws (tests/cli/test_convert.py):
    1. Shards and rows keep their numbers, so that a recipe gives the same batches from DST; that
       needs rows without defects, and no --shard-rows.
    2. Bytes of images are passed through. What the target has no place for, and a defective row, is
       an error that names the sample; with --skip-bad such rows are left out and counted.
    3. A folder DST is complete and verified: until each row was read back and compared with its
       source, all is in `DST.partial`. There a second run goes on, and another conversion is an
       error, unless --overwrite says to begin anew.

Pictures that are `jpg` in one row and `png` in another become one field `image` in MDS and LitData.
How each format stores what is no image is told in `zephon_mm/writers.py`. A value that a format
has no place for, such as an absent image in MDS, makes its row defective.

Cost: reads the source's texts three times and its images twice, the target once, in one process.

Imports: errors, io, processors.documents, writers, cli.dataset. Used by: cli.main.
"""

import argparse
import json
import os
import shutil
import tempfile
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
from tqdm import tqdm

from zephon_mm.cli import dataset
from zephon_mm.errors import ConfigError, DatasetError, SampleError
from zephon_mm.io import Dataset, read_blob
from zephon_mm.processors.documents import IMAGE_FIELDS
from zephon_mm.records import Blob
from zephon_mm.writers import WRITERS, Columns, image_format

_SUFFIXES = IMAGE_FIELDS[:-2]  # those that name a format: all but image and images
_MANIFEST = ".zephon-convert"
_BLOCK_ROWS = 32

Block = list[tuple[str, Any]]
"""Samples' names, and what became of them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    dataset.add_arguments(parser, "source")
    parser.add_argument("target", help="the folder to make")
    parser.add_argument("--to", required=True, choices=sorted(WRITERS), help="its format")
    parser.add_argument("--shard-rows", type=int, help="rows of a shard (as in the source)")
    parser.add_argument("--skip-bad", action="store_true", help="leave out rows that do not fit")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier conversion")


def run(arguments: argparse.Namespace) -> int:
    """Convert, verify and put in place; return the exit status."""
    shard_rows, anew = arguments.shard_rows, arguments.overwrite
    if "://" in arguments.target or (shard_rows is not None and shard_rows < 1):
        raise ConfigError("DST must be a local folder, and --shard-rows at least 1.")
    target = os.path.abspath(os.path.expanduser(arguments.target))
    source = dataset.opened("source", arguments, "source")
    settings = {name: vars(arguments)[name] for name in ("to", "shard_rows", "skip_bad")}
    settings |= {"source": source.digest(), "fmt": source.fmt}
    if _entries(target, settings, anew) and not anew:
        print(f"{target} holds this conversion already")
        return 0
    folder = f"{target}.partial"
    entries = _entries(folder, settings, anew)
    if anew:
        shutil.rmtree(folder, ignore_errors=True)
        entries = []
    os.makedirs(folder, exist_ok=True)
    done = _Conversion(source, folder, settings)
    done.run(entries)
    if anew:
        shutil.rmtree(target, ignore_errors=True)
    os.rename(folder, target)
    skipped = ", ".join(f"{count} {reason}" for reason, count in done.skipped.items()) or "none"
    size = len(source) - done.skipped.total()
    print(f"{target}: {size} rows as {arguments.to}, all verified; skipped: {skipped}")
    return 0


def _entries(folder: str, settings: Mapping[str, Any], anew: bool) -> list[Any]:
    """Return what an earlier run noted: its settings, and an entry for each shard it finished.

    Raises:
        ConfigError: The folder holds something else.
    """
    entries = []
    if os.path.exists(path := os.path.join(folder, _MANIFEST)):
        with open(path) as file:
            lines = [line for line in file if line.endswith("\n")]
        os.truncate(path, len("".join(lines)))  # all is ASCII; the last line may be cut
        entries = [json.loads(line) for line in lines]
    if entries and (anew or entries[0] == settings):
        return entries
    if not os.path.exists(folder) or os.listdir(folder) in ([], [_MANIFEST]):
        return []
    holds = f"another conversion, {entries[0]}" if entries else "no conversion"
    hint = "begin anew with --overwrite" if entries else "move it away"
    raise ConfigError(f"{folder} holds {holds}. Choose another DST for {settings}, or {hint}.")


class _Conversion:
    """Writes a source's rows to a folder, and compares them.

    Args:
        source: The source.
        folder: Of the target.
        settings: As in the manifest.

    Attributes:
        skipped: Rows that were left out, by reason.
    """

    def __init__(self, source: Dataset, folder: str, settings: Mapping[str, Any]) -> None:
        self._source, self._folder, self._settings = source, folder, settings
        self._fetch = partial(_fetched, source)
        cuts = list(accumulate((shard.num_rows for shard in source.shards), initial=0))
        self._starts = cuts
        if size := settings["shard_rows"]:
            cuts = [*range(0, len(source), size), len(source)]
        self._plan = [range(start, stop) for start, stop in pairwise(cuts)]
        self._merges = False
        self.skipped: Counter[str] = Counter()

    def run(self, entries: list[Any]) -> None:
        """Write all shards that have no entry yet, and verify all.

        Raises:
            DatasetError: A row is defective, or differs from what was written.
        """
        fmt = self._settings["to"]
        with tqdm(total=3 * len(self._source), unit="row", disable=None) as self._bar:
            columns = self._columns()
            if fmt in ("mds", "litdata") and len(set(columns.images) & set(_SUFFIXES)) > 1:
                self._merges = True  # a picture is `jpg` in one row and `png` in another
                columns = self._columns()
            writer = WRITERS[fmt](self._folder, columns)
            self._write(writer, entries)
            writer.finish([entry for entry in entries[1:] if entry is not None])
            self.skipped.clear()
            with tempfile.TemporaryDirectory() as cache:
                target = Dataset.from_path(
                    "target", self._folder, fmt, cache_dir=cache, progress=False
                )
                self._verify(target, writer)

    def _columns(self) -> Columns:
        """Return what the fields of all rows hold, out of their values and their first images."""
        columns = Columns()

        def look(name: str, blob: Blob) -> bytes | None:
            data = b"" if name in columns.images else self._fetch(blob)
            if data:
                columns.images[name] = image_format(data)
            return data

        def make(row: dict[str, Any]) -> Any:
            return {name: _plain(value, partial(look, name)) for name, value in row.items()}

        for block in self._blocks(range(len(self._source)), make):
            columns.add([row for _, row in block])
        return columns

    def _write(self, writer: Any, entries: list[Any]) -> None:
        """Write shards; note each in the manifest and in `entries`."""
        with open(os.path.join(self._folder, _MANIFEST), "a") as manifest:
            for number in range(len(entries) - 1, len(self._plan)):
                entry: Any = self._settings
                if number >= 0:
                    encoded = self._encoded(self._plan[number], writer)
                    blocks = ([data for _, (_, data) in block] for block in encoded)
                    first = next(blocks, None)
                    entry = first and writer.write(number, chain([first], blocks))
                manifest.write(f"{json.dumps(entry)}\n")
                manifest.flush()
                entries.append(entry)

    def _verify(self, target: Dataset, writer: Any) -> None:
        shard = 0
        for numbers in self._plan:
            at = 0
            for block in self._encoded(numbers, writer):
                _compare(target, shard, at, block)
                at += len(block)
            if at and at != target.shards[shard].num_rows:
                raise DatasetError(f"{target.shards[shard]} was written, it should have {at} rows.")
            shard += at > 0  # one without rows is not there

    def _encoded(self, rows: range, writer: Any) -> Iterator[Block]:
        """Yield blocks of what a writer's `encode` gives."""
        return self._blocks(rows, lambda row: writer.encode(_plain(row, self._fetch)))

    def _blocks(self, rows: range, make: Callable[[dict[str, Any]], Any]) -> Iterator[Block]:
        at = rows.start
        while at < rows.stop:
            shard = bisect(self._starts, at) - 1
            start, end = self._starts[shard : shard + 2]
            numbers = range(at - start, min(at + _BLOCK_ROWS, rows.stop, end) - start)
            samples = self._source.reader.read(shard, numbers)
            made = [self._made(shard, *pair, make) for pair in zip(numbers, samples, strict=True)]
            self._bar.update(len(numbers))
            at += len(numbers)
            if block := [one for one in made if one]:
                yield block

    def _made(self, shard: int, row: int, sample: Any, make: Any) -> tuple[str, Any] | None:
        name = self._source.row_name(shard, row)
        try:
            fields = _fields(sample, row)
            pictures = [field for field in fields if field in _SUFFIXES]
            if self._merges and len(pictures) == 1:
                fields["image"] = fields.pop(pictures[0])
            return name, make(fields)
        except (SampleError, UnicodeEncodeError) as error:
            if not self._settings["skip_bad"]:
                hint = "Mend the row, or leave such rows out with --skip-bad."
                raise DatasetError(f"{name}: {error} {hint}") from None
            self.skipped[error.reason] += 1
            return None


def _fields(sample: Any, row: int) -> dict[str, Any]:
    """Return a sample's fields, with a key only if it says more than they and the row do."""
    if isinstance(sample, SampleError):
        raise sample
    fields = {name: v for name, v in sample.items() if name not in ("__key__", "__hint__")}
    key = sample.get("__key__", "")
    if key not in ("", str(row), str(fields.get("id")), str(fields.get("key"))):
        fields["__key__"] = key
    return fields


def _plain(value: Any, fetch: Callable[[Blob], bytes | None]) -> Any:
    """Return a value with its blobs fetched, as lists and mappings of Python's own types.

    Raises:
        UnicodeEncodeError: A text has lone surrogates, which most formats cannot hold.
    """
    if isinstance(value, Blob):
        return fetch(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(part, fetch) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part, fetch) for part in value]
    if isinstance(value, str):
        return value.encode().decode()
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _fetched(dataset: Dataset, blob: Blob) -> bytes | None:
    try:
        return read_blob(dataset, blob)
    except SampleError as error:
        if error.reason == "no_image":  # a null, of which a reader learns when it fetches
            return None
        raise


def _compare(target: Dataset, shard: int, at: int, block: Block) -> None:
    found = target.reader.read(shard, range(at, at + len(block)))
    for (name, (stored, _)), sample in zip(block, found, strict=True):
        wanted = _bare({**stored, "__key__": None})
        got = _bare({**_plain(_fields(sample, -1), partial(_fetched, target)), "__key__": None})
        if bad := sorted(k for k in wanted.keys() | got if wanted.get(k) != got.get(k)):
            fields = ", ".join(bad)
            raise DatasetError(
                f"{name}: {fields} read back otherwise. Check the disk, or write another format."
            )


def _bare(value: Any) -> Any:
    """Return a value without what formats cannot tell apart: absent and null, kinds of NaN."""
    if isinstance(value, dict):
        return {name: _bare(part) for name, part in value.items() if part is not None}
    if isinstance(value, list):
        return [_bare(part) for part in value]
    return value if value == value else "NaN"
