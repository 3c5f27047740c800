"""Law 4 of `processors.video`: a defect is a SampleError; an error of the file is not."""

import io
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.fixtures.films import (
    add_cover,
    add_film,
    by_reading,
    encode,
    film,
    frames,
    number_of,
    picture,
    silence,
)
from tests.fixtures.pictures import load
from zephon_mm.errors import SampleError
from zephon_mm.processors.video import probe_video


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
    refused(reason, load(f"VID-09/{name}"))


@pytest.mark.parametrize(
    "encoded",
    [
        b"<!doctype html><html></html>" * 9,
        b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n/etc/hostname\n#EXT-X-ENDLIST\n",
        b"ffconcat version 1.0\nfile /etc/hostname\n",
        load("IMG-01/cmyk_adobe.jpg"),
        bytes(5000),
    ],
)
def test_what_is_no_video_is_shown(encoded):
    assert repr(encoded[:16]) in refused("not_a_video", encoded)


@pytest.mark.parametrize("kind", ["WEBP", "PNG"])
def test_an_animation_that_ffmpeg_does_not_read_is_no_video(kind):
    buffer = io.BytesIO()
    first, *others = (Image.fromarray(picture(k)) for k in range(3))
    first.save(buffer, kind, save_all=True, append_images=others, duration=100)
    refused("not_a_video", buffer.getvalue())


def test_what_is_encrypted_is_refused():
    key = {"encryption_key": "0123456789abcdef" * 2, "encryption_kid": "0123456789abcdef" * 2}
    refused("broken_video", film("h264", encryption_scheme="cenc-aes-ctr", **key))


def test_a_song_with_a_cover_is_no_video(tmp_path):
    path = tmp_path / "song.mp4"
    with av.open(path, "w") as output:
        cover = add_cover(output, 64)
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
    whole = film("h264", movflags="faststart")
    size = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(SampleError):
        probe_video(io.BytesIO(whole[:size]))


def test_an_mp4_that_was_cut_between_frames_is_refused():
    whole = film("h264", movflags="faststart")
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
