"""The two worker functions: measure samples, materialize batches. Stateless; errors are values.

What a task returns is a list as long as its items, so that the scheduler may run any of them alone.
A defect of the data becomes a `Skip` or a `Failure`. A fault of the environment (OSError) is tried
again here, then raised with the sample's name: it never becomes a result.

Imports: engine.assembly, io, ops, processors.documents, records. Used by: engine.
"""

import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, NamedTuple, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from zephon_mm.engine.assembly import EMPTY, TOKEN_FIELDS, token_fields, write_piece
from zephon_mm.errors import ConfigError, SampleError, StaleIndexError
from zephon_mm.io import Dataset, open_blob, read_blob
from zephon_mm.measured import Measured
from zephon_mm.media import NO_MARKS
from zephon_mm.ops.downscale import Downscale
from zephon_mm.ops.interleave import Interleave
from zephon_mm.ops.map import DocumentOp
from zephon_mm.ops.tokenize import Tokenize
from zephon_mm.packed import parsed
from zephon_mm.processors.augment import Augment, Drawn, apply
from zephon_mm.processors.documents import Schema, SchemaName, fields_of, schema_of, to_document
from zephon_mm.processors.header import header_of
from zephon_mm.processors.marks import shown_marks
from zephon_mm.protocols import ImageProcessor, Sample, VideoProcessor
from zephon_mm.records import Blob, Document, Image, MediaShape, Record, SampleRef, Skip, Video
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
    video_processor: VideoProcessor | None = None
    augment: Augment | None = None

    @property
    def weighted(self) -> bool:
        """Whether tokens have loss weights."""
        return getattr(self.interleave, "loss_weights", None) is not None


class ImageJob(NamedTuple):
    """An image, or parts of a video, to write at `offset` of the arena; -1: return the array.

    Without a blob it is image or video `number` of the sample's document, which is read again.
    `marks` are, if it has any, its boxes and points, and where in the arena they go.
    `first` is the first part; `room` are the bytes of its place, zeroed beyond `shape`. `grid` is
    what was measured. `sequence` is the global number of the sequence that it is delivered in: with
    the sample it keys what happens to an image at random, another thing in each pass.
    """

    ref: SampleRef
    blob: Blob | None
    offset: int
    shape: tuple[int, ...]
    number: int = 0
    first: int = 0
    room: int = 0
    video: bool = False
    grid: tuple[int, ...] = ()
    sequence: int = 0
    marks: tuple[int, ...] = ()


class TextJob(NamedTuple):
    """The token arrays of one piece to write, of a record out of the index.

    `offsets` are those of its first token in the arena's arrays of `TOKEN_FIELDS`; None: return the
    arrays instead. `num_tokens` and `extents` (int32, as bytes) are what the index says of the
    record.
    """

    ref: SampleRef
    start: int
    stop: int
    offsets: tuple[int, ...] | None
    num_tokens: int
    extents: bytes


Job = ImageJob | TextJob


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
    samples = _samples(context, wanted)
    pairs = zip(wanted, samples, strict=True)
    return Measured(_record(context, ref, sample) for ref, sample in pairs)


def _samples(context: Context, wanted: Sequence[SampleRef]) -> list[Sample | SampleError]:
    """Read samples, those of a shard at once."""
    groups: dict[tuple[int, int], list[int]] = {}
    for position, ref in enumerate(wanted):
        groups.setdefault((ref.dataset, ref.shard), []).append(position)
    found: dict[int, Sample | SampleError] = {}
    for (number, shard), positions in groups.items():
        dataset = context.datasets[number]
        rows = [wanted[position].row for position in positions]
        read = partial(dataset.reader.read, shard, rows)
        samples = persistently(read, dataset.row_name(shard, rows[0]))
        found.update(zip(positions, samples, strict=True))
    return [found[position] for position in range(len(wanted))]


def _record(context: Context, ref: SampleRef, sample: Sample | SampleError) -> Record | Skip:
    dataset = context.datasets[ref.dataset]
    name = dataset.row_name(ref.shard, ref.row)
    try:
        document = _document(context, ref.dataset, sample)
        if document is None:
            return Skip(ref, "filtered", f"{name}: dropped by the user", False)

        return context.interleave.measure(ref, document, _Blobs(dataset, name))
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


class _Blobs(NamedTuple):
    """The bytes of a sample's images and videos."""

    dataset: Dataset
    name: str

    def read(self, blob: Blob, size: int) -> bytes:
        return persistently(partial(read_blob, self.dataset, blob, size), self.name)

    def use(self, blob: Blob, action: Callable[[BinaryIO], T]) -> T:
        def attempt() -> T:
            with open_blob(self.dataset, blob) as file:
                return action(file)

        return persistently(attempt, self.name)


