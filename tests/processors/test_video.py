import ctypes
import io
import multiprocessing
import os
import random
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from av.video.reformatter import Interpolation, VideoReformatter
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.fixtures.films import FILMS, RATE, add_film, encode, film, number_of, picture, repeated
from zephon_mm.errors import SampleError
from zephon_mm.processors.video import decode_frames, probe_video

CASES = Path(__file__).parents[1] / "fixtures" / "cases"
CORNERS = [(220, 30, 40), (30, 180, 60), (30, 60, 210), (230, 210, 40)]


def case(name):
    return (CASES / name).read_bytes()


def frames(encoded, numbers=None):
    file = io.BytesIO(encoded)
    header = probe_video(file)
    numbers = range(len(header.times)) if numbers is None else numbers
    return list(decode_frames(file, numbers, header))


@cache
def by_reading(encoded):
    """Return all frames as PyAV gives them to whoever reads a file from its start to its end."""
    flags = Interpolation(0)
    for name in ("BILINEAR", "ACCURATE_RND", "BITEXACT", "FULL_CHR_H_INT"):
        flags |= Interpolation[name]
    with av.open(io.BytesIO(encoded)) as container:
        return [
            VideoReformatter().reformat(frame, format="rgb24", interpolation=flags).to_ndarray()
            for frame in container.decode(video=0)
        ]


def silence():
    """Return a second of sound."""
    frame = av.AudioFrame.from_ndarray(np.zeros((1, 48_000), np.float32), "fltp", "mono")
    frame.sample_rate, frame.pts = 48_000, 0
    return frame


def refused(reason, encoded, numbers=None):
    """Check that a film is refused, twice in the same words."""
    found = []
    for _ in range(2):
        with pytest.raises(SampleError) as error:
            frames(encoded, numbers)
        found.append(str(error.value))
    assert found[0] == found[1]
    assert found[0].startswith(f"[{reason}]"), found[0]
    return found[0]


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
    assert [number_of(pixels) for pixels in frames(case(f"VID-02/{name}"))] == list(range(9))


@pytest.mark.parametrize("name", ["vfr.mp4", "vfr.mkv"])
def test_times_are_those_of_presentation(name):
    """VID-04"""
    header = probe_video(io.BytesIO(case(f"VID-04/{name}")))
    assert header.times.tolist() == pytest.approx([0, 0.07, 0.19, 0.2, 0.41, 0.7, 0.71, 1])
    assert [number_of(pixels) for pixels in frames(case(f"VID-04/{name}"))] == list(range(8))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_short_clip_has_its_frames(count):
    """VID-05"""
    found = frames(case(f"VID-05/frames{count}.mp4"))
    assert [number_of(pixels) for pixels in found] == list(range(count))


@pytest.mark.parametrize("name", ["h264", "mkv", "ts"])
@pytest.mark.parametrize("first", [-3, 7, 90_000])
def test_times_count_from_the_first_frame_that_shows(name, first):
    encoded = film(name, first=first)
    header = probe_video(io.BytesIO(encoded))
    cut = 3 if (name, first) == ("h264", -3) else 0  # an edit list cuts off what is before 0
    assert header.times == pytest.approx(np.arange(40 - cut) / RATE, abs=1e-3)
    assert [number_of(pixels) for pixels in frames(encoded)] == list(range(cut, 40))


