"""Memoised measuring: what each row of a dataset became, kept as mapped arrays.

With an index planning reads no sample: records come out of it without tokens, which are made where
a sequence is delivered. The batches are the same bytes.

A table is a folder of immutable files, each with some rows of one dataset under one configuration;
its name is the digest of that configuration (tokenizer, schema, processor, operators, versions).
Every process adds files of its own, so any number may fill a table at once, and what one measured
is lost with a kill only since its last file. Files are merged, small into large, as they get many.

Laws (tests/test_index.py):
    1. What was added is found, whatever was merged, written and opened in between; values of a row
       are the same from whomever they come, so the order of merging does not matter.
    2. A row is found only in the shard that it was measured in: same name, bytes and row count.
    3. Only results enter: a fault of the environment is an exception, and never comes here.

Cost: about 0.3 us a record to look up, 70 bytes a row on disk, mapped and shared by all processes.

Imports: arrayfile, errors, records. Used by: engine.measuring, compiled.
"""

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zephon_mm.arrayfile import ArrayFile
from zephon_mm.packed import Block, extents_of
from zephon_mm.records import Record, SampleRef, ShardInfo, Skip

SAVED_ROWS = 16_384
"""Rows that are added before they are written: what a kill can lose."""

_FILTERED, _DEFECT = 0, -1  # in place of a number of tokens
_SUFFIX = ".rows"
_COUNTS = ("num_tokens", "num_images", "num_valid", "num_patches")

Rows = NDArray[np.int64]


class Part:
    """Some rows of a dataset, ascending, each once.

    Args:
        arrays: `rows` (n,) int64, positions in the concatenation of the shards; `num_tokens`,
            `num_images`, `num_valid` (tokens that carry loss) and `num_patches`, (n,) int32;
            `values` int32, all rows' extents; `ends` (n,) int64, where each row's end.
        defects: Row -> (reason, message).
    """

    def __init__(
        self, arrays: Mapping[str, NDArray[Any]], defects: Mapping[int, Sequence[str]]
    ) -> None:
        self.arrays = arrays
        self.defects = defects
        self.rows: Rows = arrays["rows"]
        self._ends, self._values = arrays["ends"], arrays["values"]
        first, last = (int(self.rows[0]), int(self.rows[-1])) if len(self.rows) else (0, -1)
        self._first = first if last - first + 1 == len(self.rows) else None  # it has no gaps

    def extents(self, at: int) -> list[int]:
        """Return the extents of the row at a position."""
        start = self._ends[at - 1] if at else 0
        found: list[int] = self._values[start : self._ends[at]].tolist()
        return found

    def find(self, rows: Rows) -> tuple[Rows, NDArray[np.bool_]]:
        """Return where rows are, (n,) int64, and whether they are here, (n,) bool."""
        if self._first is not None:
            at = rows - self._first
            return at, (at >= 0) & (at < len(self.rows))
        at = np.searchsorted(self.rows, rows)
        at[at == len(self.rows)] = 0
        return at, self.rows[at] == rows

    def skip(self, at: int, ref: SampleRef) -> Skip:
        """Return why the row at a position gives no record."""
        defect = self.defects.get(int(self.rows[at]))
        if defect is None:
            return Skip(ref, "filtered", "dropped by the user", False)
        return Skip(ref, defect[0], defect[1], True)

    def renumbered(self, moves: Sequence[tuple[int, int, int]]) -> "Part":
        """Return the rows of some shards under new numbers.

        Args:
            moves: (first row here, rows, first row there) of each shard that stays.
        """
        picked = [np.empty(0, dtype=np.int64)]
        numbers = [np.empty(0, dtype=np.int64)]
        for start, size, there in moves:
            low, high = np.searchsorted(self.rows, (start, start + size))
            picked.append(np.arange(low, high))
            numbers.append(self.rows[low:high] + (there - start))
        return _merged([(self, np.concatenate(picked), np.concatenate(numbers))])


def merge(parts: Sequence[Part]) -> Part:
    """Return one part with the rows of all."""
    return _merged([(part, np.arange(len(part.rows)), part.rows) for part in parts])


