"""The two worker functions: measure samples, materialize images. Stateless; errors are values.

What a task returns is a list as long as its items, so that the scheduler may run any of them alone.
A defect of the data becomes a `Skip` or a `Failure`. A fault of the environment (OSError) is tried
again here, then raised with the sample's name: it never becomes a result.

Imports: io, ops, processors.documents, records. Used by: engine.planner, engine.driver.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from zephon_mm.errors import ConfigError, SampleError
from zephon_mm.io import Dataset, read_blob
from zephon_mm.ops.interleave import Interleave
from zephon_mm.ops.map import DocumentOp
from zephon_mm.ops.tokenize import Tokenize
from zephon_mm.processors.documents import Schema, SchemaName, fields_of, schema_of, to_document
from zephon_mm.protocols import ImageProcessor, Sample
from zephon_mm.records import Blob, Document, Record, SampleRef, Skip
from zephon_mm.shm.arena import Arena

RETRY_DELAYS_S = (0.05, 0.5, 2.0)
"""Waits between tries after an OSError: long enough for a hiccup of a network file system."""

DETECTED_SHARDS, DETECTED_ROWS = 4, 32
"""How much of a dataset is looked at to tell its schema."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Context:
    """All that a worker needs, sent to it once.

    `schemas` says how the samples of each dataset become documents.
    """

    datasets: tuple[Dataset, ...]
    schemas: tuple[Schema, ...]
    operators: tuple[DocumentOp, ...]
    interleave: Interleave | Tokenize
    image_processor: ImageProcessor | None = None
    arena: Arena | None = None


class ImageJob(NamedTuple):
    """One image to write at `offset` of the arena; -1: return the array instead."""

    ref: SampleRef
    blob: Blob
    offset: int
    shape: tuple[int, ...]


class Failure(NamedTuple):
    """An image that could not be decoded, and why."""

    reason: str
    message: str


def detect_schema(dataset: Dataset) -> Schema:
    """Return a dataset's schema: as given, or as the fields of its first rows tell.

    The fields of several rows are taken together, because a sample that lacks its image must not
    pass for a text.

    Raises:
        ConfigError: The fields tell no schema.
    """
    if callable(dataset.schema):
        return dataset.schema
    if dataset.schema is not None:
        names: tuple[SchemaName, ...] = get_args(SchemaName)
        for name in names:
            if dataset.schema == name:
                return name
        raise ConfigError(
            f"dataset {dataset.name!r}: schema={dataset.schema!r} is unknown, expected one of "
            f"{', '.join(names)}, or a function"
        )
    fields: set[str] = set()
    first_error: SampleError | None = None
    for number, shard in enumerate(dataset.shards[:DETECTED_SHARDS]):
        rows = range(min(shard.num_rows, DETECTED_ROWS))
        for sample in dataset.reader.read(number, rows):
            if isinstance(sample, SampleError):
                first_error = first_error or sample
            else:
                fields |= fields_of(sample)
    try:
        return schema_of(fields)
    except SampleError as error:
        reason = first_error.message if first_error and not fields else error.message
        raise ConfigError(f"dataset {dataset.name!r} ({dataset.path}): {reason}") from error


def measure(context: Context, refs: Iterable[Sequence[int]]) -> list[Record | Skip]:
    """Turn sample references into records, or into the reasons why they give none.

    Args:
        context: The worker's context.
        refs: (n, 3) integers with the columns of `SampleRef`.
    """
    wanted = [SampleRef(int(d), int(s), int(r)) for d, s, r in refs]
    groups: dict[tuple[int, int], list[int]] = {}
    for position, ref in enumerate(wanted):
        groups.setdefault((ref.dataset, ref.shard), []).append(position)
    results: dict[int, Record | Skip] = {}
    for (number, shard), positions in groups.items():
        dataset = context.datasets[number]
        rows = [wanted[position].row for position in positions]
        read = partial(dataset.reader.read, shard, rows)
        samples = _persistently(read, dataset.row_name(shard, rows[0]))
        for position, sample in zip(positions, samples, strict=True):
            results[position] = _record(context, wanted[position], sample)
    return [results[position] for position in range(len(wanted))]


def _record(context: Context, ref: SampleRef, sample: Sample | SampleError) -> Record | Skip:
    dataset = context.datasets[ref.dataset]
    name = dataset.row_name(ref.shard, ref.row)
    try:
        document = _document(context, ref.dataset, sample)
        if document is None:
            return Skip(ref, "filtered", f"{name}: dropped by the user", False)

        def read(blob: Blob, size: int) -> bytes:
            return _persistently(partial(read_blob, dataset, blob, size), name)

        return context.interleave.measure(ref, document, read)
    except SampleError as error:
        return Skip(ref, error.reason, f"{name}: {error.message}", True)
    except Exception as error:
        error.add_note(f"while measuring sample {name}")
        raise


def _document(context: Context, number: int, sample: Sample | SampleError) -> Document | None:
    if isinstance(sample, SampleError):
        raise sample
    document = to_document(sample, context.schemas[number], context.datasets[number].missing)
    for operator in context.operators:
        if document is None:
            break
        document = operator.apply(document)
    return document


def materialize(
    context: Context, jobs: Sequence[ImageJob]
) -> list[Failure | NDArray[np.uint8] | None]:
    """Write images into the arena; None for each that is there, or a failure.

    With `offset` -1 the image's array is returned, for memory that the worker cannot reach.
    """
    return [_materialize(context, job) for job in jobs]


def _materialize(context: Context, job: ImageJob) -> Failure | NDArray[np.uint8] | None:
    dataset = context.datasets[job.ref.dataset]
    name = dataset.row_name(job.ref.shard, job.ref.row)
    assert context.image_processor is not None
    try:
        encoded = _persistently(partial(read_blob, dataset, job.blob), name)
        if job.offset < 0 or context.arena is None:
            out = np.empty(job.shape, dtype=np.uint8)
            context.image_processor.write(encoded, out)
            return out
        size = math.prod(job.shape)
        out = context.arena.view(job.offset, size).reshape(job.shape)
        context.image_processor.write(encoded, out)
    except SampleError as error:
        return Failure(error.reason, f"{name}: {error.message}")
    except Exception as error:
        error.add_note(f"while decoding an image of sample {name}")
        raise
    return None


def _persistently(action: Callable[[], T], name: str) -> T:
    """Call an action that reads; after an OSError wait and try again, then name the sample."""
    for delay_s in RETRY_DELAYS_S:
        try:
            return action()
        except OSError:
            time.sleep(delay_s)
    try:
        return action()
    except OSError as error:
        error.add_note(f"while reading sample {name}, after {len(RETRY_DELAYS_S) + 1} tries")
        raise


def poisoned_sample(context: Context, ref: Sequence[int], cause: str) -> Skip:
    """What `measure` answers for a sample that crashed its worker twice, alone."""
    where = SampleRef(*map(int, ref))
    return Skip(where, "crashed_worker", f"{_name(context, where)}: {cause}", True)


def poisoned_image(context: Context, job: ImageJob, cause: str) -> Failure:
    """What `materialize` answers for an image that crashed its worker twice, alone."""
    return Failure("crashed_worker", f"{_name(context, job.ref)}: {cause}")


def _name(context: Context, ref: SampleRef) -> str:
    return context.datasets[ref.dataset].row_name(ref.shard, ref.row)
