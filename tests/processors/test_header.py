import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.fixtures.pictures import load
from zephon_mm.errors import SampleError
from zephon_mm.processors.header import (
    MAX_PIXELS,
    ImageHeader,
    exif_orientation,
    header_of,
    probe,
)
from zephon_mm.processors.image import decode

TEXT_TAGS = (0x010D, 0x010E, 0x010F, 0x0110, 0x0131, 0x013B)


def test_header_is_read_from_few_bytes():
    encoded, counts = load("IMG-16/whole.jpg") + b"\0" * 5000, []

    def read(count):
        counts.append(count)
        return encoded[:count]

    assert probe(read) == ImageHeader("JPEG", 64, 64, 1, 3)
    assert counts == [4096]


@given(exif=st.binary(max_size=60))
def test_any_exif_gives_an_orientation(exif):
    """IMG-06."""
    assert 1 <= exif_orientation(b"II*\0\x08\0\0\0" + exif) <= 8
    assert 1 <= exif_orientation(exif) <= 8


@given(
    orientation=st.integers(0, 20),
    others=st.dictionaries(st.sampled_from(TEXT_TAGS), st.text("abc", min_size=1)),
)
def test_orientation_is_found_among_other_tags(orientation, others):
    exif = Image.Exif()
    exif.update(others)
    exif[0x0112] = orientation
    assert exif_orientation(exif.tobytes()) == (orientation if 1 <= orientation <= 8 else 1)


def test_pixel_limit_is_a_setting_checked_in_the_header():
    """IMG-25: refused before memory is taken, with both numbers and the setting."""
    bomb = load("IMG-25/bomb_20000x20000.png")
    with pytest.raises(SampleError, match=r"400000000 pixels.*max_pixels.*decode_limit_px"):
        header_of(bomb[:200])
    assert header_of(bomb, max_pixels=400_000_000).width_px == 20000
    small = load("IMG-19/w313_h1.png")
    assert decode(small, max_pixels=313).shape == (1, 313, 3)
    with pytest.raises(SampleError, match="too_many_pixels"):
        decode(small, max_pixels=312)
    assert Image.MAX_IMAGE_PIXELS is not None
    assert Image.MAX_IMAGE_PIXELS > MAX_PIXELS


@pytest.mark.parametrize("name", ["IMG-16/whole.jpg", "IMG-16/cut_half.png", "IMG-14/anim.webp"])
def test_a_file_cut_in_its_header_is_broken(name):
    with pytest.raises(SampleError, match="broken_image"):
        header_of(load(name)[:24])


@pytest.mark.parametrize("position", [17, 21, 24, 30])
def test_a_damaged_png_header_is_broken(position):
    damaged = bytearray(load("IMG-09/palette2.png"))
    damaged[position] ^= 1
    with pytest.raises(SampleError, match="broken_image"):
        header_of(bytes(damaged))
