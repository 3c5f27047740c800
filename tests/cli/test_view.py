"""`zephon-mm view` writes one picture a batch."""

from pathlib import Path

import pytest
from PIL import Image

from zephon_mm.cli.main import main
from zephon_mm.errors import ConfigError


@pytest.mark.slow
def test_each_batch_becomes_a_png(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["view", str(demo), "-n", "2", "--out", str(tmp_path / "out")]) == 0
    files = [tmp_path / "out" / f"batch-{number:03}.png" for number in range(2)]
    assert capsys.readouterr().out.split() == list(map(str, files))
    assert sorted((tmp_path / "out").iterdir()) == files
    for file in files:
        with Image.open(file) as image:
            assert image.format == "PNG"


def test_no_batch_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="-n must be at least 1, got 0"):
        main(["view", "--debug", "none.toml", "-n", "0", "--out", str(tmp_path)])
