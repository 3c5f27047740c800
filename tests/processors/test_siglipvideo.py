import io
import json
import pickle
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.fixtures.films import RATE, film, number_of
from tests.fixtures.pictures import load
from zephon_mm.errors import ConfigError, SampleError
from zephon_mm.processors import SigLIPProcessor, SigLIPVideoProcessor
from zephon_mm.processors.video import decode_frames, probe_video
from zephon_mm.protocols import VideoProcessor

IMAGE = SigLIPProcessor(size=(48, 64), patch_size=16, resample=2, backend="pillow")


def written(processor, encoded):
    """Write a video the way the engine does, over old bytes."""
    measured = processor.measure(io.BytesIO(encoded))
    out = np.full((len(measured.parts), *measured.shape), 77, dtype=np.uint8)
    processor.write(io.BytesIO(encoded), 0, out)
    return out


def sampled(processor, encoded):
    return processor.sample(probe_video(io.BytesIO(encoded)).times).tolist()


def on_screen(times, asked):
    """Return the frame that is on the screen at a time, by looking at each in turn."""
    return max(k for k, time in enumerate(times) if time <= asked + 1e-3)


# Law 1: the frame on the screen.


@pytest.mark.parametrize("name", ["vfr.mp4", "vfr.mkv"])
def test_where_the_rate_varies_times_decide(name):
    """VID-04"""
    encoded = load(f"VID-04/{name}")
    for chosen in ({"fps": 4.0}, {"num_frames": 5}, {"fps": 400.0, "max_frames": 5}):
        processor = SigLIPVideoProcessor(IMAGE, **chosen)
        assert sampled(processor, encoded) == [0, 3, 4, 6, 7]
        texts = [f"<{time} seconds>" for time in ("0.0", "0.2", "0.4", "0.7", "1.0")]
        assert list(processor.measure(io.BytesIO(encoded)).parts) == texts


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(st.sampled_from([0.001, 0.01, 0.033, 0.04, 0.5, 3.0]), max_size=60),
    fps=st.sampled_from([0.1, 1.0, 2.0, 24.0, 30.0]),
    num_frames=st.none() | st.integers(1, 20),
    max_frames=st.integers(20, 40),
)
def test_sampling_is_asking_for_evenly_spaced_times(steps, fps, num_frames, max_frames):
    times = np.cumsum([0.0, *steps])
    processor = SigLIPVideoProcessor(IMAGE, fps, num_frames, max_frames)
    asked = [k / fps for k in range(6000) if k / fps <= times[-1] + 1e-3]
    if num_frames or len(asked) > max_frames:
        asked = np.linspace(0, times[-1], num_frames or max_frames)
    found = processor.sample(times).tolist()
    assert found == sorted({on_screen(times, time) for time in asked})
    assert len(found) <= (num_frames or max_frames)


@pytest.mark.parametrize("name", ["h264", "mkv", "ts"])
def test_a_constant_rate_is_sampled_evenly_in_every_container(name):
    """Matroska rounds 0.04 s to whole milliseconds; nothing may slip by one frame for it."""
    assert sampled(SigLIPVideoProcessor(IMAGE, fps=RATE / 5), film(name)) == list(range(0, 40, 5))
    assert sampled(SigLIPVideoProcessor(IMAGE, num_frames=14), film(name)) == list(range(0, 40, 3))


# Law 2: no frame twice.


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("settings", [{"num_frames": 32}, {"fps": 300.0}])
def test_a_short_clip_gives_the_frames_that_it_has(count, settings):
    """VID-05"""
    processor = SigLIPVideoProcessor(IMAGE, **settings)
    encoded = load(f"VID-05/frames{count}.mp4")
    for _ in range(2):
        assert sampled(processor, encoded) == list(range(count))
        assert written(processor, encoded).shape == (count, 3, 48, 64)


# Law 3: the pixels of a picture.


