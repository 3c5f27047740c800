"""The builder: what cannot work fails where it is written; looking changes nothing."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fixtures.memory import (
    PROCESSOR,
    MemoryReader,
    Recipe,
    dataset,
    digests,
    random_rows,
    take,
)
from tests.fixtures.tokenizers import byte_level_bpe
from zephon_mm import indexing
from zephon_mm.errors import CheckpointError, ConfigError
from zephon_mm.io import Dataset
from zephon_mm.ops.tokenizer import TextTokenizer
from zephon_mm.packed import Sequence as PackedSequence
from zephon_mm.pipeline import Pipeline
from zephon_mm.records import Document, FileBlob, Record, Text
from zephon_mm.rng import Stream
from zephon_mm.work import StaticMixtureWorkSource, TokenEstimation

ROWS = random_rows(1, 40, [])


def source(**options: Any) -> StaticMixtureWorkSource:
    return StaticMixtureWorkSource([dataset("a", ROWS)], {"a": 1.0}, 0, **options)


def text_pipeline(**options: Any) -> Pipeline:
    pipeline = Pipeline(source()).options(runner="inline", canonical_replicas=2, **options)
    return pipeline.interleave(tokenizer=byte_level_bpe())


def same(document: Document) -> Document:
    return document


def other(document: Document) -> Document:
    return document


def keep(document: Document) -> bool:
    return True


def same_sequence(sequence: PackedSequence) -> PackedSequence:
    return sequence


# Order of operators.


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda p: p.interleave(tokenizer=byte_level_bpe()), "one .interleave, .tokenize or"),
        (lambda p: p.tokenize(tokenizer_id=byte_level_bpe()), "one .interleave, .tokenize"),
        (lambda p: p.map(same), r"\.map takes documents: put it before"),
        (lambda p: p.filter(keep), r"\.filter takes documents: put it before"),
        (lambda p: p.shuffle(buffer_size=2), r"\.shuffle counts packed .* after \.pack_flat"),
        (lambda p: p.map_sequence(same_sequence), r"\.map_sequence counts packed"),
        (lambda p: p.pack_flat(max_length=8).pack_flat(max_length=8), "one .pack_flat"),
        (lambda p: p.pack_flat(max_length=0), "max_length must be at least 1"),
        (lambda p: p.pack_flat(max_length=8).shuffle(buffer_size=0), "buffer_size must be"),
        (lambda p: p.options(dp_degree=3).batch(microbatch_size=2, global_batch_size=8), "divide"),
        (lambda p: p.batch(microbatch_size=2, global_batch_size=8).options(dp_degree=3), "divide"),
        (lambda p: p.batch(microbatch_size=0), "microbatch_size must be at least 1"),
        (lambda p: iter(p), r"no \.pack_flat|no \.batch"),
        (lambda p: iter(p.pack_flat(max_length=8)), r"no \.batch"),
        (lambda p: iter(p.batch(microbatch_size=1)), r"no \.pack_flat"),
    ],
)
def test_what_cannot_work_fails_where_it_is_written(
    wrong: Callable[[Pipeline], Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        wrong(text_pipeline())


def test_what_comes_too_early_is_told_what_it_needs() -> None:
    for wrong in (
        lambda p: p.pack_flat(max_length=8),
        lambda p: p.map_sequence(same),
        lambda p: p.map(same, parallelism=0),
    ):
        with pytest.raises(ConfigError, match=r"after \.interleave or|parallelism must be"):
            wrong(Pipeline(source()))


def test_impossible_topologies_name_what_would_work() -> None:
    with pytest.raises(ConfigError, match=r"dp_degree may be 1, 2, 4; with .* may be none at all"):
        text_pipeline(dp_degree=3).batch(microbatch_size=2, global_batch_size=8)


def test_a_running_pipeline_cannot_be_changed(recipe: Recipe) -> None:
    with recipe.build() as pipeline:
        state = pipeline.checkpoint()
        take(pipeline, 1)
        with pytest.raises(ConfigError, match="started: change a new Pipeline"):
            pipeline.options(workers=2)
        with pytest.raises(CheckpointError, match="restore before iterating"):
            pipeline.restore(state)


# Advice.


def test_awkward_topologies_and_oversized_shuffles_are_warned_of_not_refused() -> None:
    pipeline = text_pipeline(chunk_size=2, flush_every_k_chunks=2, dp_degree=7)
    pipeline.pack_flat(max_length=64).shuffle(buffer_size=4).batch(microbatch_size=2)
    with (
        pytest.warns(UserWarning, match="7 ranks on 2 lanes measure each sample 7 times"),
        pytest.warns(UserWarning, match="buffer of 4 sequences never fills in a window of 4"),
    ):
        pipeline.validate()


def test_explain_prints_every_stage(recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    with recipe.build(microbatch=2) as pipeline:
        pipeline.explain()
    printed = capsys.readouterr().out
    for part in (
        *("a: 40 rows in 6 shards", "b: 23 rows in 5 shards", ".pack(max_length=64"),
        *(".shuffle(buffer_size=3", "lanes        4", "windows of 6"),
        *("4 sequences = 1 ranks x 2 x 2", "runner       inline"),
    ):
        assert part in printed


def test_looking_changes_nothing(recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    with recipe.build() as pipeline:
        expected = digests(take(pipeline, 8))
    with recipe.build() as pipeline:
        found = {}
        for _ in range(4):
            pipeline.explain()
            pipeline.metrics()
            list(pipeline.plan(3))
            pipeline.checkpoint()
            found |= digests(take(pipeline, 2))
    assert found == expected


def test_metrics_add_up(recipe: Recipe) -> None:
    with recipe.build(microbatch=2, prefetch_batches=1) as pipeline:
        assert pipeline.metrics()["batches"] == 0
        batches = take(pipeline, 12)
        found = pipeline.metrics()
    used = [int((batch.segment_ids > 0).sum()) for batch in batches]
    ahead = found["batches_ahead"]
    assert found["batches"] in range(12, 12 + ahead + 1)
    assert found["sequences"] == 2 * found["batches"]
    assert found["tokens"] >= sum(used)
    assert found["documents"] >= sum(len(keys) for b in batches for keys in b.keys)
    assert found["images"] >= sum(len(b.image_valid) for b in batches)
    assert found["padding"] == pytest.approx(1 - found["tokens"] / (64 * found["sequences"]))
    assert found["elapsed_s"] > 0
    assert found["limit"] in ("training loop", "measuring", "decoding", "memory")
    json.dumps(found)


# Operators.


def test_functions_that_change_nothing_do_not_show(recipe: Recipe) -> None:
    with recipe.build() as pipeline:
        expected = digests(take(pipeline, 12))
    longer = Pipeline(recipe.source())
    longer.options(
        canonical_replicas=4, chunk_size=3, flush_every_k_chunks=2, runner="thread", workers=3
    )
    longer.map(same).filter(keep, parallelism=1)
    longer.interleave(tokenizer=byte_level_bpe(), image_processor=PROCESSOR)
    longer.pack_flat(max_length=64).shuffle(buffer_size=3).map_sequence(same_sequence)
    longer.batch(microbatch_size=1, global_batch_size=4)
    with longer:
        assert digests(take(longer, 12)) == expected


@pytest.mark.parametrize("version", ["", "1"])
def test_a_restore_warns_of_functions_that_it_cannot_tell_apart(
    version: str, recwarn: pytest.WarningsRecorder
) -> None:
    def build() -> Pipeline:
        pipeline = Pipeline(source()).options(runner="inline", canonical_replicas=2)
        pipeline.map(lambda document: document, version=version).filter(keep)
        pipeline.interleave(tokenizer=byte_level_bpe()).pack_flat(max_length=64)
        pipeline.map_sequence(lambda sequence: sequence, version=version)
        return pipeline.batch(microbatch_size=1)

    build().restore(build().checkpoint())
    found = [str(one.message) for one in recwarn]
    assert len(found) == (not version)
    assert all(one.count("<lambda>") == 2 and "version='...'" in one for one in found)


class Doubling:
    """A user's accumulator: gives every record twice, in an order of its own."""

    def __init__(self, rng: Stream) -> None:
        self._rng = rng
        self._held: list[Record] = []

    def push(self, item: Record) -> list[Record]:
        self._held.append(item)
        return []

    def flush(self) -> list[Record]:
        return [self._held[i] for i in self._rng.permutation(len(self._held))] * 2


