import io
import json
import pickle
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

import av
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen2VLVideoProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor
from transformers.image_utils import SizeDict
from transformers.video_processing_utils import BaseVideoProcessor
from transformers.video_utils import VideoMetadata

from zephon_mm.errors import ConfigError, SampleError
from zephon_mm.mrope import mrope_positions
from zephon_mm.processors import QwenVLProcessor, QwenVLVideoProcessor
from zephon_mm.processors.qwenvideo import frame_rate
from zephon_mm.processors.video import decode_frames, probe_video
from zephon_mm.protocols import VideoProcessor

MODELS = {"qwen2.5-vl": Qwen2VLVideoProcessor, "qwen3-vl": Qwen3VLVideoProcessor}
TELEVISION = Fraction(30_000, 1001)
CLOCK = Fraction(1, 60_000)


@cache
def film(count, *, size=(48, 64), rate=Fraction(10), seconds=None, container="mp4"):
    """Return an encoded video of smooth pictures, at a rate or at the given seconds."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        stream = output.add_stream("mpeg4", rate=rate)
        stream.height, stream.width = size
        stream.codec_context.time_base = CLOCK
        rows, cols = np.mgrid[: size[0], : size[1]]
        for k, time in enumerate(seconds or [k / rate for k in range(count)]):
            pixels = np.stack([rows * 3 + k * 7, cols * 3, rows + cols + k * 11], axis=2) % 256
            frame = av.VideoFrame.from_ndarray(pixels.astype(np.uint8), format="rgb24")
            frame.pts, frame.time_base = round(time / CLOCK), CLOCK
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return buffer.getvalue()


def small(model, /, **settings):
    return replace(QwenVLVideoProcessor.preset(model, max_pixels=40_000), **settings)


def written(processor, encoded):
    """Write a video the way the engine does, over old bytes."""
    measured = processor.measure(io.BytesIO(encoded))
    parts = (len(measured.parts),) if measured.parts else ()
    out = np.full((*parts, *measured.shape), 77, dtype=np.uint8)
    processor.write(io.BytesIO(encoded), 0, out)
    return out


def theirs(processor, **options):
    """Return transformers' processor of the same settings."""
    frame = processor.frame
    return MODELS[processor.model](
        size={"shortest_edge": frame.min_pixels, "longest_edge": frame.max_pixels},
        patch_size=frame.patch_size,
        image_mean=list(frame.mean),
        image_std=list(frame.std),
        cap_pixels_per_frame=processor.cap_pixels_per_frame,
        do_sample_frames=True,
        min_frames=processor.min_frames,
        max_frames=processor.max_frames,
        fps=processor.fps,
        **options,
    )


def reference(processor, encoded, rate, **options):
    file = io.BytesIO(encoded)
    total = len(probe_video(file).times)
    frames = np.stack(list(decode_frames(file, range(total))))
    video = torch.from_numpy(frames).permute(0, 3, 1, 2)
    metadata = VideoMetadata(total_num_frames=total, fps=float(rate))
    return theirs(processor, **options)(
        [video], video_metadata=[metadata], return_metadata=True, return_tensors="pt"
    )


# Law 1: bit for bit transformers.


CLIPS = {
    "two frames": film(2),
    "four": film(4),
    "five: the last one fills its patch": film(5),
    "eighty": film(80),
    "tiny": film(6, size=(16, 18)),
    "tall": film(6, size=(250, 34)),
    "large": film(4, size=(300, 420)),
    "television": film(75, rate=TELEVISION),
}


