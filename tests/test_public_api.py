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


@pytest.mark.parametrize("name", ["zephon_mm", "zephon_mm.processors"])
def test_the_names_of_a_package_are_few_sorted_and_exactly_those_announced(name: str) -> None:
    package = importlib.import_module(name)
    assert package.__all__ == sorted(package.__all__) == dir(package)
    assert set(NAMES[name]) <= set(package.__all__)
    assert len(package.__all__) <= MOST_NAMES
    stub = ast.parse((ROOT / name.replace(".", "/") / "__init__.pyi").read_text())
    homes = {a.name: n.module for n in stub.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert sorted(homes) == package.__all__  # what type checkers see
    for name, home in homes.items():
        assert getattr(package, name) is getattr(importlib.import_module(str(home)), name)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = package.nonsense


@pytest.mark.slow
def test_importing_starts_no_thread_prints_nothing_and_loads_what_all_need() -> None:
    code = (
        "import sys, threading, zephon_mm; assert threading.active_count() == 1; "
        "assert 'torch' not in sys.modules; from zephon_mm import Pipeline; "
        "from zephon_mm.processors import SigLIPProcessor; "
        "assert not {'av', 'jinja2', 'matplotlib', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