def test_an_accumulator_of_the_user_is_made_anew_for_every_window_and_resumes() -> None:
    def build() -> Pipeline:
        pipeline = text_pipeline(chunk_size=4, flush_every_k_chunks=2)
        pipeline.accumulate(Doubling, seed=5).pack_flat(max_length=64)
        return pipeline.batch(microbatch_size=1)

    with build() as pipeline:
        batches = take(pipeline, 30)
        expected = digests(batches)
    keys = [key for batch in batches for row in batch.keys for key in row]
    assert max(np.unique(keys, return_counts=True)[1]) >= 2
    with build() as pipeline:
        take(pipeline, 11)
        state = pipeline.checkpoint()
    with build().restore(state) as pipeline:
        assert digests(take(pipeline, 19)) == {n: expected[n] for n in range(11, 30)}


class TextReader(MemoryReader):
    """Rows of one text field."""

    def read(
        self, shard: int, rows: Sequence[int], fields: Sequence[str] | None = None
    ) -> list[Any]:
        return [{"__key__": str(row), "body": f"{shard} {row} lazy dogs"} for row in rows]


def test_tokenized_and_wrapped_text_is_the_stored_text_end_to_end() -> None:
    texts = Dataset("t", TextReader(ROWS))
    mixture = StaticMixtureWorkSource([texts], {"t": 1.0}, 0, stop_after_passes=1, shuffle=False)
    tokenizer = TextTokenizer.load(byte_level_bpe())
    expected = []
    for shard, info in enumerate(texts.shards):
        for row in range(info.num_rows):
            expected += [*tokenizer.encode(f"{shard} {row} lazy dogs"), tokenizer.eos_id]
    pipeline = Pipeline(mixture).options(runner="inline", canonical_replicas=1)
    pipeline.tokenize(tokenizer_id=byte_level_bpe(), field="body")
    pipeline.pack_flat(max_length=16, algorithm="wrap").batch(microbatch_size=1)
    with pipeline:
        batches = take(pipeline, 1000)
    ids = [n for b in batches for n in b.input_ids[b.segment_ids > 0].tolist()]
    assert ids == expected
    assert all((batch.segment_ids > 0).all() for batch in batches[:-1])
    assert batches[0].pixel_values.shape == (0, 3, 0, 0)
    assert "pixel_values" not in batches[0].to_training()


