"""With an index, whole or partly filled, the batches are the same bytes; planning reads nothing."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fixtures.memory import (
    DEADLY,
    DeadlyProcessor,
    MemoryReader,
    Recipe,
    Row,
    dataset,
    digests,
    document_of,
    random_rows,
    run_ranks,
    take,
)
from tests.fixtures.nursery import Child, Nursery
from zephon_mm import index as index_module
from zephon_mm.cli.demo_data import write_tokenizer
from zephon_mm.errors import ConfigError, SampleError, StaleIndexError
from zephon_mm.io import Dataset
from zephon_mm.pipeline import Pipeline
from zephon_mm.protocols import Sample
from zephon_mm.recipe import load_recipe
from zephon_mm.records import Document, FileBlob, Image, Text

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* ranks on .* lanes measure each sample"),
    pytest.mark.filterwarnings("ignore:a shuffle buffer of .* never fills"),
    pytest.mark.usefixtures("warm_workers"),
]


class Locked(MemoryReader):
    """Rows that nobody may read, under a digest that says they are the same."""

    locked = False

    def read(
        self, shard: int, rows: Sequence[int], fields: Sequence[str] | None = None
    ) -> list[Sample | SampleError]:
        assert not self.locked, "planning reads no sample"
        return super().read(shard, rows, fields)


class Claims(MemoryReader):
    """Says that its rows are those of another reader."""

    def __init__(self, rows: Sequence[Row], *, as_if: MemoryReader) -> None:
        super().__init__(rows)
        self._claimed = as_if.digest()

    def digest(self) -> str:
        return self._claimed


def place(name: str, reader: MemoryReader, folder: Path | None) -> Dataset:
    return Dataset(
        name,
        reader,
        schema=document_of,
        version="1",
        path=name,
        fmt="memory",
        cache_dir=folder,
    )


def with_cache(recipe: Recipe, folder: Path) -> Recipe:
    found = []
    for one in recipe.datasets:
        found.append(place(one.name, one.reader, folder))
    return replace(recipe, datasets=tuple(found))


@settings(
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    lanes=st.sampled_from([1, 2, 3, 5, 8]),
    algorithm=st.sampled_from(["best_fit", "wrap"]),
    max_images=st.sampled_from([None, 2]),
    passes=st.sampled_from([None, 1, 2]),
    first=st.tuples(st.sampled_from([1, 2, 4]), st.integers(0, 6)),
    topologies=st.lists(
        st.tuples(
            st.sampled_from([1, 2, 4]),
            st.sampled_from([1, 2]),
            st.booleans(),
            st.sampled_from(["inline", "thread"]),
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_whatever_the_index_knows_the_batches_are_the_same_bytes(
    blobs: list[FileBlob],
    tmp_path_factory: pytest.TempPathFactory,
    lanes: int,
    algorithm: str,
    max_images: int | None,
    passes: int | None,
    first: tuple[int, int],
    topologies: list[tuple[int, int, bool, str]],
) -> None:
    rows = random_rows(1, 50, blobs)
    rows[7] = SampleError("bad_json", "line 8 is cut")
    rows[9] = (Image(blobs[0]._replace(size=5)),)
    recipe = Recipe(
        datasets=(dataset("a", rows), dataset("b", random_rows(2, 23, blobs), shard_rows=5)),
        weights=(0.6, 0.4),
        lanes=lanes,
        algorithm=algorithm,
        max_images=max_images,
        passes=passes,
        shuffle=3,
        global_batch_size=8,
    )
    with recipe.build(microbatch=1) as pipeline:
        expected = digests(take(pipeline, 24))
    recipe = with_cache(recipe, tmp_path_factory.mktemp("cache"))
    dp, batches = first  # so that the next run finds some rows and misses others
    with recipe.build(dp=dp, rank=dp - 1) as pipeline:
        take(pipeline, batches)
    for dp, microbatch, balance, runner in topologies:
        sequences = len(expected) // (dp * microbatch) * dp * microbatch
        found = run_ranks(
            recipe,
            dp=dp,
            microbatch=microbatch,
            sequences=sequences,
            runner=runner,
            workers=2,
            balance=balance,
        )
        assert found.items() <= expected.items()
        assert len(found) == sequences


@pytest.fixture
def indexed(recipe: Recipe, tmp_path: Path) -> Recipe:
    """Return the common recipe with an index that knows every row."""
    locked = [Locked(random_rows(n, 40, []), name=str(n)) for n in range(2)]
    datasets = tuple(place(f"d{n}", reader, tmp_path) for n, reader in enumerate(locked))
    recipe = replace(recipe, datasets=datasets)
    with recipe.build(runner="thread") as pipeline:
        found = pipeline.build_index(progress=False)
    assert [part["records"] for part in found.values()] == [40, 40]
    return recipe


def test_with_an_index_planning_reads_no_sample(indexed: Recipe) -> None:
    with replace(indexed, datasets=tuple(map(unindexed, indexed.datasets))).build() as pipeline:
        expected = [(one.number, one.keys, one.num_tokens) for one in pipeline.plan(30)]
    for one in indexed.datasets:
        one.reader.locked = True
    with indexed.build() as pipeline:
        found = [(one.number, one.keys, one.num_tokens) for one in pipeline.plan(30)]
        pipeline.explain()
    assert found == expected


def unindexed(one: Dataset) -> Dataset:
    return place(one.name, one.reader, None)


def test_with_an_index_every_rank_knows_the_tokens_of_the_whole_step(indexed: Recipe) -> None:
    steps: dict[int, set[int | None]] = {}
    sums: dict[int, int] = {}
    for rank in range(2):
        with indexed.build(dp=2, rank=rank, microbatch=1) as pipeline:
            for batch in take(pipeline, 12):
                step = int(batch.sequence_ids[0]) // 4
                steps.setdefault(step, set()).add(batch.step_valid_tokens)
                sums[step] = sums.get(step, 0) + batch.num_valid_tokens
    assert steps == {step: {total} for step, total in sums.items()}


def test_an_index_that_is_off_is_neither_read_nor_filled(recipe: Recipe, tmp_path: Path) -> None:
    recipe = with_cache(recipe, tmp_path)
    for options in ({"index": "off"}, {"index": "read"}, {"fn": keep}):
        with recipe.build(**options) as pipeline:
            take(pipeline, 3)
        assert not list(tmp_path.rglob("*.rows"))
    with recipe.build(fn=keep) as pipeline, pytest.raises(ConfigError, match=r"\.map\(keep\) has"):
        pipeline.build_index()
    with recipe.build() as pipeline:
        take(pipeline, 3)
    assert len(list(tmp_path.rglob("*.rows"))) == 2


def keep(document: Document) -> Document:
    return document


def test_a_function_takes_part_with_its_version(recipe: Recipe, tmp_path: Path) -> None:
    recipe = with_cache(recipe, tmp_path)
    folders = set()
    for version in ("1", "2", "1"):
        pipeline = Pipeline(recipe.source()).options(runner="inline").map(keep, version=version)
        built = recipe.build()
        pipeline._stages = replace(built._stages, documents=pipeline._stages.documents)
        pipeline.build_index(progress=False)
        folders |= set(tmp_path.rglob("measured/*"))
    assert len(folders) == 4  # two datasets, two versions


@pytest.mark.parametrize("runner", ["inline", "thread", "process"])
def test_a_sample_that_changed_under_its_name_is_an_error_that_names_it(
    blobs: list[FileBlob], tmp_path: Path, runner: str
) -> None:
    rows = random_rows(3, 30, blobs)
    reader = MemoryReader(rows)
    recipe = Recipe(datasets=(place("a", reader, tmp_path),))
    with recipe.build() as pipeline:
        pipeline.build_index(progress=False)
    changed = list(rows)
    changed[11] = (*rows[11], Text("and more"))
    stale = place("a", Claims(changed, as_if=reader), tmp_path)
    recipe = replace(recipe, datasets=(stale,))
    with (
        recipe.build(runner=runner) as pipeline,
        pytest.raises(StaleIndexError, match=r"sample a/m-1/4 .*--rebuild"),
    ):
        take(pipeline, 100)
    with recipe.build() as pipeline:
        pipeline.build_index(rebuild=True, progress=False)
        assert take(pipeline, 20)


def test_batches_in_ordinary_memory_get_their_tokens_too(indexed: Recipe) -> None:
    with indexed.build(index="off") as pipeline:
        expected = digests(take(pipeline, 30))
    for runner in ("inline", "thread", "process"):
        with indexed.build(runner=runner, workers=2, memory_budget_bytes=1 << 14) as pipeline:
            kept = take(pipeline, 30)  # holds every slab
            assert pipeline.metrics()["batches_in_ordinary_memory"]
        assert digests(kept) == expected


@pytest.mark.slow
def test_an_image_that_crashes_its_worker_is_as_invalid_as_without_an_index(
    blobs: list[FileBlob], tmp_path: Path
) -> None:
    deadly = tmp_path / "deadly.jpg"
    deadly.write_bytes(Path(blobs[0].path).read_bytes() + DEADLY)
    blob = FileBlob(str(deadly), 0, deadly.stat().st_size)
    rows = random_rows(5, 30, blobs)
    rows[4] = (Text("two pictures"), Image(blobs[1]), Image(blob), Image(blobs[2]))
    recipe = Recipe(datasets=(dataset("a", rows),), max_error_rate=1.0)
    options: dict[str, Any] = {
        "runner": "process",
        "workers": 2,
        "processor": DeadlyProcessor(size=32, patch_size=16),
    }
    with recipe.build(**options) as pipeline:
        without = take(pipeline, 30)
        assert pipeline.metrics()["skipped"]["crashed_worker"]
    recipe = with_cache(recipe, tmp_path / "cache")
    with recipe.build(**options) as pipeline:
        pipeline.build_index(progress=False)
    with recipe.build(**options) as pipeline:
        assert digests(take(pipeline, 30)) == digests(without)


def test_an_operator_that_needs_token_ids_is_told_what_to_set(indexed: Recipe) -> None:
    pipeline = indexed.build()
    stages = pipeline._stages
    pipeline._stages = replace(stages, sequences=())
    pipeline.accumulate(lambda rng: NeedsTokens())
    pipeline._stages = replace(
        pipeline._stages, sequences=(*pipeline._stages.sequences, *stages.sequences)
    )
    with pipeline, pytest.raises(ConfigError, match=r"options\(index='off'\)") as caught:
        take(pipeline, 1)
    assert any("accumulate" in note for note in caught.value.__notes__)


class NeedsTokens:
    def push(self, record: Any) -> list[Any]:
        return [record] if record.token_ids[0] >= 0 else []

    def flush(self) -> list[Any]:
        return []


@pytest.mark.slow
def test_processes_that_are_killed_and_started_again_fill_one_index(
    nursery: Nursery, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(write_recipe(tmp_path))
    rng = random.Random(1)

    def start() -> Child:
        fds = {0: 0, 1: 1, 2: 2}
        return nursery.start("tests.laws.scripts.fill:main", [recipe], env=os.environ, fds=fds)

    def known() -> int:
        tables = list((tmp_path / "cache").rglob("*.rows"))
        return max((int(file.name.partition("-")[0]) for file in tables), default=0)

    for _ in range(3):
        running = [start(), start()]
        deadline = time.monotonic() + 60
        while not known() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(rng.random() * 0.05)
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.wait()
    running = [start(), start()]
    assert [process.wait() for process in running] == [0, 0]
    load_recipe(recipe).pipeline().explain()
    assert "600 of 600 samples are known" in capsys.readouterr().out


def write_recipe(folder: Path) -> Path:

    lines = [f'{{"text": "document number {n} of many"}}' for n in range(600)]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    write_tokenizer(folder / "tokenizer", lines, vocab_size=300)
    recipe = folder / "recipe.toml"
    recipe.write_text(
        """
[[datasets]]
name = "rows"
path = "rows.jsonl"
weight = 1.0
cache_dir = "cache"
[source]
seed = 1
[tokenize]
tokenizer_id = "tokenizer"
[pack]
max_length = 64
[batch]
microbatch_size = 2
"""
    )
    assert index_module.SAVED_ROWS > 600
    return recipe