@pytest.mark.parametrize("capped", [True, False])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", CLIPS)
def test_clips_equal_transformers(name, model, capped):
    processor, encoded = small(model, cap_pixels_per_frame=capped), CLIPS[name]
    rate = TELEVISION if name == "television" else 10
    measured, ours = processor.measure(io.BytesIO(encoded)), written(processor, encoded)
    raw = reference(processor, encoded, rate, do_rescale=False, do_normalize=False)
    patches = ours.reshape(-1, *processor.unit_shape)
    assert np.array_equal(patches, raw["pixel_values_videos"].numpy())
    normal = processor.normalize(torch.from_numpy(patches), torch.float32)
    assert torch.equal(normal, reference(processor, encoded, rate)["pixel_values_videos"])

    steps, rows, cols = raw["video_grid_thw"][0].tolist()
    if model == "qwen3-vl":
        assert (len(measured.parts), measured.grid) == (steps, (1, rows, cols))
    else:
        assert (measured.parts, measured.grid[:3]) == ((), (steps, rows, cols))
    assert measured.num_tokens * (len(measured.parts) or 1) == steps * rows * cols // 4


@given(
    total=st.one_of(st.integers(2, 400), st.integers(2, 60_000)),
    rate=st.one_of(st.sampled_from([10, 24, 25, 30, 60]), st.floats(1, 120)),
    fps=st.sampled_from([2, 1, 0.5, 3]),
    most=st.sampled_from([768, 32, 7]),
    model=st.sampled_from(sorted(MODELS)),
)
def test_the_same_frames_are_chosen(total, rate, fps, most, model):
    ours = QwenVLVideoProcessor.preset(model)
    ours = replace(ours, fps=fps, max_frames=most)
    metadata = VideoMetadata(total_num_frames=total, fps=rate)
    wanted = np.asarray(theirs(ours).sample_frames(metadata, fps=fps))
    if wanted[-1] == total:  # theirs runs over the end: there is no such frame
        wanted = wanted[:-1]
    np.testing.assert_array_equal(ours.sample(total, rate), wanted)


class Sized(BaseVideoProcessor):
    """What transformers' processors of the models call to resize: it tells the size instead."""

    def resize(self, image, size: Any, *args, **kwargs) -> Any:
        return size


SIZED = {name: type(name, (kind, Sized), {})() for name, kind in MODELS.items()}


