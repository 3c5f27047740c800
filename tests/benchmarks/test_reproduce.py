"""The tables of the suite, in sizes that take seconds."""

import csv
from itertools import islice
from pathlib import Path

import pytest
import torch
from matplotlib.axes import Axes

from benchmarks.reproduce.__main__ import TIMED, TRAINED, machine
from benchmarks.reproduce.elastic import Plan
from benchmarks.reproduce.elastic import ours as resumed
from benchmarks.reproduce.elastic import plain as resumed_plain
from benchmarks.reproduce.losses import difference, equal_steps, ours, plain
from benchmarks.reproduce.plain import PlainLoader, documents, micro
from benchmarks.reproduce.restores import planned_s
from benchmarks.reproduce.tables import Result
from benchmarks.restore import states
from benchmarks.train.run import Settings
from zephon_mm.recipe import Recipe

pytestmark = pytest.mark.slow
PLAN = Plan(saved_at=2, more=1, saved_on=4, resumed_on=(2, 3, 6), size=12)
ROWS = 60 + 12


def test_each_document_is_there_once_with_its_images(tiny: Recipe) -> None:
    data = documents(tiny)
    assert len(data) == ROWS
    assert all(one.labels[0] == -100 and len(one.pixels) for one in data)
    images = sum(len(one.pixels) for one in data)
    image_id = int(data[0].ids.mode().values)  # the commonest token is the placeholder
    assert sum(int((one.ids == image_id).sum()) for one in data) == 16 * images


def test_plain_ranks_share_the_documents_of_an_epoch(tiny: Recipe) -> None:
    data = documents(tiny)
    found = [
        id(one.ids)
        for rank in range(4)
        for one in islice(PlainLoader(data, 256, 4, rank)._documents(), ROWS // 4)
    ]
    assert sorted(found) == sorted(id(one.ids) for one in data)


def test_a_plain_pack_keeps_its_documents_apart(tiny: Recipe) -> None:
    pack = documents(tiny)[:3]
    found = micro(pack, 256, 0)
    size = len(pack[0].ids)
    mask = found.inputs["attention_mask"][0, 0]
    assert found.tokens == sum(len(one.ids) for one in pack)
    assert found.valid == sum(int((one.labels != -100).sum()) for one in pack)
    assert torch.equal(mask[:size, :size], torch.ones(size, size, dtype=torch.bool).tril())
    assert not mask[size:, :size].any()
    assert found.inputs["position_ids"][0, size] == 0


def test_our_curves_are_equal_over_degrees_and_the_plain_loaders_are_not(tiny: Recipe) -> None:
    settings = Settings(steps=2, digests=True)
    mine = [ours(tiny, degree, settings) for degree in (1, 2)]
    others = [plain(tiny, degree, settings) for degree in (1, 2)]
    assert (equal_steps(mine), equal_steps(others)) == (2, 0)
    assert difference(mine) < 1e-5 < difference(others)


def test_our_run_goes_on_with_other_ranks_and_the_plain_one_does_not(tiny: Recipe) -> None:
    found, other = resumed(tiny, PLAN), resumed_plain(tiny, PLAN)
    assert found.keys() == other.keys() == {0, *PLAN.resumed_on}
    assert all(steps == found[0] for steps in found.values())
    assert not any(other[ranks] == other[0] for ranks in PLAN.resumed_on)


def test_a_checkpoint_is_small_after_any_step_and_the_run_goes_on_from_it() -> None:
    found = dict(states((1, 2)))
    assert list(found) == [1, 2]
    assert all(1_000 < len(state) <= 16 << 10 for state in found.values())
    assert planned_s(found[2]) > 0


def test_a_result_is_a_table_a_file_of_values_and_a_plot(tmp_path: Path) -> None:
    def draw(axes: Axes) -> None:
        axes.plot([1, 2], [3, 4], label="a")

    result = Result("A title", ["name", "rate"], [["x", 12_345.6], ["y", 0.5]], ["a note"], draw)
    result.write("one", tmp_path)
    page = (tmp_path / "one.md").read_text()
    assert "| x | 12,346 |\n| y | 0.5 |" in page
    assert "- a note" in page
    with (tmp_path / "one.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [["name", "rate"], ["x", "12345.6"], ["y", "0.5"]]
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_names_every_table_the_machine_and_the_versions() -> None:
    page = (Path(__file__).parents[2] / "benchmarks" / "README.md").read_text()
    assert all(f"| `{name}` |" in page for name in TRAINED | TIMED)
    head = "\n".join(machine())
    versions = f"torch {torch.__version__.partition('+')[0]}"
    assert all(word in head for word in ("date: ", "CPUs", "GiB", versions))
