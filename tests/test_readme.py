"""The README stays true: its snippet and its commands run, as a newcomer would run them."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    lines = [line.partition("#")[0].strip() for block in blocks("sh") for line in block.split("\n")]
    return [line for line in lines if line]


def run(arguments: list[str], folder: Path) -> None:
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like a fresh clone on which `zephon-mm demo --data-only` was run."""
    folder = tmp_path_factory.mktemp("clone")
    (folder / "configs").mkdir()
    recipe = (ROOT / "configs" / "demo.toml").read_text()
    (folder / "configs" / "demo.toml").write_text(recipe)
    run([sys.executable, "-m", "zephon_mm.cli.main", "demo", "--data-only"], folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("snippet", blocks("python"))
def test_a_snippet_runs_as_it_is(snippet: str, folder: Path) -> None:
    run([sys.executable, "-c", snippet], folder)


@pytest.mark.slow
@pytest.mark.parametrize("command", [line for line in commands() if line.startswith("zephon-mm")])
def test_every_command_runs(command: str, folder: Path) -> None:
    run([sys.executable, "-m", "zephon_mm.cli.main", *shlex.split(command)[1:]], folder)


@pytest.mark.parametrize("command", [line for line in commands() if line.startswith("make")])
def test_every_make_target_exists(command: str) -> None:
    target = shlex.split(command)[1]
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_every_file_that_is_named_exists() -> None:
    for name in ("CONTRIBUTING.md", "benchmarks/README.md", "configs/demo.toml", ".ci/run"):
        assert name in README
        assert (ROOT / name).exists()
