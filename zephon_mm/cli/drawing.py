"""Draw packed sequences: which document, image and padding lies where in each row.

Works without a display and leaves pyplot's global state alone.

Imports: nothing from the package. Used by: cli.main, notebooks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from numpy.typing import NDArray

WIDTH_IN, ROW_IN, FRAME_IN, DPI = 14.0, 0.92, 1.5, 130
BAR = 0.33  # half the height of a row's bar; rows stand at 0, 1, 2, ...
FILLS = ["#a8c8ec", "#f6cf9a", "#b5dfb0", "#f2b8b5", "#d2c2ea", "#a9dcd9", "#ecd0e2", "#dfd9a5"]
INK, EDGE = "#2b2f36", "#5b6472"
LETTER = 0.0062  # share of a row's length that a letter of a label needs


@dataclass(frozen=True, slots=True)
class RowPicture:
    """One packed sequence.

    `segments` holds (start, stop, label) of each document, `images` (start, stop, (H, W, 3) uint8)
    of each image, both half-open token ranges in ascending order; `length` is the row's capacity.
    """

    segments: Sequence[tuple[int, int, str]]
    images: Sequence[tuple[int, int, NDArray[np.uint8]]]
    length: int


def draw_packing(
    rows: Sequence[RowPicture], path: Path, *, title: str = "Packed sequences"
) -> None:
    """Write a PNG with one bar per row.

    Args:
        rows: Drawn from top to bottom; at least one.
        path: The file to write.
        title: Stands above the picture.
    """
    height_in = FRAME_IN + ROW_IN * len(rows)
    figure = Figure(figsize=(WIDTH_IN, height_in), dpi=DPI, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    length = max(row.length for row in rows)
    axes.set_xlim(-0.002 * length, 1.002 * length)  # room for the outermost edges
    axes.set_ylim(len(rows) - 0.5, -0.5)
    _dress(axes, rows, title)
    canvas.draw()  # fixes the layout, which the size of the thumbnails depends on
    for number, row in enumerate(rows):
        _draw_row(axes, number, row)
    canvas.print_png(path)


def _dress(axes: Any, rows: Sequence[RowPicture], title: str) -> None:
    """Add what stands around the bars."""
    used = sum(stop - start for row in rows for start, stop, _ in row.segments)
    share = used / sum(row.length for row in rows)
    pictures = sum(len(row.images) for row in rows)
    documents = sum(len(row.segments) for row in rows)
    axes.set_title(
        f"{title}: {documents} documents, {pictures} images, {share:.1%} of {len(rows)} x "
        f"{max(row.length for row in rows):,} tokens used",
        loc="left",
        color=INK,
        fontsize=13,
        fontweight="bold",
        pad=12,
    )
    axes.set_yticks(range(len(rows)), [f"row {number}" for number in range(len(rows))])
    axes.set_xlabel("token", color=INK)
    axes.tick_params(colors=INK, length=0)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    for spine in axes.spines.values():
        spine.set_visible(False)
    handles = [
        Patch(facecolor=FILLS[0], edgecolor=EDGE, label="document (one colour each)"),
        Patch(facecolor="white", edgecolor=INK, linewidth=2, label="image tokens"),
        Patch(facecolor="#f3f4f6", edgecolor="#b9c0ca", hatch="////", label="padding"),
    ]
    axes.figure.legend(handles=handles, loc="outside lower right", ncols=3, frameon=False)


def _draw_row(axes: Any, number: int, row: RowPicture) -> None:
    filled = max((stop for _, stop, _ in row.segments), default=0)
    if filled < row.length:
        _box(
            axes, filled, row.length, number, facecolor="#f3f4f6", edgecolor="#b9c0ca", hatch="////"
        )
    for position, (start, stop, label) in enumerate(row.segments):
        fill = FILLS[(position + 3 * number) % len(FILLS)]
        _box(axes, start, stop, number, facecolor=fill, edgecolor=EDGE, linewidth=0.8)
        _write_label(axes, number, row, start, stop, label)
    for start, stop, pixels in row.images:
        _draw_image(axes, number, start, stop, pixels)


def _box(axes: Any, start: float, stop: float, number: int, **style: Any) -> None:
    axes.add_patch(Rectangle((start, number - BAR), stop - start, 2 * BAR, **style))


def _write_label(
    axes: Any, number: int, row: RowPicture, start: int, stop: int, label: str
) -> None:
    """Write the label above the segment, as far as it fits."""
    letters = int((stop - start) / (LETTER * row.length))
    if letters < 2:
        return
    text = label if len(label) <= letters else label[: letters - 1] + "…"
    axes.text(start, number - BAR - 0.03, text, va="bottom", color=INK, fontsize=8)


def _draw_image(axes: Any, number: int, start: int, stop: int, pixels: NDArray[np.uint8]) -> None:
    """Put the whole picture, in its proportions, into the middle of the image's tokens."""
    _box(axes, start, stop, number, facecolor="#ffffff", edgecolor=INK, linewidth=1.3, zorder=3)
    left, bottom = axes.transData.transform((start, number + BAR))
    right, top = axes.transData.transform((stop, number - BAR))
    height, width = pixels.shape[:2]
    scale = min((right - left - 4) / width, (top - bottom - 4) / height)
    if scale <= 0:
        return  # a span of a few screen pixels: its frame is all that can be seen
    x_per_px, y_per_px = (stop - start) / (right - left), 2 * BAR / (top - bottom)
    half_x, half_y = scale * width * x_per_px / 2, scale * height * y_per_px / 2
    middle = (start + stop) / 2
    axes.imshow(
        pixels,
        extent=(middle - half_x, middle + half_x, number + half_y, number - half_y),
        aspect="auto",
        interpolation="antialiased",
        zorder=4,
    )
