import concurrent.futures
import io
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile, ImageOps

from tests.fixtures.pictures import FILES, GOOD, REFUSED, encode, expected, load, noise
from tests.fixtures.processing import read_from
from zephon_mm.errors import ConfigError, SampleError
from zephon_mm.processors.header import png_chunks
from zephon_mm.processors.image import decode, probe


def png(width, height, depth, colour_type, rows, *chunks, interlaced=0):
    """Write a PNG by hand, for what Pillow cannot write."""

    def chunk(kind, body):
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, interlaced)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
    parts = [chunk(b"IHDR", header), *(chunk(*extra) for extra in chunks)]
    return b"\x89PNG\r\n\x1a\n" + b"".join([*parts, chunk(b"IDAT", pixels), chunk(b"IEND", b"")])


def interlace(encoded):
    """Rewrite an all-zero PNG as an interlaced one, counting the bytes of its seven passes."""
    width, height, depth, colour_type = struct.unpack(">IIBB", encoded[16:26])
    bits = depth * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour_type]
    grid = np.array(
        [
            [1, 6, 4, 6, 2, 6, 4, 6],
            [7, 7, 7, 7, 7, 7, 7, 7],
            [5, 6, 5, 6, 5, 6, 5, 6],
            [7, 7, 7, 7, 7, 7, 7, 7],
            [3, 6, 4, 6, 3, 6, 4, 6],
            [7, 7, 7, 7, 7, 7, 7, 7],
            [5, 6, 5, 6, 5, 6, 5, 6],
            [7, 7, 7, 7, 7, 7, 7, 7],
        ]
    )
    full = np.tile(grid, (height // 8 + 1, width // 8 + 1))[:height, :width]
    total = 0
    for number in range(1, 8):
        columns = (full == number).sum(axis=1)
        total += sum(1 + (int(count) * bits + 7) // 8 for count in columns if count)
    palette = [(b"PLTE", bytes(3))] if colour_type == 3 else []
    return png(width, height, depth, colour_type, [bytes(total - 1)], *palette, interlaced=1)


def corners(pixels):
    height, width = pixels.shape[:2]
    rows, columns = (height // 4, 3 * height // 4), (width // 4, 3 * width // 4)
    return [pixels[row, column].tolist() for row in rows for column in columns]


def assert_close(found, wanted, tolerance):
    assert np.abs(np.array(found, int) - np.array(wanted, int)).max() <= tolerance


# Law 1: one answer, known from the header.


@pytest.mark.parametrize("name", GOOD)
def test_header_knows_the_size_of_the_pixels(name):
    header, pixels = probe(read_from(load(name))), decode(load(name))
    assert pixels.shape == (header.height_px, header.width_px, 3)
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    assert pixels.flags.writeable


@pytest.mark.parametrize("name", GOOD)
def test_decoding_again_in_threads_gives_the_same_pixels(name):
    encoded = load(name)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first, *others = pool.map(decode, [encoded] * 4)
    assert all(np.array_equal(first, other) for other in others)


@pytest.mark.parametrize(("name", "reason"), REFUSED.items())
def test_defective_files_are_refused_with_a_reason(name, reason):
    """IMG-16, IMG-18, IMG-25, IMG-29: cut, no image, a bomb, HEIC; each has a reason to count."""
    with pytest.raises(SampleError) as caught:
        decode(load(name))
    assert caught.value.reason == reason


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP", "AVIF", "TIFF"])
def test_orientation_equals_that_of_pillow_in_every_format(image_format, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    encoded = encode(Image.fromarray(noise(12, 20)), image_format, exif=exif)
    with Image.open(io.BytesIO(encoded)) as image:
        upright = np.array(ImageOps.exif_transpose(image))
    header = probe(read_from(encoded))
    assert (header.height_px, header.width_px) == upright.shape[:2]
    assert np.array_equal(decode(encoded), upright)


@settings(max_examples=60, deadline=None)
@given(
    size=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    channels=st.sampled_from([1, 3, 4]),
    image_format=st.sampled_from(["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000"]),
    orientation=st.integers(0, 9),
    junk=st.integers(0, 9000),
)
def test_probe_and_decode_agree_for_any_image(size, channels, image_format, orientation, junk):
    image = Image.fromarray(noise(*size, channels))
    if image_format in ("JPEG", "PPM"):
        image = image.convert("L" if channels == 1 else "RGB")
    options = {}
    if image_format in ("JPEG", "PNG", "WEBP"):
        exif = Image.Exif()
        exif[0x0112] = orientation
        exif[0x010E] = "x" * junk  # pushes the size out of the first bytes
        options["exif"] = exif
    encoded = encode(image, image_format, **options)
    header = probe(read_from(encoded))
    assert decode(encoded).shape == (header.height_px, header.width_px, 3)
    assert header == probe(lambda count: encoded)


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from([name for name in GOOD if len(load(name)) < 3000]),
    flips=st.lists(st.tuples(st.integers(0, 2999), st.integers(1, 255)), max_size=4),
    stop=st.integers(0, 3000),
)
def test_damage_gives_pixels_of_the_probed_size_or_a_sample_error(name, flips, stop):
    damaged = bytearray(load(name))
    for position, mask in flips:
        damaged[position % len(damaged)] ^= mask
    encoded = bytes(damaged[:stop])
    try:
        pixels = decode(encoded)
    except SampleError:
        return
    header = probe(read_from(encoded))
    assert pixels.shape == (header.height_px, header.width_px, 3)


# Law 2: JPEG equals Pillow.


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
@pytest.mark.parametrize("size", [(1, 1), (7, 19), (53, 37)])
def test_jpeg_equals_pillow_bit_for_bit(size, subsampling, progressive):
    image = Image.fromarray(noise(*size))
    encoded = encode(image, "JPEG", subsampling=subsampling, progressive=progressive)
    with Image.open(io.BytesIO(encoded)) as reference:
        assert np.array_equal(decode(encoded), np.array(reference))


@pytest.mark.parametrize("name", ["IMG-27/sub420_37x53.jpg", "IMG-27/sub422_19x7.jpg"])
def test_odd_subsampled_jpeg_equals_pillow(name):
    """IMG-27: where JPEG libraries differ, there is one set of bytes."""
    with Image.open(io.BytesIO(load(name))) as reference:
        assert np.array_equal(decode(load(name)), np.array(reference))


# Law 3: one upright RGB picture.


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("IMG-04")])
def test_ten_orientations_give_one_upright_picture(name):
    """IMG-04: the size that is known from the header is the upright one, too."""
    wanted = expected("IMG-04")
    header, pixels = probe(read_from(load(name))), decode(load(name))
    assert [header.width_px, header.height_px] == wanted["size_wh"]
    assert [pixels.shape[1], pixels.shape[0]] == wanted["size_wh"]
    assert_close(corners(pixels), wanted["corners_TL_TR_BL_BR"], wanted["tolerance"])


@pytest.mark.parametrize("name", [n for n in GOOD if n[:6] in ("IMG-06", "IMG-15", "IMG-26")])
def test_metadata_loses_no_picture(name):
    """IMG-06, IMG-15, IMG-26: broken EXIF, an index of pictures, huge texts, a bad profile."""
    wanted = expected(name[:6])
    pixels = decode(load(name))
    assert probe(read_from(load(name))).orientation == 1
    assert [pixels.shape[1], pixels.shape[0]] == wanted["size_wh"]
    assert_close(corners(pixels), wanted["corners_TL_TR_BL_BR"], wanted.get("tolerance", 12))


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("IMG-26")])
def test_texts_take_no_memory(name):
    """IMG-26: a compressed text is not inflated."""
    encoded = load(name)
    decode(encoded)
    tracemalloc.start()
    try:
        decode(encoded)
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