class Smaller(NamedTuple):
    """The result of an image that was downscaled: what it would be without."""

    result: Any


def materialize(context: Context, jobs: Sequence[Job]) -> list[Any]:
    """Write images and tokens into the arena; None for each that is there, or an image's `Failure`.

    Where a job has no place in the arena its arrays are returned, for memory that the worker cannot
    reach. What an image that was downscaled returns is in a `Smaller`.
    """
    again = list(dict.fromkeys(job.ref for job in jobs if not _has_blob(job)))
    samples = dict(zip(again, _samples(context, again), strict=True))
    # Texts first: a tokenizer that images have driven out of the caches takes twice as long.
    order = sorted(range(len(jobs)), key=lambda at: isinstance(jobs[at], ImageJob))
    results = {at: _materialize(context, jobs[at], samples) for at in order}
    return [results[at] for at in range(len(jobs))]


def _has_blob(job: Job) -> bool:
    return isinstance(job, ImageJob) and job.blob is not None


def _materialize(context: Context, job: Job, samples: dict[SampleRef, Any]) -> Any:
    try:
        if _has_blob(job):
            return _write_image(context, job)
        if not isinstance(samples[job.ref], Document):  # the next job of the sample finds it here
            samples[job.ref] = _document_again(context, job.ref, samples[job.ref])
        write = _write_text if isinstance(job, TextJob) else _write_image
        return write(context, job, samples[job.ref])
    except Exception as error:
        error.add_note(f"while decoding sample {_name(context, job.ref)}")
        raise


def _document_again(context: Context, ref: SampleRef, sample: Sample | SampleError) -> Document:
    """Return the document of a sample that the index says to be sound."""
    try:
        document = _document(context, ref.dataset, sample)
    except SampleError as error:
        raise _stale(context, ref, error.message) from error
    if document is None:
        raise _stale(context, ref, "it is dropped by the user")
    return document


def _write_image(
    context: Context, job: Any, document: Document | None = None
) -> Failure | Smaller | tuple[NDArray[np.uint8], NDArray[np.float32]] | None:
    """Decode an image; with a document, the image is its, and must have the shape that is known."""
    name = _name(context, job.ref)
    media = Image(job.blob) if document is None else _media_again(context, job, document)
    shared = job.offset >= 0 and context.arena is not None
    size = math.prod(job.shape)
    room = max(job.room, size)
    place = context.arena.view(job.offset, room) if shared else np.empty(room, dtype=np.uint8)  # type: ignore[union-attr]
    out = place[:size].reshape(job.shape)
    place[size:] = 0
    try:
        write = _write_video if job.video else _write_picture
        blobs = _Blobs(context.datasets[job.ref.dataset], name)
        marks, smaller = write(context, job, blobs, media, out, document is not None)
    except SampleError as error:
        return Failure(error.reason, f"{name}: {error.message}")
    if shared and job.marks:
        context.arena.view(job.marks[-1], marks.nbytes)[:] = marks.reshape(-1).view(np.uint8)  # type: ignore[union-attr]
    result = None if shared else ((place if room > size else out), marks)
    return Smaller(result) if smaller else result


def _media_again(context: Context, job: ImageJob, document: Document) -> Image | Video:
    media = document.media
    found = media[job.number] if job.number < len(media) else None
    if found is None or isinstance(found, Video) != job.video:
        raise _stale(context, job.ref, f"it has {len(media)} images and videos")
    if isinstance(found, Image):
        marks = len(found.boxes), len(found.points)
        if marks != (job.marks[:2] or (0, 0)):
            raise _stale(context, job.ref, f"an image has {marks[0]} boxes and {marks[1]} points")
    return found


