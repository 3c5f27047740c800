"""Smaller versions of a picture: their sides, and that their size tells which one it is."""

import io
import math
from typing import Any

import numpy as np
import PIL.Image
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon_mm.processors.naflex import NaFlexProcessor
from zephon_mm.processors.qwen import QwenVLProcessor
from zephon_mm.processors.resize import resize
from zephon_mm.processors.shrink import STEPS, grid_with, shrunk

PROCESSORS = [
    NaFlexProcessor(64, patch_size=4, backend="pillow"),
    QwenVLProcessor(4, 2, 2, 8 * 8 * 4, 8 * 8 * 60, backend="pillow"),
]
sides = st.integers(1, 200)
squares = st.sampled_from([1, 2, 3])


@given(rows=sides, cols=sides, side=squares, step=st.integers(1, STEPS))
def test_a_version_is_found_by_how_many_patches_it_has(
    rows: int, cols: int, side: int, step: int
) -> None:
    full = rows * side, cols * side
    found = shrunk(full, step, side)
    assert grid_with(math.prod(found), full, side) == found


@given(rows=sides, cols=sides, side=squares)
def test_sides_fall_with_the_step_from_the_full_ones_to_a_token(
    rows: int, cols: int, side: int
) -> None:
    full = rows * side, cols * side
    found = np.array([shrunk(full, step, side) for step in range(1, STEPS + 1)])
    assert tuple(found[-1]) == full
    assert (np.diff(found, axis=0) >= 0).all()
    assert found.min() >= side
    assert not (found % side).any()


def picture(height_px: int, width_px: int) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (height_px, width_px, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    PIL.Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("step", [1, 20, 50, STEPS])
@pytest.mark.parametrize("size", [(30, 71), (64, 40), (5, 90)])
def test_a_smaller_version_is_the_picture_resized_to_fewer_patches(
    processor: Any, step: int, size: tuple[int, int]
) -> None:
    encoded = picture(*size)
    shape = processor.measure(lambda count: encoded[: count if count >= 0 else None], step)
    rows, cols = shape.grid[-2:]
    assert shape.shape == (rows * cols, *processor.unit_shape)
    out = np.empty(shape.shape, dtype=np.uint8)
    processor.write(encoded, out)

    side = processor.patch_size
    planes = np.empty((3, rows * side, cols * side), dtype=np.uint8)
    pixels = np.asarray(PIL.Image.open(io.BytesIO(encoded)))
    resample = getattr(processor, "resample", 3)
    resize(pixels, planes, resample=resample, backend="pillow")
    cut = planes.reshape(3, rows, side, cols, side).transpose(1, 3, 2, 4, 0)
    patches = out.reshape(rows, cols, -1)
    if isinstance(processor, QwenVLProcessor):  # (channel, frame, y, x), squares together
        merge = processor.merge_size
        grid = out.reshape(rows // merge, cols // merge, merge, merge, 3, 2, side, side)
        patches = grid[:, :, :, :, :, 0].transpose(0, 2, 1, 3, 5, 6, 4).reshape(rows, cols, -1)
    assert (patches == cut.reshape(rows, cols, -1)).all()
