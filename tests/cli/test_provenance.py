"""What a step is made of, told from metadata: what its batches would say."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fixtures.memory import Recipe, take
from tests.fixtures.tokenizers import save_byte_level_bpe
from zephon_mm.cli.main import main
from zephon_mm.errors import ConfigError
from zephon_mm.io import Dataset
from zephon_mm.pipeline import Pipeline
from zephon_mm.processors.siglip import SigLIPProcessor
from zephon_mm.recipe import load_recipe
from zephon_mm.work import StaticMixtureWorkSource

N = 4


class Blind(SigLIPProcessor):
    """Measures, and decodes nothing."""

    def write(self, *arguments: Any, **more: Any) -> None:
        raise AssertionError("decoded")


BLIND = Blind(size=32, patch_size=16)


@pytest.mark.parametrize("passes", [None, 2])
@pytest.mark.parametrize("balance", [False, True])
def test_a_step_is_made_of_what_its_batches_hold(
    recipe: Recipe, passes: int | None, balance: bool
) -> None:
    recipe = replace(recipe, passes=passes, stop="all_exhausted")
    with recipe.build(balance=balance) as pipeline:
        batches = take(pipeline, 6 * N)
    with recipe.build(processor=BLIND) as pipeline:
        found = {step: pipeline.provenance(step) for step in range(6)}
    datasets = {dataset.name: dataset for dataset in recipe.datasets}
    for batch in batches:
        (number,) = batch.sequence_ids.tolist()
        row = found[number // N][number % N]
        assert (row["row"], row["sequence"]) == (number % N, number)
        assert row["tokens"] == int((batch.segment_ids > 0).sum())
        assert row["images"] == len(batch.image_valid)
        assert [sample["key"] for sample in row["samples"]] == list(batch.keys[0])
        sizes = np.bincount(batch.segment_ids[0].numpy())[1:].tolist()
        assert [sample["tokens"] for sample in row["samples"]] == sizes[: len(row["samples"])]
        for sample in row["samples"]:
            dataset = datasets[sample["dataset"]]
            shard, place = dataset.locate(sample["key"])
            assert (sample["shard"], sample["row"]) == (dataset.shards[shard].name, place)
            assert sample["name"] == str(place)  # of this reader
    json.dumps(found)


@pytest.mark.parametrize("balance", [False, True])
def test_from_a_state_inside_a_step_the_steps_after_it_are_the_same(
    recipe: Recipe, balance: bool
) -> None:
    with recipe.build(dp=2, balance=balance, step_tokens=True) as pipeline:
        take(pipeline, 1)
        state = pipeline.checkpoint()
    with recipe.build() as pipeline:
        expected = [pipeline.provenance(step) for step in (1, 5)]
    with recipe.build(state=state, balance=balance) as pipeline:
        assert [pipeline.provenance(step) for step in (1, 5)] == expected
        first = 0 if balance else 2  # what was dealt by weight is no beginning of the step
        assert [planned.number for planned in pipeline.plan(3)] == [first, first + 1, first + 2]
        if not balance:
            with pytest.raises(ConfigError, match="step 0 begins with sequence 0, planning with 2"):
                pipeline.provenance(0)


@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_a_finite_run_is_made_of_the_steps_that_it_delivers(recipe: Recipe, tail: str) -> None:
    recipe = replace(recipe, passes=1, stop="all_exhausted", tail=tail, global_batch_size=7)
    with recipe.build() as pipeline:
        keys = [batch.keys[0] for batch in take(pipeline, 1000)]
    with recipe.build() as pipeline:
        rows = [row for step in range(len(keys)) for row in pipeline.provenance(step)]
    found = [tuple(sample["key"] for sample in row["samples"]) for row in rows]
    assert found == [row for row in keys if row]


@pytest.mark.parametrize("passes", [None, 1])
def test_a_step_of_raw_samples_is_made_of_theirs(passes: int | None) -> None:
    texts = Dataset.from_rows("texts", [{"text": f"text {n}"} for n in range(30)])

    def raw() -> Pipeline:
        source = StaticMixtureWorkSource([texts], {"texts": 1}, 0, stop_after_passes=passes)
        options = {"canonical_replicas": 3, "chunk_size": 4, "runner": "inline"}
        return Pipeline(source).options(**options).batch(microbatch_size=N, tail="pad")

    with raw() as pipeline:
        batches = take(pipeline, 8)
    with raw() as pipeline:
        for step, batch in enumerate(batches):
            rows = pipeline.provenance(step)
            found = [tuple(sample["key"] for sample in row["samples"]) for row in rows]
            assert found == [keys for keys in batch.keys if keys]
            assert [row["sequence"] for row in rows] == batch.sequence_ids.tolist()[: len(rows)]
        assert len(batches) == 8
        assert passes is None or pipeline.provenance(8) == []


def test_a_step_that_is_skipped_has_no_rows_and_excluded_samples_are_in_none(
    recipe: Recipe,
) -> None:
    with recipe.build() as pipeline:
        rows = pipeline.provenance(1)
        expected = [row["sequence"] for row in pipeline.provenance(3)]
        gone = rows[0]["samples"][0]["key"]
        pipeline.restore(pipeline.checkpoint(), skip_steps=[2], exclude_keys=[gone])
        steps = [pipeline.provenance(step) for step in range(4)]
        planned = [planned.number for planned in pipeline.plan(3 * N)]
    assert steps[2] == []
    assert [row["sequence"] for row in steps[3]] == expected
    assert gone not in {
        sample["key"] for step in steps for row in step for sample in row["samples"]
    }
    assert planned == [*range(2 * N), *range(3 * N, 4 * N)]


RECIPE = """
[[datasets]]
name = "texts"
path = "texts.jsonl"
weight = 1.0

