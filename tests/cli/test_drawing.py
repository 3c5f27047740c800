"""The packing picture shows the documents, images and padding where they are."""

from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.colors import to_rgb
from PIL import Image

from zephon_mm.cli.drawing import FILLS, RowPicture, draw_packing


def drawn(rows: list[RowPicture], path: Path) -> np.ndarray:
    """Return the picture's pixels, (H, W, 3) uint8."""
    draw_packing(rows, path)
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"))


def columns(pixels: np.ndarray, colour: tuple[float, ...]) -> np.ndarray:
    """Return the columns that hold many pixels of one colour, and so not only a thin line."""
    wanted = np.round(np.array(colour) * 255)
    hits = (np.abs(pixels.astype(int) - wanted).max(axis=2) <= 1).sum(axis=0)
    return np.flatnonzero(hits > 25)


@pytest.mark.slow
def test_documents_and_images_have_the_widths_of_their_token_ranges(tmp_path: Path) -> None:
    green = np.full((40, 40, 3), (0, 255, 0), np.uint8)
    row = RowPicture([(0, 300, "one"), (300, 500, "two")], [(320, 420, green)], 1_000)
    pixels = drawn([row], tmp_path / "out.png")

    first, second = (columns(pixels, to_rgb(FILLS[i])) for i in (0, 1))
    image = columns(pixels, (0, 1, 0))
    per_token = (second.max() - first.min()) / 500
    assert np.ptp(first) == pytest.approx(300 * per_token, abs=4)
    assert np.ptp(second) == pytest.approx(200 * per_token, abs=4)
    middle = (image.min() + image.max()) / 2
    assert middle == pytest.approx(first.min() + 370 * per_token, abs=3)


@pytest.mark.slow
def test_extreme_rows_draw_without_a_warning(tmp_path: Path) -> None:
    wide, tall = np.zeros((1, 90, 3), np.uint8), np.zeros((90, 1, 3), np.uint8)
    rows = [
        RowPicture([], [], 4_096),
        RowPicture([(0, 4_096, "a very long name " * 20)], [(0, 1, wide), (1, 4_096, tall)], 4_096),
        RowPicture([(i, i + 1, "x") for i in range(50)], [], 50),
    ]
    assert drawn(rows, tmp_path / "out.png").size


@pytest.mark.slow
def test_the_callers_figures_and_settings_stay(tmp_path: Path) -> None:
    before = dict(mpl.rcParams)
    drawn([RowPicture([(0, 5, "a")], [], 8)], tmp_path / "out.png")
    assert dict(mpl.rcParams) == before
    assert pyplot.get_fignums() == []
