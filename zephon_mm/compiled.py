"""From settings to what the engine runs: checks, constants, fingerprint, the engine's config.

Imports: engine, ops, stages, options. Used by: pipeline.
"""

import json
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from zephon_mm.engine.ahead import Ahead
from zephon_mm.engine.blocks import BLOCK_ROWS, RawContext
from zephon_mm.engine.driver import EngineConfig
from zephon_mm.engine.lanes import LanePlan
from zephon_mm.engine.measuring import Measuring
from zephon_mm.engine.order import Topology
from zephon_mm.engine.tasks import Context
from zephon_mm.errors import ConfigError
from zephon_mm.indexing import open_index, started_queue
from zephon_mm.io import Dataset
from zephon_mm.media import MediaLayout
from zephon_mm.metrics import Metrics
from zephon_mm.ops.map import name_of
from zephon_mm.options import Options
from zephon_mm.packed import AnyRecord
from zephon_mm.protocols import Accumulator
from zephon_mm.stages import ShuffleStage, Stages

INDEX_PAYS = "An index would pay: `zephon-mm index RECIPE`, or pipeline.build_index()."

KEPT_BATCHES = 1024
"""How many batches `checkpoint(after=batch)` can go back."""


def topology_of(options: Options, batching: tuple[int, int | None]) -> Topology:
    """Return who materializes what; a step without a global batch size is dp * B sequences."""
    size, total = batching
    dp = options.dp_degree
    return Topology(dp, options.dp_rank, size, dp * size if total is None else total)


def validate(
    stages: Stages,
    options: Options,
    topology: Topology,
    *,
    finite: bool,
    indexed: Callable[[], bool],
) -> None:
    """Check what can be checked without data; warn of settings that cost speed or mixing.

    `indexed` is asked where only a full index makes a setting cheap.

    Raises:
        ConfigError: A stage is missing.
    """
    if stages.raw:
        _validate_raw(stages, options)
        return
    if stages.fields is not None:
        raise ConfigError(
            "batch(fields=...) is for raw samples: leave out .interleave, .tokenize, .pair"
        )
    if stages.packing is None:
        raise ConfigError("the pipeline has no .pack_flat(max_length=...)")
    lanes = options.canonical_replicas
    repeats = measure_factor(lanes, topology)
    if (options.balance or options.step_tokens) and topology.dp_degree > 4 and not indexed():
        name = "balance" if options.balance else "step_tokens"
        warnings.warn(
            f"{name}=True measures each sample on each of {topology.dp_degree} ranks. {INDEX_PAYS}",
            stacklevel=4,
        )
    elif repeats > 2 and not finite and not indexed():
        warnings.warn(
            f"{topology.dp_degree} ranks on {lanes} lanes measure each sample {repeats:.3g} times "
            f"over all ranks. It costs less if dp_degree * microbatch_size = {topology.group_size} "
            f"and canonical_replicas divide one another. {INDEX_PAYS}",
            stacklevel=4,
        )
    for stage in stages.sequences:
        if isinstance(stage, ShuffleStage) and stage.buffer_size >= options.window_samples:
            warnings.warn(
                f"a shuffle buffer of {stage.buffer_size} sequences never fills in a window of "
                f"{options.window_samples} samples: raise flush_every_k_chunks",
                stacklevel=4,
            )


def _validate_raw(stages: Stages, options: Options) -> None:
    if stages.documents:
        raise ConfigError(
            f"{stages.documents[0].name} takes documents, and this pipeline delivers samples as "
            "they are stored: add .interleave or .tokenize, and .pack_flat(max_length=...)"
        )
    if options.balance:
        raise ConfigError("balance=True weighs packed sequences; raw samples have no weight")


def measure_factor(num_lanes: int, topology: Topology) -> float:
    """Return how often each sample is measured over all ranks, at most, without an index."""
    size = topology.microbatch_size
    cycle = num_lanes // math.gcd(num_lanes, topology.group_size)
    return min(num_lanes, cycle * size) * topology.dp_degree / num_lanes