def test_avif_loads():
    """IMG-29."""
    wanted = expected("IMG-29")["quad.avif"]
    pixels = decode(load("IMG-29/quad.avif"))
    assert_close(corners(pixels), wanted["corners_TL_TR_BL_BR"], wanted["tolerance"])


@pytest.mark.parametrize("name", ["IMG-01/cmyk_adobe.jpg", "IMG-03/cmyk_no_adobe.jpg"])
def test_cmyk_follows_adobe_with_and_without_its_marker(name):
    """IMG-01, IMG-03: one rule, Adobe's, whether the marker is there or not."""
    wanted = expected("IMG-01")
    pixels = decode(load(name))
    centres = [pixels[y, x].tolist() for x, y in wanted["patch_centres_xy"]]
    assert_close(centres, wanted["rgb"], wanted["tolerance"])


def test_16_bit_samples_are_shifted_by_8():
    """IMG-07."""
    ramp = np.arange(256)
    gray, rgb = decode(load("IMG-07/gray16.png")), decode(load("IMG-07/rgb16.png"))
    assert np.array_equal(gray[0], np.stack([ramp] * 3, axis=1))
    assert np.array_equal(rgb[0], np.stack([ramp, 255 - ramp, np.full(256, 128)], axis=1))


@pytest.mark.parametrize(("low", "high"), [(0, 0), (255, 0), (0, 255), (127, 128)])
def test_16_bit_samples_ignore_their_low_byte(low, high):
    row = bytes([high, low]) * 3
    assert decode(png(3, 1, 16, 0, [row])).tolist() == [[[high] * 3] * 3]
    assert decode(png(1, 1, 16, 2, [row])).tolist() == [[[high] * 3]]


