import ctypes
import io
import multiprocessing
import os
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.fixtures.films import (
    FILMS,
    RATE,
    add_cover,
    add_film,
    by_reading,
    encode,
    film,
    frames,
    number_of,
    picture,
    repeated,
    silence,
)
from tests.fixtures.pictures import load
from zephon_mm.errors import SampleError
from zephon_mm.processors.video import decode_frames, probe_video

CORNERS = [(220, 30, 40), (30, 180, 60), (30, 60, 210), (230, 210, 40)]


class Counting(io.BytesIO):
    """A file that counts the bytes that are read."""

    total = 0

    def read(self, size: int | None = -1):
        found = super().read(size)
        self.total += len(found)
        return found


# Law 1: frames in order of presentation, at the file's own times.


@pytest.mark.parametrize("name", [name for name in FILMS if not name.startswith("png")])
def test_frame_k_shows_k_in_every_container(name):
    header = probe_video(io.BytesIO(film(name)))
    assert (header.width_px, header.height_px, len(header.times)) == (96, 64, 40)
    assert header.times == pytest.approx(np.arange(40) / RATE, abs=1e-3 if name != "gif" else 0.01)
    assert [number_of(pixels) for pixels in frames(film(name))] == list(range(40))


@pytest.mark.parametrize("name", ["no_count.mkv", "no_count.webm"])
def test_a_count_of_zero_is_unknown(name):
    """VID-02"""
    assert [number_of(pixels) for pixels in frames(load(f"VID-02/{name}"))] == list(range(9))


@pytest.mark.parametrize("name", ["vfr.mp4", "vfr.mkv"])
def test_times_are_those_of_presentation(name):
    """VID-04"""
    header = probe_video(io.BytesIO(load(f"VID-04/{name}")))
    assert header.times.tolist() == pytest.approx([0, 0.07, 0.19, 0.2, 0.41, 0.7, 0.71, 1])
    assert [number_of(pixels) for pixels in frames(load(f"VID-04/{name}"))] == list(range(8))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_short_clip_has_its_frames(count):
    """VID-05"""
    found = frames(load(f"VID-05/frames{count}.mp4"))
    assert [number_of(pixels) for pixels in found] == list(range(count))


@pytest.mark.parametrize("name", ["h264", "mkv", "ts"])
@pytest.mark.parametrize("first", [-3, 7, 90_000])
def test_times_count_from_the_first_frame_that_shows(name, first):
    encoded = film(name, first=first)
    header = probe_video(io.BytesIO(encoded))
    cut = 3 if (name, first) == ("h264", -3) else 0  # an edit list cuts off what is before 0
    assert header.times == pytest.approx(np.arange(40 - cut) / RATE, abs=1e-3)
    assert [number_of(pixels) for pixels in frames(encoded)] == list(range(cut, 40))


@pytest.mark.parametrize(
    ("name", "container", "options"),
    [
        ("h264", "mp4", {"movflags": "frag_keyframe+empty_moov+default_base_moof"}),
        ("h264", "mp4", {"movflags": "frag_every_frame+empty_moov"}),
        ("h264", "mp4", {"movflags": "hybrid_fragmented"}),
        ("h264", "mp4", {"movflags": "negative_cts_offsets"}),
        ("h264", "mp4", {"use_editlist": "0"}),
        ("h264", "mov", {"write_tmcd": "1"}),
        ("h264", "matroska", {"live": "1"}),
        ("ts", "mpegts", {"mpegts_m2ts_mode": "1"}),
    ],
)
def test_how_a_container_is_written_does_not_show(name, container, options):
    """Fragments, no duration, no edit list: the pictures and times are those of the plain file."""
    plain, other = film(name), repeated(name, 1, container, **options)
    for numbers in (range(40), [25], [3, 39]):
        assert np.array_equal(frames(other, numbers), frames(plain, numbers))
    times = probe_video(io.BytesIO(plain)).times
    assert probe_video(io.BytesIO(other)).times == pytest.approx(times, abs=1e-3)


def test_a_clock_that_overflows_runs_on():
    """The clock of MPEG-TS has 33 bits, and begins anew every 26.5 hours."""
    first = 2**33 // (90_000 // RATE) - 20
    encoded = film("ts", first=first, mpegts_copyts="1")
    assert probe_video(io.BytesIO(encoded)).times == pytest.approx(np.arange(40) / RATE)
    assert [number_of(pixels) for pixels in frames(encoded)] == list(range(40))
    assert [number_of(pixels) for pixels in frames(encoded, [15, 30])] == [15, 30]


