"""The command line: exit statuses, messages instead of tracebacks, help for every command."""

import re
from pathlib import Path

import pytest

from zephon_mm.cli.main import COMMANDS, main
from zephon_mm.errors import ConfigError
from zephon_mm.recipe import load_recipe


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_explains(command: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*([command] if command else []), "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert "usage: zephon-mm" in shown
    assert all(name in shown for name in ([command] if command else COMMANDS))


@pytest.mark.parametrize("words", [[], ["frobnicate"], ["plan"], ["verify", "x", "--dp", "0"]])
def test_wrong_words_exit_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert "usage: zephon-mm" in capsys.readouterr().err


def test_an_error_of_the_user_is_a_message_and_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(tmp_path / "none.toml")]) == 2
    err = capsys.readouterr().err
    assert "none.toml cannot be read" in err
    assert "Traceback" not in err
    with pytest.raises(ConfigError):
        main(["plan", "--debug", str(tmp_path / "none.toml")])


@pytest.mark.slow
def test_plan_shows_the_next_sequences(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(demo), "-n", "3"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["number", "tokens", "images", "samples"]
    planned = load_recipe(demo).pipeline().plan(3)
    for row, one in zip(rows, planned, strict=True):
        numbers = [int(word) for word in re.findall(r"\d+", row)[:3]]
        assert numbers == [one.number, one.num_tokens, one.num_images]
        assert one.keys[0] in row


@pytest.mark.slow
def test_index_measures_every_sample_once(
    unknown: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = unknown
    assert main(["plan", str(file), "-n", "5"]) == 0
    planned = capsys.readouterr().out
    assert main(["index", str(file), "--quiet"]) == 0
    shown = capsys.readouterr().out
    assert "captions: 40 rows, 40 records of" in shown
    assert "stories: 20 rows, 20 records of" in shown
    assert "films: 6 rows, 6 records of" in shown
    load_recipe(file).pipeline().explain()
    assert "76 of 76 samples are known" in capsys.readouterr().out
    assert main(["plan", str(file), "-n", "5"]) == 0
    assert capsys.readouterr().out == planned
    assert main(["index", str(file), "--rebuild", "--workers", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[:-1] == shown.splitlines()[:-1]
