import concurrent.futures
import io
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import skimage
import sklearn.datasets
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import Siglip2ImageProcessor, Siglip2ImageProcessorPil
from transformers.models.siglip2.image_processing_siglip2 import get_image_size_for_max_num_patches

from tests.fixtures.processing import read_from, written
from zephon_mm.errors import ConfigError, SampleError
from zephon_mm.processors import NaFlexProcessor
from zephon_mm.processors.image import decode
from zephon_mm.processors.naflex import PRESETS
from zephon_mm.processors.siglip import SigLIPProcessor
from zephon_mm.protocols import ImageProcessor

CASES = Path(__file__).parents[1] / "fixtures" / "cases"
PHOTOGRAPHS = [
    Path(sklearn.datasets.__file__).parent / "images" / "china.jpg",
    Path(skimage.__file__).parent / "data" / "rocket.jpg",
    Path(skimage.__file__).parent / "data" / "chelsea.png",
]
BACKENDS = {"torchvision": Siglip2ImageProcessor, "pillow": Siglip2ImageProcessorPil}
EXTREME_SIZES = [
    *((1, 1), (2, 1), (3, 3), (3, 5), (5, 3), (1, 313), (313, 1), (1, 201), (16, 16), (256, 256)),
    *((10, 4000), (4000, 10), (31, 2000), (480, 853), (1, 20_000), (20_000, 1)),
]


def random_sizes(count, largest):
    """Return sizes as even on a logarithmic scale, so that slivers and specks are among them."""
    rng = np.random.default_rng(2026)
    return np.exp(rng.uniform(0, np.log(largest), (count, 2))).astype(int).tolist()


