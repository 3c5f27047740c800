"""Pictures of packed sequences: drawn where the tokens are, with the pixels that were decoded."""

import importlib
import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib as mpl
import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import pyplot
from matplotlib.colors import to_rgb

from tests.fixtures.films import film
from tests.fixtures.memory import Recipe, dataset, take
from zephon_mm.errors import ConfigError
from zephon_mm.media import Media, MediaLayout, MediaPlan
from zephon_mm.pipeline import Pipeline
from zephon_mm.processors import (
    AnyResProcessor,
    NaFlexProcessor,
    QwenVLProcessor,
    QwenVLVideoProcessor,
    SigLIPProcessor,
)
from zephon_mm.records import FileBlob, ImageSlot, Text, Video
from zephon_mm.show import (
    BAR,
    BROKEN,
    FILLS,
    LOSS,
    Picture,
    Row,
    Span,
    draw_plan,
    draw_row,
    draw_rows,
    pixels_of,
    row_of_batch,
    row_of_plan,
    runs_of,
)

GREEN = np.full((40, 40, 3), (0, 255, 0), np.uint8)
QWEN = QwenVLProcessor(patch_size=4, min_pixels=1, max_pixels=10**6)


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def media_of(processor: Any, pixels: np.ndarray, shape: tuple[int, ...], grid: Any) -> Media:
    """Return what a batch holds of one image, of which the processor wrote `pixels`."""
    plan = MediaPlan(MediaLayout.of(processor))
    plan.add(ImageSlot(None, 0, 1, shape, grid), (0, 0, 1), (0, 0, 1))
    flat = np.zeros(int(np.prod(plan.shape)), dtype=np.uint8)
    flat[: pixels.size] = pixels.ravel()
    return plan.media(flat.reshape(plan.shape), processor)


def written(processor: Any, picture: np.ndarray) -> Media:
    buffer = io.BytesIO()
    PIL.Image.fromarray(picture).save(buffer, "PNG")
    encoded = buffer.getvalue()
    measured = processor.measure(lambda n: encoded[:n] if n >= 0 else encoded)
    out = np.empty(measured.shape, dtype=np.uint8)
    processor.write(encoded, out)
    return media_of(processor, out, measured.shape, measured.grid)


# Law 2: a thumbnail is the picture, which these sizes leave as it is.


@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(1, 6), st.booleans())
def test_patches_are_put_together_to_the_picture(rows: int, cols: int, packed: bool) -> None:
    naflex = NaFlexProcessor(rows * cols, patch_size=4, backend="pillow", packed=packed)
    picture = noise(rows * 4, cols * 4)
    assert np.array_equal(pixels_of(written(naflex, picture), 0), picture)
    picture = noise(rows * 8, cols * 8)
    assert np.array_equal(pixels_of(written(QWEN, picture), 0), picture)


@pytest.mark.parametrize("processor", [SigLIPProcessor(size=56), AnyResProcessor(size=56)])
def test_a_picture_and_the_view_in_front_of_tiles_are_themselves(processor: Any) -> None:
    picture = noise(56, 56)
    if isinstance(processor, AnyResProcessor):
        processor = AnyResProcessor(size=56, grid_pinpoints=((56, 112), (112, 112)))
    assert np.array_equal(pixels_of(written(processor, picture), 0), picture)


@pytest.mark.parametrize("steps", [1, 2, 12])
def test_the_frames_of_one_run_of_tokens_stand_side_by_side(steps: int) -> None:
    frames = [noise(16, 24, seed) for seed in range(steps)]
    out = np.empty((steps, 24, *QWEN.unit_shape), dtype=np.uint8)
    for place, frame in zip(out, frames, strict=True):
        QWEN.place(frame, place, (4, 6), slice(None))
    video = QwenVLVideoProcessor(QWEN, "qwen2.5-vl")
    shape = (steps * 24, *QWEN.unit_shape)
    media = media_of(video, out, shape, (steps, 4, 6, 99))
    assert np.array_equal(pixels_of(media, 0), np.concatenate(frames, axis=1))


def test_units_that_show_no_picture_have_none() -> None:
    for shape in ((7,), (5, 7), (2, 3, 4)):
        processor = SimpleNamespace(unit_shape=shape[-3:])
        assert pixels_of(media_of(processor, np.zeros(shape), shape, ()), 0) is None


# Law 1: everything is where its tokens are.


def colours(figure: Picture, axes: Any, places: np.ndarray) -> np.ndarray:
    """Return the colours, (n, 3) uint8, on the screen at (n, 2) places of an axes."""
    figure.canvas.draw()
    screen = np.asarray(figure.canvas.buffer_rgba())
    columns, rows = axes.transData.transform(places).astype(int).T
    return screen[len(screen) - 1 - rows, columns, :3]


