"""The extension points. A new reader, processor, accumulator, source or runner is one file.

Each protocol has at most four methods and one shared contract test in `tests/contracts/`.

Imports: records. Used by: everything below the pipeline.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, BinaryIO, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from zephon_mm.errors import SampleError
from zephon_mm.records import Chunk, Column, MediaShape, RowBlob, ShardInfo, State

In = TypeVar("In", contravariant=True)
Out = TypeVar("Out", covariant=True)

Sample = Mapping[str, Any]
"""One stored row: field name -> str, number, bytes, Blob, or lists and mappings of these."""


@runtime_checkable
class Reader(Protocol):
    """Random access to the rows of one dataset in one format.

    A reader is picklable, safe after fork and spawn, and holds no payload: image fields come back
    as blobs. Its methods may be called from several threads at once.
    """

    @property
    def shards(self) -> Sequence[ShardInfo]:
        """The shards in the order of the data."""
        ...

    def read(
        self, shard: int, rows: Sequence[int], fields: Sequence[str] | None = None
    ) -> list[Sample | SampleError]:
        """Return the rows in the given order; a defective row is returned as its error.

        Args:
            shard: Index into `shards`.
            rows: Row numbers inside the shard.
            fields: Only these fields; None for all.

        Raises:
            OSError: The environment failed; the same call may succeed later.
            DatasetError: The shard is not the one that was indexed.
        """
        ...

    def fetch(self, blob: RowBlob) -> bytes:
        """Return the complete bytes of a blob that is not a file region."""
        ...

    def digest(self) -> str:
        """Return hex digits that change when any shard's name, size or row count does."""
        ...


@runtime_checkable
class ColumnReader(Protocol):
    """What a reader may have besides: the bytes of many rows at once, for raw samples."""

    def columns(
        self, shard: int, rows: NDArray[np.int64], fields: Sequence[str]
    ) -> Mapping[str, Column]:
        """Return the stored bytes of fields that `read` gives as text, bytes or blobs.

        Text is UTF-8, images are as encoded: what `read` and `read_blob` give. A row that `read`
        gives as an error is valid in no column. A field that cannot be given so is left out. With
        `starts` a column need not copy the bytes; they must not change while it is there.

        Args:
            shard: Index into `shards`.
            rows: (n,) row numbers inside the shard, in any order, at least one.
            fields: Names.

        Raises:
            OSError: The environment failed; the same call may succeed later.
            DatasetError: The shard is not the one that was indexed.
        """
        ...


@runtime_checkable
class ImageProcessor(Protocol):
    """Turns one encoded image into the model's uint8 input. Stateless and picklable.

    A processor whose arrays all have one shape, a picture, needs its four methods only. Another
    also says, in attributes, how they lie in a batch:

        unit_shape    what is stacked, such as (3, H, W) for tiles, (768,) for patches; a measured
                      shape is one unit, or (k, *unit_shape)
        pad_to        None: `pixel_values` is (sum of all k, *unit_shape). P: it is
                      (N, P, *unit_shape), zero beyond k
        grid_key      the name under which a model takes the grids of `MediaShape`, or None
        global_first  False where the part that shows the whole picture is the last, not the first
    """

    def measure(self, read: Callable[[int], bytes]) -> MediaShape:
        """Return token count and output shape from the image's header alone.

        Args:
            read: `read(n)` gives the first n bytes of the image (fewer when it is shorter);
                `read(-1)` gives all of it.

        Raises:
            SampleError: The bytes are no image that can be used.
        """
        ...

    def write(self, encoded: bytes, out: NDArray[np.uint8]) -> None:
        """Decode, resize and write the image into `out`, which has the measured shape.

        With parts, `out` is (len(parts), *shape).

        Raises:
            SampleError: The bytes do not decode. `out` may then hold anything.
        """
        ...

    def normalize(self, pixels: Any, dtype: Any) -> Any:
        """Map a uint8 tensor of written images to the model's range, in `dtype`."""
        ...

    def fingerprint(self) -> Mapping[str, Any]:
        """Return everything that the pixels depend on, JSON-serialisable."""
        ...


@runtime_checkable
class VideoProcessor(Protocol):
    """Turns one encoded video into the model's uint8 input: attributes as `ImageProcessor`."""

    def measure(self, file: BinaryIO) -> MediaShape:
        """Return what the video becomes, without decoding; a part is a frame, or several.

        Args:
            file: The video, seekable, open for this call, and for `write` where that follows.

        Raises:
            SampleError: The file is no video that can be used.
        """
        ...

    def write(self, file: BinaryIO, first: int, out: NDArray[np.uint8]) -> None:
        """Decode parts `[first, first + len(out))` into `out`, (n, *shape).

        Without parts, `first` is 0 and `out` has the measured shape.

        Raises:
            SampleError: They do not decode. `out` may then hold anything.
        """
        ...

    def normalize(self, pixels: Any, dtype: Any) -> Any:
        """Map a uint8 tensor of written frames to the model's range, in `dtype`."""
        ...

    def fingerprint(self) -> Mapping[str, Any]:
        """Return everything that the pixels depend on, JSON-serialisable."""
        ...


@runtime_checkable
class Accumulator(Protocol[In, Out]):
    """A serial operator that sees metadata only. Newly made for every lane and window."""

    def push(self, item: In, /) -> Iterable[Out]:
        """Take one item; return what it completes, usually nothing."""
        ...

    def flush(self) -> Iterable[Out]:
        """Return what is still held: the window ends here."""
        ...


@runtime_checkable
class WorkSource(Protocol):
    """The curriculum: which samples come next in a lane. Pure: all state is in its argument.

    `next` may be called for any state again, at any time, in any order and in several processes
    that know nothing of each other, and must answer the same. Whatever else it depends on (a
    server's answer, a user's decision) belongs into the state, once it was used: see
    `zephon_mm.integrations.curriculum`. A source is picklable; `tests/contracts/work_source.py`
    checks all this.

    A source may also have, and `StaticMixtureWorkSource` has:

        finite            False where lanes never end; without it, they may
        with_windows(n)   the source, told how many chunks a window has
        needs_constants, estimate, with_constants, constants
                          what is measured once, and kept in checkpoints
        with_history, carried, with_turn, weights_at
                          mixtures that change: `restore(allow=["mixture"])`, `Pipeline.steer`
        by_tokens, account, settled
                          exact shares of tokens: `Pipeline.mix`
    """

    @property
    def datasets(self) -> Sequence[Any]:
        """The datasets that `Chunk.refs` point into."""
        ...

    def start(self, lane: int, num_lanes: int) -> State:
        """Return the state in which a lane begins."""
        ...

    def next(self, state: State, chunk_size: int) -> tuple[Chunk | None, State]:
        """Return the next chunk and the state after it, or (None, state) at a lane's end.

        A chunk has 1 to `chunk_size` rows that are in the shards of `datasets`. What distinguishes
        lanes is in their states alone.
        """
        ...

    def fingerprint(self) -> Mapping[str, Any]:
        """Return everything that the chunks depend on, JSON-serialisable."""
        ...


@runtime_checkable
class Runner(Protocol):
    """A `concurrent.futures.Executor` whose tasks get the runner's context as first argument.

    The context is any picklable value, sent to each worker once: `submit(fn, x)` runs
    `fn(context, x)`. Results are functions of the arguments, so a task may run again.
    """

    workers: int

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Run `fn(context, *args)` in a worker."""
        ...

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stop the workers; with `wait`, return when they are gone."""
        ...

    def stats(self) -> Mapping[str, int]:
        """Return plain counters such as `worker_restarts`."""
        ...
