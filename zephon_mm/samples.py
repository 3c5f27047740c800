"""A batch of raw samples: the stored bytes of each field, as columns and as mappings.

Laws (tests/test_samples.py):
    1. `samples[i][name]` is what the reader's `read` gives, with bytes in the place of blobs.
    2. A row's digest depends on the names and stored bytes of its fields alone: the same samples
       have the same digests in every format.

Cost: values are made when they are asked for; the columns are views.

Imports: records. Used by: engine.raw.
"""

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zephon_mm.records import Column

Kind = Literal["text", "bytes", "json"]
"""What a field's stored bytes are: UTF-8, an encoded image or the like, or any other value."""


@dataclass(frozen=True, eq=False)
class SampleBatch:
    """B raw samples. The columns may be views of shared memory; treat them as read-only.

    Attributes:
        columns: Field -> its bytes, row after row; not valid in rows that lack the field, that are
            defective, or that pad the last step.
        kinds: Field -> what its bytes are.
        refs: (B, 3) int64 with the columns of `SampleRef`; -1 for padding.
        sequence_ids: (B,) int64, the global numbers of the rows.
        delivered: Global samples delivered, over all ranks, once this batch is.
        datasets: What `refs` point into.
    """

    columns: Mapping[str, Column]
    kinds: Mapping[str, Kind]
    refs: NDArray[np.int64]
    sequence_ids: NDArray[np.int64]
    delivered: int
    datasets: Sequence[Any]

    @functools.cached_property
    def samples(self) -> Sequence["RawSample"]:
        """The samples; a value is made each time it is asked for."""
        fields = {
            name: _Field(column.data.data, [0, *column.ends.tolist()], column.valid.tolist(), kind)
            for (name, column), kind in zip(self.columns.items(), self.kinds.values(), strict=True)
        }
        return [RawSample(fields, row) for row in range(len(self.refs))]

    @property
    def keys(self) -> tuple[tuple[str, ...], ...]:
        """For each row, the name of its sample: `dataset/row`; none for padding."""
        return tuple(
            (self.datasets[dataset].key(shard, row),) if dataset >= 0 else ()
            for dataset, shard, row in self.refs.tolist()
        )

    def row_sha256(self) -> tuple[str, ...]:
        """Return one digest a row: its fields' names and stored bytes, sorted by name."""
        return tuple(_digest(self, row) for row in range(len(self.refs)))

    def sha256(self) -> str:
        """Return the digest of the batch: that of its rows' digests in global order."""
        rows = zip(self.sequence_ids.tolist(), self.row_sha256(), strict=True)
        return hashlib.sha256("".join(row for _, row in sorted(rows)).encode()).hexdigest()


class _Field(NamedTuple):
    """A column as plain values, which are faster one by one; row i is `[ends[i], ends[i + 1])`."""

    data: memoryview
    ends: list[int]
    valid: list[bool]
    kind: Kind


class RawSample(Mapping[str, Any]):
    """The fields that one row has: text as str, encoded images as bytes, other values as stored."""

    __slots__ = ("_fields", "_row")

    def __init__(self, fields: Mapping[str, _Field], row: int) -> None:
        self._fields = fields
        self._row = row

    def __getitem__(self, name: str) -> Any:
        data, ends, valid, kind = self._fields[name]
        row = self._row
        if not valid[row]:
            raise KeyError(name)
        found = data[ends[row] : ends[row + 1]]
        if kind == "bytes":
            return found.tobytes()
        text = str(found, "utf-8")
        return text if kind == "text" else json.loads(text)

    def __iter__(self) -> Iterator[str]:
        return iter([name for name, field in self._fields.items() if field.valid[self._row]])

    def __len__(self) -> int:
        return sum(field.valid[self._row] for field in self._fields.values())


def stored(column: Column, row: int) -> NDArray[np.uint8]:
    """Return the bytes of one row of a column, a view; none where it is not valid."""
    start = column.ends[row - 1] if row else 0
    return column.data[start : column.ends[row]]


def _digest(batch: SampleBatch, row: int) -> str:
    sha = hashlib.sha256()
    for name in sorted(batch.columns):
        column = batch.columns[name]
        if column.valid[row]:
            data = stored(column, row)
            sha.update(f"{name} {data.size}\n".encode())
            sha.update(data.data)
    return sha.hexdigest()
