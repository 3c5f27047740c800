"""Mixtures in recipes: shares of tokens, passes and a curriculum, written and read back."""

import json
from pathlib import Path

import pytest

from zephon_mm.cli.demo_data import write_tokenizer
from zephon_mm.errors import ConfigError
from zephon_mm.recipe import Recipe, load_recipe

TEXT = """
[[datasets]]
name = "short"
path = "short.jsonl"
weight = 0.5

[[datasets]]
name = "long"
path = "long.jsonl"
weight = 0.5

[source]
seed = 1
max_passes = {long = 400}
stop = "all_exhausted"
curriculum = [[100, {short = 0.2, long = 0.8}], [300, {short = 1, long = 0}]]
windows_per_step = [0.25, 0.125]

[tokenize]
tokenizer_id = "./tokenizer"

[mix]
by = "tokens"

[pack]
max_length = 64

[batch]
microbatch_size = 8
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, words in (("short", 2), ("long", 20)):
        rows = [json.dumps({"text": "word " * (words + n % 3)}) + "\n" for n in range(20)]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    write_tokenizer(tmp_path / "tokenizer", ["a word"], vocab_size=300)
    return tmp_path


def load(folder: Path, text: str) -> Recipe:
    (folder / "recipe.toml").write_text(text)
    return load_recipe(folder / "recipe.toml")


def test_a_mixture_by_tokens_with_a_curriculum_is_a_recipe(folder: Path) -> None:
    recipe = load(folder, TEXT)
    assert load(folder, recipe.to_toml()) == recipe
    with recipe.pipeline(runner="inline", workers=1) as pipeline:
        found = pipeline.fingerprint()["source"]
        assert found["by"] == "tokens"
        assert found["max_passes"] == {"long": 400}
        assert found["curriculum"] == [[25, [0.2, 0.8]], [50, [1.0, 0.0]]]
        batches = [batch for _, batch in zip(range(9), pipeline, strict=False)]
        told = pipeline.metrics()["datasets"]
    assert sum(batch.num_valid_tokens for batch in batches) > 0
    assert {one["target"] for one in told.values()} == {0.5}
    assert told["short"]["share"] == pytest.approx(0.5, abs=0.04)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("{long = 400}", "3", r"\[source\]: max_passes must be a table"),
        ("= [[100, {short = 0.2, long = 0.8}], [", "= [3, [", r"curriculum must be a list, each a"),
        ('"tokens"', '"bytes"', r'\[mix\]: by must be "tokens", got "bytes"'),
    ],
)
def test_what_is_no_mixture_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, TEXT.replace(old, new, 1))
