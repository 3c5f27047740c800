"""`bench`: a rate, an answer and what limits; the exit status is the answer."""

import re
from pathlib import Path

import pytest

from zephon_mm.cli.bench import WAITS, advice, limit_of
from zephon_mm.cli.main import main
from zephon_mm.options import Options, cpus
from zephon_mm.recipe import load_recipe


@pytest.mark.slow
@pytest.mark.parametrize(("need", "status"), [("1", 0), ("1e12", 1)])
def test_the_status_says_whether_the_need_is_met(
    demo: Path, need: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", str(demo), "--need-tokens", need, "--seconds", "0.3"]) == status
    rate, needed, answer, limit = capsys.readouterr().out.splitlines()
    assert int(re.findall(r"[\d,]+", rate)[0].replace(",", "")) > 0
    assert needed == f"need    {float(need):,.0f} usable tokens/s"
    assert answer.startswith("answer  no: 0.00" if status else "answer  yes: ")
    assert re.match("limit   (measuring|decoding|memory|planning): .+", limit)


@pytest.mark.parametrize(
    "words", [["--need-tokens=0"], ["--need-tokens=nan"], ["--need-tokens=5", "--seconds=0"]]
)
def test_numbers_that_tell_nothing_are_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "none.toml", *words]) == 2
    assert "must be above 0" in capsys.readouterr().err


@pytest.mark.slow
def test_data_of_one_batch_tells_no_rate(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = demo.read_text().replace("seed = 7", "seed = 7\nstop_after_passes = 1", 1)
    one = demo.with_name("one.toml")
    one.write_text(text.replace("_size = 24", "_size = 1").replace("_size = 4\n", "_size = 1\n"))
    count = len(list(load_recipe(one).pipeline().plan(10_000)))
    one.write_text(
        text.replace("_size = 24", f"_size = {count}").replace("_size = 4\n", f"_size = {count}\n")
    )
    assert main(["bench", str(one), "--need-tokens", "1", "--seconds", "60"]) == 2
    assert "the data ends with the first batch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("waits", "limit"),
    [
        ({}, "planning"),
        ({"driver_wait_measure_s": 6.0, "driver_wait_consumer_s": 2.0}, "measuring"),
        ({"driver_wait_measure_s": 2.0, "driver_wait_consumer_s": 6.0}, "decoding"),
        ({"driver_wait_memory_s": 6.0}, "memory"),
    ],
)
def test_what_the_driver_waits_for_limits(waits: dict[str, float], limit: str) -> None:
    assert limit_of(dict.fromkeys(WAITS.values(), 0.0) | waits | {"elapsed_s": 10.0}) == limit


@pytest.mark.parametrize("limit", ["measuring", "decoding"])
def test_nothing_is_advised_that_is_set_already(limit: str) -> None:
    found = [
        advice(limit, Options(runner=runner, workers=workers))
        for runner, workers in (("thread", 1), ("process", cpus() - 1), ("process", cpus()))
    ]
    said = ('runner = "process"', f"workers = {cpus()}", "more CPUs")
    assert [[one in text for one in said] for text in found] == [
        [True, False, False],
        [False, cpus() > 1, cpus() == 1],
        [False, False, True],
    ]
