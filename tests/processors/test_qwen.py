import json
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import skimage
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import Qwen2VLImageProcessor, Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize as their_resize

from tests.fixtures.pictures import encode, load, noise
from tests.fixtures.processing import read_from, written
from zephon_mm.errors import ConfigError, SampleError
from zephon_mm.processors import QwenVLProcessor
from zephon_mm.processors.image import decode
from zephon_mm.processors.qwen import smart_resize
from zephon_mm.protocols import ImageProcessor

PHOTOGRAPHS = Path(skimage.__file__).parent / "data"
MODELS = ("qwen2.5-vl", "qwen3-vl")
BACKENDS = {"torchvision": Qwen2VLImageProcessor, "pillow": Qwen2VLImageProcessorPil}
EXTREME_SIZES = [
    *((1, 1), (2, 1), (3, 3), (3, 5), (1, 200), (200, 1), (1, 150), (313, 2), (31, 33)),
    *((28, 28), (32, 32), (56, 56), (64, 64), (256, 256), (255, 257), (5, 1000), (1999, 10)),
]


def reference(processor, pixels, **options):
    theirs = BACKENDS[processor.backend](
        size={"shortest_edge": processor.min_pixels, "longest_edge": processor.max_pixels},
        patch_size=processor.patch_size,
        merge_size=processor.merge_size,
        temporal_patch_size=processor.temporal_patch_size,
        image_mean=list(processor.mean),
        image_std=list(processor.std),
    )
    return theirs(pixels, return_tensors="pt", input_data_format="channels_last", **options)


def assert_equals_transformers(processor, encoded):
    ours, pixels = written(processor, encoded), decode(encoded)
    raw = reference(processor, pixels, do_rescale=False, do_normalize=False)
    assert np.array_equal(ours, raw["pixel_values"].numpy())
    normal = processor.normalize(torch.from_numpy(ours), torch.float32)
    whole = reference(processor, pixels)
    assert torch.equal(normal, whole["pixel_values"])
    measured = processor.measure(read_from(encoded))
    assert whole["image_grid_thw"].tolist() == [list(measured.grid)]
    assert measured.num_tokens == np.prod(measured.grid) // processor.merge_size**2


# Law 1: bit for bit transformers.


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["coffee.png", "rocket.jpg", "page.png", "hubble_deep_field.jpg"])
def test_photographs_equal_transformers(name, model, backend):
    processor = QwenVLProcessor.preset(model, backend=backend)
    assert_equals_transformers(processor, (PHOTOGRAPHS / name).read_bytes())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shape", EXTREME_SIZES)
def test_extreme_sizes_equal_transformers(shape, model, backend):
    processor = QwenVLProcessor.preset(model, backend=backend)
    assert_equals_transformers(processor, encode(noise(*shape)))


@pytest.mark.slow
@settings(max_examples=60)
@given(
    shape=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    patch=st.tuples(st.sampled_from([2, 7, 14, 16]), st.integers(1, 3), st.integers(1, 3)),
    limits=st.tuples(st.integers(1, 20_000), st.integers(20_000, 90_000)),
    backend=st.sampled_from(sorted(BACKENDS)),
    image_format=st.sampled_from(["PNG", "JPEG"]),
)
def test_any_size_and_setting_equals_transformers(shape, patch, limits, backend, image_format):
    if max(shape) > 200 * min(shape):
        shape = shape[::-1][:1] * 2
    processor = QwenVLProcessor(
        *patch, *limits, mean=(0.48, 0.45, 0.4), std=(0.26, 0.27, 0.28), backend=backend
    )
    assert_equals_transformers(processor, encode(noise(*shape), image_format))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", MODELS)