def test_32_bit_samples_are_refused():
    encoded = encode(Image.fromarray(np.ones((2, 2), np.float32)), "TIFF")
    with pytest.raises(SampleError, match="unsupported_pixels"):
        decode(encoded)


def test_palette_indices_become_colours():
    """IMG-09."""
    assert decode(load("IMG-09/palette2.png"))[0, :2].tolist() == [[255, 0, 0], [0, 255, 0]]


def test_alpha_is_composited_on_white():
    """IMG-11, IMG-12."""
    wanted, row = expected("IMG-11"), decode(load("IMG-11/rgba_hidden.png"))[0]
    for column in (0, 3, 4):
        assert_close(row[column], wanted[f"x{column}"], wanted["tolerance"])
    gray = decode(load("IMG-12/la.png"))[0]
    assert gray[0].tolist() == [255] * 3
    assert gray[7].tolist() == [90] * 3


def test_gray_and_one_bit_become_three_equal_channels():
    """IMG-12."""
    assert decode(load("IMG-12/one_bit.png"))[0, 0].tolist() == [255] * 3
    assert_close(decode(load("IMG-12/l.jpg")).reshape(-1, 3), [[77] * 3], 1)
    pixels = decode(load("IMG-12/l.png"))
    assert (pixels == pixels[..., :1]).all()


@pytest.mark.parametrize(
    ("depth", "colour_type", "row", "chunks", "wanted"),
    [
        (1, 0, b"\x80", [(b"tRNS", b"\0\1")], [[255] * 3, [0] * 3]),
        (1, 0, b"\x80", [(b"tRNS", b"\0\0")], [[255] * 3, [255] * 3]),
        (2, 0, b"\x90", [(b"tRNS", b"\0\2")], [[255] * 3, [85] * 3]),
        (2, 0, b"\x90", [(b"tRNS", b"\0\1")], [[170] * 3, [255] * 3]),
        (8, 0, b"\x07\x08", [(b"tRNS", b"\0\7")], [[255] * 3, [8] * 3]),
        (16, 0, b"\7\1\7\2", [(b"tRNS", b"\7\1")], [[255] * 3, [7] * 3]),
        (8, 2, b"\1\2\3\1\2\4", [(b"tRNS", b"\0\1\0\2\0\3")], [[255] * 3, [1, 2, 4]]),
        (8, 3, b"\0\1", [(b"PLTE", b"\1\2\3\4\5\6"), (b"tRNS", b"\0")], [[255] * 3, [4, 5, 6]]),
        (
            8,
            3,
            b"\0\1",
            [(b"PLTE", b"\0\0\0\4\5\6"), (b"tRNS", b"\x80\xff")],
            [[127] * 3, [4, 5, 6]],
        ),
    ],
)
def test_transparent_colours_of_png_become_white(depth, colour_type, row, chunks, wanted):
    assert decode(png(2, 1, depth, colour_type, [row], *chunks)).tolist() == [wanted]