def test_a_stream_that_was_entered_midway_begins_with_a_key_frame():
    whole = film("ts")
    found = [number_of(pixels) for pixels in frames(whole[len(whole) // 188 // 3 * 188 :])]
    assert found == list(range(found[0], 40))
    assert found[0] in (12, 24)


def test_other_streams_are_passed_by(tmp_path):
    """A cover, sound and a smaller video, all in front of the film."""
    path = tmp_path / "film.mp4"
    with av.open(path, "w") as output:
        cover = output.add_stream("mjpeg", rate=1)
        cover.width, cover.height, cover.pix_fmt = 200, 200, "yuvj420p"
        cover.disposition = av.stream.Disposition.attached_pic
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
    encoded = case("VID-12/b_frames.mp4")
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
    encoded = [case("VID-07/w50_h38.mp4"), case("VID-10/ten_bit_hevc.mp4"), film("vp9", 3)]
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
    encoded = case("VID-12/b_frames.mp4")
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
    encoded = case(f"VID-01/rot{name}.mp4")
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
    for k, pixels in enumerate(frames(case(f"VID-07/{name}"))):
        assert pixels.shape[1] == width
        bottom = pixels[pixels.shape[0] // 2 + 2 :, -4:].astype(int)
        assert np.abs(bottom - (60 + 11 * k)).max() <= 8


@pytest.mark.parametrize("name", ["ten_bit_ffv1.mkv", "ten_bit_hevc.mp4"])
def test_ten_bits_are_scaled_to_eight(name):
    """VID-10"""
    for k, pixels in enumerate(frames(case(f"VID-10/{name}"))):
        assert np.abs(pixels[-8:].astype(int) - (60 + 11 * k)).max() <= 6


def test_the_range_of_colours_is_honoured():
    """VID-11"""
    for name in ("full_range.mkv", "limited_range.mkv"):
        for k, pixels in enumerate(frames(case(f"VID-11/{name}"))):
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


# Law 4: a defect is a SampleError.


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("audio_only.mp4", "no_video"),
        ("empty.mp4", "not_a_video"),
        ("no_moov.mp4", "not_a_video"),
        ("no_packets.mkv", "not_a_video"),
    ],
)
def test_a_file_without_frames_is_named(name, reason):
    """VID-09"""
    refused(reason, case(f"VID-09/{name}"))


@pytest.mark.parametrize(
    "encoded",
    [
        b"<!doctype html><html></html>" * 9,
        b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n/etc/hostname\n#EXT-X-ENDLIST\n",
        b"ffconcat version 1.0\nfile /etc/hostname\n",
        case("IMG-01/cmyk_adobe.jpg"),
        bytes(5000),
    ],
)
def test_what_is_no_video_is_shown(encoded):
    assert repr(encoded[:16]) in refused("not_a_video", encoded)


def test_a_song_with_a_cover_is_no_video(tmp_path):
    path = tmp_path / "song.mp4"
    with av.open(path, "w") as output:
        cover = output.add_stream("mjpeg", rate=1)
        cover.width, cover.height, cover.pix_fmt = 64, 64, "yuvj420p"
        cover.disposition = av.stream.Disposition.attached_pic
        sound = output.add_stream("aac", rate=48_000)
        output.mux(encode(cover, [picture(9, 64, 64)]))
        output.mux([*sound.encode(silence()), *sound.encode(None)])
    assert "'audio', 'video'" in refused("no_video", path.read_bytes())


def test_an_unknown_codec_is_named():
    refused("no_codec", film("vp8").replace(b"V_VP8", b"V_XX8"))


def test_limits_are_checked_from_the_header():
    file = io.BytesIO(film("h264"))
    assert len(probe_video(file, max_pixels=96 * 64, max_frames=40).times) == 40
    with pytest.raises(SampleError, match=r"too_many_pixels.*6144.*6143"):
        probe_video(file, max_pixels=96 * 64 - 1)
    with pytest.raises(SampleError, match=r"too_many_frames.*39"):
        probe_video(file, max_frames=39)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_cut_mp4_is_refused_wherever_it_was_cut(data):
    whole = film("h264", front=True)
    size = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(SampleError):
        probe_video(io.BytesIO(whole[:size]))


def test_an_mp4_that_was_cut_between_frames_is_refused():
    whole = film("h264", front=True)
    with av.open(io.BytesIO(whole)) as container:
        places = [packet.pos for packet in container.demux(video=0) if packet.size]
    for place in places:
        refused("broken_video", whole[:place])


def test_a_cut_mkv_has_the_frames_that_it_holds():
    whole = film("mkv")
    found = frames(whole[: len(whole) // 2])
    assert 0 < len(found) < 40
    assert [number_of(pixels) for pixels in found] == list(range(len(found)))


@pytest.mark.parametrize("bad", range(12, 24))
def test_damage_is_found_from_the_key_frame_to_the_frame_asked_for(bad):
    encoded = film("h264")
    with av.open(io.BytesIO(encoded)) as container:
        packets: list[Any] = [packet for packet in container.demux(video=0) if packet.size]
    times = sorted(packet.pts for packet in packets)
    place, size = next((one.pos, one.size) for one in packets if times.index(one.pts) == bad)
    damaged = encoded[:place] + bytes(size) + encoded[place + size :]
    for numbers in ([bad], [3, bad], [bad, 30], [12, 23]):
        refused("broken_video", damaged, numbers)
    for numbers in ([0, 11], [24], [3, 24, 39]):
        expected = [by_reading(encoded)[k] for k in numbers]
        assert np.array_equal(frames(damaged, numbers), expected)


def test_a_change_of_size_is_refused(tmp_path):
    path = tmp_path / "film.webm"
    other = tmp_path / "other.webm"
    other.write_bytes(film("vp8", 5, size=(48, 32)))
    with av.open(path, "w") as output, av.open(other) as second:
        stream = add_film(output, "vp8")
        output.mux(encode(stream, (picture(k) for k in range(5))))
        packet: Any
        for packet in second.demux(video=0):
            if packet.size:
                packet.stream, packet.pts, packet.dts = stream, packet.pts + 200, packet.dts + 200
                output.mux(packet)
    assert len(frames(path.read_bytes(), [0, 4])) == 2
    assert "(96, 64)" in refused("broken_video", path.read_bytes(), [7])


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(["h264", "hevc", "mkv", "vp9", "ts", "avi", "flv", "gif"]),
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1),
)
def test_damaged_bytes_give_frames_or_a_sample_error_the_same_each_time(name, flips):
    damaged = bytearray(film(name))
    for place, value in flips:
        damaged[int(place * len(damaged))] = value

    def outcome():
        try:
            return [pixels.tobytes() for pixels in frames(bytes(damaged), [0])]
        except SampleError as error:
            return str(error)

    assert outcome() == outcome()


class Failing(io.BytesIO):
    """A file whose reads fail after a while, as those of a network do."""

    reads = 3

    def read(self, size: int | None = -1):
        self.reads -= 1
        if self.reads < 0:
            raise OSError(5, "the network is gone")
        return super().read(size)


@pytest.mark.parametrize("reads", range(1, 4))
@pytest.mark.parametrize("name", ["h264", "mkv", "ts"])
def test_an_error_of_the_file_is_no_defect(name, reads):
    file = Failing(film(name, 200, size=(192, 128)))
    file.reads = reads
    with pytest.raises(OSError, match="the network is gone"):
        probe_video(file)


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
