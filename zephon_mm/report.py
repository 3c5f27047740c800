"""What a person is told: the compiled stages, and the counters of a run.

Imports: engine.order, stages, options, metrics. Used by: pipeline.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from zephon_mm.compiled import measure_factor
from zephon_mm.engine.order import Topology
from zephon_mm.metrics import skips
from zephon_mm.options import Options
from zephon_mm.stages import Stages


def describe(
    source: Any, stages: Stages, options: Options, topology: Topology, *, index: str
) -> str:
    """Return the stages of a pipeline as text, one a line."""
    lines = [f"source       {type(source).__name__}"]
    lines += [f"               {_dataset(dataset)}" for dataset in source.datasets]
    lines += [f"in workers   {one.name}({one.operator!r})" for one in stages.documents]
    interleave = stages.interleave
    if interleave is not None:
        processor = getattr(interleave, "image_processor", None)
        lines.append(f"in workers   .{type(interleave).__name__.lower()}, images: {processor}")
    else:
        lines.append(f"in workers   read fields: {', '.join(stages.fields or ('all',))}")
    for stage in stages.sequences:
        for name, settings in stage.fingerprint().items():
            shown = ", ".join(f"{key}={value}" for key, value in settings.items())
            lines.append(f"per lane     .{name}({shown})")
    lanes, window = options.canonical_replicas, options.window_samples
    repeats = measure_factor(lanes, topology)
    lines += [
        f"in workers   decode, {options.task_images} images a task",
        f"lanes        {lanes}, windows of {window} samples: a restore measures at most "
        f"{lanes * window} samples again",
        f"step         {topology.global_batch_size} sequences = {topology.dp_degree} ranks x "
        f"{topology.microbatch_size} x {topology.global_batch_size // topology.group_size} "
        f"microbatches; this is rank {topology.dp_rank}",
        f"measuring    each sample up to {repeats:.3g} times over all ranks, if the index lacks it",
        f"index        {index}",
        f"runner       {options.runner}, {options.workers} workers, "
        f"{options.prefetch_batches} batches ahead, {options.memory_budget_bytes >> 20} MiB",
    ]
    return "\n".join(lines)


def _dataset(dataset: Any) -> str:
    return f"{dataset.name}: {len(dataset)} rows in {len(dataset.shards)} shards"


def summary(
    counters: Mapping[str, float], *, elapsed_s: float, max_length: int, defects: Sequence[str]
) -> dict[str, Any]:
    """Return a run's counters, rates and what limits it.

    Returns:
        `batches`, `sequences`, `documents`, `images`, `tokens` (without padding); the same per
        second with `_per_s`; `padding`, the share of positions that are padding; `wait_s`, what
        `next()` waited; `skipped`, reason -> count; `defects`, the latest messages; `limit`, the
        stage that the others wait for; the driver's waits, queue depths and the runner's counters.
    """
    found: dict[str, Any] = {
        name: value for name, value in counters.items() if not name.startswith("skipped.")
    }
    for name in ("batches", "sequences", "documents", "images", "tokens"):
        found.setdefault(name, 0)
        found[f"{name}_per_s"] = found[name] / elapsed_s if elapsed_s else 0.0
    positions = found["sequences"] * max_length
    found["padding"] = 1 - found["tokens"] / positions if positions else 0.0
    found["elapsed_s"] = elapsed_s
    found["skipped"] = skips(counters)
    found["defects"] = list(defects)
    found["limit"] = _limit(found)
    return found


def _limit(found: Mapping[str, Any]) -> str:
    """Return what limits: the consumer unless it waits, then what the driver waits for."""
    if found.get("wait_s", 0.0) < 0.05 * found["elapsed_s"]:
        return "training loop"
    waits = {
        "measuring": found.get("driver_wait_measure_s", 0.0),
        "decoding": found.get("driver_wait_consumer_s", 0.0),
        "memory": found.get("driver_wait_memory_s", 0.0),
    }
    return max(waits, key=lambda name: waits[name])