@pytest.mark.parametrize("name", ["anim.gif", "anim.png", "anim.webp"])
def test_animation_is_its_first_frame(name):
    """IMG-14: also when it is asked for again."""
    pixels = decode(load(f"IMG-14/{name}"))
    assert pixels[5, 1].tolist() == [200, 0, 0]
    assert np.array_equal(pixels, decode(load(f"IMG-14/{name}")))
    assert np.array_equal(pixels, decode(load("IMG-14/anim.gif")))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("IMG-19/w313_h1.png", (1, 313, 3)),
        ("IMG-19/w1_h313.png", (313, 1, 3)),
        ("IMG-20/w3_h3.png", (3, 3, 3)),
        ("IMG-20/w3_h3_rgba.png", (3, 3, 3)),
        ("IMG-20/w3_h5.png", (5, 3, 3)),
        ("IMG-20/w5_h3.png", (3, 5, 3)),
        ("IMG-21/w1_h1.jpg", (1, 1, 3)),
        ("IMG-21/w1_h1.png", (1, 1, 3)),
        ("IMG-21/w2_h1.png", (1, 2, 3)),
        ("IMG-23/w10_h4000.png", (4000, 10, 3)),
        ("IMG-23/w4000_h10.png", (10, 4000, 3)),
        ("IMG-23/w201_h1.png", (1, 201, 3)),
    ],
)
def test_channels_are_last_whatever_the_sides(name, shape):
    """IMG-19, IMG-20, IMG-21, IMG-23."""
    assert decode(load(name)).shape == shape


# Law 4: damage is an error that says what was found.


@pytest.mark.parametrize("name", ["whole.jpg", "progressive_whole.jpg"])
def test_no_cut_of_a_jpeg_is_filled_with_grey(name):
    """IMG-16."""
    encoded = load(f"IMG-16/{name}")
    for stop in range(2, len(encoded) - 1, 97):
        with pytest.raises(SampleError):
            decode(encoded[:stop])


@pytest.mark.parametrize("image_format", ["PNG", "WEBP", "AVIF", "GIF", "BMP", "TIFF", "PPM"])
def test_a_cut_image_is_whole_or_broken(image_format):
    encoded = encode(Image.fromarray(noise(24, 16)), image_format)
    whole = decode(encoded)
    for stop in range(1, len(encoded), max(1, len(encoded) // 40)):
        try:
            assert np.array_equal(decode(encoded[:stop]), whole)
        except SampleError:
            continue


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGB", "RGBA", "I;16"])
def test_a_black_png_is_whole(mode, interlaced):
    for size in [(1, 1), (1, 2), (5, 3), (9, 17)]:
        encoded = encode(Image.new(mode, size), "PNG")
        if interlaced:
            encoded = interlace(encoded)
        assert decode(encoded).shape == (size[1], size[0], 3)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_png_whose_pixels_end_early_is_broken(rows):
    with pytest.raises(SampleError, match="broken_image"):
        decode(png(2, 4, 8, 0, [b"\1\2"] * rows))


def test_a_png_with_a_flipped_byte_is_whole_or_broken():
    """IMG-34: torchvision's decoder dies of nearly every one. A crash: tests/laws/test_crashes."""
    pixels = noise(32, 48)
    encoded = encode(Image.fromarray(pixels), "PNG")
    start, end = next((a, b) for kind, a, b in png_chunks(encoded) if kind == b"IDAT")
    whole = []
    for position in range(start, end):
        damaged = bytearray(encoded)
        damaged[position] ^= 0x10
        try:
            assert np.array_equal(decode(bytes(damaged)), pixels)
        except SampleError:
            continue
        whole.append(position - start)
    assert len(whole) < 10  # the chunk's length and checksum, by which no pixel changes


def test_tolerant_pillow_is_refused(monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(ConfigError, match="LOAD_TRUNCATED_IMAGES"):
        decode(load("IMG-16/cut_60pct.jpg"))