def encode(shape, image_format="PNG", **options):
    """Return noise of (height, width) as a PNG or JPEG."""
    noise = np.random.default_rng(shape).integers(0, 256, (*shape, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, image_format, **{"compress_level": 1, **options})
    return buffer.getvalue()


def reference(processor, images, **options):
    theirs = BACKENDS[processor.backend](
        patch_size=processor.patch_size,
        max_num_patches=processor.max_num_patches,
        resample=processor.resample,
        **options,
    )
    return theirs(images, return_tensors="pt", input_data_format="channels_last")


def assert_equals_transformers(processor, encoded):
    measured, ours = processor.measure(read_from(encoded)), written(processor, encoded)
    pixels = decode(encoded)
    raw = reference(processor, pixels, do_rescale=False, do_normalize=False)["pixel_values"][0]
    theirs = reference(processor, pixels)
    assert list(measured.grid) == theirs["spatial_shapes"][0].tolist()
    assert measured.num_tokens == len(ours) == theirs["pixel_attention_mask"][0].sum()
    assert np.array_equal(ours, raw[: len(ours)].numpy())
    normal = processor.normalize(torch.from_numpy(ours), torch.float32)
    assert torch.equal(normal, theirs["pixel_values"][0, : len(ours)])


def their_grid(height, width, patch_size, max_num_patches):
    sides = get_image_size_for_max_num_patches(height, width, patch_size, max_num_patches)
    return tuple(side // patch_size for side in sides)


# Law 1: bit for bit transformers.


@settings(max_examples=300, deadline=None)
@given(
    height=st.one_of(st.integers(1, 40), st.integers(1, 5000), st.integers(1, 65_535)),
    width=st.one_of(st.integers(1, 40), st.integers(1, 5000), st.integers(1, 65_535)),
    patch_size=st.sampled_from([14, 16, 32]),
    max_num_patches=st.integers(1, 4096),
)
def test_any_grid_equals_transformers(height, width, patch_size, max_num_patches):
    ours = NaFlexProcessor(max_num_patches, patch_size).grid(height, width)
    assert ours == their_grid(height, width, patch_size, max_num_patches)
    assert min(ours) >= 1
    assert ours[0] * ours[1] <= max_num_patches


@pytest.mark.parametrize("max_num_patches", [256, 1024])
def test_500_grids_equal_transformers(max_num_patches):
    for height, width in EXTREME_SIZES + random_sizes(500, 8000):
        ours = NaFlexProcessor(max_num_patches).grid(height, width)
        assert ours == their_grid(height, width, 16, max_num_patches), (height, width)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", EXTREME_SIZES + random_sizes(60, 1200))
def test_pixels_of_a_png_equal_transformers(shape, backend):
    assert_equals_transformers(NaFlexProcessor(backend=backend), encode(shape))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", random_sizes(30, 900))
@pytest.mark.parametrize(("max_num_patches", "resample"), [(576, 2), (64, 3)])
def test_pixels_of_a_jpeg_equal_transformers(shape, backend, max_num_patches, resample):
    processor = NaFlexProcessor(max_num_patches, resample=resample, backend=backend)
    assert_equals_transformers(processor, encode(shape, "JPEG", quality=90))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("path", PHOTOGRAPHS, ids=lambda path: path.name)
@pytest.mark.parametrize("max_num_patches", [256, 1024])
def test_photographs_equal_transformers(path, backend, max_num_patches):
    processor = NaFlexProcessor(max_num_patches, backend=backend)
    assert_equals_transformers(processor, path.read_bytes())


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 120), st.integers(1, 120)),
    patch_size=st.sampled_from([7, 14, 16]),
    max_num_patches=st.integers(1, 80),
    resample=st.sampled_from([2, 3]),
    backend=st.sampled_from(sorted(BACKENDS)),
)
def test_any_setting_equals_transformers(shape, patch_size, max_num_patches, resample, backend):
    processor = NaFlexProcessor(max_num_patches, patch_size, resample, backend)
    assert_equals_transformers(processor, encode(shape))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_padded_and_a_packed_batch_hold_what_transformers_gives(backend):
    images = [encode(shape, "JPEG") for shape in ((40, 300), (123, 77), (1, 1), (256, 256))]
    processor = NaFlexProcessor(64, backend=backend)
    theirs = reference(processor, [decode(image) for image in images])
    padded = np.zeros((len(images), processor.pad_to, *processor.unit_shape), dtype=np.uint8)
    mask = torch.zeros(padded.shape[:2], dtype=torch.int32)
    for number, image in enumerate(images):
        patches = written(processor, image)
        padded[number, : len(patches)] = patches
        mask[number, : len(patches)] = 1
    normal = processor.normalize(torch.from_numpy(padded), torch.float32) * mask[..., None]
    assert torch.equal(mask, theirs["pixel_attention_mask"])
    assert torch.equal(normal, theirs["pixel_values"])

    packed = NaFlexProcessor(64, backend=backend, packed=True)
    ours = torch.from_numpy(np.concatenate([written(packed, image) for image in images]))
    assert ours.shape[1:] == packed.unit_shape
    assert torch.equal(
        packed.normalize(ours, torch.float32), theirs["pixel_values"][mask.to(torch.bool)]
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_levels_normalise_as_in_transformers(backend):
    levels = np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3)
    processor = NaFlexProcessor(1, backend=backend)
    theirs = reference(processor, levels)["pixel_values"][0]
    ours = torch.from_numpy(levels.reshape(1, 768))
    assert torch.equal(processor.normalize(ours, torch.float32), theirs)
    assert torch.equal(processor.normalize(ours, torch.bfloat16), theirs.to(torch.bfloat16))


# Law 2: the measured shape is written, one patch or more each way.


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 400), st.integers(1, 400)),
    patch_size=st.sampled_from([14, 16, 32]),
    max_num_patches=st.integers(1, 300),
    orientation=st.integers(1, 8),
)
def test_the_measured_shape_is_written(shape, patch_size, max_num_patches, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    encoded = encode(shape, "JPEG", exif=exif)
    processor = NaFlexProcessor(max_num_patches, patch_size)
    measured = processor.measure(read_from(encoded))
    rows, cols = measured.grid
    assert (
        measured.shape == (rows * cols, *processor.unit_shape) == (rows * cols, patch_size**2 * 3)
    )
    assert measured.num_tokens == rows * cols <= max_num_patches
    assert measured.parts == ()
    upright = shape[::-1] if orientation >= 5 else shape
    assert (rows, cols) == their_grid(*upright, patch_size, max_num_patches)
    processor.write(encoded, np.empty(measured.shape, dtype=np.uint8))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "path",
    [path for case in (19, 20, 21, 23) for path in sorted(CASES.glob(f"IMG-{case}/w*"))],
    ids=lambda path: f"{path.parent.name}/{path.name}",
)
def test_slivers_and_specks_have_a_patch_each_way(path, backend):
    """Hold for IMG-19, IMG-20, IMG-21 and IMG-23."""
    encoded, processor = path.read_bytes(), NaFlexProcessor(backend=backend)
    rows, cols = processor.measure(read_from(encoded)).grid
    assert min(rows, cols) >= 1
    assert rows * cols <= 256
    assert_equals_transformers(processor, encoded)


