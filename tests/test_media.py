"""Where images lie in a batch, and what a model is given of them."""

import io
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.processing import measured
from zephon_mm.errors import ConfigError
from zephon_mm.media import Media, MediaLayout, MediaPlan
from zephon_mm.processors import (
    AnyResProcessor,
    NaFlexProcessor,
    QwenVLProcessor,
    QwenVLVideoProcessor,
    SigLIPProcessor,
    SigLIPVideoProcessor,
    TileProcessor,
)
from zephon_mm.records import ImageSlot

NAFLEX = NaFlexProcessor(max_num_patches=16)
PACKED = NaFlexProcessor(max_num_patches=16, packed=True)
FIXED = SigLIPProcessor(size=32, patch_size=16)
QWEN = QwenVLProcessor(min_pixels=32 * 32, max_pixels=64 * 64)
TILES = TileProcessor(size=32, max_side=64, patch_size=16, scale_factor=1)
ANYRES = AnyResProcessor(size=28, patch_size=14, grid_pinpoints=((28, 56), (56, 28)))
VIDEOS = [QwenVLVideoProcessor(QWEN), QwenVLVideoProcessor(QWEN, "qwen2.5-vl")]
FRAMES = SigLIPVideoProcessor(FIXED)


def picture(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    PIL.Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def made(processor: Any, pictures: list[bytes]) -> Media:
    """Return what a batch holds of pictures, in memory that held other bytes."""
    plan = MediaPlan(MediaLayout.of(processor))
    shapes = [measured(processor, encoded) for encoded in pictures]
    for number, shape in enumerate(shapes):
        slot = ImageSlot(None, 0, shape.num_tokens, shape.shape, shape.grid, number)
        plan.add(slot, (0, 10 * number, shape.num_tokens), (0, 0, 99))
    flat = np.full(int(np.prod(plan.shape)), 0xA5, dtype=np.uint8)
    for number, (encoded, shape) in enumerate(zip(pictures, shapes, strict=True)):
        offset, size = plan.region(number, 1)
        used = int(np.prod(shape.shape))
        processor.write(encoded, flat[offset : offset + used].reshape(shape.shape))
        flat[offset + used : offset + size] = 0
    return plan.media(flat.reshape(plan.shape), processor)


PICTURES = [picture(48, 32), picture(200, 10), picture(3, 3)]


@given(
    counts=st.lists(st.integers(1, 9), max_size=12),
    pad_to=st.none() | st.integers(9, 12),
)
@settings(max_examples=60)
def test_regions_follow_one_another_and_cover_the_array(
    counts: list[int], pad_to: int | None
) -> None:
    plan = MediaPlan(MediaLayout((5,), pad_to))
    for count in counts:
        plan.add(ImageSlot(None, 0, count, (count, 5)), (0, 0, count), (0, 0, 0))
    end = 0
    for number in range(len(counts)):
        offset, size = plan.region(number, 1)
        assert offset == end
        end += size
    assert end == np.prod(plan.shape)
    assert plan.region(0, len(counts)) == (0, end)


@given(kinds=st.lists(st.integers(0, 4), max_size=10), data=st.data())
def test_one_bad_tile_takes_the_whole_picture_with_it(kinds: list[int], data: Any) -> None:
    plan, groups = MediaPlan(MediaLayout((2,))), []
    for kind in kinds:  # 0: an image without parts; n: one of n parts
        first = len(plan.slots)
        for part in range(kind) if kind else (-1,):
            plan.add(ImageSlot(None, 0, 1, (2,), part=part), (0, 0, 1), (0, 0, 0))
        groups.append(set(range(first, len(plan.slots))))
    if not groups:
        return
    bad = data.draw(st.sets(st.integers(0, len(plan.slots) - 1)))
    wanted = set().union(*(group for group in groups if group & bad))
    assert plan.whole(bad) == sorted(wanted)


def test_padded_and_packed_patches_are_the_same_patches() -> None:
    padded, packed = made(NAFLEX, PICTURES), made(PACKED, PICTURES)
    assert padded.pixel_values.shape == (3, 16, 768)
    assert packed.pixel_values.shape == (int(packed.cu_units[-1]), 768)
    assert torch.equal(padded.grids, packed.grids)
    for number in range(3):
        rows, columns = packed.grids[number].tolist()
        assert len(packed.pixels_of(number)) == rows * columns
        assert torch.equal(padded.pixels_of(number), packed.pixels_of(number))
    mask = padded.attention_mask
    assert mask.dtype == torch.int32
    assert mask.sum(1).tolist() == torch.diff(packed.cu_units).tolist()


def test_a_model_sees_zeros_where_there_is_no_patch_or_no_picture() -> None:
    for processor in (NAFLEX, PACKED, FIXED):
        media = made(processor, PICTURES)
        media.valid[1] = False
        found = media.training(None, torch.float32)
        values = found["pixel_values"]
        if processor is PACKED:
            first, last = media.cu_units[1:3].tolist()
            assert found["image_cu_seqlens"].dtype == torch.int32
            assert not values[first:last].any()
            assert values[:first].any()
        else:
            assert not values[1].any()
            assert values[0].any()
        if processor is NAFLEX:
            assert not values[~media.attention_mask.bool()].any()
            assert found["pixel_attention_mask"].sum() == media.cu_units[-1]
        assert ("spatial_shapes" in found) == (processor is not FIXED)


@pytest.mark.parametrize("processor", [NAFLEX, PACKED, FIXED, TILES, ANYRES, QWEN, FRAMES, *VIDEOS])
def test_a_batch_without_images_gives_nothing_or_one_of_zeros_on_demand(processor: Any) -> None:
    media = made(processor, [])
    assert len(media.training(None, torch.float32)["pixel_values"]) == 0
    assert media.training(None, torch.float32, omit=True) == {}
    found = media.training(None, torch.float32, dummy=True)
    pixels = found["pixel_values"]
    assert len(pixels) > 0
    assert pixels.shape[-len(processor.unit_shape) :] == processor.unit_shape
    assert not pixels.any()
    if processor.grid_key is not None:
        (grid,) = found[processor.grid_key].tolist()
        assert min(grid) > 0
        if processor in (QWEN, *VIDEOS):
            assert np.prod(grid) == len(pixels) == processor.merge_size**2


def test_padding_of_no_images_is_as_that_of_some() -> None:
    empty = made(PACKED, []).training(None, torch.float32, pad_to=7)
    assert empty["pixel_values"].shape == (7, 768)
    assert empty["image_cu_seqlens"].tolist() == [0, 7]
    assert empty["spatial_shapes"].shape == (0, 2)
    assert made(NAFLEX, []).training(None, torch.float32, pad_to=2)["spatial_shapes"].all()
    for processor in (QWEN, ANYRES):
        for pictures in ([], PICTURES[:1]):
            with pytest.raises(ConfigError, match="pad_images_to needs images that can be told"):
                made(processor, pictures).training(None, torch.float32, pad_to=7000)


def test_images_are_padded_to_one_shape_that_a_model_can_be_compiled_for() -> None:
    fixed = made(FIXED, PICTURES).training(None, torch.float32, pad_to=5)
    assert fixed["pixel_values"].shape == (5, 3, 32, 32)
    assert not fixed["pixel_values"][3:].any()
    naflex = made(NAFLEX, PICTURES).training(None, torch.float32, pad_to=4)
    assert naflex["pixel_values"].shape == (4, 16, 768)
    assert naflex["spatial_shapes"][3].tolist() == [1, 1]
    assert naflex["pixel_attention_mask"][3].tolist() == [1] + [0] * 15
    packed = made(PACKED, PICTURES)
    patches = int(packed.cu_units[-1])
    found = packed.training(None, torch.float32, pad_to=patches + 7)
    assert found["pixel_values"].shape == (patches + 7, 768)
    assert found["image_cu_seqlens"].tolist() == [*packed.cu_units.tolist(), patches + 7]
    assert found["spatial_shapes"].shape == (3, 2)
    with pytest.raises(ConfigError, match="pad_images_to=2, but the batch has 3 images"):
        made(FIXED, PICTURES).training(None, torch.float32, pad_to=2)
    with pytest.raises(ConfigError, match=r"has \d+ patches: .*max_patches=\.\.\."):
        made(PACKED, PICTURES).training(None, torch.float32, pad_to=2)