def _merged(sources: Sequence[tuple[Part, Rows, Rows]]) -> Part:
    """Return a part of (part, positions in it, their row numbers), sorted, each row once."""
    columns, base = [], 0
    for part, at, rows in sources:
        ends = part.arrays["ends"]
        size = np.diff(ends, prepend=0)
        start = ends - size + base
        counts = (part.arrays[name][at] for name in _COUNTS)
        columns.append(np.stack((rows, *counts, start[at], size[at])))
        base += len(part.arrays["values"])
    table = np.concatenate(columns, axis=1)
    _, first = np.unique(table[0], return_index=True)
    rows, *counted, start, size = table[:, first]
    ends = np.cumsum(size)
    gather = np.repeat(start - (ends - size), size) + np.arange(int(size.sum()))
    values = np.concatenate([part.arrays["values"] for part, *_ in sources])[gather]
    defects: dict[int, Sequence[str]] = {}
    for part, at, new in sources:
        there = dict(zip(part.rows[at].tolist(), new.tolist(), strict=True)) if part.defects else {}
        defects |= {there[row]: told for row, told in part.defects.items() if row in there}
    return Part(
        {
            "rows": np.ascontiguousarray(rows),
            **{name: new.astype(np.int32) for name, new in zip(_COUNTS, counted, strict=True)},
            "ends": ends,
            "values": values,
        },
        defects,
    )


class Table:
    """The rows of one dataset under one configuration.

    Args:
        folder: Where its files are.
        shards: Of the dataset, in order.
        write: Whether files may be written and merged.
    """

    def __init__(self, folder: Path, shards: Sequence[ShardInfo], *, write: bool = True) -> None:
        self.folder = folder
        self._write = write
        self._shards = [[name, num_bytes, num_rows] for name, num_rows, num_bytes in shards]
        sizes = [shard.num_rows for shard in shards]
        self._starts = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
        self._parts: list[tuple[Part, str]] = []  # and the file that it is in
        self._ignored: set[str] = set()
        self._clear()
        self.refresh()

    @property
    def num_shards(self) -> int:
        """Shards of the dataset."""
        return len(self._shards)

    @property
    def num_rows(self) -> int:
        """Rows of the dataset."""
        return int(self._starts[-1])

    @property
    def num_known(self) -> int:
        """Rows that a file holds; exact after `refresh`."""
        return sum(len(part.rows) for part, _ in self._parts)

    def refresh(self) -> None:
        """Take up what other processes wrote."""
        if not self.folder.is_dir():
            return
        have = {name for _, name in self._parts} | self._ignored
        for name in sorted(set(os.listdir(self.folder)) - have):
            file = ArrayFile.load(self.folder / name) if name.endswith(_SUFFIX) else None
            if file is None or not file.is_intact():
                self._ignored.add(name)  # being written, deleted by a merge, or damaged
                continue
            self._parts.append((self._adopted(file), name))
        if len(self._parts) > 1:
            self._rewrite(len(self._parts))

    def lookup(self, refs: NDArray[np.int64], columns: NDArray[np.int64]) -> list[Part]:
        """Write what is known of rows into the columns of a `Block`; return their stores."""
        rows = self._starts[refs[:, 1]] + refs[:, 2]
        for number, (part, _) in enumerate(self._parts):
            at, hit = part.find(rows)
            at = at[hit]
            counts = (part.arrays[name][at] for name in _COUNTS)
            for column, values in zip(columns, (*counts, number, at), strict=True):
                column[hit] = values
        return [part for part, _ in self._parts]

    def add(self, result: Record | Skip) -> None:
        """Note what a row became; it is found after the next `save`."""
        row = int(self._starts[result.ref.shard]) + result.ref.row
        values: list[int] = []
        if isinstance(result, Record):
            values = extents_of(result)
            counts = (result.num_tokens, result.num_images, result.num_valid_tokens)
            self._new.append((row, *counts, result.num_patches, len(values)))
        else:
            self._new.append((row, _DEFECT if result.defect else _FILTERED, 0, 0, 0, 0))
            if result.defect:
                self._new_defects[row] = (result.reason, result.message)
        self._new_values += values
        if len(self._new) >= SAVED_ROWS:
            self.save()

    def save(self) -> None:
        """Write what was added."""
        if not self._new:
            return
        new = np.array(self._new, dtype=np.int64)
        arrays: dict[str, NDArray[Any]] = {
            "rows": new[:, 0],
            **{name: new[:, at].astype(np.int32) for at, name in enumerate(_COUNTS, start=1)},
            "ends": np.cumsum(new[:, -1]),
            "values": np.array(self._new_values, dtype=np.int32),
        }
        self._parts.append((merge([Part(arrays, self._new_defects)]), ""))
        self._clear()
        count = 1
        while count < len(self._parts) and (
            len(self._parts[-count - 1][0].rows)
            < 2 * sum(len(part.rows) for part, _ in self._parts[-count:])
        ):
            count += 1
        self._rewrite(count)

    def unknown(self, shard: int) -> Rows:
        """Return the rows of a shard that no file holds, (n,) int64."""
        start, stop = self._starts[shard : shard + 2].tolist()
        known = np.zeros(stop - start, dtype=np.bool_)
        for part, _ in self._parts:
            low, high = np.searchsorted(part.rows, (start, stop))
            known[part.rows[low:high] - start] = True
        return np.flatnonzero(~known)

    def summary(self) -> dict[str, Any]:
        """Return rows by what became of them, tokens, images, bytes on disk."""
        found: dict[str, Any] = {"records": 0, "tokens": 0, "images": 0, "skipped": {}}
        for part, _ in self._parts:
            tokens = part.arrays["num_tokens"]
            found["records"] += int((tokens > 0).sum())
            found["tokens"] += int(tokens[tokens > 0].sum(dtype=np.int64))
            found["images"] += int(part.arrays["num_images"].sum(dtype=np.int64))
            reasons = [reason for reason, _ in part.defects.values()]
            reasons += ["filtered"] * int((tokens == _FILTERED).sum())
            for reason in sorted(set(reasons)):
                found["skipped"][reason] = found["skipped"].get(reason, 0) + reasons.count(reason)
        return found

    def clear(self) -> None:
        """Forget every row, also on disk."""
        for _, name in self._parts:
            (self.folder / name).unlink(missing_ok=True)
        self._parts.clear()

    def _clear(self) -> None:
        self._new: list[tuple[int, ...]] = []  # row, counts, extents
        self._new_values: list[int] = []
        self._new_defects: dict[int, tuple[str, str]] = {}

    def _adopted(self, file: ArrayFile) -> Part:
        """Return a file's rows under this dataset's numbers."""
        defects = {int(row): told for row, told in file.header["defects"]}
        part = Part(file.arrays, defects)
        theirs = file.header["shards"]
        if theirs == self._shards:
            return part
        starts = self._starts[:-1].tolist()
        here = {tuple(shard): at for shard, at in zip(self._shards, starts, strict=True)}
        moves, at = [], 0
        for shard in theirs:
            if (there := here.get(tuple(shard))) is not None:
                moves.append((at, shard[2], there))
            at += shard[2]
        return part.renumbered(moves)

    def _rewrite(self, count: int) -> None:
        """Merge the last `count` parts and write them as one file."""
        merged = merge([part for part, _ in self._parts[-count:]])
        old = [name for _, name in self._parts[-count:] if name]
        del self._parts[-count:]
        self._parts.append((merged, ""))
        if not self._write:
            return
        header = {"shards": self._shards, "defects": list(merged.defects.items())}
        file = ArrayFile.encode(header, merged.arrays)
        name = f"{len(merged.rows)}-{file.checksum:08x}{_SUFFIX}"
        try:
            mapped = file.save(self.folder / name)
            for other in old:
                if other != name:
                    (self.folder / other).unlink(missing_ok=True)
        except OSError as error:
            warnings.warn(
                f"cannot keep an index at {self.folder} ({error}): samples are measured again in "
                "the next run. Set the dataset's cache_dir to a folder that can be written.",
                stacklevel=2,
            )
            self._write = False
            return
        self._parts[-1] = Part(mapped.arrays, merged.defects), name


