"""Boxes and points are where their pixels are, whatever happens to the picture."""

import io
from functools import partial
from typing import Any

import numpy as np
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.fixtures.processing import measured
from zephon_mm.errors import SampleError
from zephon_mm.media import MediaLayout, MediaPlan
from zephon_mm.processors import (
    AnyResProcessor,
    NaFlexProcessor,
    QwenVLProcessor,
    SigLIPProcessor,
    TileProcessor,
)
from zephon_mm.processors.augment import Augment, Drawn, apply
from zephon_mm.processors.header import header_of
from zephon_mm.processors.image import decode
from zephon_mm.processors.marks import count_marks, shown_marks
from zephon_mm.records import FileBlob, Image, ImageSlot
from zephon_mm.show import pixels_of

BLOB = FileBlob("/x", 0, 1)
GEOMETRY = Augment(crop=(0.2, 1.0), flip=0.5)
PROCESSORS: dict[str, Any] = {
    "siglip": SigLIPProcessor(size=(96, 128), patch_size=16),
    "siglip-scaled": SigLIPProcessor(size=64, patch_size=16, decode="scaled"),
    "naflex": NaFlexProcessor(max_num_patches=60),
    "qwen": QwenVLProcessor(min_pixels=64 * 64, max_pixels=160 * 160),
    "tiles": TileProcessor(size=64, max_side=192, patch_size=16),
    "view-first": TileProcessor(
        size=64, max_side=192, patch_size=16, fit="nanovlm", global_first=True
    ),
    "anyres": AnyResProcessor(size=84, grid_pinpoints=((84, 168), (168, 84), (168, 168))),
}
DRAWN = st.builds(
    lambda key, plain: Drawn() if plain else GEOMETRY.draw(key), st.integers(), st.booleans()
)


@st.composite
def marked(draw: Any, least: int = 60) -> tuple[bytes, tuple[int, int, int, int]]:
    """Return a picture turned by EXIF, black with a white box, and the box in what is stored."""
    height, width = draw(st.tuples(st.integers(160, 400), st.integers(160, 400)))
    left, top = draw(st.integers(0, width - least)), draw(st.integers(0, height - least))
    right, bottom = draw(st.integers(left + least, width)), draw(st.integers(top + least, height))
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[top:bottom, left:right] = 255
    image, exif = PIL.Image.fromarray(pixels), PIL.Image.Exif()
    exif[0x0112] = draw(st.integers(1, 8))
    buffer = io.BytesIO()
    image.save(buffer, draw(st.sampled_from(["JPEG", "PNG"])), exif=exif, quality=95)
    return buffer.getvalue(), (left, top, right, bottom)


