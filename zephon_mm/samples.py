"""A batch of raw samples: the stored bytes of each field, as columns and as mappings.

Laws (tests/test_samples.py):
    1. `samples[i][name]` is what the reader's `read` gives, with bytes in the place of blobs.
    2. A row's digest depends on the names and stored bytes of its fields alone: the same samples
       have the same digests in every format.

Cost: a sample is made when it is asked for; the columns are views.

Imports: records. Used by: engine.raw.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

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
    def samples(self) -> "Samples":
        """The samples; one is made each time it is asked for."""
        return Samples(self)

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


class Samples(Sequence[dict[str, Any]]):
    """The fields that each row has: text as str, images as bytes, other values as stored."""

    def __init__(self, batch: SampleBatch) -> None:
        self._size = len(batch.refs)
        # As plain values, which are faster one by one; row i is `[ends[i], ends[i + 1])`.
        self._fields = [
            (name, _VALUES[batch.kinds[name]], data.data, [0, *ends.tolist()], valid.tolist())
            for name, (data, ends, valid, _) in batch.columns.items()
        ]

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, row: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, row: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [self[one] for one in range(self._size)[row]]
        row = range(self._size)[row]
        return {
            name: value_of(data[ends[row] : ends[row + 1]])
            for name, value_of, data, ends, valid in self._fields
            if valid[row]
        }


_VALUES: Mapping[Kind, Callable[[memoryview], Any]] = {
    "text": lambda data: str(data, "utf-8"),
    "bytes": bytes,
    "json": lambda data: json.loads(bytes(data)),
}


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