class Index:
    """The tables of a pipeline's datasets.

    Args:
        tables: In the order of the datasets; None for one that has no place for an index.
        fill: Whether what is measured is added.
    """

    def __init__(self, tables: Sequence[Table | None], *, fill: bool) -> None:
        self.tables = tables
        self._fill = fill

    @property
    def complete(self) -> bool:
        """Whether every row of every dataset is known: planning reads no sample then."""
        return all(table is not None and table.num_known == table.num_rows for table in self.tables)

    def lookup(self, refs: NDArray[np.int64]) -> Block:
        """Return what is known of rows.

        Args:
            refs: (n, 3) int64 with the columns of `SampleRef`.
        """
        found = np.full((6, len(refs)), Block.UNKNOWN, dtype=np.int64)
        stores: list[Part] = []
        for number in np.unique(refs[:, 0]).tolist():
            table = self.tables[number]
            if table is not None:
                places = np.flatnonzero(refs[:, 0] == number)
                columns = found[:, places]
                parts = table.lookup(refs[places], columns)
                columns[-2] += len(stores)
                found[:, places] = columns
                stores += parts
        return Block(refs, found, stores)

    def add(self, results: Sequence[Record | Skip]) -> None:
        """Note what rows became, if this index is to be filled."""
        if self._fill:
            for result in results:
                table = self.tables[result.ref.dataset]
                if table is not None:
                    table.add(result)

    def save(self) -> None:
        """Write what was added."""
        for table in self.tables:
            if table is not None:
                table.save()
