"""The names that users import and the keywords that they write, pinned.

A name may be added here. Removing or renaming one breaks somebody's training script: it needs a
deprecation and a line in CHANGELOG.md.
"""

import ast
import importlib
import inspect
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import zephon_mm
from zephon_mm.options import Options

ROOT = Path(__file__).parents[1]
MOST_NAMES = 12

NAMES = {
    "zephon_mm": ["Pipeline"],
    "zephon_mm.checkpoint": ["merge_checkpoints"],
    "zephon_mm.errors": [
        "CheckpointError",
        "ConfigError",
        "DataQualityError",
        "DatasetError",
        "RunnerError",
        "SampleError",
        "WorkerCrashed",
        "WorkerLost",
        "ZephonError",
    ],
    "zephon_mm.io": ["Dataset"],
    "zephon_mm.processors": ["SigLIPProcessor"],
    "zephon_mm.work": ["StaticMixtureWorkSource", "TokenEstimation"],
}

# What `Pipeline.options` takes, each a field of `Options`.
OPTIONS = [
    "canonical_replicas",
    "chunk_size",
    "dp_degree",
    "dp_rank",
    "flush_every_k_chunks",
    "io_options",
    "runner",
    "workers",
]

# method of Pipeline -> keywords that it must take
METHODS = {
    "options": [],
    "map": [],
    "filter": [],
    "map_sequence": [],
    "accumulate": [],
    "tokenize": ["tokenizer_id", "field"],
    "interleave": ["tokenizer", "image_processor"],
    "pack_flat": ["max_length", "algorithm", "max_images"],
    "shuffle": ["buffer_size", "seed"],
    "batch": ["microbatch_size", "global_batch_size"],
    "checkpoint": ["after", "group"],
    "restore": [],
    "validate": [],
    "explain": [],
    "plan": [],
    "metrics": [],
    "close": [],
}


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in NAMES.items() for name in names]
)
def test_documented_names_can_be_imported(module: str, name: str) -> None:
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize("method", METHODS)
def test_pipeline_methods_take_their_documented_keywords(method: str) -> None:
    taken = inspect.signature(getattr(zephon_mm.Pipeline, method)).parameters
    assert set(METHODS[method]) <= set(taken)


def test_options_has_its_documented_fields() -> None:
    assert set(OPTIONS) <= {field.name for field in fields(Options)}


def test_the_packages_names_are_few_sorted_and_exactly_those_announced() -> None:
    assert zephon_mm.__all__ == sorted(zephon_mm.__all__)
    assert set(NAMES["zephon_mm"]) <= set(zephon_mm.__all__)
    assert len(zephon_mm.__all__) <= MOST_NAMES
    assert dir(zephon_mm) == zephon_mm.__all__
    stub = ast.parse((ROOT / "zephon_mm" / "__init__.pyi").read_text())
    imported = [a.name for n in stub.body if isinstance(n, ast.ImportFrom) for a in n.names]
    assert sorted(imported) == zephon_mm.__all__  # what type checkers see


@pytest.mark.slow
def test_importing_starts_no_thread_and_prints_nothing() -> None:
    code = (
        "import sys, threading, zephon_mm; assert threading.active_count() == 1; "
        "assert 'torch' not in sys.modules; from zephon_mm import Pipeline"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