@given(
    frames=st.one_of(st.integers(2, 40), st.integers(2, 900)),
    shape=st.one_of(
        st.tuples(st.integers(1, 3000), st.integers(1, 3000)),
        st.sampled_from([(1080, 1920), (720, 1280), (2160, 3840), (20, 3000)]),
    ),
    most=st.sampled_from([None, 10**6, 40_000]),
    least=st.sampled_from([None, 1, 30_000]),
    capped=st.booleans(),
    model=st.sampled_from(sorted(MODELS)),
)
def test_the_grid_of_a_clip_is_that_of_transformers(frames, shape, most, least, capped, model):
    processor = QwenVLVideoProcessor.preset(model, max_pixels=most)
    if least is not None:
        processor = replace(processor, frame=replace(processor.frame, min_pixels=least))
    processor = replace(processor, cap_pixels_per_frame=capped)
    settings = {"factor": processor.frame.factor, "temporal_factor": 2, "resample": None}
    frame = processor.frame
    size = SizeDict(shortest_edge=frame.min_pixels, longest_edge=frame.max_pixels)
    clip = torch.empty((1, 1, 1, 1, 1), dtype=torch.uint8).expand(1, frames, 3, *shape)
    try:
        found = SIZED[model].resize(clip, size, cap_pixels_per_frame=capped, **settings)
    except ValueError:
        with pytest.raises(SampleError, match="extreme_aspect"):
            processor.grid(frames, *shape)
    else:
        side = processor.frame.patch_size
        assert processor.grid(frames, *shape) == (found.height // side, found.width // side)


# The rate of a video is not believed from its header, but counted.


@pytest.mark.parametrize("clock", [1000, 15_360, 90_000])
@pytest.mark.parametrize("rate", [Fraction(10), 24, 25, 30, 50, 60, TELEVISION, TELEVISION * 4 / 5])
def test_a_coarse_clock_loses_no_frame(rate, clock):
    for model in MODELS:
        processor = QwenVLVideoProcessor.preset(model)
        for total in [*range(2, 200), 300, 301, 1799, 1800, 5000, 100_000]:
            times = np.round(np.arange(total) * clock / float(rate)) / clock
            ours = processor.sample(total, frame_rate(times))
            assert np.array_equal(ours, processor.sample(total, float(rate))), total


def test_rates_that_vary_are_means():
    assert frame_rate(np.array([0.0, 0.1, 0.7, 2.0])) == 1.5
    assert frame_rate(np.array([0.0, 0.4, 3.7])) == round(2 / 3.7, 6)
    assert frame_rate(np.array([0.0, 7.3])) == round(1 / 7.3, 6)
    assert frame_rate(np.array([0.0])) == 24
    assert frame_rate(np.array([0.0, 1e9])) > 0


@pytest.mark.parametrize("container", ["mp4", "matroska", "avi"])
def test_ten_seconds_are_twenty_frames_in_every_container(container):
    encoded = film(300, size=(16, 16), rate=Fraction(30), container=container)
    assert len(small("qwen3-vl").measure(io.BytesIO(encoded)).parts) == 10


# Law 2: times.


def test_parts_tell_the_mean_of_the_times_of_their_frames():
    """VID-16: 10 frames a second, 8 frames, sampled at 2, temporal patches of 2."""
    measured = small("qwen3-vl").measure(io.BytesIO(film(8)))
    numbers = small("qwen3-vl").sample(8, 10.0)
    assert numbers.tolist() == [0, 2, 5, 7]  # at least 4 are taken
    assert measured.parts == ("<0.1 seconds>", "<0.6 seconds>")
    calculated = Qwen3VLProcessor._calculate_timestamps(None, numbers, 10.0, 2)
    assert measured.parts == tuple(f"<{time:.1f} seconds>" for time in calculated)


@pytest.mark.parametrize("total", [2, 5, 9, 61, 80])
def test_times_equal_those_of_transformers(total):
    processor = small("qwen3-vl")
    measured = processor.measure(io.BytesIO(film(total)))
    numbers = processor.sample(total, 10.0)
    calculated = Qwen3VLProcessor._calculate_timestamps(None, numbers, 10.0, 2)
    assert measured.parts == tuple(f"<{time:.1f} seconds>" for time in calculated)


def test_times_are_the_true_ones_where_the_rate_varies():
    """VID-04: frames at uneven times."""
    seconds = (0.0, 0.2, 0.4, 1.6, 1.8, 3.0, 3.2, 4.0)
    measured = small("qwen3-vl").measure(io.BytesIO(film(8, seconds=seconds)))
    middles = ("<0.1 seconds>", "<1.0 seconds>", "<2.4 seconds>", "<3.6 seconds>")
    assert measured.parts == middles


@pytest.mark.parametrize(("total", "rate"), [(90, 10), (39, 4), (75, TELEVISION), (61, 12)])
def test_seconds_of_a_temporal_patch_are_those_of_transformers(total, rate):
    """To the last bit of a float32: positions are whole parts of its multiples."""
    processor = small("qwen2.5-vl")
    encoded = film(total, rate=Fraction(rate))
    found = reference(processor, encoded, rate)
    seconds = 2 / found["video_metadata"][0].sampled_fps
    *grid, bits = processor.measure(io.BytesIO(encoded)).grid
    assert np.int32(bits).view(np.float32) == np.float32(seconds)

    count = grid[0] * grid[1] * grid[2] // 4
    index = np.array([[0, 0, count]])
    times = mrope_positions(
        np.arange(count)[None],
        index,
        np.array([[*grid, bits]]),
        merge_size=processor.merge_size,
        tokens_per_second=processor.tokens_per_second,
    )[0, 0]
    wanted = (torch.arange(grid[0]) * (2 * torch.tensor(seconds))).long()
    assert times.reshape(grid[0], -1)[:, 0].tolist() == wanted.tolist()


# Law 3, and parts.


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("total", [1, 2, 3])
def test_short_clips_are_taken_whole(total, model):
    """VID-05: a lone frame is repeated, which transformers refuses."""
    processor, encoded = small(model), film(total)
    frames = 3 if (total, model) == (3, "qwen3-vl") else min(total, 2)
    assert len(processor.sample(total, 10.0)) == frames
    measured = processor.measure(io.BytesIO(encoded))
    steps = len(measured.parts) or measured.grid[0]
    assert steps == (frames + 1) // 2
    patches = written(processor, encoded).reshape(steps, -1, 3, 2, processor.frame.patch_size**2)
    repeated = np.array_equal(patches[-1, :, :, 0], patches[-1, :, :, 1])
    assert repeated == (frames % 2 == 1)


def test_parts_can_be_written_one_by_one():
    processor, encoded = small("qwen3-vl"), film(80)
    together = written(processor, encoded)
    assert len(together) == 8
    for first, stop in ((0, 1), (3, 5), (7, 8)):
        out = np.full((stop - first, *together.shape[1:]), 77, dtype=np.uint8)
        processor.write(io.BytesIO(encoded), first, out)
        assert np.array_equal(out, together[first:stop])


# Refusals and settings.


@pytest.mark.parametrize("model", MODELS)
def test_defects_are_found_while_measuring(model):
    with pytest.raises(SampleError, match="not_a_video"):
        small(model).measure(io.BytesIO(b"<html></html>"))
    limited = small(model, frame=replace(small(model).frame, decode_limit_px=1000))
    with pytest.raises(SampleError, match="too_many_pixels"):
        limited.measure(io.BytesIO(film(4)))


def test_it_is_picklable_and_a_processor():
    processor = small("qwen2.5-vl")
    assert pickle.loads(pickle.dumps(processor)) == processor
    assert isinstance(processor, VideoProcessor)
    assert (processor.unit_shape, processor.pad_to) == ((1176,), None)
    assert processor.grid_key == "video_grid_thw"
    assert small("qwen3-vl").tokens_per_second is None


@pytest.mark.parametrize(
    "settings",
    [{"model": "qwen1"}, {"fps": 0}, {"min_frames": 1}, {"min_frames": 5, "max_frames": 4}],
)
def test_impossible_settings_are_refused_at_construction(settings):
    with pytest.raises(ConfigError):
        QwenVLVideoProcessor(QwenVLProcessor(), **settings)


def test_presets_are_the_published_ones():
    three = QwenVLVideoProcessor.preset("qwen3-vl")
    assert (three.frame.min_pixels, three.frame.max_pixels) == (4096, 25_165_824)
    two = QwenVLVideoProcessor.preset("qwen2.5-vl")
    size = Qwen2VLVideoProcessor().size
    assert (two.frame.min_pixels, two.frame.max_pixels) == (
        size["shortest_edge"],
        size["longest_edge"],
    )
    for processor in (three, two):
        assert (processor.fps, processor.min_frames, processor.max_frames) == (2, 4, 768)
    with pytest.raises(ConfigError, match="qwen3-vl"):
        QwenVLVideoProcessor.preset("qwen1")


def test_fingerprint_tells_all_that_pixels_depend_on():
    ours = small("qwen3-vl").fingerprint()
    assert json.loads(json.dumps(ours)) == ours
    assert "ffmpeg" in ours
    others = [
        small("qwen2.5-vl"),
        small("qwen3-vl", model="qwen2.5-vl"),
        small("qwen3-vl", fps=1),
        small("qwen3-vl", min_frames=2),
        small("qwen3-vl", max_frames=8),
        small("qwen3-vl", cap_pixels_per_frame=False),
        QwenVLVideoProcessor.preset("qwen3-vl", backend="pillow", max_pixels=40_000),
    ]
    assert all(other.fingerprint() != ours for other in others)
