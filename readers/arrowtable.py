"""Rows at random out of Arrow record batches, such as those of a mapped file.

Laws (tests/readers/test_parquet.py):
    1. `take` touches the asked rows of the asked columns alone, in any order. It never joins the
       batches of a file, as `pyarrow.Table.take` does.
    2. A column's bytes stay in Arrow's own buffers, in the mapped file where it has them: no Python
       object and no copy per row.

Cost: a few microseconds per batch and column that a block of rows touches.

Imports: records, readers.imagerefs, pyarrow. Used by: readers.parquet.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray

from zephon_mm.readers.imagerefs import Place, place_name
from zephon_mm.records import Column, RowBlob

pc: Any = pyarrow.compute  # it makes its functions when it is imported: no type checker sees them

NULLS = b"zephon_mm.nulls"
"""Key in a schema's metadata: JSON of the nulls in the bytes of each image column, if known."""


class ArrowTable:
    """Record batches with one schema.

    Args:
        batches: In order.
        source: Where the bytes of their columns lie; elsewhere they are copied.

    Attributes:
        schema: Of all batches, empty without one.
        images: Whether of each column with images this table tells which of them are there,
            without their bytes: those that its structs and lists hold.
    """

    def __init__(self, batches: Iterable[Any], source: Any = b"") -> None:
        self.batches = tuple(batches)
        self._source = np.frombuffer(source, dtype=np.uint8)
        self._placed: dict[tuple[str, int], _Placed | None] = {}
        self.schema = self.batches[0].schema if self.batches else pa.schema([])
        self._starts = np.cumsum([0] + [batch.num_rows for batch in self.batches])
        nulls = json.loads((self.schema.metadata or {}).get(NULLS, "{}"))
        names = [*nulls] or [field.name for field in self.schema if holds_binary(field.type)]
        self.images = {name: nulls.get(name) == self._num_absent(name) for name in names}

    @classmethod
    def map(cls, path: str) -> "ArrowTable":
        """Map an Arrow IPC file or stream, which may lose its name meanwhile, but not shrink.

        Raises:
            pa.ArrowInvalid: It is no whole Arrow file; or an OSError without a number.
        """
        return cls.of(pa.memory_map(path).read_buffer())

    @classmethod
    def of(cls, source: Any) -> "ArrowTable":
        """Return what a buffer with an Arrow IPC file or stream holds, as `map` does."""
        if source[:6].to_pybytes() != b"ARROW1":
            return cls(pa.ipc.open_stream(source), source)
        file = pa.ipc.open_file(source)
        return cls(map(file.get_batch, range(file.num_record_batches)), source)

    def cell(self, name: str, row: int) -> Any:
        """Return one value as an Arrow scalar, which copies nothing."""
        at = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self.batches[at].column(name)[row - int(self._starts[at])]

    def take(self, names: Sequence[str], rows: NDArray[np.int64]) -> dict[str, Any]:
        """Return the rows of some columns as arrays, in the order asked; nulls for no such column.

        Args:
            names: Of columns.
            rows: (n,) int64, in any order.
        """
        which = np.searchsorted(self._starts, rows, side="right") - 1
        order = np.argsort(which, kind="stable")
        cuts = np.searchsorted(which[order], np.arange(len(self.batches) + 1))
        pieces: dict[str, list[Any]] = {name: [] for name in names if name in self.schema.names}
        for at in np.flatnonzero(np.diff(cuts)):
            local = rows[order[cuts[at] : cuts[at + 1]]] - self._starts[at]
            is_run = bool((local[1:] - local[:-1] == 1).all())
            for name, parts in pieces.items():
                column = plain(self.batches[at].column(name))
                parts.append(column.slice(local[0], local.size) if is_run else column.take(local))
        taken = {name: pa.nulls(rows.size, pa.large_binary()) for name in names}
        taken |= {name: pa.concat_arrays(parts) for name, parts in pieces.items() if parts}
        if (which[1:] < which[:-1]).any():
            back = np.argsort(order)
            taken = {name: array.take(back) for name, array in taken.items()}
        return taken

    def column(self, name: str, rows: NDArray[np.int64]) -> Column | None:
        """Return the rows of a column as `to_column` does, left where they lie if they can be."""
        which = np.searchsorted(self._starts, rows, side="right") - 1
        starts, ends, valid = np.empty_like(rows), np.empty_like(rows), np.ones(rows.size, np.bool_)
        for at in np.flatnonzero(np.bincount(which)).tolist():
            if (name, at) not in self._placed:
                self._placed[name, at] = self._place(name, at)
            if (placed := self._placed[name, at]) is None:
                return to_column(self.take([name], rows)[name])
            mine = which == at
            local = rows[mine] - self._starts[at]
            starts[mine], ends[mine] = (placed.begin + placed.offsets[local + i] for i in (0, 1))
            if placed.nulls is not None:
                valid[mine] = placed.nulls[local >> 3] >> (local & 7) & 1
        ends[~valid] = starts[~valid]  # under a null there may be bytes
        return Column(self._source, ends, valid, starts)

    def _place(self, name: str, at: int) -> "_Placed | None":
        """Return where a batch has the bytes of a column; None if not in the source, as stored."""
        array = self.batches[at].column(name) if name in self.schema.names else pa.nulls(0)
        if is_picture(array.type):
            struct = array
            array = struct.flatten()[struct.type.get_field_index("bytes")]
            if array.null_count > struct.null_count:
                return None
        if not (is_text(array.type) or is_binary(array.type)) or _is_view(array.type):
            return None
        nulls, offsets, data = array.buffers()
        begin = (data.address if data else 0) - self._source.ctypes.data
        if array.offset or not offsets or not 0 <= begin < self._source.size:
            return None
        is_large = pa.types.is_large_binary(array.type) or pa.types.is_large_string(array.type)
        return _Placed(
            begin,
            np.frombuffer(offsets, dtype=np.int64 if is_large else np.int32),
            np.frombuffer(nulls, dtype=np.uint8) if array.null_count else None,
        )

    def _num_absent(self, name: str) -> int:
        """Return how many images are absent by null structs and by null and empty lists."""
        total = 0
        for batch in self.batches if name in self.schema.names else []:
            array = batch.column(name)
            if is_list(array.type):
                lengths = pc.list_value_length(array).fill_null(0).to_numpy()
                total += int((lengths == 0).sum())
                array = array.flatten()
            total += array.null_count
        return total