# Fingerprints.


def changed(recipe: Recipe, blobs: list[FileBlob]) -> dict[str, Recipe]:
    """Return recipes that differ in what decides the batches, by the name of the difference."""
    more = dataset("b", random_rows(3, 23, blobs), shard_rows=5)
    return {
        "source.seed": replace(recipe, seed=1),
        "source.weights.0": replace(recipe, weights=(0.5, 0.5)),
        "source.stop_after_passes": replace(recipe, passes=1),
        "source.datasets.1.1": replace(recipe, datasets=(recipe.datasets[0], more)),
        "lanes": replace(recipe, lanes=5),
        "chunk_size": replace(recipe, chunk_size=5),
        "flush_every_k_chunks": replace(recipe, chunks_per_window=3),
        "sequences.0.pack.max_length": replace(recipe, max_length=65),
        "sequences.0.pack.algorithm": replace(recipe, algorithm="wrap"),
        "sequences.0.pack.max_images": replace(recipe, max_images=3),
        "sequences.1.shuffle.buffer_size": replace(recipe, shuffle=4),
        "global_batch_size": replace(recipe, global_batch_size=8),
    }


def test_a_state_of_another_recipe_is_refused_by_the_name_of_what_differs(
    recipe: Recipe, blobs: list[FileBlob]
) -> None:
    with recipe.build() as pipeline:
        take(pipeline, 4)
        state = pipeline.checkpoint()
    for name, other_recipe in changed(recipe, blobs).items():
        with pytest.raises(CheckpointError, match=rf"\n  {name}: .* in the state, .* now\n"):
            other_recipe.build(state=state)


