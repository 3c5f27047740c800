"""The notebooks run from top to bottom on the demo's data, and are stored without outputs."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from zephon_mm.cli.demo_data import make_demo_data

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PICTURES = {"01": 1, "02": 4, "03": 2, "04": 0, "05": 1}  # at least so many are drawn


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like `notebooks/` in a clone in which the data was made."""
    clone = tmp_path_factory.mktemp("clone")
    make_demo_data(clone / "demo_out" / "data")
    shutil.copytree(ROOT / "configs", clone / "configs")
    (clone / "notebooks").mkdir()
    return clone / "notebooks"


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_and_draws(path: Path, folder: Path) -> None:
    copy = folder / path.name
    shutil.copy(path, copy)
    execute = "from nbclient.cli import main; main()"  # `jupyter execute`, of this interpreter
    command = [sys.executable, "-c", execute, "--inplace", "--timeout=120", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    outputs = [output for cell in read(copy).cells for output in cell.get("outputs", [])]
    drawn = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(drawn) >= PICTURES[path.stem[:2]]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_stored_without_outputs(path: Path) -> None:
    book = read(path)
    nbformat.validate(book)
    for cell in book.cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


def test_all_are_run() -> None:
    assert [path.stem[:2] for path in NOTEBOOKS] == sorted(PICTURES)