class _Placed(NamedTuple):
    """A batch's column: where in the source its bytes begin, Arrow's offsets and null bitmap."""

    begin: int
    offsets: NDArray[Any]
    nulls: NDArray[np.uint8] | None


def blobs_of(cell: Any, shard: int, row: int, place: Place, *, told: bool) -> Any:
    """Return a cell's value with its images as blobs; one without bytes as a mapping of its path.

    Args:
        cell: An Arrow scalar.
        shard: Where it is stored.
        row: Likewise.
        place: Likewise, inside the row.
        told: It holds structs without their bytes, all of which are there.
    """
    if not cell.is_valid:
        return None
    if is_list(cell.type):
        return [blobs_of(one, shard, row, (*place, i), told=told) for i, one in enumerate(cell)]
    if told or is_binary(cell.type) or (is_picture(cell.type) and cell["bytes"].is_valid):
        return RowBlob(shard, row, place_name(place))
    if is_picture(cell.type):
        path = cell["path"].as_py() if "path" in cell else None
        return None if path is None else {"path": path}
    if pa.types.is_struct(cell.type):
        return {name: blobs_of(cell[name], shard, row, (*place, name), told=told) for name in cell}
    return cell.as_py()


def bytes_at(cell: Any, steps: Iterable[str]) -> Any:
    """Return the bytes, or the text, at a place inside a cell; None for a null."""
    for step in steps:
        if is_list(cell.type):
            cell = cell[int(step)]
        elif pa.types.is_struct(cell.type):
            cell = cell[step]
    return (cell["bytes"] if is_picture(cell.type) and cell.is_valid else cell).as_py()


def to_column(array: Any) -> Column | None:
    """Return an array's stored bytes, text as UTF-8, images as encoded; None if it holds neither.

    Args:
        array: Texts, binaries, or structs of `bytes` and `path`, of which a path alone is neither.
    """
    if is_picture(array.type):
        data = array.flatten()[array.type.get_field_index("bytes")]
        if data.null_count > array.null_count:
            return None
        array = data
    if not is_stored(array.type):
        return None
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    array = array.cast(pa.large_binary())
    if array.null_count:
        array = array.fill_null(b"")  # under a null there may be bytes
    _, offsets, data = array.buffers()
    ends = np.frombuffer(offsets or bytes(8), dtype=np.int64)[array.offset :][: len(array) + 1]
    stored = np.frombuffer(data or b"", dtype=np.uint8)[ends[0] : ends[-1]]
    return Column(stored, ends[1:] - ends[0], valid)


def plain(array: Any) -> Any:
    """Return an array whose rows can be taken and written: no dictionary, no view."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        return array.dictionary_decode()
    if is_picture(kind) and any(_is_view(field.type) for field in kind):
        parts = [plain(part) for part in array.flatten()]
        return pa.StructArray.from_arrays(parts, [*kind.names], mask=array.is_null())
    if _is_view(kind):
        return array.cast(pa.large_binary() if is_binary(kind) else pa.large_string())
    return array


def _is_view(kind: Any) -> bool:
    return bool(pa.types.is_string_view(kind) or pa.types.is_binary_view(kind))


def is_binary(kind: Any) -> bool:
    """Whether a type holds bytes of any length."""
    types = pa.types
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))


def is_text(kind: Any) -> bool:
    """Whether a type is text."""
    types = pa.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def is_stored(kind: Any) -> bool:
    """Whether a column can be made of a type: text, bytes or a picture."""
    return is_text(kind) or is_binary(kind) or is_picture(kind)


def holds_binary(kind: Any) -> bool:
    """Whether a type, or any inside it, holds bytes of any length."""
    inner = (kind.field(i).type for i in range(kind.num_fields))
    return is_binary(kind) or any(map(holds_binary, inner))


def is_picture(kind: Any) -> bool:
    """Whether a type is a struct of `bytes` and perhaps `path`."""
    names = {field.name for field in kind} if pa.types.is_struct(kind) else set()
    return "bytes" in names and names <= {"bytes", "path"}


def item_type(kind: Any) -> Any:
    """Return the type of a list's items; of anything else its own."""
    return kind.value_type if is_list(kind) else kind


def is_list(kind: Any) -> bool:
    """Whether a type is a list."""
    is_fixed = pa.types.is_fixed_size_list(kind)
    return bool(is_fixed or pa.types.is_list(kind) or pa.types.is_large_list(kind))