def test_a_stream_that_was_entered_midway_begins_with_a_key_frame():
    whole = film("ts")
    found = [number_of(pixels) for pixels in frames(whole[len(whole) // 188 // 3 * 188 :])]
    assert found == list(range(found[0], 40))
    assert found[0] in (12, 24)


def test_other_streams_are_passed_by(tmp_path):
    """A cover, sound and a smaller video, all in front of the film."""
    path = tmp_path / "film.mp4"
    with av.open(path, "w") as output:
        cover = add_cover(output, 200)
        sound = output.add_stream("aac", rate=48_000)
        small = add_film(output, "h264", (48, 32))
        large = add_film(output, "h264")
        large.disposition = av.stream.Disposition.default
        output.mux(encode(cover, [picture(99, 200, 200)]))
        output.mux([*sound.encode(silence()), *sound.encode(None)])
        output.mux(encode(small, (picture(40 + k, 48, 32) for k in range(20))))
        output.mux(encode(large, (picture(k) for k in range(20))))
    assert [number_of(pixels) for pixels in frames(path.read_bytes())] == list(range(20))


@pytest.mark.parametrize("name", ["open", "hevc-open"])
def test_frames_that_lack_what_they_refer_to_are_not_counted(tmp_path, name):
    """A film that was cut at an open group of pictures, without encoding it again."""
    path = tmp_path / "film.mkv"
    with av.open(io.BytesIO(film(name))) as source, av.open(path, "w") as output:
        stream = output.add_stream_from_template(source.streams.video[0])
        packets: list[Any] = [packet for packet in source.demux(video=0) if packet.size]
        key = [k for k, packet in enumerate(packets) if packet.is_keyframe][-1]
        first = sorted(packet.pts for packet in packets).index(packets[key].pts)
        assert any(packet.pts < packets[key].pts for packet in packets[key:])
        for packet in packets[key:]:
            packet.stream = stream
            output.mux(packet)
    assert [number_of(pixels) for pixels in frames(path.read_bytes())] == list(range(first, 40))
    assert probe_video(io.BytesIO(path.read_bytes())).times[0] == 0


def test_of_frames_that_share_a_time_the_first_counts(tmp_path):
    """5000 frames a second, on Matroska's clock of milliseconds."""
    path = tmp_path / "film.mkv"
    with av.open(path, "w") as output:
        stream = output.add_stream("ffv1", rate=5000)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        for k in range(40):
            frame = av.VideoFrame.from_ndarray(picture(k))
            frame.pts, frame.time_base = k, Fraction(1, 5000)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    wanted = [0, *range(3, 40, 5)]
    assert [number_of(pixels) for pixels in frames(path.read_bytes())] == wanted
    for k, number in enumerate(wanted):
        assert number_of(frames(path.read_bytes(), [k])[0]) == number


# Law 2: the same bytes by seeking, by reading on, everywhere.


def test_frame_k_is_the_same_by_seek_and_by_reading():
    """VID-12"""
    encoded = load("VID-12/b_frames.mp4")
    for k in random.Random(0).sample(range(40), 40):
        (found,) = frames(encoded, [k])
        assert number_of(found) == k
        assert np.array_equal(found, by_reading(encoded)[k])


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from([name for name in FILMS if name not in ("gif", "png-alpha")]),
    numbers=st.lists(st.integers(0, 39), max_size=6).map(sorted),
)
def test_any_choice_of_frames_equals_reading(name, numbers):
    found = frames(film(name), numbers)
    assert len(found) == len(numbers)
    for k, pixels in zip(numbers, found, strict=True):
        assert np.array_equal(pixels, by_reading(film(name))[k])
        assert pixels.flags.c_contiguous
        assert pixels.dtype == np.uint8


def test_a_film_without_places_to_start_from_is_read_through():
    """Its key frames are marked, but a picture is whole only some frames after each."""
    encoded = film("refresh", 60)
    for k in range(60):
        (found,) = frames(encoded, [k])
        assert np.array_equal(found, by_reading(encoded)[k])


@pytest.mark.parametrize(
    ("name", "container"),
    [
        ("h264", "mp4"),
        ("h264", "matroska"),
        ("h264", "mpegts"),
        ("hevc-open", "mp4"),
        ("vp9", "webm"),
        ("avi", "avi"),
    ],
)
def test_a_seek_skips_what_is_not_needed(name, container):
    file = Counting(repeated(name, 300, container))
    header = probe_video(file)
    assert len(header.times) == 12_000
    file.total = 0
    found = [number_of(pixels) for pixels in decode_frames(file, [1305, 11_999], header)]
    assert found == [1305 % 40, 39]
    assert file.total < 0.5 * len(file.getvalue())


def test_pixels_do_not_depend_on_the_cpu():
    maps = Path("/proc/self/maps").read_text().splitlines()
    library = next(line.split()[-1] for line in maps if "libavutil" in line)
    force_flags = ctypes.CDLL(library).av_force_cpu_flags
    encoded = [load("VID-07/w50_h38.mp4"), load("VID-10/ten_bit_hevc.mp4"), film("vp9", 3)]
    here = [frames(one) for one in encoded]
    try:
        force_flags(0)
        plain = [frames(one) for one in encoded]
    finally:
        force_flags(-1)
    assert all(np.array_equal(a, b) for a, b in zip(here, plain, strict=True))


def leave_early(encoded, sender):
    threads = len(os.listdir("/proc/self/task"))
    for k in range(200):
        pictures = decode_frames(io.BytesIO(encoded), range(k % 20, 40))
        next(pictures)
        assert len(os.listdir("/proc/self/task")) == threads
        del pictures
    sender.send("done")


def test_leaving_early_in_a_forked_process_does_not_hang():
    """VID-14"""
    encoded = load("VID-12/b_frames.mp4")
    with av.open(io.BytesIO(encoded)) as container:  # the parent has used a decoder with threads
        container.streams.video[0].thread_type = "AUTO"
        next(container.decode(video=0))
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=leave_early, args=(encoded, sender))
        child.start()
        sender.close()
        try:
            assert receiver.poll(60)
            assert receiver.recv() == "done"
        finally:
            child.kill()
            child.join()


# Law 3: upright, RGB, 8 bits, on white.


@pytest.mark.parametrize(("name", "steps"), [("0", 0), ("90", 3), ("180", 2), ("270", 1)])
def test_rotation_is_applied_and_in_the_header(name, steps):
    """VID-01"""
    encoded = load(f"VID-01/rot{name}.mp4")
    header = probe_video(io.BytesIO(encoded))
    (pixels,) = frames(encoded, [1])
    assert pixels.shape == (header.height_px, header.width_px, 3)
    assert pixels.shape == ((64, 48, 3) if steps % 2 else (48, 64, 3))
    corners = np.rot90(np.array(CORNERS).reshape(2, 2, 3), steps)
    shown = pixels[[4, 4, -5, -5], [4, -5, 4, -5]].reshape(2, 2, 3)
    assert np.abs(shown.astype(int) - corners).max() < 30


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
def test_all_eight_ways_to_turn_a_picture(tmp_path, degrees, mirrored):
    path = tmp_path / "film.mov"
    with av.open(path, "w") as output:
        stream = add_film(output, "png")
        stream.set_display_rotation(degrees, hflip=mirrored)
        output.mux(encode(stream, [picture(7)]))
    turned = np.rot90(picture(7), degrees // 90)
    (found,) = frames(path.read_bytes())
    assert np.array_equal(found, turned[:, ::-1] if mirrored else turned)


@pytest.mark.parametrize(("orientation", "steps"), [(1, 0), (6, 3), (3, 2), (8, 1)])
def test_side_data_that_pyav_does_not_know_loses_no_rotation(tmp_path, orientation, steps):
    """FFmpeg 8 gives a JPEG's EXIF as side data of a kind at which PyAV 18.1 raises."""
    exif, still, path = Image.Exif(), io.BytesIO(), tmp_path / "film.mkv"
    exif[0x0112] = orientation
    Image.fromarray(picture(7)).save(still, "JPEG", exif=exif, quality=95)
    with av.open(path, "w") as output:
        stream = output.add_stream("mjpeg", rate=RATE)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuvj420p"
        packet = av.Packet(still.getvalue())
        packet.pts, packet.dts, packet.time_base = 0, 0, Fraction(1, RATE)
        packet.stream, packet.is_keyframe = stream, True
        output.mux(packet)
    (found,) = frames(path.read_bytes())
    turned = np.rot90(picture(7), steps)
    assert found.shape == turned.shape
    assert np.abs(found.astype(int) - turned).mean() < 6


@pytest.mark.parametrize(
    ("name", "width"), [("w50_h38.mp4", 50), ("w35_h23.mkv", 35), ("w1294_like_w70_h54.mp4", 70)]
)
def test_odd_widths_have_no_wrong_columns(name, width):
    """VID-07"""
    for k, pixels in enumerate(frames(load(f"VID-07/{name}"))):
        assert pixels.shape[1] == width
        bottom = pixels[pixels.shape[0] // 2 + 2 :, -4:].astype(int)
        assert np.abs(bottom - (60 + 11 * k)).max() <= 8


@pytest.mark.parametrize("name", ["ten_bit_ffv1.mkv", "ten_bit_hevc.mp4"])
def test_ten_bits_are_scaled_to_eight(name):
    """VID-10"""
    for k, pixels in enumerate(frames(load(f"VID-10/{name}"))):
        assert np.abs(pixels[-8:].astype(int) - (60 + 11 * k)).max() <= 6


def test_the_range_of_colours_is_honoured():
    """VID-11"""
    for name in ("full_range.mkv", "limited_range.mkv"):
        for k, pixels in enumerate(frames(load(f"VID-11/{name}"))):
            assert np.abs(pixels[-8:].astype(int) - (60 + 11 * k)).max() <= 8


@pytest.mark.parametrize(
    "told", ["interlaced=1", "transfer=smpte2084", "transfer=arib-std-b67", "sar=16/15"]
)
def test_fields_hdr_and_pixels_that_are_not_square_are_given_as_stored(told):
    def stored(told):
        buffer, options = io.BytesIO(), {"x264-params": f"{told}:qp=0:threads=1:log-level=none"}
        with av.open(buffer, "w", format="mp4") as output:
            stream = output.add_stream("libx264", rate=RATE, options=options)
            stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
            output.mux(encode(stream, (picture(k) for k in range(3))))
        with av.open(io.BytesIO(buffer.getvalue())) as container:
            frame = next(container.decode(video=0))
            shape = container.streams.video[0].sample_aspect_ratio
        found = (frame.interlaced_frame, int(frame.color_trc), shape or 1)
        return found, np.array(frames(buffer.getvalue()))

    (plain, pixels), (special, same) = stored("keyint=12"), stored(told)
    assert plain == (False, 2, 1) != special
    assert np.abs(same.astype(int) - pixels).max() <= (16 if special[0] else 2)  # fields halve
    assert np.abs(same.astype(int) - pixels).mean() < 1  # the rows that share a colour


def test_alpha_is_composited_on_white(tmp_path):
    rng, path = np.random.default_rng(0), tmp_path / "film.mov"
    rgba = rng.integers(0, 256, (64, 96, 4), dtype=np.uint8)
    with av.open(path, "w") as output:
        stream = add_film(output, "png-alpha")
        output.mux(encode(stream, [rgba]))
    white = Image.new("RGBA", (96, 64), (255, 255, 255, 255))
    expected = np.asarray(Image.alpha_composite(white, Image.fromarray(rgba)).convert("RGB"))
    (found,) = frames(path.read_bytes())
    assert np.abs(found.astype(int) - expected).max() <= 1


# Law 5: memory, and what is read.


def peak_bytes():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


@pytest.mark.slow
@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_an_hour_takes_no_more_memory_than_its_index(container):
    file = Counting(repeated("h264", 90_000 // 40, container))
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = peak_bytes()
    header = probe_video(file)
    assert len(header.times) == 90_000
    assert header.times[-1] == pytest.approx(3600 - 1 / RATE, abs=1e-3)
    numbers = range(7, 90_000, 3000)
    found = [number_of(pixels) for pixels in decode_frames(file, numbers, header)]
    assert found == [k % 40 for k in numbers]
    assert peak_bytes() - before < 12 * 2**20


def test_a_file_is_probed_once_while_it_is_open():
    file = Counting(film("h264"))
    header = probe_video(file)
    read = file.total
    assert probe_video(file) is header
    assert file.total == read
    with pytest.raises(SampleError, match="too_many_frames"):
        probe_video(file, max_frames=39)
    assert probe_video(Counting(film("h264"))) is not header


def test_the_file_stays_open_wherever_it_was():
    file = io.BytesIO(film("h264"))
    file.seek(123)
    assert [number_of(pixels) for pixels in decode_frames(file, [3, 3, 9])] == [3, 3, 9]
    assert not file.closed
