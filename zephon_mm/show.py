"""Pictures of packed sequences: which document, image, loss and padding lies where in a row.

Laws (tests/test_show.py):
    1. Everything is drawn where its tokens are.
    2. A thumbnail is the picture that the processor was given, however its patches lie in a batch,
       with its boxes.
    3. The attention that is drawn is the mask that `Batch.to_training` gives.
    4. No display is needed, and pyplot's global state is left alone.

Cost: 0.5 s to import matplotlib. Runs are drawn, not tokens: 8 rows of 4,096 tokens took 2 s on a
busy machine, whatever their documents, and 4 s with 500 thumbnails.

Imports: errors. Used by: batch, planning, which import it when a picture is asked for.
"""

import io
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zephon_mm.errors import ConfigError

try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle
except ImportError as error:
    raise ConfigError('pictures need matplotlib: pip install "zephon-mm[demo]"') from error

Decode = Callable[[list[int]], str]
Pixels = NDArray[np.uint8]

WIDTH_IN, ROW_IN, FRAME_IN, DETAIL_IN, DPI = 14.0, 0.92, 1.5, (9.0, 11.0), 130
MOST_ROWS = 8  # of a batch, unless rows are named
MOST_FRAMES = 12  # of a video that is one run of tokens
BAR = 0.33  # half the height of a row's bar; rows stand at 0, 1, 2, ...
FILLS = ["#a8c8ec", "#f6cf9a", "#b5dfb0", "#f2b8b5", "#d2c2ea", "#a9dcd9", "#ecd0e2", "#dfd9a5"]
INK, EDGE, LOSS, BROKEN, SEEN = "#2b2f36", "#5b6472", "#2f7d4f", "#d6303a", "#c3ccd8"
PADDING: dict[str, Any] = {"facecolor": "#f3f4f6", "edgecolor": "#b9c0ca", "hatch": "////"}
LETTER_IN = 0.087  # that a letter of a label needs


class Span(NamedTuple):
    """Tokens `[start, stop)` of a row, and what is there.

    A document's `label` is what is written above it, and `kind` its dataset. An image has its
    `pixels`, (H, W, 3), unless they are not known, and `boxes` in them, (n, 4) fractions; it is
    `broken` where it could not be decoded.
    """

    start: int
    stop: int
    label: str = ""
    kind: str = ""
    pixels: Pixels | None = None
    broken: bool = False
    boxes: Any = ()


class Row(NamedTuple):
    """One packed sequence of at most `length` tokens; spans are in ascending order."""

    name: str
    length: int
    documents: Sequence[Span]
    images: Sequence[Span]
    trained: Sequence[Span]


class Picture(Figure):
    """A figure that notebooks show, and that needs no pyplot."""

    def __init__(self, width_in: float, height_in: float) -> None:
        super().__init__(figsize=(width_in, height_in), dpi=DPI, layout="constrained")
        FigureCanvasAgg(self)

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


# From a batch or a plan to rows.


def runs_of(values: NDArray[Any]) -> list[tuple[int, int]]:
    """Return the ranges [start, stop) of equal values, in order."""
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return list(pairwise(edges))


def row_of_batch(batch: Any, number: int, decode: Decode | None = None) -> Row:
    """Return a row of a `Batch`, its documents labelled by their text, else by their keys."""
    if number not in range(len(batch.keys)):
        raise ConfigError(f"show takes rows of 0 to {len(batch.keys) - 1}, got {number}")
    ids, segments = batch.input_ids[number], batch.segment_ids[number].numpy()
    trained = batch.labels[number].numpy() >= 0
    documents = []
    for start, stop in runs_of(segments):
        if segments[start] > 0:
            key = batch.keys[number][segments[start] - 1]
            label = decode(ids[start:stop].tolist()) if decode else key
            documents.append(Span(start, stop, " ".join(label.split()), key.partition("/")[0]))
    images = [
        Span(
            *(first, first + count),
            pixels=pixels_of(media, at),
            broken=not media.valid[at],
            boxes=media.boxes[media.boxes_index[:, 0] == at].tolist(),
        )
        for media in (batch.images, batch.videos)
        for at, (row, first, count) in enumerate(media.index.tolist())
        if row == number
    ]
    loss = [Span(start, stop) for start, stop in runs_of(trained) if trained[start]]
    name = f"row {number}\n# {int(batch.sequence_ids[number])}"
    return Row(name, len(ids), documents, images, loss)


def row_of_plan(planned: Any, length: int) -> Row:
    """Return a `PlannedSequence` as a row of at most `length` tokens; no pixels are known."""
    documents: list[Span] = []
    images, loss, at = [], [], 0
    for piece, key in zip(planned.sequence.pieces, planned.keys, strict=True):
        shift = at - piece.start
        documents.append(Span(at, at + piece.num_tokens, key, key.partition("/")[0]))
        at += piece.num_tokens
        for image in piece.images():
            start = image.start + shift
            images.append(Span(start, start + image.num_tokens))
        for first, last in piece.record.trained_runs:
            start, stop = max(first, piece.start + 1) + shift, min(last + shift, at)
            loss += [Span(start, stop)] if start < stop else []
    return Row(f"# {planned.number}", length, documents, images, loss)