def shows(found: np.ndarray, colour: str) -> np.ndarray:
    """Return where colours are one colour, up to rounding."""
    return np.abs(found - np.array(to_rgb(colour)) * 255).max(axis=1) < 2


def spans(flags: list[bool]) -> list[Span]:
    return [Span(a, b) for a, b in runs_of(np.array(flags)) if flags[a]]


@pytest.mark.slow
@settings(max_examples=8)
@given(st.data(), st.integers(1, 40))
def test_every_token_has_the_colour_of_what_it_is(data: st.DataObject, used: int) -> None:
    kinds = data.draw(st.lists(st.integers(0, 1), min_size=used, max_size=used))
    flags = st.lists(st.booleans(), min_size=used, max_size=used)
    trained, image = data.draw(flags), data.draw(flags)
    documents = [Span(a, b, "", "ab"[kinds[a]]) for a, b in runs_of(np.array(kinds))]
    figure = draw_rows([Row("row", 40, documents, spans(image), spans(trained))])
    tokens = np.arange(40) + 0.5
    bar = colours(figure, figure.axes[0], np.stack([tokens, 0 * tokens], axis=1))
    under = colours(figure, figure.axes[0], np.stack([tokens, 0 * tokens + BAR + 0.06], axis=1))
    assert shows(under, LOSS)[:used].tolist() == trained
    assert not shows(under, LOSS)[used:].any()
    assert shows(bar, "white")[:used].tolist() == image
    names = sorted({document.kind for document in documents})
    for at, document in enumerate(documents):
        fill = np.array(to_rgb(FILLS[names.index(document.kind)]))
        wanted = mpl.colors.to_hex(fill if at % 2 == 0 else 0.6 * fill + 0.4)
        plain = [at for at in range(document.start, document.stop) if not image[at]]
        assert shows(bar[plain], wanted).all()
    assert not any(shows(bar[used:], fill).any() for fill in FILLS)


@pytest.mark.slow
def test_a_thumbnail_lies_in_the_middle_of_its_tokens_and_a_broken_one_is_framed() -> None:
    images = [Span(32, 42, pixels=GREEN), Span(60, 70, pixels=GREEN, broken=True)]
    figure = draw_rows([Row("row", 100, [Span(0, 80, "d/0", "d")], images, [])])
    places = np.array([[37, 0], [34, 0], [65, 0], [60, 0.1], [70, 0.1]])
    found = colours(figure, figure.axes[0], places)
    assert shows(found, "#00ff00").tolist() == [True, True, False, False, False]
    assert shows(found, BROKEN).tolist() == [False, False, False, True, True]


def test_a_picture_without_tokens_stands_in_the_middle_of_its_row() -> None:
    rows = [Row("pair", 100, [Span(0, 20, "d/0", "d")], [Span(0, 0, pixels=GREEN)], [])]
    (picture,) = draw_rows(rows).axes[0].images
    left, right, *_ = picture.get_extent()
    assert left < 50 == (left + right) / 2 < right


def test_a_box_is_framed_where_it_is_in_the_thumbnail() -> None:
    image = Span(10, 60, pixels=GREEN, boxes=[(0.25, 0.5, 0.75, 1.0)])
    axes = draw_rows([Row("row", 100, [Span(0, 80, "d/0", "d")], [image], [])]).axes[0]
    (picture,), (frame,) = axes.images, axes.patches
    left, right, bottom, top = picture.get_extent()
    width, height = right - left, bottom - top
    wanted = [left + width / 4, top + height / 2, left + width * 3 / 4, bottom]
    assert np.allclose(frame.get_bbox().extents, wanted)


def test_an_image_that_did_not_decode_is_told(recipe: Recipe) -> None:
    with recipe.build() as pipeline:
        batch = next(iter(pipeline))
    batch.image_valid[0] = False
    first, *others = row_of_batch(batch, 0).images
    assert first.broken
    assert not any(image.broken for image in others)


@pytest.mark.parametrize("algorithm", ["best_fit", "wrap"])
def test_a_plan_shows_what_the_batches_show(recipe: Recipe, algorithm: str) -> None:
    datasets = recipe.datasets
    recipe = Recipe(datasets=datasets, weights=(0.6, 0.4), algorithm=algorithm, max_length=48)
    with recipe.build(microbatch=2) as pipeline:
        planned = [row_of_plan(one, 48) for one in pipeline.plan(12)]
        rows = [row_of_batch(batch, n) for batch in take(pipeline, 6) for n in range(2)]
    assert any(row.images for row in rows)
    for plan, row in zip(planned, rows, strict=True):
        assert plan.documents == row.documents
        assert [image[:2] for image in plan.images] == [image[:2] for image in row.images]
        assert all(image.pixels is not None for image in row.images)
        assert joined(plan.trained) == joined(row.trained)


def joined(found: Any) -> list[int]:
    return [token for span in found for token in range(span.start, span.stop)]


