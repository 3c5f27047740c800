"""The knobs of a pipeline's execution, declared once, with their checks.

Of these, `canonical_replicas`, `chunk_size` and `flush_every_k_chunks` decide the data; all others
change the speed only.

Imports: errors. Used by: pipeline, recipe.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from zephon_mm.errors import ConfigError
from zephon_mm.tables import check_types, unknown

RUNNERS = ("inline", "thread", "process")
INDEXES = ("fill", "read", "off")
CGROUP = Path("/sys/fs/cgroup")


def _limits(name: str) -> list[int]:
    """Return the numbers in a file of this container's control group; none without a limit."""
    try:
        text = (CGROUP / name).read_text()
    except OSError:
        return []
    return [int(word) for word in text.split() if word.isdigit()] if "max" not in text else []


def cpus() -> int:
    """The CPUs that this process may use, in whole ones of a container's quota."""
    allowed = len(os.sched_getaffinity(0))
    quota, period = _limits("cpu.max") or (allowed, 1)
    return max(1, min(allowed, quota // period))


def _memory_budget() -> int:
    """A quarter of the memory, at most 4 GiB; it is taken only as batches need it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total // 4, *(limit // 4 for limit in _limits("memory.max")), 4 << 30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a pipeline runs.

    Args:
        canonical_replicas: L, the number of lanes: fixes the sample order for ever.
        dp_degree: Data-parallel ranks (DDP, FSDP, HSDP: the product of replicas and shards).
        dp_rank: This process's, in [0, dp_degree).
        mesh: `Pipeline.options` and `Recipe.pipeline` take a `DeviceMesh` instead of the two, read
            both off it and keep only the numbers. Data-parallel are the dimensions named in
            `meshes.DATA_DIMS` (`dp`, `dp_replicate`, `dp_shard`, `fsdp`, `batch`, ...); ranks that
            differ only in tensor, pipeline, context, sequence or expert parallelism
            (`meshes.PEER_DIMS`) get equal batches, which context parallelism cuts itself. Pass the
            whole mesh, or its data-parallel part: torchtitan's `parallel_dims.get_mesh("batch")`
            (there `fsdp` spans `cp` too), accelerate's `accelerator.torch_device_mesh`. Save with
            `checkpoint(group=...)` of the data-parallel group; one peer of each need write it.
        runner: `inline`, `thread` or `process`.
        workers: Threads or processes; None is one for each CPU that this process may use.
        chunk_size: Samples that the source emits at once.
        flush_every_k_chunks: Chunks of a window: what a restore plans again.
        balance: Deal each step's sequences to ranks so that their vision and attention work is
            even; every rank plans all lanes then.
        max_error_rate: Share of defective samples (and images) that is tolerated; 0 for none.
        prefetch_batches: Batches that may be ready or in work ahead of the training loop.
        memory_budget_bytes: Shared memory for batches, in bytes.
        task_images: Images that one task decodes; up to four times as many where none is urgent.
        task_rows: Samples that one task measures; up to four times as many where none is urgent.
        task_timeout_s: How long a task may run in a `process` worker, in seconds.
        index: What of each sample is measured once and kept, beside the caches of the datasets:
            `fill` takes from the index and adds to it, `read` only takes, `off` measures anew. It
            never changes a batch.
        step_tokens: Whether every batch has `step_valid_tokens`, for which a rank plans all lanes;
            None: where that costs nothing (one rank, a finite source, `balance`, a full index).
        io_options: `{"cache": {"enabled": True}}`, which is always so: shards of stores are kept
            where `Dataset.from_path(cache_dir=, cache_bytes=)` says. All else is an error.
    """

    canonical_replicas: int = 8
    dp_degree: int = 1
    dp_rank: int = 0
    runner: str = "process"
    workers: int = field(default_factory=cpus)
    chunk_size: int = 256
    flush_every_k_chunks: int = 8
    balance: bool = False
    max_error_rate: float = 0.01
    prefetch_batches: int = 32
    memory_budget_bytes: int = field(default_factory=_memory_budget)
    task_images: int = 16
    task_rows: int = 64
    task_timeout_s: float = 300.0
    index: str = "fill"
    step_tokens: bool | None = None
    io_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        check_types(Options, "options", **values)
        for one in fields(self):
            if one.type == "int" or one.type is int:
                least = 0 if one.name == "dp_rank" else 1
                if values[one.name] < least:
                    raise ConfigError(
                        f"options: {one.name} must be at least {least}, got {values[one.name]}"
                    )
        if not 0 <= self.dp_rank < self.dp_degree:
            raise ConfigError(
                f"options: dp_rank must be in [0, dp_degree = {self.dp_degree}), got {self.dp_rank}"
            )
        if self.runner not in RUNNERS:
            raise ConfigError(
                f"options: runner must be one of {', '.join(RUNNERS)}, got {self.runner!r}"
            )
        if self.index not in INDEXES:
            raise ConfigError(
                f"options: index must be one of {', '.join(INDEXES)}, got {self.index!r}"
            )
        if not 0 <= self.max_error_rate <= 1:
            raise ConfigError(
                f"options: max_error_rate must be in [0, 1], got {self.max_error_rate}"
            )
        if not self.task_timeout_s > 0:
            raise ConfigError(f"options: task_timeout_s must be above 0, got {self.task_timeout_s}")
        _check_io(self.io_options)

    @property
    def window_samples(self) -> int:
        """Samples between two flush sentinels of a lane."""
        return self.chunk_size * self.flush_every_k_chunks


def check_names(given: Mapping[str, Any], config: type, where: str) -> None:
    """Raise a ConfigError that lists the known settings if a given one is unknown."""
    known = {one.name for one in fields(config)}
    for name in given:
        if name not in known:
            raise ConfigError(f"{where}: {unknown(name, known, 'setting')}")


def _check_io(io_options: Mapping[str, Any]) -> None:
    if io_options not in ({}, {"cache": {}}, {"cache": {"enabled": True}}):
        raise ConfigError(
            'options: io_options can only be {"cache": {"enabled": True}}, which is always so, got '
            f"{io_options!r}. Dataset.from_path(cache_dir=, cache_bytes=) says where shards of "
            "stores are kept, and how many bytes of them."
        )
