"""Law 6 of `processors.image`: scaled decoding."""

import numpy as np
import pytest
import skimage.data
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from tests.fixtures.pictures import GOOD, REFUSED, encode, load, noise
from tests.fixtures.processing import read_from
from zephon_mm.errors import SampleError
from zephon_mm.processors.header import probe
from zephon_mm.processors.image import decode


def jpeg(pixels, orientation=1, **options):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(Image.fromarray(pixels), "JPEG", exif=exif, **options)


@settings(max_examples=80, deadline=None)
@given(
    sides=st.tuples(st.integers(1, 200), st.integers(1, 200)),
    times=st.sampled_from([1, 2, 4, 8]),
    at_least=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    channels=st.sampled_from([1, 3]),
    subsampling=st.sampled_from(["4:4:4", "4:2:2", "4:2:0"]),
    progressive=st.booleans(),
    orientation=st.integers(1, 8),
)
def test_sides_are_divided_by_what_leaves_enough_and_no_remainder(
    sides, times, at_least, channels, subsampling, progressive, orientation
):
    height, width = (max(1, side // times) * times for side in sides)
    options = {"subsampling": subsampling} if channels == 3 else {}
    encoded = jpeg(noise(height, width, channels), orientation, progressive=progressive, **options)
    exact, scaled = decode(encoded), decode(encoded, at_least=at_least)
    may = [
        scale
        for scale in (1, 2, 4, 8)
        if all(n % scale == 0 for n in exact.shape[:2])
        and all(n // scale >= least for n, least in zip(exact.shape, at_least, strict=False))
    ]
    assert scaled.shape == (*(n // max(may, default=1) for n in exact.shape[:2]), 3)
    assert scaled.flags.c_contiguous
    assert scaled.flags.writeable
    if max(may, default=1) == 1:
        assert np.array_equal(scaled, exact)


@pytest.mark.parametrize("scale", [2, 4, 8])
def test_a_scaled_picture_is_the_whole_one_made_smaller_and_not_moved(scale):
    encoded = jpeg(skimage.data.astronaut(), quality=95)
    scaled = decode(encoded, at_least=(512 // scale, 512 // scale)).astype(int)
    blocks = decode(encoded).reshape(512 // scale, scale, 512 // scale, scale, 3)
    error = np.abs(scaled - blocks.mean(axis=(1, 3))).mean()
    assert error < 2
    for axis in (0, 1):  # a shift by a pixel, in either direction, is further away
        assert np.abs(scaled - np.roll(blocks.mean(axis=(1, 3)), 1, axis)).mean() > 3 * error
        assert np.abs(scaled - np.roll(blocks.mean(axis=(1, 3)), -1, axis)).mean() > 3 * error


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_scaled_picture_is_upright(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    lying = Image.fromarray(decode(jpeg(noise(32, 64)), at_least=(16, 32)))
    lying.getexif()[0x0112] = orientation
    upright = np.array(ImageOps.exif_transpose(lying))
    scaled = decode(jpeg(noise(32, 64), orientation), at_least=upright.shape[:2])
    assert np.array_equal(scaled, upright)


@pytest.mark.parametrize("name", GOOD)
def test_only_jpeg_is_scaled(name):
    exact, scaled = decode(load(name)), decode(load(name), at_least=(1, 1))
    if probe(read_from(load(name))).components not in (1, 3):
        assert np.array_equal(scaled, exact)


@pytest.mark.parametrize("name", [name for name in REFUSED if name.startswith("IMG-16")])
def test_what_is_refused_is_refused_scaled(name):
    with pytest.raises(SampleError) as caught:
        decode(load(name), at_least=(1, 1))
    assert caught.value.reason == REFUSED[name]


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(["IMG-16/whole.jpg", "IMG-16/progressive_whole.jpg"]),
    flips=st.lists(st.tuples(st.integers(0, 9999), st.integers(1, 255)), max_size=3),
    stop=st.integers(1, 9999),
    at_least=st.sampled_from([8, 16, 32]),
)
def test_scaled_and_exact_refuse_the_same_bytes(name, flips, stop, at_least):
    damaged = bytearray(load(name))
    for position, mask in flips:
        damaged[position % len(damaged)] ^= mask
    encoded = bytes(damaged[: max(stop, 1)])

    def reason(**options):
        try:
            decode(encoded, **options)
        except SampleError as error:
            return error.reason
        return None

    assert reason(at_least=(at_least, at_least)) == reason()
