import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from zephon_mm.errors import ConfigError
from zephon_mm.processors.resize import BICUBIC, BILINEAR, LANCZOS, check_resize, normalize, resize

MODES = {
    LANCZOS: InterpolationMode.LANCZOS,
    BILINEAR: InterpolationMode.BILINEAR,
    BICUBIC: InterpolationMode.BICUBIC,
}
side = st.integers(2, 90)


def noise(height, width):
    return np.random.default_rng((height, width)).integers(0, 256, (height, width, 3), np.uint8)


def planes(height, width):
    return np.full((3, height, width), 77, dtype=np.uint8)


@settings(max_examples=80, deadline=None)
@given(source=st.tuples(side, side), size=st.tuples(side, side), resample=st.sampled_from([*MODES]))
def test_every_filter_equals_its_library(source, size, resample):
    pixels, ours = noise(*source), planes(*size)
    resize(pixels, ours, resample=resample, backend="pillow")
    image = Image.fromarray(pixels).resize(size[::-1], resample)
    assert np.array_equal(ours, np.asarray(image).transpose(2, 0, 1))

    resize(pixels, ours, resample=resample, backend="torchvision")
    whole = torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
    theirs = functional.resize(whole, list(size), MODES[resample], antialias=True)
    assert np.array_equal(ours, theirs.numpy())


@settings(max_examples=80, deadline=None)
@given(
    source=st.tuples(side, side),
    size=st.tuples(side, side),
    resample=st.sampled_from([*MODES]),
    backend=st.sampled_from(["torchvision", "pillow"]),
)
def test_layouts_of_source_and_target_do_not_change_pixels(source, size, resample, backend):
    frame = noise(source[0] + 5, source[1] + 7)
    cut = frame[2 : 2 + source[0], 3 : 3 + source[1]]
    wanted = planes(*size)
    resize(cut.copy(), wanted, resample=resample, backend=backend)

    last = np.full((*size, 3), 77, dtype=np.uint8)
    resize(cut, last.transpose(2, 0, 1), resample=resample, backend=backend)
    assert np.array_equal(last.transpose(2, 0, 1), wanted)

    around = planes(size[0] + 4, size[1] + 6)
    resize(cut, around[:, 1:-3, 2:-4], resample=resample, backend=backend)
    assert np.array_equal(around[:, 1:-3, 2:-4], wanted)
    around[:, 1:-3, 2:-4] = 77
    assert (around == 77).all()


@pytest.mark.parametrize("backend", ["torchvision", "pillow"])
def test_constants_of_the_channels_meet_their_planes(backend):
    pixels = torch.from_numpy(noise(6, 8)).permute(2, 0, 1).repeat(2, 1, 1, 1)
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    together = normalize(pixels, torch.float32, mean=mean, std=std, backend=backend)
    for channel in range(3):
        plane = pixels[:, channel]
        settings = {"mean": mean[channel], "std": std[channel], "backend": backend}
        assert torch.equal(together[:, channel], normalize(plane, torch.float32, **settings))


def test_only_the_filters_of_a_processor_are_taken():
    check_resize(LANCZOS, "pillow", filters=(LANCZOS,))
    with pytest.raises(ConfigError, match=r"resample=1 .* 2 \(bilinear\), 3 \(bicubic\)"):
        check_resize(LANCZOS, "torchvision")
    with pytest.raises(ConfigError, match="backend='opencv'"):
        check_resize(BILINEAR, "opencv")
