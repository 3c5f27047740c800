import pytest

from tests.fixtures.pictures import load
from zephon_mm.errors import SampleError
from zephon_mm.processors.formats import format_of


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("page.jpg", "HTML page"),
        ("empty.jpg", "empty file"),
        ("zeros.jpg", "zeros"),
        ("json_error.jpg", "JSON"),
        ("lfs_pointer.jpg", "Git LFS"),
        ("one_byte.png", "1 byte"),
    ],
)
def test_files_that_are_no_image_are_named(name, words):
    """IMG-18."""
    with pytest.raises(SampleError, match=words):
        format_of(load(f"IMG-18/{name}"))


def test_heic_is_named_by_its_brand():
    """IMG-29."""
    with pytest.raises(SampleError, match="brand 'heic'"):
        format_of(load("IMG-29/heic_header_only.jpg"))


@pytest.mark.parametrize(
    ("name", "image_format"),
    [
        ("IMG-16/whole.jpg", "JPEG"),
        ("IMG-15/two_pictures.jpg", "JPEG"),
        ("IMG-14/anim.gif", "GIF"),
        ("IMG-14/anim.png", "PNG"),
        ("IMG-14/anim.webp", "WEBP"),
        ("IMG-29/quad.avif", "AVIF"),
    ],
)
def test_images_are_told_apart_by_their_first_bytes(name, image_format):
    """IMG-14, IMG-15, IMG-29: never by a file's name."""
    assert format_of(load(name)[:64]) == image_format


def test_a_video_is_no_image():
    with pytest.raises(SampleError, match=r"not_an_image.*isom"):
        format_of(b"\0\0\0\x18ftypisom\0\0\2\0isommp41")