def _write_picture(
    context: Context, job: ImageJob, blobs: _Blobs, image: Any, out: NDArray[np.uint8], check: bool
) -> tuple[NDArray[np.float32], bool]:
    """Write an image; return its marks, and whether it is smaller than it could be."""
    processor, stage = context.image_processor, context.interleave
    assert processor is not None
    encoded = blobs.read(image.blob, -1)
    read = partial(_first_bytes, encoded)
    if check:
        again: Callable[[], MediaShape] = partial(processor.measure, read)
        if isinstance(stage, Downscale):
            again = partial(stage.version, read, tuple(job.shape))
        _check_shape(context, job, again)
    header = header_of(encoded, max_pixels=sys.maxsize) if job.marks else None
    size = (0, 0) if header is None else (header.height_px, header.width_px)
    drawn = Drawn()
    if context.augment is None:
        processor.write(encoded, out)
    else:
        drawn = context.augment.draw(*job.ref, job.number, job.sequence)

        def change(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
            nonlocal size
            size = (pixels.shape[0], pixels.shape[1])  # fewer where it was decoded scaled
            return apply(pixels, drawn)

        processor.write(encoded, out, change=change)  # type: ignore[call-arg]
    smaller = isinstance(stage, Downscale) and processor.measure(read).shape != out.shape
    marks = NO_MARKS if header is None else shown_marks(image, header, size, drawn)
    return marks, smaller


def _write_video(
    context: Context, job: ImageJob, blobs: _Blobs, video: Any, out: NDArray[np.uint8], check: bool
) -> tuple[NDArray[np.float32], bool]:
    """Write frames; they have no marks, and are never smaller."""
    processor = context.video_processor
    assert processor is not None

    def attempt(file: BinaryIO) -> None:  # `write` need not read again what `measure` has read
        if check:
            _check_shape(context, job, partial(processor.measure, file))
        processor.write(file, job.first, out)

    blobs.use(video.blob, attempt)
    return NO_MARKS, False


def _first_bytes(encoded: bytes, size: int) -> bytes:
    return encoded[:size] if size >= 0 else encoded


def _check_shape(context: Context, job: ImageJob, measure: Callable[[], MediaShape]) -> None:
    """Raise a StaleIndexError unless a header says what the index does."""
    try:
        found = measure()
    except SampleError as error:
        raise _stale(context, job.ref, error.message) from error
    shape = tuple(job.shape)[1:] if found.parts else tuple(job.shape)
    if (tuple(found.shape), tuple(found.grid)) != (shape, tuple(job.grid)):
        raise _stale(context, job.ref, f"an image gives {found.shape}, the index has {job.shape}")


def _write_text(context: Context, job: Any, document: Document) -> list[NDArray[Any]] | None:
    """Tokenize a sample again and write the tokens of a piece of it."""
    images, trained, uncut = parsed(np.frombuffer(job.extents, dtype=np.int32).tolist())
    dataset, name = context.datasets[job.ref.dataset], _name(context, job.ref)
    known: list[MediaShape | None] = [  # the texts of several parts are not in the index
        None if image.part == 0 else MediaShape(image.num_tokens, image.shape, (), image.grid)
        for image in images
        if image.part <= 0
    ]
    num_media = len(document.media)
    if num_media != len(known):
        raise _stale(context, job.ref, f"it has {num_media} images, the index has {len(known)}")
    try:
        record = context.interleave.measure(job.ref, document, _Blobs(dataset, name), known)
    except SampleError as error:
        raise _stale(context, job.ref, error.message) from error
    starts = [image.start for image in record.images]
    if (record.num_tokens, starts, record.trained_runs, record.uncut) != (
        *(job.num_tokens, [image.start for image in images], trained, uncut),
    ):
        found = f"it gives {record.num_tokens} tokens, the index has {job.num_tokens}"
        raise _stale(context, job.ref, found)
    size = job.stop - job.start
    dtypes = [TOKEN_FIELDS[name] for name in token_fields(weighted=context.weighted)]
    if job.offsets is None or context.arena is None:
        filled = zip(EMPTY, dtypes, strict=False)
        arrays = [np.full(size, value, dtype=dtype) for value, dtype in filled]
        write_piece(record, job.start, job.stop, arrays)
        return arrays
    places = zip(job.offsets, dtypes, strict=True)
    arrays = [context.arena.view(at, size * kind.itemsize).view(kind) for at, kind in places]
    write_piece(record, job.start, job.stop, arrays)
    return None


def _stale(context: Context, ref: SampleRef, found: str) -> StaleIndexError:
    return StaleIndexError(
        f"sample {_name(context, ref)} is not what was measured, or what the index says of it: "
        f"{found}. Data or code changed under the same name, size and version: make the index anew "
        "with `zephon-mm index RECIPE --rebuild`, or set options(index='off')."
    )


def persistently(action: Callable[[], T], name: str) -> T:
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


def poisoned_job(context: Context, job: Job, cause: str) -> Failure:
    """What `materialize` answers for a job that crashed its worker twice, alone."""
    return Failure("crashed_worker", f"{_name(context, job.ref)}: {cause}")


def _name(context: Context, ref: SampleRef) -> str:
    return context.datasets[ref.dataset].row_name(ref.shard, ref.row)