@pytest.mark.parametrize("name", ["w1_h1.jpg", "w1_h1.png"])
def test_one_pixel_gives_one_colour(name):
    """IMG-21."""
    encoded = (CASES / "IMG-21" / name).read_bytes()
    colour = decode(encoded)[0, 0]
    for backend in BACKENDS:
        ours = written(NaFlexProcessor(backend=backend), encoded)
        assert len(ours) == 49
        assert np.array_equal(ours.reshape(-1, 3), np.broadcast_to(colour, (49 * 256, 3)))


def test_patches_are_in_raster_order_with_channels_last():
    pixels = np.full((48, 48, 3), 9, dtype=np.uint8)
    pixels[..., 0] = np.arange(48)[:, None] * 5
    pixels[..., 1] = np.arange(48) * 5
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    patches = written(NaFlexProcessor(9), stream.getvalue()).reshape(3, 3, 16, 16, 3)
    for row, col, y, x in np.ndindex(3, 3, 16, 16):
        assert patches[row, col, y, x].tolist() == [(row * 16 + y) * 5, (col * 16 + x) * 5, 9]


# Law 3: no state.


def test_threads_and_order_do_not_change_patches():
    processor = NaFlexProcessor()
    images = [encode(shape) for shape in random_sizes(12, 500)]
    alone = [written(processor, image) for image in images]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        together = list(pool.map(lambda image: written(processor, image), images[::-1]))
    assert all(np.array_equal(a, b) for a, b in zip(alone, together[::-1], strict=True))


def test_it_is_picklable_and_a_processor():
    processor = NaFlexProcessor(64, 14, 3, "pillow", packed=True)
    assert pickle.loads(pickle.dumps(processor)) == processor
    assert isinstance(processor, ImageProcessor)


# Refusals and settings.


def test_defects_are_found_while_measuring():
    with pytest.raises(SampleError, match="too_many_pixels"):
        NaFlexProcessor(max_pixels=100).measure(read_from(encode((10, 11))))
    with pytest.raises(SampleError, match="not_an_image"):
        NaFlexProcessor().measure(read_from(b"<html></html>"))


def test_a_side_that_needs_too_many_patches_is_refused():
    with pytest.raises(SampleError, match=r"expected at most 2.*max_num_patches") as caught:
        NaFlexProcessor(2).grid(1, 60_000_000)
    assert caught.value.reason == "too_many_patches"


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_patches": 0},
        {"max_num_patches": 25.6},
        {"patch_size": 0},
        {"resample": 1},
        {"backend": "opencv"},
        {"max_pixels": 0},
    ],
)
def test_impossible_settings_are_refused_at_construction(settings):
    with pytest.raises(ConfigError):
        NaFlexProcessor(**settings)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_the_published_ones(name):
    assert NaFlexProcessor.preset(name) == NaFlexProcessor(256, 16, 2)
    preset = NaFlexProcessor.preset(f"google/{name}", 1024, backend="pillow", packed=True)
    assert preset == NaFlexProcessor(1024, backend="pillow", packed=True)


def test_the_preset_of_another_kind_names_its_processor():
    with pytest.raises(ConfigError, match=r"SigLIPProcessor\.preset"):
        NaFlexProcessor.preset("siglip2-so400m-patch16-384")
    with pytest.raises(ConfigError, match=r"NaFlexProcessor\.preset"):
        SigLIPProcessor.preset("google/siglip2-so400m-patch16-naflex")


def test_the_batch_layout_is_said():
    padded, packed = NaFlexProcessor(64), NaFlexProcessor(64, packed=True)
    assert (padded.unit_shape, padded.pad_to, padded.grid_key) == ((768,), 64, "spatial_shapes")
    assert (packed.unit_shape, packed.pad_to, packed.grid_key) == ((768,), None, "spatial_shapes")


def test_fingerprint_tells_all_that_patches_depend_on():
    ours = NaFlexProcessor().fingerprint()
    assert json.loads(json.dumps(ours)) == ours
    assert NaFlexProcessor(packed=True).fingerprint() == ours  # only the batch differs
    others = [
        NaFlexProcessor(255),
        NaFlexProcessor(patch_size=14),
        NaFlexProcessor(resample=3),
        NaFlexProcessor(backend="pillow"),
        NaFlexProcessor(max_pixels=1000),
    ]
    assert all(other.fingerprint() != ours for other in others)
