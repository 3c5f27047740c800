"""A recipe for the tiny model, on a small data set of its own."""

from pathlib import Path

import pytest
import torch

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


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
