"""Recipes: what is wrong is named, what is right builds the pipeline, writing reads back."""

import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon_mm.batch import Batch
from zephon_mm.cli.demo import RECIPE
from zephon_mm.cli.demo_data import make_demo_data
from zephon_mm.errors import ConfigError
from zephon_mm.recipe import Recipe, load_recipe
from zephon_mm.tables import Knob, checked, dump, knobs_of

CONFIGS = Path(__file__).parents[1] / "configs"

PLAIN = """
[[datasets]]
name = "a"
path = "data"
weight = 1

[source]
seed = 1

[interleave]
tokenizer = "tok/en"

[pack]
max_length = 64

[batch]
microbatch_size = 2
"""


def load(tmp_path: Path, text: str) -> Recipe:
    file = tmp_path / "recipe.toml"
    file.write_text(text)
    return load_recipe(file)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the demo's recipe and a small form of its data."""
    folder = tmp_path_factory.mktemp("demo")
    make_demo_data(folder / "data", num_captions=40, num_shards=2, num_stories=20)
    (folder / "demo.toml").write_text(RECIPE)
    return folder


def test_the_demo_recipe_of_a_clone_is_the_one_that_the_demo_writes() -> None:
    clone = (CONFIGS / "demo.toml").read_text()
    assert clone.replace("../demo_out/data/", "data/").endswith(RECIPE)


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.toml")), ids=lambda file: file.name)
def test_every_recipe_here_loads_without_its_data_and_reads_back_as_written(
    file: Path, tmp_path: Path
) -> None:
    recipe = load_recipe(file)
    assert load(tmp_path, recipe.to_toml()) == recipe


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seed = 1", "sed = 1", r"\[source\]: unknown key 'sed'; did you mean 'seed'"),
        ("seed = 1", "", r"\[source\] is missing"),
        ("seed = 1", "stop = 'all_exhausted'", r"\[source\]: the key seed is missing"),
        ("seed = 1", "seed = true", r"\[source\]: seed must be an integer, got true"),
        ("seed = 1", "seed = 1\nstop = 'end'", r'stop must be "first_exhausted" or "all_exh'),
        ("seed = 1", "seed = 1\ntoken_estimation = {rows = 3}", r"unknown key 'rows'. Known: sam"),
        ("seed = 1", "seed = 1\ntoken_estimation = {sample_rows = 0}", r"sample_rows must be at"),
        ("seed = 1", "seed = 1\ntoken_estimation = 3", r"true or false or a table \{...\}, got 3"),
        ("[source]", "[sorce]", r"unknown section 'sorce'; did you mean 'source'"),
        ("weight = 1", "weight = -1", r"\[\[datasets\]\] number 1: weight must be a finite"),
        ("weight = 1", "weight = '1'", r"weight must be a number, got \"1\""),
        ("weight = 1", "", r"the key weight is missing; it is a number"),
        ("weight = 1", "weight = 1\nfmt = 'tar'", r"number 1: fmt='tar' is not one of"),
        ("weight = 1", "weight = 1\nfmt = 'jsonl'\nsplit = 'last_dot'", r"unknown key 'split'"),
        ("weight = 1", "weight = 1\nsplit = 'last'", r'split must be "first_dot" or "last_dot"'),
        ("weight = 1", "weight = 1\nmissing = 'ignore'", r'"skip" or "error" or "keep"'),
        ('"data"', "['a', 3]", r"number 1: path must be text or a path or a list, each text"),
        ("[[datasets]]", "[datasets]", r"datasets must be a section \[\[datasets\]\]"),
        ("max_length = 64", "max_length = 64.5", r"\[pack\]: max_length must be an integer"),
        ("max_length = 64", "max_length = 0", r"\[pack\]: pack: max_length must be at least 1"),
        ("microbatch_size = 2", "microbatch_size = 0", r"\[batch\]: microbatch_size must be"),
        ("_size = 2", "_size = 2\nglobal_batch_size = 3", r"1 \* 2 must divide global_batch_size"),
        (
            "[pack]",
            "[options]\nworkers = 0\n[pack]",
            r"\[options\]: options: workers must be at least 1",
        ),
        ("[pack]", "[options]\nrunner = 'gpu'\n[pack]", r"runner must be one of inline, thread"),
        ("[pack]", "[shuffle]\nbuffer_size = 0\n[pack]", r"\[shuffle\]: shuffle: buffer_size"),
        ("[pack]", "[image_processor]\nkind = 'vit'\n[pack]", r"kind must be one of .*siglip"),
        ("[pack]", "[image_processor]\nkind = [1]\n[pack]", r"kind must be one of .*siglip"),
        ("[pack]", "[image_processor]\nsize = [1]\n[pack]", r"size must be an integer or a list"),
        ("[pack]", "[image_processor]\npatch_size = 0\n[pack]", r"holds no patch of patch_size=0"),
        ("[pack]", "[image_processor]\npreset = 'big'\n[pack]", r"'big' is no preset"),
        ("[pack]", "[tokenize]\ntokenizer_id = 'x'\n[pack]", r"one of \[interleave\], \[tok"),
        ("[pack]", "image_token = 3\n[pack]", r"\[interleave\]: image_token must be text, got 3"),
        ("[pack]", "pack = [", r"is not a TOML file"),
    ],
)
def test_what_is_wrong_is_named_with_file_section_and_key(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in PLAIN
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path, PLAIN.replace(old, new, 1))
    assert "recipe.toml" in str(caught.value)


