import concurrent.futures
import hashlib
import io
import json
import pickle
from functools import cache
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import skimage
import sklearn.datasets
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import SiglipImageProcessor, SiglipImageProcessorPil

from tests.fixtures.pictures import encode, load, noise
from tests.fixtures.processing import read_from, written
from zephon_mm.errors import ConfigError, SampleError
from zephon_mm.processors import SigLIPProcessor
from zephon_mm.processors.image import decode
from zephon_mm.processors.resize import _resizes_bytes
from zephon_mm.processors.siglip import preset_names
from zephon_mm.protocols import ImageProcessor

PHOTOGRAPHS = {
    **{
        name: Path(skimage.__file__).parent / "data" / name
        for name in (
            *("astronaut.png", "chelsea.png", "coffee.png", "hubble_deep_field.jpg", "ihc.png"),
            *("motorcycle_left.png", "moon.png", "page.png", "rocket.jpg", "camera.png"),
        )
    },
    **{
        name: Path(sklearn.datasets.__file__).parent / "images" / name
        for name in ("china.jpg", "flower.jpg")
    },
}
ODD_SIZES = [(1, 1), (1, 313), (313, 1), (3, 5), (37, 53), (1, 201), (31, 2000), (2000, 31)]
BACKENDS = {"torchvision": SiglipImageProcessor, "pillow": SiglipImageProcessorPil}
EVERY_SETTING = [
    pytest.param(size, resample, backend, id=f"{backend}-{resample}-{size}")
    for backend in BACKENDS
    for resample in (2, 3)
    for size in (224, 384)
]


@cache
def photograph(name, quality):
    """Return a photograph, at most 640 pixels wide, as JPEG; quality 100 stands for PNG."""
    with Image.open(PHOTOGRAPHS[name]) as image:
        picture = image.convert("RGB")
    picture.thumbnail((640, 640))
    if quality == 100:
        return encode(picture)
    return encode(picture, "JPEG", quality=quality)


def reference(processor, pixels, **options):
    height, width = processor.height_width
    theirs = BACKENDS[processor.backend](
        size={"height": height, "width": width}, resample=processor.resample, **options
    )
    found = theirs(pixels, return_tensors="pt", input_data_format="channels_last")
    return found["pixel_values"][0]


def assert_equals_transformers(processor, encoded):
    ours, pixels = written(processor, encoded), decode(encoded)
    raw = reference(processor, pixels, do_rescale=False, do_normalize=False)
    assert np.array_equal(ours, raw.numpy())
    normal = processor.normalize(torch.from_numpy(ours), torch.float32)
    assert torch.equal(normal, reference(processor, pixels))


# Law 1: bit for bit transformers.


@pytest.mark.parametrize("quality", [90, 100])
@pytest.mark.parametrize("name", PHOTOGRAPHS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("resample", [2, 3])
def test_photographs_equal_transformers(backend, resample, name, quality):
    assert_equals_transformers(
        SigLIPProcessor(384, 14, resample, backend), photograph(name, quality)
    )


@pytest.mark.parametrize(("size", "resample", "backend"), EVERY_SETTING)
@pytest.mark.parametrize("shape", ODD_SIZES)
def test_odd_sizes_equal_transformers(shape, size, resample, backend):
    encoded = encode(Image.fromarray(noise(*shape)))
    assert_equals_transformers(SigLIPProcessor(size, 14, resample, backend), encoded)


@pytest.mark.parametrize(("size", "resample", "backend"), EVERY_SETTING)
def test_an_image_of_the_right_size_is_copied(size, resample, backend):
    pixels = noise(size, size)
    ours = written(SigLIPProcessor(size, 14, resample, backend), encode(Image.fromarray(pixels)))
    assert np.array_equal(ours, pixels.transpose(2, 0, 1))


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 120), st.integers(1, 120)),
    size=st.tuples(st.integers(2, 90), st.integers(2, 90)),  # to 1 x 1 their call fails
    resample=st.sampled_from([2, 3]),
    backend=st.sampled_from(sorted(BACKENDS)),
)
def test_any_size_equals_transformers(shape, size, resample, backend):
    encoded = encode(Image.fromarray(noise(*shape)))
    assert_equals_transformers(SigLIPProcessor(size, 1, resample, backend), encoded)


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_levels_normalise_as_in_transformers(backend):
    levels = np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3)
    processor = SigLIPProcessor(16, 16, backend=backend)
    ours = processor.normalize(torch.from_numpy(levels).permute(2, 0, 1), torch.float32)
    theirs = reference(processor, levels)
    assert torch.equal(ours, theirs)
    half = processor.normalize(torch.from_numpy(levels).permute(2, 0, 1), torch.bfloat16)
    assert torch.equal(half, theirs.to(torch.bfloat16))