def pixels_of(media: Any, number: int) -> Pixels | None:
    """Return one of `Batch.images` or `Batch.videos`, (H, W, 3); None where its units show none.

    Of tiles that share their tokens it is the first, the view of the whole; of a video that is one
    run of tokens its frames, side by side.
    """
    units: Pixels = media.pixels_of(number).numpy()
    grid = media.grids[number].tolist()
    if units.ndim > 2:
        planes = units.reshape(-1, *units.shape[-3:])[0]
        return planes.transpose(1, 2, 0) if len(planes) == 3 else None
    frame = getattr(media.processor, "frame", media.processor)  # Qwen-VL's videos have one inside
    side = getattr(frame, "patch_size", 0)
    if not side or len(grid) < 2:
        return None
    if len(grid) == 2:
        rows, cols = grid
        patches = units.reshape(rows, cols, side, side, 3).swapaxes(1, 2)
        return patches.reshape(rows * side, cols * side, 3)
    steps, rows, cols = grid[:3]
    merge = frame.merge_size
    blocks = (rows // merge, cols // merge, merge, merge)
    patches = units.reshape(steps, *blocks, 3, -1, side, side)[:: -(-steps // MOST_FRAMES)]
    strip = patches[..., 0, :, :].transpose(1, 3, 6, 0, 2, 4, 7, 5)
    return strip.reshape(rows * side, -1, 3)


# From rows to figures.


def draw_batch(
    batch: Any, numbers: Sequence[int] | None = None, decode: Decode | None = None
) -> Picture:
    """Return a figure of rows of a batch; of the first `MOST_ROWS` if none are named."""
    numbers = numbers or range(min(len(batch.keys), MOST_ROWS))
    return draw_rows([row_of_batch(batch, number, decode) for number in numbers])


def draw_plan(planned: Iterable[Any], length: int) -> Picture:
    """Return a figure of planned sequences of at most `length` tokens."""
    rows = [row_of_plan(one, length) for one in planned] if length else []
    if not rows:
        raise ConfigError("nothing to show: raw samples have no tokens, and a plan is shown once")
    return draw_rows(rows)


def draw_rows(rows: Sequence[Row]) -> Picture:
    """Return a figure with one bar a row, from top to bottom."""
    figure = Picture(WIDTH_IN, FRAME_IN + ROW_IN * len(rows))
    axes = figure.add_subplot()
    _draw_bars(axes, rows)
    axes.set_xlabel("token", color=INK)
    return figure


def draw_row(batch: Any, number: int, decode: Decode | None = None) -> Picture:
    """Return a figure of one row: its bar, its positions, and what each token attends to."""
    row = row_of_batch(batch, number, decode)
    figure = Picture(*DETAIL_IN)
    bar, positions, attention = figure.subplots(3, sharex=True, height_ratios=[1, 1.3, 7])
    lines = {"position": batch.position_ids[number]}
    if hasattr(batch.images.processor or batch.videos.processor, "merge_size"):
        axes = batch.mrope_position_ids()[1:, number]
        lines = dict(zip(("time", "row", "column"), axes, strict=True))
    for name, line in lines.items():
        positions.plot(line.numpy(), label=name, linewidth=1)
    if len(lines) > 1:
        positions.legend(loc="upper left", frameon=False, fontsize=8)
    positions.set_ylabel("position", color=INK)
    _draw_attention(attention, batch.segment_ids[number].numpy())
    for axes in (positions, attention):
        _plain(axes)
    _draw_bars(bar, [row])
    return figure


def _draw_attention(axes: Any, segments: NDArray[Any]) -> None:
    """Fill where a query, from top to bottom, sees a key: to the left, in its own segment."""
    shapes: dict[bool, list[Any]] = {True: [], False: []}
    for start, stop in runs_of(segments):
        steps = np.repeat(np.arange(start, stop + 1), 2)
        stairs = np.stack([steps[1:], steps[:-1]], axis=1)
        shapes[bool(segments[start])].append(np.concatenate([stairs, [(start, stop)]]))
    plain: dict[str, Any] = {"facecolor": SEEN, "edgecolor": EDGE, "linewidth": 0.8}
    axes.add_collection(PolyCollection(shapes[True], **plain), autolim=False)
    axes.add_collection(PolyCollection(shapes[False], **PADDING), autolim=False)
    axes.set_ylim(len(segments), 0)
    axes.set_xlabel("token that is seen", color=INK)
    axes.set_ylabel("token that sees", color=INK)


def _plain(axes: Any) -> None:
    axes.tick_params(colors=INK, length=0)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    for spine in axes.spines.values():
        spine.set_visible(False)


def _draw_bars(axes: Any, rows: Sequence[Row]) -> None:
    """Draw rows one below the other, at y = 0, 1, 2, ..., with what stands around them."""
    length = max(row.length for row in rows)
    kinds = sorted({document.kind for row in rows for document in row.documents})
    fills = {kind: FILLS[number % len(FILLS)] for number, kind in enumerate(kinds)}
    axes.set_xlim(-0.002 * length, 1.002 * length)  # room for the outermost edges
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_title(_title(rows), loc="left", color=INK, fontsize=12, fontweight="bold", pad=12)
    _plain(axes)
    for number, row in enumerate(rows):
        _draw_runs(axes, number, row, fills)
    broken = any(image.broken for row in rows for image in row.images)
    handles = [
        *(Patch(facecolor=fill, edgecolor=EDGE, label=kind) for kind, fill in fills.items()),
        Patch(facecolor="white", edgecolor=INK, linewidth=2, label="image"),
        *([Patch(facecolor="white", edgecolor=BROKEN, label="broken image")] if broken else []),
        Patch(facecolor=LOSS, label="tokens with loss"),
        Patch(**PADDING, label="padding"),
    ]
    ncols = min(len(handles), 7)
    axes.figure.legend(handles=handles, loc="outside lower right", ncols=ncols, frameon=False)
    axes.figure.draw_without_rendering()  # fixes the layout, which thumbnails depend on
    for number, row in enumerate(rows):
        for image in row.images:  # one without tokens, of a pair, stands in the middle of its row
            stop = image.stop if image.stop > image.start else row.length
            _draw_thumbnail(axes, number, image._replace(stop=stop))


def _title(rows: Sequence[Row]) -> str:
    used = sum(document.stop - document.start for row in rows for document in row.documents)
    documents = sum(len(row.documents) for row in rows)
    images = sum(len(row.images) for row in rows)
    return (
        f"{documents} documents, {images} images, "
        f"{used / sum(row.length for row in rows):.1%} of {len(rows)} x {rows[0].length:,} tokens"
    )


def _draw_runs(axes: Any, number: int, row: Row, fills: dict[str, str]) -> None:
    """Draw all but the thumbnails; neighbours of one dataset differ in shade."""
    place, width_in = (number - BAR, 2 * BAR), axes.figure.get_figwidth()
    filled = row.documents[-1].stop if row.documents else 0
    axes.broken_barh([(filled, row.length - filled)], place, **PADDING)
    shades = [(fills[one.kind], (1.0, 0.6)[at % 2]) for at, one in enumerate(row.documents)]
    frames = [BROKEN if image.broken else INK for image in row.images]
    for spans, where, style in (
        (row.documents, place, {"facecolors": shades, "edgecolor": EDGE, "linewidth": 0.8}),
        (row.trained, (number + BAR + 0.03, 0.07), {"facecolor": LOSS}),
        (row.images, place, {"facecolor": "white", "edgecolors": frames, "linewidth": 1.3}),
    ):
        extents = [(span.start, span.stop - span.start) for span in spans]
        axes.broken_barh(extents, where, **style)
    for document in row.documents:
        letters = int((document.stop - document.start) / row.length * width_in / LETTER_IN)
        text = document.label
        text = text if len(text) <= letters else text[: letters - 1] + "…"
        if letters > 1:
            above = (document.start, number - BAR - 0.03)
            axes.text(*above, text, va="bottom", color=INK, fontsize=8, parse_math=False)


def _draw_thumbnail(axes: Any, number: int, image: Span) -> None:
    """Put the whole picture, in its proportions, into the middle of the image's tokens."""
    if image.pixels is None or image.broken:
        return
    left, bottom = axes.transData.transform((image.start, number + BAR))
    right, top = axes.transData.transform((image.stop, number - BAR))
    height, width = image.pixels.shape[:2]
    scale = min((right - left - 4) / width, (top - bottom - 4) / height)
    if scale <= 0:
        return  # a span of a few screen pixels: its frame is all that can be seen
    half_x = scale * width * (image.stop - image.start) / (right - left) / 2
    half_y = scale * height * BAR / (top - bottom)
    middle, step = (image.start + image.stop) / 2, max(1, int(0.5 / scale))
    axes.imshow(
        image.pixels[::step, ::step],  # twice as fine as the screen is enough
        extent=(middle - half_x, middle + half_x, number + half_y, number - half_y),
        aspect="auto",
        interpolation="antialiased",
        zorder=4,
    )
    for x, y, to_x, to_y in image.boxes:
        corner = middle + (2 * x - 1) * half_x, number + (2 * y - 1) * half_y
        sides = 2 * (to_x - x) * half_x, 2 * (to_y - y) * half_y
        axes.add_patch(Rectangle(corner, *sides, fill=False, edgecolor=BROKEN, zorder=5))