def test_what_changes_the_speed_alone_is_not_in_the_fingerprint(recipe: Recipe) -> None:
    expected = recipe.build().fingerprint()
    for options in (
        {"dp": 2, "rank": 1, "microbatch": 2},
        {"runner": "thread", "workers": 7, "task_rows": 1, "task_images": 9},
        {"prefetch_batches": 3, "memory_budget_bytes": 1 << 20, "task_timeout_s": 5.0},
        {"max_error_rate": 0.5},
    ):
        assert recipe.build(**options).fingerprint() == expected


def test_users_functions_are_told_apart_by_name_and_version() -> None:
    def fingerprint(fn: Callable[[Document], Document], version: str = "") -> dict[str, Any]:
        pipeline = Pipeline(source()).map(fn, version=version)
        return pipeline.interleave(tokenizer=byte_level_bpe()).fingerprint()

    assert fingerprint(same) == fingerprint(same)
    assert len({json.dumps(fingerprint(*args)) for args in [(same,), (other,), (same, "2")]}) == 3


def test_what_was_estimated_is_kept_in_the_state_and_not_measured_again() -> None:
    def build() -> Pipeline:
        rows = [(Text("word " * n),) for n in range(1, 30)]
        mixture = StaticMixtureWorkSource(
            [dataset("a", ROWS), dataset("b", rows)],
            {"a": 0.5, "b": 0.5},
            seed=1,
            token_estimation=TokenEstimation(sample_rows=8),
        )
        pipeline = Pipeline(mixture).options(runner="inline", canonical_replicas=2)
        pipeline.interleave(tokenizer=byte_level_bpe()).pack_flat(max_length=64)
        return pipeline.batch(microbatch_size=1)

    with build() as pipeline:
        expected = digests(take(pipeline, 20))
    with build() as pipeline:
        take(pipeline, 8)
        state = json.loads(json.dumps(pipeline.checkpoint()))
    assert set(state["constants"]["tokens_per_row"]) == {"a", "b"}
    with build().restore(state) as pipeline:
        assert digests(take(pipeline, 12)) == {n: expected[n] for n in range(8, 20)}
    guessed = {name: {"a": 5.0, "b": 5.0} for name in ("tokens_per_row", "tokens_per_byte")}
    with pytest.raises(CheckpointError, match="constants"):
        build().restore(state | {"constants": guessed})


# CKP-18.
def test_the_names_that_trainers_look_for(recipe: Recipe) -> None:
    with recipe.build() as pipeline:
        take(pipeline, 3)
        state = pipeline.state_dict()
        assert json.loads(state["zephon_mm"]) == pipeline.checkpoint()
    again = recipe.build()
    again.load_state_dict(state)
    assert again.state_dict() == state
    with pytest.raises(CheckpointError, match="takes what state_dict gave"):
        recipe.build().load_state_dict({})


def test_a_part_is_refused_until_it_is_merged(recipe: Recipe) -> None:
    with recipe.build(dp=2, rank=1) as pipeline:
        take(pipeline, 1)
        part = pipeline.checkpoint()
    with pytest.raises(CheckpointError, match=r"the part of rank 1 of 2: merge the parts"):
        recipe.build(state=part)


