"""Reading blocks of raw samples: the worker function, and which fields there are.

A block is some hundred rows in the order of delivery. Its rows are read shard by shard as columns
and written row after row where the batches will lie, so no payload is pickled. How large a block
will be is estimated; one that does not fit in its place is sent back instead, which is slower.

Layout of a block of n rows and F fields: ends (F, n) int64, valid (F, n) bool, then the bytes of
each field, each from a multiple of `ALIGN_BYTES`.

Laws (tests/engine/test_raw.py):
    1. A block's columns depend on its refs alone, not on whether the reader has `columns`.
    2. A defective row is valid in no column, and named.

Cost: a copy into place, and one before it by readers that do not leave the bytes where they lie.

Imports: engine.tasks, io, samples, shm. Used by: engine.raw, compiled, stages.
"""

import base64
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zephon_mm.engine.tasks import DETECTED_ROWS, DETECTED_SHARDS, Failure, persistently
from zephon_mm.errors import ConfigError, SampleError
from zephon_mm.io import Dataset, read_blob
from zephon_mm.records import Column, FileBlob, RowBlob
from zephon_mm.samples import Kind, stored
from zephon_mm.shm.arena import Arena
from zephon_mm.shm.layout import ALIGN_BYTES

BLOCK_ROWS = 8_192
BLOCK_BYTES = 16 << 20
"""What a block is at most, unless one batch is more: small enough to stay near the caches."""

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RawContext:
    """All that a worker needs, sent to it once; and `row_bytes`, about the bytes of a row."""

    datasets: tuple[Dataset, ...]
    kinds: Mapping[str, Kind]
    row_bytes: float
    arena: Arena | None = None


class BlockJob(NamedTuple):
    """Rows to read, (n, 3) int64 refs, -1 for padding, into `num_bytes` at `offset` of the arena.

    With -1 for `offset` the block is sent back.
    """

    refs: Rows
    offset: int
    num_bytes: int


class Block(NamedTuple):
    """A block that was read: where each field's bytes start in it, and its size.

    `buffer` is the block itself where it was sent back; `failures` has the defective rows.
    """

    starts: tuple[int, ...]
    num_bytes: int
    buffer: NDArray[np.uint8] | None
    failures: Mapping[int, Failure]


def header_bytes(rows: int, fields: int) -> int:
    """Return where the bytes of the first field start."""
    return _aligned(9 * rows * fields)


def block_columns(
    buffer: NDArray[np.uint8], starts: Sequence[int], rows: int
) -> Iterator[tuple[Rows, NDArray[np.bool_], NDArray[np.uint8]]]:
    """Yield (ends, valid, bytes) of each field of a block, as views of it."""
    fields = len(starts)
    ends = buffer[: 8 * fields * rows].view(np.int64).reshape(fields, rows)
    valid = buffer[8 * fields * rows : 9 * fields * rows].view(np.bool_).reshape(fields, rows)
    return zip(ends, valid, (buffer[start:] for start in starts), strict=True)


def detect_fields(
    datasets: Sequence[Dataset], wanted: Sequence[str] | None
) -> tuple[dict[str, Kind], float]:
    """Return the fields that the first rows have, with their kinds, and about the bytes of a row.

    Args:
        datasets: Of the source.
        wanted: The fields to deliver, in order; None for all, sorted by name.

    Raises:
        ConfigError: A wanted field is in none of the rows that were looked at, or there is none.
    """
    kinds: dict[str, Kind] = {}
    looked_at = [(d, *pair) for d in datasets for pair in [*enumerate(d.shards)][:DETECTED_SHARDS]]
    for dataset, shard, info in looked_at:
        samples = dataset.reader.read(shard, range(min(info.num_rows, DETECTED_ROWS)))
        found = [pair for s in samples if not isinstance(s, SampleError) for pair in s.items()]
        for name, value in found:
            if value is not None and not name.startswith("__"):
                kind = _kind_of(value)
                kinds[name] = kind if kinds.get(name, kind) == kind else "json"
    missing = [name for name in wanted or () if name not in kinds]
    if missing or not kinds:
        raise ConfigError(
            f"batch(fields=[...]): the first rows of the datasets have no {missing or 'field'}, "
            f"they have {sorted(kinds)}. Name fields that are there."
        )
    row_bytes = max(info.num_bytes / max(info.num_rows, 1) for _, _, info in looked_at)
    return {name: kinds[name] for name in wanted or sorted(kinds)}, max(row_bytes, 1.0)


