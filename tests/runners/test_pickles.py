"""By reference where a new process can import, by value elsewhere."""

import collections
import decimal
import os.path
import pickle
import sys
import traceback
import types

import cloudpickle
import numpy as np
import PIL.Image
import pytest
import simplejpeg
import torch

import zephon_mm.errors
from zephon_mm.errors import RunnerError
from zephon_mm.runners import pickles


@pytest.fixture
def handmade():
    """A module that exists in this process only."""
    module = types.ModuleType("handmade_by_a_notebook")
    source = "class Point:\n    pass\nSCALE = 3\ndef scale(context, x):\n    return SCALE * x\n"
    exec(source, module.__dict__)
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


@pytest.mark.parametrize(
    "module",
    [sys, os, os.path, collections, decimal, np, np.random, torch, PIL.Image, simplejpeg,
     cloudpickle, zephon_mm.errors],
    ids=lambda module: module.__name__,
)  # fmt: skip
def test_what_is_installed_is_importable(module: types.ModuleType) -> None:
    assert pickles.is_importable(module.__name__)


def test_main_handmade_and_shadowed_modules_are_not(handmade, tmp_path, monkeypatch) -> None:
    assert not pickles.is_importable("__main__")
    assert not pickles.is_importable(handmade.__name__)
    (tmp_path / "zephon_shadow_test.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    shadow = types.ModuleType("zephon_shadow_test")
    shadow.__file__ = __file__
    monkeypatch.setitem(sys.modules, shadow.__name__, shadow)
    assert not pickles.is_importable(shadow.__name__)


def test_handmade_functions_travel_by_value_with_their_globals(handmade) -> None:
    data = pickles.dumps((handmade.scale, handmade))
    assert not cloudpickle.list_registry_pickle_by_value()
    del sys.modules[handmade.__name__]
    scale, module = pickle.loads(data)
    sys.modules[handmade.__name__] = handmade
    assert scale(None, 5) == 15
    assert module.SCALE == 3


def test_a_class_that_went_by_value_comes_back_as_itself(handmade) -> None:
    point = pickle.loads(pickles.dumps(handmade.Point()))
    assert type(point) is handmade.Point


def test_importable_functions_travel_by_reference() -> None:
    assert len(pickles.dumps((os.path.join, ("a", "b")))) < 100


def failing(depth: int) -> None:
    if depth:
        failing(depth - 1)
    raise LookupError("depth reached")


def test_an_exception_carries_its_traceback_as_text() -> None:
    try:
        failing(3)
    except LookupError as raised:
        raised.add_note("row 14")
        error = pickles.loads_error(pickles.dumps_error(raised))
    assert type(error) is LookupError
    assert error.__notes__ == ["row 14"]
    text = "".join(traceback.format_exception(error))
    assert text.count("failing(depth - 1)") == 3


def test_an_exception_that_cannot_be_rebuilt_says_so() -> None:
    class Picky(Exception):
        def __init__(self, a: int, b: int) -> None:
            super().__init__(f"{a} and {b}")

    error = pickles.loads_error(pickles.dumps_error(Picky(1, 2)))
    assert type(error) is RunnerError
    assert "Picky: 1 and 2" in str(error)
    unpicklable = pickles.loads_error(pickles.dumps_error(ValueError(sys._getframe())))
    assert "Make the exception picklable" in str(unpicklable)