[source]
seed = 3

[options]
canonical_replicas = 2
chunk_size = 4
flush_every_k_chunks = 2
runner = "inline"

[tokenize]
tokenizer_id = "tokenizer.json"

[pack]
max_length = 32

[batch]
microbatch_size = 2
global_batch_size = 4
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rows = [{"id": f"text-{n}", "text": "words " * (1 + n % 9)} for n in range(50)]
    (tmp_path / "texts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    save_byte_level_bpe(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path / "recipe.toml"


def inspect(words: Sequence[object], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = main(["inspect", *map(str, words)])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_inspect_tells_a_recipe_by_its_content(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = file.with_name("recipe.txt")
    other.write_text(RECIPE)
    status, shown = inspect([other], capsys)
    assert status == 0
    assert "step         4 sequences" in shown
    status, shown = inspect([file.with_name("texts.jsonl")], capsys)
    assert status == 0
    assert "format   jsonl" in shown


@pytest.mark.parametrize("option", ["--step 0", "--state {}/state.json", "--json"])
def test_what_is_of_a_recipe_needs_one(
    file: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file.with_name("state.json").write_text("{}")
    words = option.format(file.parent).split()
    status, shown = inspect([file.with_name("texts.jsonl"), *words], capsys)
    assert status
    assert "texts.jsonl" in shown


def test_inspect_shows_the_rows_of_a_step(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = load_recipe(file).pipeline().provenance(7)
    status, shown = inspect([file, "--step", 7, "--json"], capsys)
    assert status == 0
    assert json.loads(shown) == rows
    status, shown = inspect([file, "--step", 7], capsys)
    assert status == 0
    assert shown.startswith("step 7, 4 rows\nrow 0, sequence 28: ")
    for sample in (sample for row in rows for sample in row["samples"]):
        named = f"{sample['key']}: texts.jsonl row {sample['row']} (text-{sample['row']}), "
        assert f"  {named}{sample['tokens']} tokens, 0 images\n" in shown


def test_inspect_begins_with_a_state_and_knows_what_it_left_out(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with load_recipe(file).pipeline() as pipeline:
        take(pipeline, 5)
        state = pipeline.checkpoint()
    saved = file.with_name("state.json")
    saved.write_text(json.dumps(state))
    for step in (3, 6):
        straight = inspect([file, "--step", step, "--json"], capsys)
        assert inspect([file, "--step", step, "--json", "--state", saved], capsys) == straight
    status, shown = inspect([file, "--step", 1, "--state", saved], capsys)
    assert status == 2
    assert "step 1 begins with sequence 4, planning with 10: restore a state of before" in shown
    with load_recipe(file).pipeline().restore(state, skip_steps=[5]) as pipeline:
        saved.write_text(json.dumps(pipeline.checkpoint()))
    status, shown = inspect([file, "--step", 5, "--state", saved], capsys)
    assert (status, shown) == (0, "step 5, 0 rows: it is skipped, or the data ends before it\n")


def test_what_is_no_state_is_named(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        inspect([file, "--step", 1, "--state", file], capsys)
    assert "recipe.toml is no checkpoint as JSON" in capsys.readouterr().err
    strange = file.with_name("strange.json")
    strange.write_text("{}")
    status, shown = inspect([file, "--step", 1, "--state", strange], capsys)
    assert status == 2
    assert "is not a checkpoint" in shown
