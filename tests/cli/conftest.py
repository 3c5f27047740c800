"""A small copy of the demo's data set, which several commands are tried on."""

import shutil
from pathlib import Path

import pytest

from zephon_mm.cli.demo import RECIPE
from zephon_mm.cli.demo_data import make_demo_data


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's recipe on 40 captions, 20 stories, 10 chats and 6 films; run by threads."""
    folder = tmp_path_factory.mktemp("demo")
    counts = {"num_captions": 40, "num_stories": 20, "num_chats": 10, "num_films": 6}
    make_demo_data(folder / "data", num_shards=2, **counts)
    (folder / "demo.toml").write_text(RECIPE.replace('"process"', '"thread"'))
    return folder / "demo.toml"


@pytest.fixture
def unknown(demo: Path, tmp_path: Path) -> Path:
    """The same in another place, where no index knows it."""
    shutil.copytree(demo.parent, tmp_path, dirs_exist_ok=True)
    return tmp_path / "demo.toml"