def test_a_state_stays_small() -> None:
    sets = tuple(dataset(f"dataset-{n}", random_rows(n, 30, [])) for n in range(8))
    wide = Recipe(datasets=sets, weights=(1.0,) * 8, lanes=64, global_batch_size=64)
    with wide.build(microbatch=16, prefetch_batches=1) as pipeline:
        take(pipeline, 20)
        state = pipeline.checkpoint()
    assert len(state["lanes"]) == 64
    assert len(json.dumps(state)) <= 16 << 10


@pytest.mark.parametrize("returned", [None, 3])
def test_a_map_sequence_that_returns_no_sequence_is_told(recipe: Recipe, returned: Any) -> None:
    pipeline = Pipeline(recipe.source()).options(runner="inline", memory_budget_bytes=8 << 20)
    pipeline.interleave(tokenizer=byte_level_bpe(), image_processor=PROCESSOR)
    pipeline.pack_flat(max_length=64).map_sequence(lambda _: returned).batch(microbatch_size=1)
    with pipeline, pytest.raises(TypeError, match=r"map_sequence.* must return a Sequence"):
        next(iter(pipeline))


def test_an_accumulator_without_push_is_told(recipe: Recipe) -> None:
    pipeline = Pipeline(recipe.source()).options(runner="inline", memory_budget_bytes=8 << 20)
    pipeline.interleave(tokenizer=byte_level_bpe(), image_processor=PROCESSOR)
    pipeline.pack_flat(max_length=64).accumulate(lambda rng: object()).batch(microbatch_size=1)
    with pipeline, pytest.raises(ConfigError, match=r"accumulate.* push\(item\) and flush"):
        next(iter(pipeline))


def test_a_source_that_is_none_is_told(recipe: Recipe) -> None:
    with pytest.raises(ConfigError, match="Pipeline takes a WorkSource, got Dataset"):
        Pipeline(recipe.datasets[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"microbatch_size": 2.5}, "microbatch_size must be an integer, got 2.5"),
        ({"microbatch_size": True}, "microbatch_size must be an integer, got True"),
        ({"microbatch_size": 1, "tail": "keep"}, "tail must be"),
    ],
)
def test_a_wrong_type_is_told_where_it_is_passed(
    recipe: Recipe, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Pipeline(recipe.source()).batch(**change)


class Forgetful:
    """An accumulator whose author forgot a `return`."""

    def push(self, item: object) -> None:
        pass

    def flush(self) -> list[Any]:
        return []


def test_an_accumulator_that_returns_nothing_is_told(recipe: Recipe) -> None:
    pipeline = Pipeline(recipe.source()).options(runner="inline", memory_budget_bytes=8 << 20)
    pipeline.interleave(tokenizer=byte_level_bpe(), image_processor=PROCESSOR)
    pipeline.pack_flat(max_length=64).accumulate(lambda rng: Forgetful()).batch(microbatch_size=1)
    with pipeline, pytest.raises(TypeError, match=r"\.accumulate.* push must return an iterable"):
        next(iter(pipeline))


def test_what_the_index_knows_is_not_measured_to_estimate_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = "".join(json.dumps({"text": "word " * n}) + "\n" for n in range(1, 30))
    (tmp_path / "rows.jsonl").write_text(rows)

    def constants() -> Any:
        data = Dataset.from_path("a", tmp_path / "rows.jsonl", cache_dir=tmp_path / "cache")
        estimation = TokenEstimation(sample_rows=8)
        mixture = StaticMixtureWorkSource([data], {"a": 1}, seed=1, token_estimation=estimation)
        pipeline = Pipeline(mixture).options(runner="inline", canonical_replicas=2)
        pipeline.interleave(tokenizer=byte_level_bpe()).pack_flat(max_length=64)
        return pipeline.batch(microbatch_size=1).fingerprint()["source"]["constants"]

    expected = constants()
    monkeypatch.setattr(indexing, "make_runner", None)  # nobody could measure
    assert constants() == expected