def test_normalising_leaves_its_argument_alone():
    pixels = torch.full((2, 3, 4, 4), 255, dtype=torch.uint8)
    assert SigLIPProcessor().normalize(pixels, torch.float32).unique().tolist() == [1.0]
    assert pixels.unique().tolist() == [255]


# Law 2: measured shape = written shape.


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 400), st.integers(1, 400)),
    size=st.one_of(st.integers(32, 128), st.tuples(st.integers(32, 128), st.integers(32, 128))),
    patch_size=st.sampled_from([14, 16, 32]),
    orientation=st.integers(1, 8),
)
def test_the_measured_shape_is_written(shape, size, patch_size, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    encoded = encode(Image.fromarray(noise(*shape)), "JPEG", exif=exif)
    processor = SigLIPProcessor(size, patch_size)
    measured = processor.measure(read_from(encoded))
    height, width = processor.height_width
    assert measured.shape == (3, height, width) == written(processor, encoded).shape
    assert measured.num_tokens == (height // patch_size) * (width // patch_size)


@pytest.mark.parametrize("name", ["w1_h1.jpg", "w1_h1.png"])
def test_one_pixel_gives_one_colour(name):
    """IMG-21."""
    encoded = load(f"IMG-21/{name}")
    colour = decode(encoded)[0, 0]
    for backend in BACKENDS:
        ours = written(SigLIPProcessor(backend=backend), encoded)
        assert np.array_equal(ours, np.broadcast_to(colour[:, None, None], ours.shape))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wide_image_is_squashed_not_cropped(backend):
    """IMG-31: a circle, 40 px wide in 200 x 50 px, is 20 x 80 px wide in a square of 100."""
    rows, columns = np.ogrid[:50, :200]
    circle = (rows - 24.5) ** 2 + (columns - 99.5) ** 2 <= 20**2
    circle[:, :20] = circle[:, -20:] = True  # both ends stay visible
    pixels = np.repeat(np.where(circle, 255, 0).astype(np.uint8)[..., None], 3, axis=2)
    ours = written(SigLIPProcessor(100, 10, backend=backend), encode(Image.fromarray(pixels)))[0]
    assert ours[:, :9].min() == ours[:, -9:].min() == 255
    inside = ours[:, 15:-15] > 127
    assert abs(inside.any(axis=0).sum() - 20) <= 1
    assert abs(inside.any(axis=1).sum() - 80) <= 1


GOLDEN = {
    ("torchvision", 2): "fd5aed92afb18c5e",
    ("torchvision", 3): "c3c3e264902d8e8d",
    ("pillow", 2): "32f2630bfa716dcc",
    ("pillow", 3): "020e94fe8562e25d",
}


@pytest.mark.parametrize(("backend", "resample"), GOLDEN)
def test_the_pixels_of_each_backend_are_those_of_always(backend, resample):
    """IMG-30: each has its own; bilinear torchvision has other ones on CPUs without AVX2."""
    if (backend, resample) == ("torchvision", 2) and not _resizes_bytes():
        pytest.skip("a CPU whose bilinear filter works in float32")
    ours = written(
        SigLIPProcessor(224, 16, resample, backend), encode(Image.fromarray(noise(61, 97)))
    )
    assert hashlib.sha256(ours).hexdigest()[:16] == GOLDEN[backend, resample]


# Law 3: no state.


def test_threads_and_order_do_not_change_pixels():
    processor = SigLIPProcessor()
    images = [photograph(name, 90) for name in PHOTOGRAPHS]
    alone = [written(processor, image) for image in images]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        together = list(pool.map(lambda image: written(processor, image), images[::-1]))
    assert all(np.array_equal(a, b) for a, b in zip(alone, together[::-1], strict=True))


def test_it_is_picklable_and_a_processor():
    processor = SigLIPProcessor(224, 16, 2, "pillow")
    assert pickle.loads(pickle.dumps(processor)) == processor
    assert isinstance(processor, ImageProcessor)


# Scaled decoding.


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_large_jpeg_is_decoded_scaled_to_nearly_the_same_pixels(backend):
    encoded = encode(Image.open(PHOTOGRAPHS["astronaut.png"]), "JPEG", quality=90)  # 512 x 512
    processor = SigLIPProcessor(128, 16, backend=backend, decode="scaled")
    scaled = written(processor, encoded)
    exact = written(SigLIPProcessor(128, 16, backend=backend), encoded)
    assert 0 < np.abs(scaled.astype(int) - exact).mean() < 1
    half = decode(encoded, at_least=(256, 256))
    raw = reference(processor, half, do_rescale=False, do_normalize=False)
    assert np.array_equal(scaled, raw.numpy())


@pytest.mark.parametrize("size", [129, 257, (128, 129)])
def test_an_image_below_four_times_the_output_is_decoded_exactly(size):
    encoded = encode(Image.open(PHOTOGRAPHS["astronaut.png"]), "JPEG", quality=90)
    exact, scaled = (
        written(SigLIPProcessor(size, 16, decode=how), encoded) for how in ("exact", "scaled")
    )
    assert np.array_equal(exact, scaled)


# Refusals and settings.


def test_defects_are_found_while_measuring():
    processor = SigLIPProcessor(max_pixels=100)
    with pytest.raises(SampleError, match="too_many_pixels"):
        processor.measure(read_from(encode(Image.fromarray(noise(10, 11)))))
    with pytest.raises(SampleError, match="not_an_image"):
        processor.measure(read_from(b"<html></html>"))


@pytest.mark.parametrize(
    "settings",
    [
        {"resample": 0},
        {"resample": 1},
        {"backend": "opencv"},
        {"size": 13},
        {"size": (384, 8)},
        {"patch_size": 0},
        {"std": 0.0},
        {"max_pixels": 0},
        {"decode": "fast"},
    ],
)
def test_impossible_settings_are_refused_at_construction(settings):
    with pytest.raises(ConfigError):
        SigLIPProcessor(**settings)


@pytest.mark.parametrize(
    ("name", "size", "patch", "resample", "tokens"),
    [
        ("siglip-base-patch16-224", 224, 16, 3, 196),
        ("siglip-large-patch16-384", 384, 16, 3, 576),
        ("siglip-so400m-patch14-384", 384, 14, 3, 729),
        ("siglip2-base-patch32-256", 256, 32, 2, 64),
        ("google/siglip2-base-patch16-512", 512, 16, 2, 1024),
        ("siglip2-so400m-patch14-384", 384, 14, 2, 729),
        ("siglip2-so400m-patch16-384", 384, 16, 2, 576),
        ("siglip2-giant-opt-patch16-256", 256, 16, 2, 256),
    ],
)
def test_presets_are_the_published_ones(name, size, patch, resample, tokens):
    processor = SigLIPProcessor.preset(name)
    assert (processor.size, processor.patch_size, processor.resample) == (size, patch, resample)
    assert processor.measure(read_from(photograph("coffee.png", 90))).num_tokens == tokens


def test_every_preset_can_be_made():
    assert len(preset_names()) == 23
    for name in preset_names():
        assert SigLIPProcessor.preset(name, backend="pillow").backend == "pillow"


def test_unknown_presets_say_what_exists():
    with pytest.raises(ConfigError, match=r"NaFlexProcessor\.preset"):
        SigLIPProcessor.preset("siglip2-base-patch16-naflex")
    with pytest.raises(ConfigError, match="siglip2-so400m-patch16-384"):
        SigLIPProcessor.preset("siglip3")


def test_fingerprint_tells_all_that_pixels_depend_on():
    """IMG-27, IMG-30: the decoder, its version and the backend, too."""
    ours = SigLIPProcessor().fingerprint()
    assert ours["simplejpeg"] == version("simplejpeg")
    assert ours["pillow"] == version("pillow")
    assert json.loads(json.dumps(ours)) == ours
    assert ours["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert "cpu_capability" not in SigLIPProcessor(backend="pillow").fingerprint()
    others = [
        SigLIPProcessor(size=224),
        SigLIPProcessor(size=(384, 224)),
        SigLIPProcessor(patch_size=16),
        SigLIPProcessor(resample=2),
        SigLIPProcessor(backend="pillow"),
        SigLIPProcessor(mean=0.4),
        SigLIPProcessor(std=0.4),
        SigLIPProcessor(max_pixels=1000),
        SigLIPProcessor(decode="scaled"),
    ]
    assert all(other.fingerprint() != ours for other in others)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (5, 1)])
def test_a_turned_sliver_is_written(shape: tuple[int, int], orientation: int) -> None:
    pixels = np.full((*shape, 3), 77, dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG", exif=exif)
    assert (written(SigLIPProcessor(size=32, patch_size=16), stream.getvalue()) == 77).all()
