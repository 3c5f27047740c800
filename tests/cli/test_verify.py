"""`verify`: equal where the data is equal, and the first difference named where it is not."""

import copy
from pathlib import Path

import pytest

from zephon_mm.batch import step_sha256
from zephon_mm.cli.main import main
from zephon_mm.cli.verify import Combination, Delivered, first_difference, report
from zephon_mm.recipe import load_recipe


@pytest.fixture(scope="module")
def recipe(demo: Path) -> str:
    text = demo.read_text().replace("global_batch_size = 24", "global_batch_size = 6")
    text = text.replace("canonical_replicas = 24", "canonical_replicas = 4")
    file = demo.with_name("verify.toml")
    file.write_text(text.replace("microbatch_size = 4", "microbatch_size = 1"))
    return str(file)


def verify(recipe: str, *words: str) -> int:
    return main(["verify", recipe, "--workers", "2", "--steps", "2", *words])


def delivered(rows: int = 6) -> Delivered:
    numbers = range(rows)
    return Delivered({n: f"{n:064x}" for n in numbers}, {n: (f"data/{n}",) for n in numbers})


@pytest.mark.slow
@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_all_topologies_are_equal_and_impossible_ones_are_listed(
    recipe: str, resume: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--dp", "1,3", "--microbatch", "2,4", "--runner", "inline,thread", *resume]
    assert verify(recipe, *words) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "all equal: 4 combinations, 2 steps, 12 rows, 4 skipped"
    assert "skipped: 3 * 4 does not divide 6" in out


@pytest.mark.slow
def test_worker_processes_deliver_the_same(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(recipe, "--dp", "2", "--microbatch", "1", "--runner", "process") == 0
    assert "all equal: 1 combinations" in capsys.readouterr().out


def test_no_possible_combination_is_an_error(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(recipe, "--dp", "5", "--microbatch", "1") == 2
    assert "no dp * microbatch divides global_batch_size = 6" in capsys.readouterr().err


def test_the_first_difference_is_named_by_step_row_sequence_and_samples() -> None:
    expected, found = delivered(), delivered()
    assert first_difference(expected, found, 3) is None
    found.digests[5] = "5" * 64
    found.digests[4] = "f" * 64
    found.keys[4] = ("other/4",)
    message = first_difference(expected, found, 3)
    assert message is not None
    assert message.startswith("step 1, row 1 (sequence 4): expected 0000000000000000 of data/4")
    assert message.endswith("got ffffffffffffffff of other/4")


def test_a_missing_or_surplus_row_is_a_difference() -> None:
    expected, found = delivered(6), delivered(7)
    assert "(sequence 6): expected nothing" in str(first_difference(expected, found, 3))
    assert "(sequence 6): expected 0000" in str(first_difference(found, expected, 3))
    assert "got nothing" in str(first_difference(found, expected, 3))


@pytest.mark.slow
def test_a_row_that_two_ranks_deliver_is_a_difference(recipe: str) -> None:
    with load_recipe(recipe).pipeline(runner="inline") as pipeline:
        batch = next(iter(pipeline))
    once, twice = Delivered(), Delivered()
    once.add(batch)
    twice.add(batch)
    assert first_difference(once, twice, 6) is None
    twice.add(batch)
    assert "row 0 (sequence 0): delivered more than once" in str(first_difference(once, twice, 6))


@pytest.mark.slow
def test_a_recipe_without_a_whole_step_is_an_error(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path(recipe).read_text().replace("seed = 7", "seed = 7\nstop_after_passes = 1", 1)
    file = Path(recipe).with_name("finite.toml")
    file.write_text(text.replace("global_batch_size = 6", "global_batch_size = 600"))
    assert verify(str(file), "--dp", "1", "--microbatch", "1", "--runner", "inline") == 2
    assert "sequences, a step needs 600" in capsys.readouterr().err


def test_a_difference_makes_the_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    expected, one, two = delivered(), Combination(1, 1, "inline"), Combination(2, 1, "thread")
    found = {one: delivered(), two: copy.deepcopy(expected)}
    assert report([one, two], found, expected, 3) == 0
    found[two].digests[2] = "f" * 64
    assert report([one, two], found, expected, 3) == 1
    assert "NOT EQUAL: 1 of 2 combinations differ" in capsys.readouterr().out


def test_a_steps_digest_is_that_of_its_rows_in_order() -> None:
    run = delivered(6)
    assert run.step(1, 3) == step_sha256({n: f"{n:064x}" for n in (5, 4, 3)})