# Law 3: the attention is the mask.


@pytest.mark.slow
def test_a_cell_is_filled_where_a_query_sees_a_key(recipe: Recipe) -> None:
    with recipe.build() as pipeline:
        batch = next(iter(pipeline))
    mask = batch.to_training(attention="sdpa")["attention_mask"][0, 0]
    figure = draw_row(batch, 0)
    cells = np.indices(mask.shape).reshape(2, -1).T[:, ::-1] + 0.5  # (key, query)
    seen = ~shows(colours(figure, figure.axes[2], cells), "white")
    assert torch.equal(torch.from_numpy(seen).reshape(mask.shape), mask)
    (line,) = figure.axes[1].lines
    assert np.array_equal(line.get_ydata(), batch.position_ids[0].numpy())


@pytest.mark.slow
def test_videos_are_drawn_with_the_positions_of_their_axes(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(film("h264"))
    blob = FileBlob(str(tmp_path / "a.mp4"), 0, len(film("h264")))
    rows = [(Video(blob), Text(f"a film {number}")) for number in range(8)]
    recipe = Recipe(datasets=(dataset("films", rows),), max_length=256)
    video = QwenVLVideoProcessor(QWEN, "qwen3-vl", fps=2.0, max_frames=4)
    with recipe.build(processor=QWEN, video_processor=video) as pipeline:
        batch = next(iter(pipeline))
    assert {image.pixels.shape[2] for image in row_of_batch(batch, 0).images} == {3}
    figure = draw_row(batch, 0)
    found = [line.get_ydata() for line in figure.axes[1].lines]
    assert np.array_equal(found, batch.mrope_position_ids()[1:, 0].numpy())
    assert batch.show()._repr_png_().startswith(b"\x89PNG")


# What it does not do, and what it refuses.


@pytest.mark.slow
def test_extreme_rows_draw_without_a_warning() -> None:
    wide, tall = np.zeros((1, 90, 3), np.uint8), np.zeros((90, 1, 3), np.uint8)
    long = "a very $long \\name " * 20
    images = [Span(0, 1, pixels=wide), Span(1, 4_096, pixels=tall)]
    rows = [
        Row("a", 4_096, [], [], []),
        Row("b", 4_096, [Span(0, 4_096, long)], images, [Span(0, 4_096)]),
        Row("c", 50, [Span(i, i + 1, "x") for i in range(50)], [], []),
    ]
    assert draw_rows(rows)._repr_png_().startswith(b"\x89PNG")


def test_the_number_of_shapes_does_not_grow_with_the_documents() -> None:
    def shapes(count: int) -> int:
        documents = [Span(at, at + 1) for at in range(count)]
        return len(draw_rows([Row("row", 4_096, documents, [], documents)]).axes[0].get_children())

    assert shapes(4_096) == shapes(2)


def test_the_callers_figures_and_settings_stay() -> None:
    before = dict(mpl.rcParams)
    draw_rows([Row("row", 8, [Span(0, 5, "a")], [], [])])
    assert dict(mpl.rcParams) == before
    assert pyplot.get_fignums() == []


def test_documents_are_labelled_by_key_or_by_text(recipe: Recipe) -> None:
    with recipe.build(microbatch=2) as pipeline:
        batch = next(iter(pipeline))
    keys = batch.show([1]).axes[0].texts
    assert keys[0].get_text().startswith(batch.keys[1][0][:3])
    counted = batch.show_row(1, decode=lambda ids: f"\n{len(ids)} $\nids").axes[0].texts
    assert counted[0].get_text() == f"{int((batch.segment_ids[1] == 1).sum())} $ ids"


def test_what_is_not_there_is_refused(recipe: Recipe) -> None:
    with recipe.build(microbatch=2) as pipeline:
        batch = next(iter(pipeline))
        plan = pipeline.plan(2)
        assert next(plan).number == 2
        assert [text.get_text() for text in plan.show().axes[0].get_yticklabels()] == ["# 3"]
        with pytest.raises(ConfigError, match="nothing to show"):
            plan.show()
    for rows in ([2], [-1]):
        with pytest.raises(ConfigError, match="rows of 0 to 1"):
            batch.show(rows)
    with pytest.raises(ConfigError, match="rows of 0 to 1"):
        batch.show_row(2)
    with pytest.raises(ConfigError, match="raw samples have no tokens"):
        draw_plan(iter([]), 0)


def test_raw_samples_are_refused(recipe: Recipe) -> None:
    pipeline = Pipeline(recipe.source()).options(canonical_replicas=2, runner="inline")
    with (
        pipeline.batch(microbatch_size=2) as raw,
        pytest.raises(ConfigError, match="raw samples have no tokens"),
    ):
        raw.plan(2).show()


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "zephon_mm.show")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install \"zephon-mm\[demo\]\""):
        importlib.import_module("zephon_mm.show")