def seen(processor: Any, encoded: bytes, drawn: Drawn) -> tuple[NDArray[np.uint8], Any]:
    """Return the picture that the encoder is shown, and the size of that which was augmented."""
    sizes, shape = [], measured(processor, encoded)
    lead = (len(shape.parts),) if shape.parts else ()
    out = np.empty((*lead, *shape.shape), np.uint8)

    def change(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        sizes.append(pixels.shape[:2])
        return apply(pixels, drawn)

    processor.write(encoded, out, change)
    if lead:
        return out[0 if processor.global_first else -1].transpose(1, 2, 0), sizes[0]
    plan = MediaPlan(MediaLayout.of(processor))
    plan.add(ImageSlot(None, 0, 1, shape.shape, shape.grid), (0, 0, 1), (0, 0, 1))
    full = np.zeros(plan.shape, np.uint8)
    full.reshape(-1)[: out.size] = out.reshape(-1)
    picture = pixels_of(plan.media(full, processor), 0)
    assert picture is not None
    return picture, sizes[0]


def white(pixels: NDArray[np.uint8]) -> list[int]:
    """Return the box around what is white."""
    rows, columns = (np.flatnonzero((pixels[..., 0] > 127).any(axis=axis)) for axis in (1, 0))
    return [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]


# Law 1: a mark is where its pixels are.


@pytest.mark.parametrize("kind", list(PROCESSORS))
@settings(max_examples=25)
@given(picture=marked(), drawn=DRAWN)
def test_a_box_and_its_corners_are_where_the_encoder_sees_them(
    kind: str, picture: Any, drawn: Drawn
) -> None:
    encoded, (left, top, right, bottom) = picture
    image = Image(BLOB, boxes=((left, top, right, bottom),), points=((left, top), (right, bottom)))
    pixels, size = seen(PROCESSORS[kind], encoded, drawn)
    box, *points = shown_marks(image, header_of(encoded), size, drawn)
    height, width = pixels.shape[:2]
    box = box * (width, height, width, height)
    if min(box[2] - box[0], box[3] - box[1]) < 4:  # an edge at most is left
        return
    assert np.abs(white(pixels) - box).max() <= 1.6
    corners = np.clip([point[:2] for point in points], 0, 1) * (width, height)
    assert np.allclose(np.sort(corners, axis=0).ravel(), box, atol=1e-3)


@settings(max_examples=40)
@given(picture=marked(), drawn=DRAWN)
def test_marks_on_the_upright_picture_are_not_turned(picture: Any, drawn: Drawn) -> None:
    encoded, stored = picture
    pixels, header = decode(encoded), header_of(encoded)
    there = tuple(white(pixels))
    ways = Image(BLOB, boxes=(stored,)), Image(BLOB, boxes=(there,), upright=True)
    first, second = (shown_marks(one, header, pixels.shape[:2], drawn) for one in ways)
    assert np.array_equal(first, second)


def test_tiles_together_show_what_the_view_shows() -> None:
    pixels = np.zeros((150, 200, 3), np.uint8)
    pixels[30:90, 50:140] = 255
    buffer = io.BytesIO()
    PIL.Image.fromarray(pixels).save(buffer, "PNG")
    processor, encoded = PROCESSORS["tiles"], buffer.getvalue()
    shape = measured(processor, encoded)
    out = np.empty((len(shape.parts), *shape.shape), np.uint8)
    processor.write(encoded, out)
    rows, cols = 3, 3
    together = out[:-1].reshape(rows, cols, 3, 64, 64).transpose(0, 3, 1, 4, 2)
    found = np.array(white(together.reshape(rows * 64, cols * 64, 3))) / 192
    image = Image(BLOB, boxes=((50, 30, 140, 90),))
    (box,) = shown_marks(image, header_of(encoded), (150, 200), Drawn())
    assert np.abs(found - box).max() <= 1.6 / 192


# Law 2: every mark keeps its place in its list.

NUMBERS = st.floats(-50, 450)
POINTS = st.tuples(NUMBERS, NUMBERS)
BOXES = st.builds(lambda a, b: (*map(min, a, b), *map(max, a, b)), POINTS, POINTS)


@given(
    picture=marked(),
    drawn=DRAWN,
    boxes=st.lists(BOXES, max_size=5),
    points=st.lists(POINTS, max_size=5),
)
def test_marks_are_what_each_is_alone(
    picture: Any, drawn: Drawn, boxes: list[Any], points: list[Any]
) -> None:
    header = header_of(picture[0])
    place = partial(
        shown_marks, header=header, size=(header.height_px, header.width_px), drawn=drawn
    )
    if not boxes and not points:
        assert count_marks(Image(BLOB)) == ()
        return
    image = Image(BLOB, boxes=tuple(boxes), points=tuple(points))
    found = place(image)
    assert count_marks(image) == (len(boxes), len(points))
    assert (found.dtype, found.shape) == (np.float32, (len(boxes) + len(points), 4))
    alone = [place(Image(BLOB, boxes=(box,))) for box in boxes]
    alone += [place(Image(BLOB, points=(point,))) for point in points]
    assert found.tobytes() == np.concatenate(alone).tobytes()
    shown, flat = found[: len(boxes)], found[len(boxes) :]
    assert ((shown >= 0) & (shown <= 1)).all()
    assert (shown[:, :2] <= shown[:, 2:]).all()
    assert np.array_equal(flat[:, :2], flat[:, 2:])
    assert not np.signbit(found[found == 0]).any()  # law 3


def test_what_a_crop_cuts_away_has_no_width_or_no_height() -> None:
    drawn = Drawn(side=0.5, x=0.0, y=0.0)  # the upper left quarter
    image = Image(BLOB, boxes=((60, 0, 80, 40), (0, 60, 10, 70), (20, 20, 40, 80)))
    image = Image(BLOB, boxes=image.boxes, points=((75, 25),))
    buffer = io.BytesIO()
    PIL.Image.new("RGB", (100, 100)).save(buffer, "PNG")
    found = shown_marks(image, header_of(buffer.getvalue()), (100, 100), drawn)
    wanted = [[1, 0, 1, 0.8], [0, 1, 0.2, 1], [0.4, 0.4, 0.8, 1], [1.5, 0.5, 1.5, 0.5]]
    assert np.allclose(found, wanted)


# What cannot be marked.


@pytest.mark.parametrize(
    "marks",
    [
        {"boxes": ((1, 2, 3),)},
        {"boxes": ((1, 2, 3, 4), (1, 2))},
        {"boxes": (1, 2, 3, 4)},
        {"boxes": ((30, 20, 10, 10),)},
        {"boxes": ((0, 0, float("inf"), 1),)},
        {"boxes": ((0, 0, None, 1),)},
        {"boxes": ("ab",)},
        {"boxes": ({"x": 1},)},
        {"boxes": ((0, 0, 10**400, 1),)},
        {"boxes": ((0, 0, 1e200, 1),)},
        {"boxes": (((1, 2), (3, 4)),)},
        {"points": ((1, 2, 3, 4),)},
        {"points": ((1, float("nan")),)},
    ],
)
def test_what_marks_nothing_is_refused_by_name(marks: Any) -> None:
    with pytest.raises(
        SampleError, match=f"found {next(iter(marks))} .*, expected each as"
    ) as told:
        count_marks(Image(BLOB, **marks))
    assert told.value.reason == "bad_field"