def read_blocks(context: RawContext, jobs: Sequence[BlockJob]) -> list[Block]:
    """Read blocks and write them in place, as `BlockJob` says."""
    _keep_memory()
    return [_read_block(context, job) for job in jobs]


@functools.cache
def _keep_memory() -> None:
    """Make this process keep the memory that it frees: fresh pages cost a third of reading images.

    glibc takes from the system, and gives back, what is larger than the largest array that it saw
    freed; this one is never touched.
    """
    np.empty(24 << 20, dtype=np.uint8)


def poisoned_block(context: RawContext, job: BlockJob, cause: str) -> Failure:
    """Name the rows of a block that crashed its worker twice; the run ends with it."""
    dataset, shard, row = job.refs[0].tolist()
    name = context.datasets[dataset].row_name(shard, row)
    return Failure("crashed_worker", f"{len(job.refs)} rows, the first {name}: {cause}")


def _read_block(context: RawContext, job: BlockJob) -> Block:
    parts: list[tuple[Rows, list[Column]]] = []
    failures: dict[int, Failure] = {}
    for places in _by_shard(job.refs):
        number, shard = job.refs[places[0], :2].tolist()
        columns, failed = _columns(context, context.datasets[number], shard, job.refs[places, 2])
        failures |= {int(places[at]): failure for at, failure in failed.items()}
        parts.append((places, columns))
    block, out = _lay_out(context, job, parts, failures)
    if not_text := _failed_texts(context, job.refs, block.starts, out):
        failures |= not_text  # without those that failed before, which have no bytes
        block, _ = _lay_out(context, job, parts, failures)
    return block


def _lay_out(
    context: RawContext,
    job: BlockJob,
    parts: Sequence[tuple[Rows, Sequence[Column]]],
    failures: Mapping[int, Failure],
) -> tuple[Block, NDArray[np.uint8]]:
    """Write the rows of each shard, given by their places, where they lie in the block."""
    shape = len(context.kinds), len(job.refs)
    sizes, valid = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.bool_)
    for places, columns in parts:
        for field, column in enumerate(columns):
            sizes[field, places] = column.ends - _starts(column)
            valid[field, places] = column.valid
    valid[:, list(failures)] = False
    sizes[~valid] = 0
    ends = sizes.cumsum(axis=1)
    starts, end = [], header_bytes(shape[1], shape[0])
    for size in ends[:, -1].tolist():
        starts.append(end)
        end = _aligned(end + size)
    shared = context.arena is not None and job.offset >= 0 and end <= job.num_bytes
    out = context.arena.view(job.offset, end) if shared else np.empty(end, dtype=np.uint8)  # type: ignore[union-attr]
    for field, (its_ends, its_valid, data) in enumerate(block_columns(out, starts, shape[1])):
        its_ends[:] = ends[field]
        its_valid[:] = valid[field]
        for places, columns in parts:
            last, size = ends[field, places], sizes[field, places]
            _scatter(columns[field], data, last - size, last)
    return Block(tuple(starts), end, None if shared else out, failures), out


def _starts(column: Column) -> Rows:
    """Return where each row of a column begins."""
    if column.starts is not None:
        return column.starts
    starts = np.zeros_like(column.ends)
    starts[1:] = column.ends[:-1]
    return starts


def _scatter(column: Column, out: NDArray[np.uint8], starts: Rows, ends: Rows) -> None:
    """Copy each row of a column to its place."""
    # Slices of memoryviews cost half of what slices of arrays do.
    source, target = column.data.data, out.data
    froms = _starts(column).tolist()
    for at, start, end in zip(froms, starts.tolist(), ends.tolist(), strict=True):
        target[start:end] = source[at : at + end - start]


def _by_shard(refs: Rows) -> Iterator[Rows]:
    """Yield the places of the rows of each shard, ascending; padding is left out."""
    order = np.lexsort((refs[:, 1], refs[:, 0]))
    ordered = refs[order, :2]
    cuts = np.flatnonzero((ordered[1:] != ordered[:-1]).any(axis=1)) + 1
    for places in np.split(order, cuts):
        if refs[places[0], 0] >= 0:
            yield places