def test_a_recipe_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.toml cannot be read: No such file"):
        load_recipe(tmp_path / "none.toml")


def test_missing_data_says_what_makes_it(tmp_path: Path) -> None:
    recipe = load(tmp_path, 'data_from = "make it"\n' + PLAIN)
    with pytest.raises(ConfigError, match=r"there is no .*/data: run `make it`"):
        recipe.pipeline()


def test_missing_sections_and_images_without_interleave_are_named(tmp_path: Path) -> None:
    text = PLAIN.replace("[interleave]\ntokenizer", "[tokenize]\ntokenizer_id")
    load(tmp_path, text)
    with pytest.raises(ConfigError, match=r"\[tokenize\] reads no image"):
        load(tmp_path, text + "[image_processor]\nsize = 32\n")
    with pytest.raises(ConfigError, match=r"the section \[\[datasets\]\]|datasets.* is missing"):
        load(tmp_path, text.replace(text[: text.index("[source]")], ""))


def test_paths_are_relative_to_the_file_and_hub_ids_stay(tmp_path: Path) -> None:
    text = PLAIN.replace('"data"', '["data", "/abs/x.tar", "s3://b/y.tar", "p-{0..2}.tar"]')
    tables = load(tmp_path, text).tables
    assert tables["datasets"][0]["path"] == [
        str(tmp_path / "data"),
        "/abs/x.tar",
        "s3://b/y.tar",
        str(tmp_path / "p-{0..2}.tar"),
    ]
    assert tables["interleave"]["tokenizer"] == "tok/en"
    (tmp_path / "tok" / "en").mkdir(parents=True)
    assert load(tmp_path, text).tables["interleave"]["tokenizer"] == str(tmp_path / "tok" / "en")


def first_batch(recipe: Recipe, **more: Any) -> Batch:
    with recipe.pipeline(runner="inline", **more) as pipeline:
        return next(iter(pipeline))


@pytest.mark.slow
def test_a_recipe_gives_the_same_batches_wherever_it_was_written(
    demo: Path, tmp_path: Path
) -> None:
    recipe = load_recipe(demo / "demo.toml")
    batch = first_batch(recipe)
    assert batch.sha256() == first_batch(load(tmp_path, recipe.to_toml())).sha256()
    moved = tmp_path / "moved"
    shutil.copytree(demo, moved)
    assert first_batch(load_recipe(moved / "demo.toml")).sha256() == batch.sha256()


@pytest.mark.slow
def test_arguments_take_the_place_of_settings(demo: Path) -> None:
    recipe = load_recipe(demo / "demo.toml")
    batch = first_batch(recipe, microbatch_size=2, global_batch_size=4, dp_degree=2, dp_rank=1)
    assert batch.sequence_ids.tolist() == [2, 3]
    with pytest.raises(ConfigError, match=r"\[options\]: options: unknown setting 'threads'"):
        recipe.pipeline(threads=3)


@pytest.mark.slow
def test_errors_that_need_the_data_also_name_file_and_section(demo: Path) -> None:
    file = demo / "bad.toml"
    file.write_text(RECIPE.replace("seed = 7", "seed = 7\nshuffle_block_rows = 0", 1))
    with pytest.raises(ConfigError, match=r"bad.toml: \[source\]: shuffle_block_rows must be"):
        load_recipe(file).pipeline()


# Tables.

scalars = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(st.characters(codec="utf-8")),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=4), values, max_size=4))
def test_reading_what_was_dumped_gives_it_back(tables: dict[str, Any]) -> None:
    assert tomllib.loads(dump(tables)) == tables


def test_knobs_are_those_of_the_signature() -> None:
    def owner(rows: int, *more: int, share: float = 0.5, call: Any = None, **rest: str) -> None: ...

    assert knobs_of(owner, "call") == {"rows": Knob(int, required=True), "share": Knob(float)}
    assert checked({"rows": 1, "share": 2}, knobs_of(owner)) == {"rows": 1, "share": 2}