@pytest.mark.parametrize("backend", ["torchvision", "pillow"])
@pytest.mark.parametrize("resample", [2, 3])
@pytest.mark.parametrize("name", ["h264", "hevc", "vp9", "mkv"])
def test_a_frame_equals_the_same_picture(name, resample, backend):
    image = SigLIPProcessor(56, 14, resample, backend)
    processor = SigLIPVideoProcessor(image, fps=5.0)
    numbers = list(range(0, 40, 5))
    ours = written(processor, film(name))
    pictures = decode_frames(io.BytesIO(film(name)), numbers)
    for number, found, pixels in zip(numbers, ours, pictures, strict=True):
        assert number_of(pixels) == number
        still, expected = io.BytesIO(), np.zeros((3, 56, 56), dtype=np.uint8)
        Image.fromarray(pixels).save(still, "PNG")
        image.write(still.getvalue(), expected)
        assert np.array_equal(found, expected)
    normal = processor.normalize(torch.from_numpy(ours), torch.float32)
    assert torch.equal(normal, image.normalize(torch.from_numpy(ours), torch.float32))


@pytest.mark.parametrize(
    ("size", "patch_size", "pool", "tokens"),
    [(384, 14, 2, 196), (384, 14, 1, 729), (384, 16, 2, 144), (384, 14, 3, 81), (224, 16, 20, 1)],
)
def test_tokens_are_squares_of_patches(size, patch_size, pool, tokens):
    processor = SigLIPVideoProcessor(SigLIPProcessor(size, patch_size), pool=pool)
    measured = processor.measure(io.BytesIO(film("h264")))
    assert (measured.num_tokens, measured.shape, measured.grid) == (tokens, (3, size, size), ())
    assert measured.parts == ("<0.0 seconds>", "<1.0 seconds>")


def test_without_timestamps_there_are_as_many_parts():
    processor = SigLIPVideoProcessor(IMAGE, timestamps=False, fps=2.0)
    assert processor.measure(io.BytesIO(film("h264"))).parts == ("",) * 4


# Law 4: however the parts are spread.


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(["h264", "open", "hevc-open", "ps", "avi-h264"]),
    cuts=st.sets(st.integers(1, 19), max_size=5),
)
def test_parts_are_the_same_in_any_grouping(name, cuts):
    processor = SigLIPVideoProcessor(IMAGE, num_frames=20)
    whole = written(processor, film(name))
    assert len(whole) == 20
    pieces = np.zeros_like(whole)
    bounds = [0, *sorted(cuts), 20]
    for first, stop in pairwise(bounds):
        processor.write(io.BytesIO(film(name)), first, pieces[first:stop])
    assert np.array_equal(pieces, whole)


# Settings.


def test_it_is_picklable_and_a_processor():
    processor = SigLIPVideoProcessor(IMAGE, num_frames=8)
    assert pickle.loads(pickle.dumps(processor)) == processor
    assert isinstance(processor, VideoProcessor)
    assert (processor.unit_shape, processor.pad_to, processor.grid_key) == ((3, 48, 64), None, None)


def test_defects_are_found_while_measuring():
    small = SigLIPVideoProcessor(replace(IMAGE, max_pixels=96 * 64 - 1))
    with pytest.raises(SampleError, match="too_many_pixels"):
        small.measure(io.BytesIO(film("h264")))
    with pytest.raises(SampleError, match="not_a_video"):
        small.measure(io.BytesIO(b"<html></html>"))


@pytest.mark.parametrize(
    "settings",
    [
        {"fps": 0.0},
        {"fps": float("nan")},
        {"fps": float("inf")},
        {"num_frames": 0},
        {"num_frames": 33},
        {"max_frames": 0},
        {"pool": 0},
    ],
)
def test_impossible_settings_are_refused_at_construction(settings):
    with pytest.raises(ConfigError, match=r"fps=.*num_frames=.*max_frames=.*pool="):
        SigLIPVideoProcessor(IMAGE, **settings)


def test_the_fingerprint_tells_all_that_pixels_depend_on():
    ours = SigLIPVideoProcessor(IMAGE).fingerprint()
    assert json.loads(json.dumps(ours)) == ours
    assert {"av", "ffmpeg", "image"} <= set(ours)
    others = [
        {"image": replace(IMAGE, resample=3)},
        {"fps": 2.0},
        {"num_frames": 8},
        {"max_frames": 8},
        {"pool": 1},
        {"timestamps": False},
    ]
    for other in others:
        assert replace(SigLIPVideoProcessor(IMAGE), **other).fingerprint() != ours