def _columns(
    context: RawContext, dataset: Dataset, shard: int, rows: Rows
) -> tuple[list[Column], dict[int, Failure]]:
    """Return the columns of some rows of a shard, one a field, and which rows are defective."""
    kinds, reader = context.kinds, dataset.reader
    where = dataset.row_name(shard, int(rows[0]))
    fast = [name for name, kind in kinds.items() if kind != "json"]
    found: dict[str, Column] = {}
    columns = getattr(reader, "columns", None)  # as a `ColumnReader` has: isinstance is slow
    if fast and columns is not None:
        found |= persistently(functools.partial(columns, shard, rows, fast), where)
    # `read` gives the other fields, and says why a row has none.
    slow: dict[str, list[bytes | None]] = {n: [None] * len(rows) for n in kinds if n not in found}
    lacking = ~np.any([found[name].valid for name in fast if name in found] or [rows < 0], axis=0)
    places = np.arange(len(rows)) if slow else np.flatnonzero(lacking)
    failures: dict[int, Failure] = {}
    for place, sample in _samples(dataset, shard, rows, places, list(slow or kinds)):
        where = dataset.row_name(shard, int(rows[place]))
        try:
            if isinstance(sample, SampleError):
                raise sample
            for name, values in slow.items():
                value = functools.partial(_encode, dataset, sample.get(name), kinds[name])
                values[place] = persistently(value, where)
        except SampleError as error:
            failures[place] = Failure(error.reason, f"{where}: {error.message}")
    found |= {name: _column_of(values) for name, values in slow.items()}
    return [found[name] for name in kinds], failures


def _samples(
    dataset: Dataset, shard: int, rows: Rows, places: Rows, fields: Sequence[str]
) -> Iterator[tuple[int, Any]]:
    """Yield the rows at some places, each with its place."""
    if places.size:
        read = functools.partial(dataset.reader.read, shard, rows[places].tolist(), fields)
        name = dataset.row_name(shard, int(rows[places[0]]))
        yield from zip(places.tolist(), persistently(read, name), strict=True)


def _column_of(values: Sequence[bytes | None]) -> Column:
    data = np.frombuffer(b"".join(value or b"" for value in values), dtype=np.uint8)
    ends = np.cumsum([len(value or b"") for value in values], dtype=np.int64)
    return Column(data, ends, np.array([value is not None for value in values], dtype=np.bool_))


def _encode(dataset: Dataset, value: Any, kind: Kind) -> bytes | None:
    if value is None:
        return None
    if kind == "json":
        return json.dumps(_plain(dataset, value), ensure_ascii=False, sort_keys=True).encode()
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, FileBlob | RowBlob):
        return read_blob(dataset, value)
    return value if isinstance(value, bytes) else _encode(dataset, value, "json")


def _plain(dataset: Dataset, value: Any) -> Any:
    """Return a value that JSON has: bytes and blobs as base64, arrays as lists."""
    if isinstance(value, FileBlob | RowBlob):
        value = read_blob(dataset, value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return {str(name): _plain(dataset, part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(dataset, part) for part in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _failed_texts(
    context: RawContext, refs: Rows, starts: Sequence[int], block: NDArray[np.uint8]
) -> dict[int, Failure]:
    failures: dict[int, Failure] = {}
    fields = zip(context.kinds.items(), block_columns(block, starts, len(refs)), strict=True)
    for name, ends, data in ((n, e, data) for (n, kind), (e, _, data) in fields if kind == "text"):
        for row in _not_text(Column(data[: ends[-1]], ends, ends > 0)):
            dataset, shard, number = refs[row].tolist()
            where = context.datasets[dataset].row_name(shard, number)
            message = f"{where}: field {name!r} is not UTF-8. Encode it as UTF-8."
            failures.setdefault(row, Failure("bad_utf8", message))
    return failures


def _not_text(column: Column) -> list[int]:
    """Return the rows that are not UTF-8."""
    starts = _starts(column)
    first = column.data[starts[starts < column.ends]]
    # The whole decodes and no row begins inside a character: then each of them decodes.
    if _decodes(column.data) and not ((first & 0xC0) == 0x80).any():
        return []
    return [row for row in range(len(column.ends)) if not _decodes(stored(column, row))]


def _decodes(data: NDArray[np.uint8]) -> bool:
    try:
        str(data.data, "utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _kind_of(value: Any) -> Kind:
    if isinstance(value, str):
        return "text"
    return "bytes" if isinstance(value, bytes | FileBlob | RowBlob) else "json"


def _aligned(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES
