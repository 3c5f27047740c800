"""The fluent builder: a source, operators, a batch; checked at construction, run by a driver.

    source -> [schema, map, filter, interleave | tokenize]   in the workers, stateless
           -> [pack, shuffle, accumulate, map_sequence]      in the planner, per lane and window
           -> [decode, resize]                               in the workers, into shared memory
           -> Batch

Imports: everything below. Used by: users, recipe, cli.
"""

import json
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Self

from zephon_mm.batch import Batch
from zephon_mm.checkpoint import gather_checkpoint
from zephon_mm.compiled import (
    KEPT_BATCHES,
    compile_engine,
    fingerprint,
    topology_of,
    validate,
    with_constants,
)
from zephon_mm.engine.driver import Driver, EngineConfig
from zephon_mm.engine.lanes import Cursor
from zephon_mm.engine.order import Topology, check_resume, check_topology
from zephon_mm.engine.planner import Position, Start
from zephon_mm.errors import CheckpointError, ConfigError
from zephon_mm.metrics import Metrics
from zephon_mm.ops.interleave import Interleave
from zephon_mm.ops.map import Filter, Map
from zephon_mm.ops.pack import PackConfig
from zephon_mm.ops.tokenize import Tokenize
from zephon_mm.ops.tokenizer import TextTokenizer
from zephon_mm.options import Options, check_names
from zephon_mm.planning import PlannedSequence, planned_sequences
from zephon_mm.protocols import ImageProcessor, WorkSource
from zephon_mm.records import Document
from zephon_mm.records import Sequence as PackedSequence
from zephon_mm.report import describe, summary
from zephon_mm.resume import check_whole, start_of, state_of
from zephon_mm.stages import (
    DocumentStage,
    Factory,
    PackStage,
    ShuffleStage,
    Stages,
    map_stage,
    user_stage,
)
from zephon_mm.tables import check_types

STATE_KEY = "zephon_mm"
"""The one key of `state_dict()`."""


class Pipeline:
    """A recipe that yields deterministic batches. Iterate it; `checkpoint` and `restore` it.

    Args:
        source: Which samples come next; a `WorkSource`, such as `StaticMixtureWorkSource`.
    """

    def __init__(self, source: Any) -> None:
        if not isinstance(source, WorkSource):
            raise ConfigError(
                f"Pipeline takes a WorkSource, got {type(source).__name__}. For datasets: "
                "StaticMixtureWorkSource([dataset], {dataset.name: 1.0}, seed=0)."
            )
        self._source: Any = source
        self._options = Options()
        self._stages = Stages()
        self._batching: tuple[int, int | None] | None = None
        self._metrics = Metrics()
        self._start = Start()
        self._position = Position(0, 0, None)
        self._recent: deque[Position] = deque(maxlen=KEPT_BATCHES)
        self._closed = self._pad_tail = False
        self._driver: Driver | None = None
        self._iterator: Callable[[], _Batches | None] = lambda: None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._began = 0.0

    # Building.

    def options(self, **changes: Any) -> Self:
        """Set how the pipeline runs; the settings are those of `zephon_mm.options.Options`.

        Raises:
            ConfigError: An unknown setting or an impossible value.
        """
        check_names(changes, Options, "options")
        return self._build(options=replace(self._options, **changes))

    def map(
        self,
        fn: Callable[[Document], Document],
        *,
        version: str = "",
        parallelism: int | None = None,
    ) -> Self:
        """Replace every document by `fn(document)`, in the workers; `fn` must be pure.

        Args:
            fn: The function. A `SampleError` that it raises skips the sample.
            version: Change it when the function's meaning changes: part of the fingerprint.
            parallelism: Workers that may be in it at once.
        """
        stage = DocumentStage(".map", Map(fn), version)
        return self._build(stages=self._stages.with_document(stage, parallelism))

    def filter(
        self, fn: Callable[[Document], bool], *, version: str = "", parallelism: int | None = None
    ) -> Self:
        """Keep the documents for which `fn(document)` is true; arguments as for `map`."""
        stage = DocumentStage(".filter", Filter(fn), version)
        return self._build(stages=self._stages.with_document(stage, parallelism))

    def interleave(
        self,
        *,
        tokenizer: Any,
        image_processor: ImageProcessor | None = None,
        eos: bool = True,
        image_token: str | None = None,
        parallelism: int | None = None,
    ) -> Self:
        """Turn documents of text and images into tokens and image placeholders.

        Args:
            tokenizer: What `TextTokenizer.load` takes: a folder, a file, a hub id, or a tokenizer.
            image_processor: What images become; None for documents of text only.
            eos: End every document with the end token, which is trained.
            image_token: Name of the placeholder token; None looks for the usual ones.
            parallelism: Workers that may measure at once.

        Raises:
            ConfigError: The tokenizer lacks a token that is needed.
        """
        if image_processor is not None and not isinstance(image_processor, ImageProcessor):
            raise ConfigError(
                f"interleave: image_processor must be an ImageProcessor such as SigLIPProcessor(), "
                f"got {image_processor!r}"
            )
        loaded = TextTokenizer.load(tokenizer, image_token=image_token, eos=eos)
        stage = Interleave(loaded, image_processor, eos=eos)
        return self._build(stages=self._stages.with_interleave(stage, parallelism))

    def tokenize(
        self,
        *,
        tokenizer_id: Any,
        field: str = "text",
        eos: bool = True,
        parallelism: int | None = None,
    ) -> Self:
        """Turn one text field of every sample into tokens; arguments as for `interleave`."""
        stage = Tokenize(TextTokenizer.load(tokenizer_id, eos=eos), field, eos=eos)
        return self._build(stages=self._stages.with_interleave(stage, parallelism))

    def pack_flat(
        self,
        *,
        max_length: int,
        algorithm: Literal["best_fit", "wrap"] = "best_fit",
        max_images: int | None = None,
        overlong: Literal["drop", "truncate"] = "drop",
        lookahead: int | None = None,
    ) -> Self:
        """Pack documents into sequences; the settings are those of `zephon_mm.ops.pack`."""
        more = {} if lookahead is None else {"lookahead": lookahead}
        config = PackConfig(max_length, algorithm, max_images, overlong, **more)
        return self._build(stages=self._stages.with_sequence(PackStage(config)))

    def shuffle(self, *, buffer_size: int, seed: int = 0) -> Self:
        """Shuffle sequences within each lane, through a buffer of `buffer_size` of them."""
        return self._build(stages=self._stages.with_sequence(ShuffleStage(buffer_size, seed)))

    def map_sequence(
        self, fn: Callable[[PackedSequence], PackedSequence], *, version: str = ""
    ) -> Self:
        """Replace every packed sequence by `fn(sequence)`; metadata only."""
        return self._build(stages=self._stages.with_sequence(map_stage(fn, version)))

    def accumulate(self, factory: Factory, *, seed: int = 0, version: str = "") -> Self:
        """Add an accumulator: `factory(rng)` is called for every window of every lane.

        Before `.pack_flat` it takes records, after it sequences: `push(item)` and `flush()` return
        iterables of them.
        """
        stage = user_stage("accumulate", factory, factory, seed, version)
        return self._build(stages=self._stages.with_sequence(stage))

    def batch(
        self,
        *,
        microbatch_size: int,
        global_batch_size: int | None = None,
        tail: Literal["drop", "pad"] = "drop",
    ) -> Self:
        """Set B, the sequences of a batch, and N, those of a step over all ranks.

        With N set it is part of the fingerprint; without, N = dp_degree * B.

        Args:
            microbatch_size: B.
            global_batch_size: N; every rank delivers N / (dp_degree * B) batches a step.
            tail: What a finite run does with the sequences that do not fill a step: `drop` them
                (at most N - 1, counted), or `pad` the step with rows of padding alone, whose `keys`
                are empty, so that an evaluation sees every document once.

        Raises:
            ConfigError: `dp_degree * B` does not divide N.
        """
        check_types(
            Pipeline.batch,
            "batch",
            microbatch_size=microbatch_size,
            global_batch_size=global_batch_size,
            tail=tail,
        )
        self._build(batching=(microbatch_size, global_batch_size))
        self._pad_tail = tail == "pad"
        return self

    def _build(
        self,
        *,
        options: Options | None = None,
        stages: Stages | None = None,
        batching: tuple[int, int | None] | None = None,
    ) -> Self:
        if self._driver is not None:
            raise ConfigError("the pipeline is running: change a new Pipeline instead")
        options, batching = options or self._options, batching or self._batching
        if batching is not None:
            check_topology(topology_of(options, batching))
        self._options = options
        self._stages = stages or self._stages
        self._batching = batching
        return self

    # Looking.

    def validate(self) -> None:
        """Do all launch-time checks, without reading data.

        Raises:
            ConfigError: A stage is missing, or settings contradict each other.
        """
        validate(self._stages, self._options, self._topology(), finite=self._finite)

    def explain(self) -> None:
        """Print the compiled stages, the topology and what a restore costs."""
        self.validate()
        text = describe(self._source, self._stages, self._options, self._topology())
        sys.stdout.write(text + "\n")

    def plan(self, count: int) -> Iterator[PlannedSequence]:
        """Yield the next `count` sequences of the global order, without decoding an image."""
        self._check_open()
        at = self._position
        start = Start(at.delivered, self._cursors(at), at.next_lane, at.dealt)
        yield from planned_sequences(self._compiled(Metrics()), start, count)

    def metrics(self) -> dict[str, Any]:
        """Return counters, rates and what limits: see `zephon_mm.report.summary`."""
        packing = self._stages.packing
        elapsed_s = time.perf_counter() - self._began if self._began else 0.0
        return summary(
            self._metrics.snapshot() | (self._driver.stats() if self._driver else {}),
            elapsed_s=elapsed_s,
            max_length=packing.max_length if packing else 0,
            defects=self._metrics.defects(),
        )

    # Running.

    def __iter__(self) -> "_Batches":
        """Return an iterator that goes on from the current position.

        Raises:
            RuntimeError: Another iterator of this pipeline is alive.
        """
        self._check_open()
        if self._iterator() is not None:
            raise RuntimeError(
                "this pipeline is being iterated already; drop that iterator first (a traceback "
                "that is kept, as in a notebook after an error, may hold it), or build another "
                "Pipeline"
            )
        self._driver = self._driver or self._start_driver()
        batches = _Batches(self)
        self._iterator = weakref.ref(batches)
        return batches

    def _start_driver(self) -> Driver:
        driver = Driver(self._compiled(self._metrics), self._start, self._metrics)
        self._finalizer = weakref.finalize(self, driver.collected)
        self._began = time.perf_counter()
        return driver

    def _next(self) -> Batch:
        self._check_open()
        assert self._driver is not None
        item = self._driver.next()
        if item is None:
            raise StopIteration
        batch, self._position = item
        self._recent.append(self._position)
        return batch

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the pipeline was closed; build another one")

    def close(self) -> None:
        """Stop threads and workers. Delivered batches stay valid; take checkpoints before."""
        self._closed = True
        if self._finalizer is not None:
            self._finalizer.detach()
        if self._driver is not None:
            self._driver.close()
        self._driver = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # Resuming.

    def checkpoint(self, *, after: Batch | None = None, group: Any = None) -> dict[str, Any]:
        """Return a small, JSON-serialisable state: what was delivered, never what is prefetched.

        Args:
            after: Count the batches up to this one; None counts all that `next()` returned.
            group: A CPU process group: collective, and the complete state on every rank. Without,
                the state is complete with one rank, else a part for `merge_checkpoints`.
        """
        self._check_open()
        at = self._position if after is None else self._position_of(after)
        self._measure_constants()
        state = state_of(
            at,
            self._cursors(at),
            num_lanes=self._options.canonical_replicas,
            topology=self._topology(),
            all_lanes=self._plans_all_lanes,
            constants=getattr(self._source, "constants", None),
            fingerprint=self.fingerprint(),
        )
        return state if group is None else gather_checkpoint(state, group)

    def restore(self, state: Mapping[str, Any]) -> Self:
        """Go on from a state; GPU count, microbatch size, runner and workers may differ.

        Raises:
            CheckpointError: The state is a part, of another recipe, or iteration has started.
            ConfigError: It was taken inside a step that this topology cannot finish.
        """
        self._check_open()
        if self._driver is not None:
            raise CheckpointError("restore before iterating: this pipeline has started")
        check_whole(state)
        if state["constants"] is not None and getattr(self._source, "needs_constants", False):
            self._source = self._source.with_constants(state["constants"])
        start = start_of(state, fingerprint=self.fingerprint(), all_lanes=self._plans_all_lanes)
        if self._batching is not None and self._batching[1] is not None:
            check_resume(start.delivered, self._topology())
        self._start = start
        self._position = Position(start.delivered, start.next_lane, None, start.dealt)
        return self

    def fingerprint(self) -> dict[str, Any]:
        """Return all that decides the batches, JSON-serialisable; measures constants if needed."""
        self._measure_constants()
        global_batch_size = self._batching[1] if self._batching else None
        found = fingerprint(self._source, self._stages, self._options, global_batch_size)
        result: dict[str, Any] = json.loads(json.dumps(found))
        return result

    def state_dict(self) -> dict[str, str]:
        """Return `checkpoint()` as JSON under one key, for trainers that look for this method.

        `torch.distributed.checkpoint` fills a template that it takes before the first batch: its
        structure must not change. With several ranks save `checkpoint(group=...)` instead, whose
        value is the same on every rank.
        """
        return {STATE_KEY: json.dumps(self.checkpoint())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if STATE_KEY not in state:
            raise CheckpointError(f"load_state_dict takes what state_dict gave, got {state!r:.200}")
        self.restore(json.loads(state[STATE_KEY]))

    # Parts of the above.

    @property
    def _plans_all_lanes(self) -> bool:
        return self._finite or self._options.balance

    @property
    def _finite(self) -> bool:
        return bool(getattr(self._source, "finite", True))

    def _topology(self) -> Topology:
        if self._batching is None:
            raise ConfigError("the pipeline has no .batch(microbatch_size=...)")
        return topology_of(self._options, self._batching)

    def _position_of(self, batch: Batch) -> Position:
        for position in reversed(self._recent):
            if position.delivered == batch.delivered:
                return position
        raise CheckpointError(
            f"checkpoint(after=batch): the batch that ends at sequence {batch.delivered} is not "
            f"among the last {KEPT_BATCHES} that this pipeline delivered"
        )

    def _cursors(self, at: Position) -> Mapping[int, Cursor]:
        if self._driver is None or at.delivered == self._start.delivered:
            return self._start.cursors or {}
        return self._driver.cursors(at)

    def _measure_constants(self) -> None:
        self._source = with_constants(self._source, self._stages, self._options)

    def _compiled(self, metrics: Metrics) -> EngineConfig:
        self.validate()
        self._measure_constants()
        return compile_engine(
            self._source,
            self._stages,
            self._options,
            self._topology(),
            finite=self._finite,
            pad_tail=self._pad_tail,
            metrics=metrics,
        )


class _Batches:
    """The iterator of a pipeline. Dropping it stops nothing: another one goes on from there."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        return self._pipeline._next()
