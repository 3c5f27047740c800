"""The demo runs through: data, training, more ranks, pictures."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from zephon_mm.cli.demo_training import has_fallen
from zephon_mm.cli.main import main
from zephon_mm.recipe import load_recipe


@pytest.mark.slow
def test_a_short_demo_leaves_its_files_and_equal_digests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--steps", "3", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    rows = re.findall(r"^ +(\d) \| (\d) x \d +\| \w+ +\| [0-9a-f]{16} \| yes$", out, re.M)
    assert [(int(step), int(ranks)) for step, ranks in rows] == [(s, 1 + s // 2) for s in range(8)]
    assert "all digests are equal" in out
    for name in ("packing.png", "loss.png"):
        with Image.open(tmp_path / name) as image:
            assert image.format == "PNG"
    assert main(["plan", str(tmp_path / "demo.toml"), "-n", "1"]) == 0


@pytest.mark.slow
def test_data_only_makes_what_the_recipe_names_without_what_trains(tmp_path: Path) -> None:
    code = (
        "import sys; from zephon_mm.cli.main import main; assert main(sys.argv[1:]) == 0; "
        "assert not {'matplotlib', 'torch', 'transformers'} & set(sys.modules)"
    )
    words = ["demo", "--data-only", "--out", str(tmp_path)]
    subprocess.run([sys.executable, "-c", code, *words], check=True, timeout=280)
    pipeline = load_recipe(tmp_path / "demo.toml").pipeline(runner="inline")
    assert len(list(pipeline.plan(1))) == 1


def test_a_loss_has_fallen_if_its_end_is_below_its_start() -> None:
    assert has_fallen([3.0, 2.0, 1.0])
    assert not has_fallen([1.0, 2.0])
    assert has_fallen([5.0] * 10 + [9.0] * 30 + [4.0] * 10)
