"""What the benchmarks run on: a recipe for the tiny model on drawn data, and photographs."""

from pathlib import Path

import pytest
import torch

from benchmarks.data import make_data, write_benchmark_tokenizer
from zephon_mm.cli.demo_data import make_demo_data
from zephon_mm.recipe import Recipe, load_recipe

CONFIG = Path(__file__).parents[2] / "configs" / "tiny_vlm.toml"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """`configs/tiny_vlm.toml`, on 60 captions and 12 stories."""
    folder = tmp_path_factory.mktemp("tiny")
    make_demo_data(folder / "data", num_captions=60, num_shards=2, num_stories=12)
    text = CONFIG.read_text().replace("../demo_out/data", "data")
    (folder / "tiny_vlm.toml").write_text(text)
    return load_recipe(folder / "tiny_vlm.toml")


@pytest.fixture(scope="session")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 48 captioned `photos` and the benchmarks' `tokenizer`."""
    folder = tmp_path_factory.mktemp("photographs")
    make_data(folder / "photos", num_samples=48)
    write_benchmark_tokenizer(folder / "tokenizer")
    return folder


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