def test_all_levels_normalise_as_in_transformers(model, backend):
    processor = QwenVLProcessor.preset(model, backend=backend)
    side = 16 * processor.factor
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16).repeat(side // 16, 0)
    pixels = levels.repeat(side // 16, 1)[..., None].repeat(3, axis=2)
    theirs = reference(processor, pixels)["pixel_values"]
    ours = torch.from_numpy(written(processor, encode(pixels)))
    assert torch.equal(processor.normalize(ours, torch.float32), theirs)
    assert torch.equal(processor.normalize(ours, torch.bfloat16), theirs.to(torch.bfloat16))
    assert processor.normalize(ours[:0], torch.float32).shape == (0, *processor.unit_shape)


# Law 2: the grid is known from the header.


side_px = st.one_of(st.integers(1, 70), st.integers(1, 40_000))


@settings(max_examples=400)
@given(
    height=side_px,
    width=side_px,
    factor=st.sampled_from([28, 32, 16, 48]),
    least=st.sampled_from([1, 56 * 56, 65536, 10**6]),
    most=st.sampled_from([10**6, 12_845_056, 16_777_216]),
)
def test_the_size_is_that_of_transformers(height, width, factor, least, most):
    if max(height, width) / min(height, width) > 200:
        with pytest.raises(SampleError, match=r"extreme_aspect.*200 at most"):
            smart_resize(height, width, factor=factor, limits=(least, most))
        return
    ours = smart_resize(height, width, factor=factor, limits=(least, most))
    assert ours == their_resize(height, width, factor, least, most)
    assert min(ours) >= factor


def test_five_hundred_sizes_have_the_patches_of_transformers():
    rng = random.Random(5)
    for model in MODELS:
        processor = QwenVLProcessor.preset(model)
        size = {"shortest_edge": processor.min_pixels, "longest_edge": processor.max_pixels}
        theirs = Qwen2VLImageProcessor(size=size, patch_size=processor.patch_size)
        for _ in range(500):
            height = rng.randint(1, 9000)
            width = rng.randint(max(1, height // 200 + 1), min(9000, height * 200))
            rows, cols = processor.grid(height, width)
            assert rows * cols == theirs.get_number_of_image_patches(height, width)


@settings(max_examples=40)
@given(
    shape=st.tuples(st.integers(1, 200), st.integers(1, 200)),
    orientation=st.integers(1, 8),
    model=st.sampled_from(MODELS),
)
def test_the_measured_shape_is_written(shape, orientation, model):
    exif = Image.Exif()
    exif[0x0112] = orientation
    encoded = encode(noise(*shape), "JPEG", exif=exif)
    processor = QwenVLProcessor.preset(model, max_pixels=150 * 150)
    measured = processor.measure(read_from(encoded))
    height, width = shape[::-1] if orientation >= 5 else shape
    assert measured.grid == (1, *processor.grid(height, width))
    assert measured.shape == (np.prod(measured.grid), *processor.unit_shape)
    assert_equals_transformers(processor, encoded)


# Layout, by hand.


def test_patches_of_a_token_are_neighbours_and_channels_come_first():
    pixels = np.zeros((8, 8, 3), np.uint8)
    pixels[..., 0] = np.arange(8)[:, None] // 2 * 10 + np.arange(8) // 2  # row, column of a patch
    pixels[..., 1], pixels[..., 2] = 101, 102
    processor = QwenVLProcessor(patch_size=2, min_pixels=64, max_pixels=64)
    patches = written(processor, encode(pixels)).reshape(16, 3, 2, 2, 2)
    order = [0, 1, 10, 11, 2, 3, 12, 13, 20, 21, 30, 31, 22, 23, 32, 33]
    assert patches[:, 0, 0, 0, 0].tolist() == order
    assert (patches[:, 0] == np.array(order).reshape(16, 1, 1, 1)).all()
    assert (patches[:, 1] == 101).all()
    assert (patches[:, 2] == 102).all()


def test_one_pixel_gives_one_colour():
    """IMG-21."""
    encoded = load("IMG-21/w1_h1.png")
    processor = QwenVLProcessor(max_pixels=256 * 256)
    patches = written(processor, encoded).reshape(256, 3, -1)
    assert (patches == decode(encoded)[0, 0][:, None]).all()


# Refusals and settings.


@pytest.mark.parametrize("shape", [(1, 201), (201, 1), (10, 4000)])
def test_slivers_are_refused_from_the_header(shape):
    """IMG-23."""
    with pytest.raises(SampleError, match=r"extreme_aspect.*factor of 200"):
        QwenVLProcessor().measure(read_from(encode(np.zeros((*shape, 3), np.uint8))))


def test_defects_are_found_while_measuring():
    processor = QwenVLProcessor(decode_limit_px=100)
    with pytest.raises(SampleError, match="too_many_pixels"):
        processor.measure(read_from(encode(noise(10, 11))))
    with pytest.raises(SampleError, match="not_an_image"):
        processor.measure(read_from(b"<html></html>"))


def test_a_damaged_body_leaves_the_batch_alone():
    encoded = encode(noise(64, 64), "JPEG")[:-200]
    out = np.full(QwenVLProcessor().measure(read_from(encoded)).shape, 77, dtype=np.uint8)
    with pytest.raises(SampleError, match="broken_image"):
        QwenVLProcessor().write(encoded, out)
    assert (out == 77).all()


def test_it_is_picklable_and_a_processor():
    processor = QwenVLProcessor.preset("qwen2.5-vl", max_pixels=10**6)
    assert pickle.loads(pickle.dumps(processor)) == processor
    assert isinstance(processor, ImageProcessor)
    assert (processor.unit_shape, processor.pad_to) == ((1176,), None)
    assert processor.grid_key == "image_grid_thw"


@pytest.mark.parametrize(
    "settings",
    [
        {"patch_size": 0},
        {"merge_size": 0},
        {"temporal_patch_size": 0},
        {"decode_limit_px": 0},
        {"min_pixels": 0},
        {"min_pixels": 2**24 + 1},
        {"min_pixels": 1, "max_pixels": 1023},
        {"mean": (0.5,)},
        {"std": (0.5, 0.5, 0.0)},
        {"backend": "opencv"},
    ],
)
def test_impossible_settings_are_refused_at_construction(settings):
    with pytest.raises(ConfigError):
        QwenVLProcessor(**settings)


def test_presets_are_the_published_ones():
    three, two = QwenVLProcessor.preset("qwen3-vl"), QwenVLProcessor.preset("qwen2.5-vl")
    assert three == QwenVLProcessor()
    assert (three.min_pixels, three.max_pixels) == (65536, 16_777_216)
    assert (two.patch_size, two.min_pixels, two.max_pixels) == (14, 3136, 12_845_056)
    assert two.mean == tuple(Qwen2VLImageProcessor().image_mean)
    assert two.std == tuple(Qwen2VLImageProcessor().image_std)
    small = QwenVLProcessor.preset("qwen3-vl", max_pixels=4096)
    assert (small.min_pixels, small.max_pixels) == (4096, 4096)
    with pytest.raises(ConfigError, match=r"qwen2\.5-vl, qwen3-vl"):
        QwenVLProcessor.preset("qwen1")


def test_fingerprint_tells_all_that_pixels_depend_on():
    ours = QwenVLProcessor().fingerprint()
    assert json.loads(json.dumps(ours)) == ours
    others = [
        QwenVLProcessor(patch_size=14),
        QwenVLProcessor(merge_size=1),
        QwenVLProcessor(temporal_patch_size=1),
        QwenVLProcessor(min_pixels=1024),
        QwenVLProcessor(max_pixels=10**6),
        QwenVLProcessor(mean=(0.5, 0.5, 0.4)),
        QwenVLProcessor(std=(0.5, 0.5, 0.4)),
        QwenVLProcessor(backend="pillow"),
        QwenVLProcessor(decode_limit_px=1000),
    ]
    assert all(other.fingerprint() != ours for other in others)
