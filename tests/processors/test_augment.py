import json
import pickle

import numpy as np
import pytest
import skimage.data
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms.v2 import functional

from tests.fixtures.pictures import noise
from zephon_mm.errors import ConfigError
from zephon_mm.processors.augment import (
    Augment,
    Drawn,
    apply,
    window,
)

EVERYTHING = Augment((0.3, 0.9), 0.5, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1)
GEOMETRY = Augment(crop=(0.2, 1.0), flip=0.5)
SIZES = st.tuples(st.integers(1, 90), st.integers(1, 90))
KEYS = st.tuples(st.integers(), st.text(max_size=5))


# Law 1: a function of settings and key.


@settings(max_examples=25, deadline=None)
@given(key=KEYS, other=KEYS)
def test_a_key_gives_its_pixels_and_another_key_others(key, other):
    pixels = noise(40, 30)
    first = apply(pixels, EVERYTHING.draw(*key))
    assert np.array_equal(first, apply(pixels.copy(), EVERYTHING.draw(*key)))
    assert (EVERYTHING.draw(*key) == EVERYTHING.draw(*other)) == (key == other)
    if key != other:
        assert not np.array_equal(first, apply(pixels, EVERYTHING.draw(*other)))


def test_global_random_numbers_are_neither_used_nor_moved():
    states = (torch.get_rng_state(), np.random.get_state()[1].tolist())
    apply(noise(9, 9), EVERYTHING.draw(1))
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == np.random.get_state()[1].tolist()


@given(key=KEYS, crop=st.floats(0.1, 1.0), flip=st.floats(0, 1), hue=st.floats(0, 0.5))
def test_one_setting_does_not_change_what_is_drawn_for_another(key, crop, flip, hue):
    ours, plain = Augment((crop, 1.0), flip, hue=hue).draw(*key), Augment().draw(*key)
    assert ours._replace(side=1.0, flip=False, hue=0.0) == plain
    assert ours.side == Augment((crop, 1.0)).draw(*key).side
    assert ours.flip == Augment(flip=flip).draw(*key).flip


@given(key=KEYS)
def test_what_is_drawn_is_within_the_settings(key):
    drawn = EVERYTHING.draw(*key)
    assert drawn.side**2 >= 0.3 - 1e-9
    assert drawn.side**2 <= 0.9 + 1e-9
    assert all(abs(factor - 1) <= 0.4 for factor in drawn[4:7])
    assert abs(drawn.hue) <= 0.1
    assert Augment(flip=1.0).draw(*key).flip
    assert not Augment(flip=0.0).draw(*key).flip


def test_draws_fill_their_ranges():
    drawn = [EVERYTHING.draw(number) for number in range(400)]
    for values, low, high in (
        ([one.side**2 for one in drawn], 0.3, 0.9),
        ([one.x for one in drawn], 0, 1),
        ([one.y for one in drawn], 0, 1),
        ([one.flip for one in drawn], 0, 1),
        ([one.brightness for one in drawn], 0.6, 1.4),
        ([one.hue for one in drawn], -0.1, 0.1),
    ):
        assert abs(np.mean(values) - (low + high) / 2) < 0.1 * (high - low)


@pytest.mark.slow
def test_the_number_of_threads_does_not_change_pixels():
    pixels, threads = skimage.data.astronaut()[:301, :303].copy(), torch.get_num_threads()
    try:
        found = []
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append([apply(pixels, EVERYTHING.draw(key)).tobytes() for key in range(3)])
    finally:
        torch.set_num_threads(threads)
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("factor", [0.6, 0.95, 1.4])
def test_contrast_is_that_of_torchvision_within_rounding(factor):
    pixels = skimage.data.astronaut()
    theirs = functional.adjust_contrast(torch.from_numpy(pixels).permute(2, 0, 1), factor)
    ours = apply(pixels, Drawn(contrast=factor)).astype(int)
    assert np.abs(ours - theirs.permute(1, 2, 0).numpy()).max() <= 1


def test_other_changes_are_those_of_torchvision():
    pixels = noise(31, 45)
    image = torch.from_numpy(pixels).permute(2, 0, 1)
    for drawn, theirs in (
        (Drawn(flip=True), functional.horizontal_flip(image)),
        (Drawn(brightness=1.3), functional.adjust_brightness(image, 1.3)),
        (Drawn(saturation=0.7), functional.adjust_saturation(image, 0.7)),
        (Drawn(hue=-0.05), functional.adjust_hue(image, -0.05)),
    ):
        assert np.array_equal(apply(pixels, drawn), theirs.permute(1, 2, 0).numpy())


# Law 2: a picture keeps its size.


@settings(max_examples=30, deadline=None)
@given(size=SIZES, key=KEYS)
def test_a_picture_keeps_its_size_and_the_original_its_pixels(size, key):
    pixels = noise(*size)
    changed = apply(pixels, EVERYTHING.draw(*key))
    assert changed.shape == pixels.shape
    assert changed.dtype == np.uint8
    assert changed.flags.c_contiguous
    assert np.array_equal(pixels, noise(*size))


@given(size=SIZES, key=KEYS)
def test_what_is_kept_lies_in_the_picture(size, key):
    top, left, height, width = window(size, GEOMETRY.draw(*key))
    assert 0 <= top <= top + height <= size[0]
    assert 0 <= left <= left + width <= size[1]
    assert min(height, width) >= 1


def test_the_defaults_change_nothing():
    pixels = noise(20, 30)
    assert Augment().draw(7)[3:] == Drawn()[3:]
    assert np.array_equal(apply(pixels, Augment().draw(7)), pixels)


# Settings.


@pytest.mark.parametrize(
    "settings",
    [
        {"crop": (0.0, 1.0)},
        {"crop": (0.9, 0.5)},
        {"crop": (0.5, 1.1)},
        {"flip": -0.1},
        {"flip": 1.1},
        {"brightness": 1.1},
        {"contrast": -1},
        {"saturation": 2},
        {"hue": 0.6},
    ],
)
def test_impossible_settings_are_refused_at_construction(settings):
    with pytest.raises(ConfigError, match="least <= greatest"):
        Augment(**settings)


def test_it_is_picklable_and_its_fingerprint_tells_all():
    assert pickle.loads(pickle.dumps(EVERYTHING)) == EVERYTHING
    ours = EVERYTHING.fingerprint()
    assert json.loads(json.dumps(ours)) == ours
    others = [{"crop": (0.3, 1.0)}, {"flip": 0.4}, {"brightness": 0.3}, {"hue": 0.2}]
    for change in others:
        assert Augment(**{**vars(EVERYTHING), **change}).fingerprint() != ours
