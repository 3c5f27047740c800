"""What commands are told of a dataset."""

import argparse
from pathlib import Path

import pytest

from zephon_mm.cli import dataset
from zephon_mm.errors import ConfigError

HUB = Path(__file__).parents[1] / "fixtures" / "hub" / "hub"


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    dataset.add_arguments(parser, "path")
    return parser.parse_args([str(HUB), *words])


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_options_are_those_of_the_reader() -> None:
    found = dataset.opened("d", arguments("--option", "split=sft"), "path")
    assert (found.name, len(found)) == ("d", 4)
    words = ("--fmt", "parquet", "--option", "split=all", "--option", 'image_map={"a": "b"}')
    assert len(dataset.opened("d", arguments(*words), "path", config=None)) == 11


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--option", "split"), "--option split: expected NAME=VALUE"),
        (("--option", "splt=sft"), "unexpected keyword argument 'splt'"),
        ((), "has sft, train, asked for split=None"),
    ],
)
def test_what_is_wrong_with_options_is_told(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataset.opened("d", arguments(*words), "path")
