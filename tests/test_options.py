"""Every knob is checked where it is set, by name."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.memory import Recipe
from zephon_mm import options as options_module
from zephon_mm.errors import ConfigError
from zephon_mm.options import Options, check_names


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"canonical_replicas": 0}, "canonical_replicas must be at least 1, got 0"),
        ({"workers": True}, "workers must be an integer, got True"),
        ({"chunk_size": 2.0}, r"chunk_size must be an integer, got 2\.0"),
        ({"flush_every_k_chunks": -1}, "flush_every_k_chunks must be"),
        ({"prefetch_batches": 0}, "prefetch_batches must be"),
        ({"memory_budget_bytes": 0}, "memory_budget_bytes must be"),
        ({"task_images": 0}, "task_images must be"),
        ({"task_rows": "8"}, "task_rows must be an integer, got '8'"),
        ({"dp_degree": 2, "dp_rank": 2}, r"dp_rank must be in \[0, dp_degree = 2\), got 2"),
        ({"dp_rank": -1}, "dp_rank must be at least 0, got -1"),
        ({"runner": "spark"}, "runner must be one of inline, thread, process, got 'spark'"),
        ({"index": "on"}, "index must be one of fill, read, off, got 'on'"),
        ({"max_error_rate": 1.5}, r"max_error_rate must be in \[0, 1\], got 1\.5"),
        ({"max_error_rate": float("nan")}, r"max_error_rate must be in \[0, 1\], got nan"),
        ({"task_timeout_s": 0}, "task_timeout_s must be above 0"),
        ({"io_options": {"cash": {}}}, r"io_options can only be .* got \{'cash': \{\}\}"),
        (
            {"io_options": {"cache": {"dir": "x"}}},
            r"io_options can only be .*from_path\(cache_dir=",
        ),
        ({"io_options": {"cache": {"enabled": False}}}, "io_options can only be"),
    ],
)
def test_an_impossible_value_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^options: {message}"):
        Options(**changes)


def test_an_unknown_setting_is_an_error_that_lists_the_known(recipe: Recipe) -> None:
    with pytest.raises(ConfigError, match="unknown setting 'worker'; did you mean 'workers'"):
        recipe.build(worker=3)
    check_names({"workers": 1}, Options, "options")


def test_defaults_suit_the_machine() -> None:
    options = Options()
    assert options.workers >= 1
    assert 0 < options.memory_budget_bytes <= 4 << 30
    assert options.window_samples == options.chunk_size * options.flush_every_k_chunks == 2048


@pytest.mark.parametrize(
    ("files", "workers", "budget_mib"),
    [
        ({"cpu.max": "max 100000", "memory.max": "max"}, 64, 4096),
        ({"cpu.max": "350000 100000", "memory.max": str(2 << 30)}, 3, 512),
        ({"cpu.max": "50000 100000", "memory.max": str(1 << 50)}, 1, 4096),
        ({}, 64, 4096),
    ],
)
def test_defaults_keep_to_the_limits_of_a_container(
    files: dict[str, str],
    workers: int,
    budget_mib: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(options_module, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(os, "sysconf", lambda name: 1 << 20)  # 1 TiB of memory
    assert (Options().workers, Options().memory_budget_bytes >> 20) == (workers, budget_mib)
