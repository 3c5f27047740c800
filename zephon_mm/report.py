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
    counters: Mapping[str, float],
    *,
    elapsed_s: float,
    max_length: int,
    defects: Sequence[str],
    max_patches: int | None = None,
) -> dict[str, Any]:
    """Return a run's counters, rates and what limits it.

    Returns:
        `batches`, `sequences`, `documents`, `images`, `tokens` (without padding); the same per
        second with `_per_s`; `padding`, the share of positions that are padding, `density`, that of
        the others, and `wasted_tokens`, how many are; `vision_fill`, the patches of `max_patches`
        that are used, where there is such a limit; `truncated`, the documents that were planned cut
        short; `downscaled`, the images that were made smaller so that their documents fit;
        `wait_s`, what `next()` waited; `skipped`, reason -> count; `defects`, the latest messages;
        `limit`, the stage that the others wait for; the driver's waits, queue depths and the
        runner's counters.
    """
    found: dict[str, Any] = {
        name: value
        for name, value in counters.items()
        if not name.startswith(("skipped.", "dataset."))
    }
    for name in ("batches", "sequences", "documents", "images", "tokens"):
        found.setdefault(name, 0)
        found[f"{name}_per_s"] = found[name] / elapsed_s if elapsed_s else 0.0
    positions = found["sequences"] * max_length
    found["wasted_tokens"] = positions - found["tokens"] if positions else 0
    found["density"] = found["tokens"] / positions if positions else 0.0
    found["padding"] = 1 - found["density"] if positions else 0.0
    if max_patches is not None:
        room = found["sequences"] * max_patches
        found["vision_fill"] = found.get("patches", 0) / room if room else 0.0
    found["elapsed_s"] = elapsed_s
    found["skipped"] = skips(counters)
    found["truncated"] = found["skipped"].get("truncated", 0)
    found["defects"] = list(defects)
    found["limit"] = _limit(found)
    return found


def shares(counters: Mapping[str, float], source: Any, window: int) -> dict[str, dict[str, Any]]:
    """Return what was delivered of each dataset, by name.

    Args:
        counters: Of a run.
        source: Its source.
        window: Whose weights are the target.

    Returns:
        `rows`, `tokens`, `trained_tokens` and `trained`, their part of the tokens; `passes`, rows
        of those that the dataset has; `share`, of the tokens or rows of all since the run began or
        was restored, and `target`, what the source wants it to be in `window` (where weights
        change, no longer comparable), None where it does not say so.
    """
    unit = getattr(source, "unit", "tokens")
    targets = source.weights_at(window) if hasattr(source, "weights_at") else None
    found: dict[str, dict[str, Any]] = {}
    for number, dataset in enumerate(source.datasets):
        names = ("rows", "tokens", "trained_tokens")
        told = {name: int(counters.get(f"dataset.{number}.{name}", 0)) for name in names}
        trained, passes = (
            told["trained_tokens"] / max(told["tokens"], 1),
            told["rows"] / len(dataset),
        )
        target = targets.get(dataset.name, 0.0) if targets else None
        found[dataset.name] = {**told, "trained": trained, "passes": passes, "target": target}
    total = sum(told[unit] for told in found.values())
    return {name: {**told, "share": told[unit] / max(total, 1)} for name, told in found.items()}


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