def with_constants(source: Any, stages: Stages, options: Options) -> Any:
    """Return the source, told of windows, its constants measured on fixed rows if it needs some.

    What the index does not know is measured by a runner of the pipeline's kind: a sample that hangs
    or crashes is contained by it. The index is filled.
    """
    if hasattr(source, "with_windows"):
        source = source.with_windows(options.flush_every_k_chunks)
    if not getattr(source, "needs_constants", False):
        return source
    if stages.interleave is None:
        raise ConfigError("estimating tokens needs .interleave or .tokenize")
    context = stages.context(source.datasets)
    index = open_index(stages, options, context)
    with ExitStack() as stack:
        # Workers take seconds to start: only if the index lacks a row.
        queue = cache(lambda: stack.enter_context(started_queue(options, context)))

        def count_tokens(dataset: int, rows: list[tuple[int, int]]) -> list[int | None]:
            refs = np.array([(dataset, *row) for row in rows])
            items = [None] if index is None else list(index.lookup(refs))
            if None in items:
                parts = Measuring(queue(), index, options.task_rows)((0,), refs)
                items = [item for part in parts for item in part.result()]
            return [getattr(item, "num_tokens", None) for item in items]

        source = source.with_constants(source.estimate(count_tokens))
    if index is not None:
        index.save()
    return source


def fingerprint(
    source: Any, stages: Stages, options: Options, global_batch_size: int | None
) -> dict[str, Any]:
    """Return all that decides the batches, as plain JSON values."""
    schemas = [
        [d.schema if isinstance(d.schema, str | None) else name_of(d.schema), d.version, d.missing]
        for d in source.datasets
    ]
    found = {
        "source": source.fingerprint(),
        "schemas": schemas,
        **stages.fingerprint(),
        "lanes": options.canonical_replicas,
        "chunk_size": options.chunk_size,
        "flush_every_k_chunks": options.flush_every_k_chunks,
        "global_batch_size": global_batch_size,
    }
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def compile_engine(
    source: Any,
    stages: Stages,
    options: Options,
    topology: Topology,
    *,
    finite: bool,
    pad_tail: bool,
    metrics: Metrics,
) -> EngineConfig:
    """Return what the driver runs."""
    context: Context | RawContext
    index, whole_steps, ahead = None, False, options.prefetch_batches
    if stages.raw:
        context = stages.raw_context(source.datasets)
        ahead *= max(BLOCK_ROWS // topology.microbatch_size, 1)
    else:
        context = stages.context(source.datasets)
        index = open_index(stages, options, context)
        complete = topology.dp_degree == 1 or (index is not None and index.complete)
        whole_steps = complete if options.step_tokens is None else options.step_tokens
    total = sum(len(dataset) for dataset in context.datasets)
    plan = LanePlan(
        source=source,
        accumulators=_Accumulators(stages, metrics, context.datasets),
        chunk_size=options.chunk_size,
        chunks_per_window=options.flush_every_k_chunks,
        max_error_rate=options.max_error_rate,
        barren_records=total // options.canonical_replicas + options.window_samples,
        remembered=(KEPT_BATCHES + ahead) * topology.group_size,
        balance=options.balance,
        whole_steps=options.balance or whole_steps,
        pad_tail=pad_tail,
        ahead=Ahead(context.datasets, index) or None,
        mix=stages.packing if stages.mixes else None,
    )
    return EngineConfig(
        plan=plan,
        context=context,
        num_lanes=options.canonical_replicas,
        topology=topology,
        finite=finite,
        max_length=stages.packing.max_length if stages.packing else 0,
        pad_id=stages.interleave.tokenizer.pad_id if stages.interleave else 0,
        runner=options.runner,
        workers=options.workers,
        prefetch_batches=options.prefetch_batches,
        memory_budget_bytes=options.memory_budget_bytes,
        task_images=options.task_images,
        task_rows=options.task_rows,
        task_timeout_s=options.task_timeout_s,
        measure_parallelism=stages.parallelism,
        images=MediaLayout.of(getattr(context, "image_processor", None)),
        videos=MediaLayout.of(getattr(context, "video_processor", None)),
        index=index,
    )


@dataclass(frozen=True, slots=True)
class _Accumulators:
    """Makes the accumulators of a window; names and counts what they drop."""

    stages: Stages
    metrics: Metrics
    datasets: Sequence[Dataset]

    def __call__(self, lane: int, window: int) -> Sequence[Accumulator[Any, Any]]:
        return self.stages.accumulators(lane, window, self._report)

    def _report(self, reason: str, record: AnyRecord) -> None:
        dataset, shard, row = record.ref
        name = self.datasets[dataset].row_name(shard, row)
        counts = f"{record.num_tokens} tokens, {record.num_images} images"
        self.metrics.skip(reason, f"{name}: {counts}, {record.num_patches} patches")
