"""Raw samples: any topology, runner, restart and way of reading gives the same stored bytes."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.fixtures.memory import take
from zephon_mm.checkpoint import merge_checkpoints
from zephon_mm.engine import raw
from zephon_mm.errors import ConfigError, DataQualityError, SampleError, WorkerCrashed
from zephon_mm.io import Dataset
from zephon_mm.pipeline import Pipeline
from zephon_mm.protocols import Sample
from zephon_mm.records import Column, RowBlob, ShardInfo
from zephon_mm.samples import SampleBatch
from zephon_mm.work import StaticMixtureWorkSource

pytestmark = [
    pytest.mark.filterwarnings("ignore:a shuffle buffer of .* never fills"),
    pytest.mark.usefixtures("warm_workers"),
]

BLOCK_ROWS = 50


@pytest.fixture(scope="module", autouse=True)
def _small_blocks() -> Iterator[None]:
    """Read a few rows at once, so that a short run has several blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(raw, "BLOCK_ROWS", BLOCK_ROWS)
        yield


class RawReader:
    """Rows of fields, read one by one; images are blobs."""

    def __init__(self, rows: Sequence[Mapping[str, Any] | SampleError], shard_rows: int) -> None:
        self.rows = [rows[at : at + shard_rows] for at in range(0, len(rows), shard_rows)]
        self.shards = [ShardInfo(f"s{n}", len(p), 9 * len(p)) for n, p in enumerate(self.rows)]

    def read(
        self, shard: int, rows: Sequence[int], fields: Sequence[str] | None = None
    ) -> list[Sample | SampleError]:
        return [self._one(shard, row, fields) for row in rows]

    def _one(self, shard: int, row: int, fields: Sequence[str] | None) -> Sample | SampleError:
        found = self.rows[shard][row]
        if isinstance(found, SampleError):
            return found
        sample = {
            name: RowBlob(shard, row, name) if isinstance(value, bytes) else value
            for name, value in found.items()
            if fields is None or name in fields
        }
        return {**sample, "__key__": str(row)}

    def fetch(self, blob: RowBlob) -> bytes:
        found = self.rows[blob.shard][blob.row]
        assert not isinstance(found, SampleError)
        data: bytes = found[blob.field]
        return data

    def digest(self) -> str:
        return str(len(self.rows))


class ColumnsReader(RawReader):
    """The same rows, given as columns too."""

    def columns(
        self, shard: int, rows: NDArray[np.int64], fields: Sequence[str]
    ) -> dict[str, Column]:
        found = {}
        for name in fields:
            picked = [self.rows[shard][row] for row in rows.tolist()]
            values = [None if isinstance(row, SampleError) else row.get(name) for row in picked]
            data = [value.encode() if isinstance(value, str) else value for value in values]
            ends = np.cumsum([len(value or b"") for value in data], dtype=np.int64)
            joined = np.frombuffer(b"".join(value or b"" for value in data), dtype=np.uint8)
            found[name] = Column(joined, ends, np.array([value is not None for value in data]))
        return found


def rows_of(name: str, count: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number in range(count):
        row: dict[str, Any] = {"txt": f"{name}{number} é" * (number % 5)}
        if number % 3:
            row["jpg"] = bytes([number % 251]) * (7 * number % 40)
        if number % 4:
            row["meta"] = {"n": number, "of": [name, None]}
        rows.append(row)
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRecipe:
    """What decides the data; `build` adds what may not."""

    rows: tuple[int, int] = (40, 23)
    passes: int | None = None
    stop: str = "all_exhausted"
    lanes: int = 3
    shuffle: int | None = None
    total: int | None = None
    tail: str = "drop"
    fields: tuple[str, ...] | None = None
    reader: type[RawReader] = ColumnsReader

    def source(self) -> StaticMixtureWorkSource:
        named = zip("ab", self.rows, (7, 4), strict=True)
        datasets = [Dataset(n, self.reader(rows_of(n, count), s)) for n, count, s in named]
        weights = {"a": 0.6, "b": 0.4}
        return StaticMixtureWorkSource(
            datasets, weights, 5, stop_after_passes=self.passes, stop=self.stop
        )

    def build(
        self, *, dp: int = 1, rank: int = 0, size: int = 1, state: Any = None, **options: Any
    ) -> Pipeline:
        pipeline = Pipeline(self.source()).options(
            canonical_replicas=self.lanes,
            chunk_size=4,
            flush_every_k_chunks=2,
            dp_degree=dp,
            dp_rank=rank,
            **{"runner": "inline", "memory_budget_bytes": 8 << 20, **options},
        )
        if self.shuffle is not None:
            pipeline.shuffle(buffer_size=self.shuffle, seed=1)
        pipeline.batch(
            microbatch_size=size, global_batch_size=self.total, tail=self.tail, fields=self.fields
        )
        return pipeline if state is None else pipeline.restore(state)


def run(recipe: RawRecipe, count: int, **options: Any) -> dict[int, str]:
    """Return sequence id -> digest and key of the first `count` batches."""
    with recipe.build(**options) as pipeline:
        return rows_in(take(pipeline, count))


def rows_in(batches: Sequence[Any]) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for batch in batches:
        ids = batch.sequence_ids.tolist()
        found |= dict(zip(ids, zip(batch.row_sha256(), batch.keys, strict=True), strict=True))
    return found


recipes = st.builds(
    RawRecipe,
    rows=st.tuples(st.integers(1, 60), st.integers(1, 30)),
    passes=st.sampled_from([None, None, 1, 3]),
    stop=st.sampled_from(["first_exhausted", "all_exhausted"]),
    lanes=st.sampled_from([1, 2, 3, 5, 8, 64]),
    shuffle=st.sampled_from([None, 1, 3, 100]),
    tail=st.sampled_from(["drop", "pad"]),
)


@settings(max_examples=60)
@given(
    drawn=recipes,
    dp=st.integers(1, 5),
    size=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    steps=st.integers(1, 4),
    ahead=st.integers(1, 9),
)
def test_any_topology_gives_the_samples_of_one_rank(
    drawn: RawRecipe, dp: int, size: int, accumulation: int, steps: int, ahead: int
) -> None:
    total = dp * size * accumulation
    recipe = replace(drawn, total=total)
    try:
        expected = run(recipe, steps * total)
    except DataQualityError:
        for rank in range(dp):
            with pytest.raises(DataQualityError, match=f"a step needs {total}"):
                run(recipe, 1, dp=dp, rank=rank, size=size)
        return
    found: dict[int, Any] = {}
    for rank in range(dp):
        part = run(
            recipe, steps * accumulation, dp=dp, rank=rank, size=size, prefetch_batches=ahead
        )
        assert part.keys().isdisjoint(found)
        found |= part
    assert found == expected
    assert sorted(found) == list(range(len(found)))
    assert recipe.passes is not None or len(found) == steps * total


@settings(max_examples=60)
@given(
    recipe=recipes,
    before=st.integers(1, 40),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
)
def test_a_restored_run_goes_on_where_the_other_stopped(
    recipe: RawRecipe, before: int, sizes: tuple[int, int]
) -> None:
    recipe = replace(recipe, tail="drop")
    first, second = sizes
    try:
        with recipe.build(size=first) as pipeline:
            head = take(pipeline, before)
            state = pipeline.checkpoint()
    except DataQualityError:
        return
    assert state["delivered"] == len(head) * first
    with recipe.build(size=second, state=state) as pipeline:
        assert pipeline.checkpoint() == state
        rest = rows_in(take(pipeline, 20))
    found = rows_in(head) | rest
    assert found.items() <= run(recipe, len(found)).items()
    assert len(found) == len(head) * first + len(rest)


@pytest.mark.parametrize("passes", [None, 3])
@pytest.mark.parametrize("shuffle", [None, 3])
def test_the_parts_of_several_ranks_resume_on_others(
    passes: int | None, shuffle: int | None
) -> None:
    recipe = RawRecipe(passes=passes, shuffle=shuffle, lanes=8, total=12)
    expected = run(recipe, 60)
    found: dict[int, Any] = {}
    parts = []
    for rank in range(2):
        with recipe.build(dp=2, rank=rank, size=3) as pipeline:
            found |= rows_in(take(pipeline, 6))
            parts.append(pipeline.checkpoint())
    state = merge_checkpoints(parts)
    for rank in range(4):
        with recipe.build(dp=4, rank=rank, size=1, state=state) as pipeline:
            found |= rows_in(take(pipeline, 6))
    assert found == expected


def test_a_checkpoint_after_an_earlier_batch_goes_on_there() -> None:
    recipe = RawRecipe(passes=2)
    with recipe.build(size=3) as pipeline:
        batches = take(pipeline, 9)
        state = pipeline.checkpoint(after=batches[3])
    with recipe.build(size=3, state=state) as pipeline:
        assert rows_in(take(pipeline, 5)) == rows_in(batches[4:])
    assert state["delivered"] == 12


def test_sample_s_is_the_next_one_of_lane_s_mod_l_while_it_lasts() -> None:
    for passes in (None, 2):
        recipe = RawRecipe(passes=passes)
        source = recipe.source()
        refs = []
        for lane in range(recipe.lanes):
            state, mine = source.start(lane, recipe.lanes), []
            chunk, state = source.next(state, 4)
            while chunk is not None and len(mine) < 80:
                mine += [tuple(ref) for ref in chunk.refs.tolist()]
                chunk, state = source.next(state, 4)
            refs.append(mine)
        expected = [
            mine[number]
            for number in range(max(map(len, refs)))
            for mine in refs
            if number < len(mine)
        ]
        with recipe.build(size=4) as pipeline:
            batches = take(pipeline, 30)
        found = [tuple(ref) for batch in batches for ref in batch.refs.tolist()]
        assert found == expected[: len(found)]
        assert len(found) > 100


@pytest.mark.parametrize("runner", ["inline", "thread", "process"])
@pytest.mark.parametrize("reader", [RawReader, ColumnsReader])
def test_runners_and_ways_of_reading_agree(runner: str, reader: type[RawReader]) -> None:
    expected = run(RawRecipe(shuffle=3), 30, size=5)
    recipe = RawRecipe(shuffle=3, reader=reader)
    assert run(recipe, 30, size=5, runner=runner, workers=2) == expected


def test_samples_are_what_was_stored() -> None:
    recipe = RawRecipe(passes=1)
    stored = {"a": rows_of("a", 40), "b": rows_of("b", 23)}
    seen = set()
    with recipe.build(size=3) as pipeline:
        for batch in pipeline:
            assert isinstance(batch, SampleBatch)
            for sample, ref, (key,) in zip(batch.samples, batch.refs, batch.keys, strict=True):
                name = "ab"[ref[0]]
                row = int(ref[1] * (7 if name == "a" else 4) + ref[2])
                assert dict(sample) == stored[name][row]
                assert key == f"{name}/{row}"
                seen.add(key)
    assert len(seen) == 63


def test_fields_choose_what_is_read() -> None:
    whole = RawRecipe().build(size=4)
    some = RawRecipe(fields=("jpg",)).build(size=4)
    with whole, some:
        for all_fields, one in zip(take(whole, 9), take(some, 9), strict=True):
            assert list(one.columns) == ["jpg"]
            for sample, wanted in zip(one.samples, all_fields.samples, strict=True):
                assert dict(sample) == {n: v for n, v in wanted.items() if n == "jpg"}
        assert whole.fingerprint() != some.fingerprint()


@pytest.mark.parametrize("budget", [8 << 20, 64 << 10])
def test_batches_that_are_kept_stay_as_they_are(budget: int) -> None:
    """With the small budget most blocks do not fit where they should lie."""
    expected = run(RawRecipe(), 60, size=3)
    with RawRecipe().build(size=3, memory_budget_bytes=budget, runner="thread") as pipeline:
        assert rows_in(take(pipeline, 60)) == expected


@pytest.mark.parametrize("runner", ["inline", "thread"])
def test_memory_comes_back_when_batches_are_dropped(runner: str) -> None:
    """Ten times the budget goes through it, and never past it."""
    rows = [{"jpg": bytes([number]) * 20_000} for number in range(100)]
    source = StaticMixtureWorkSource([Dataset("a", ColumnsReader(rows, 50))], {"a": 1.0}, 0)
    pipeline = Pipeline(source).options(runner=runner, memory_budget_bytes=4 << 20)
    with pipeline.batch(microbatch_size=10) as batches:
        for _, batch in zip(range(200), batches, strict=False):
            assert batch.columns["jpg"].data.size == 200_000
        assert "batches_in_ordinary_memory" not in batches.metrics()


def test_a_block_larger_than_was_estimated_is_sent_back_whole() -> None:
    rows: list[dict[str, Any]] = [{"jpg": b"x"}] * 40 + [{"jpg": b"y" * 300_000}] * 60
    for runner in ("inline", "process"):
        source = StaticMixtureWorkSource(
            [Dataset("a", ColumnsReader(rows, 50))],
            {"a": 1.0},
            0,
            shuffle=False,
            stop_after_passes=1,
        )
        pipeline = Pipeline(source).options(canonical_replicas=1, runner=runner, workers=1)
        with pipeline.batch(microbatch_size=10) as batches:
            found = [sample["jpg"] for batch in batches for sample in batch.samples]
        assert found == [row["jpg"] for row in rows]


class CopyingReader(ColumnsReader):
    """Gives text that is cut inside a character."""

    def columns(
        self, shard: int, rows: NDArray[np.int64], fields: Sequence[str]
    ) -> dict[str, Column]:
        found = super().columns(shard, rows, fields)
        data, ends, valid, _ = found["txt"]
        return {**found, "txt": Column(data, np.minimum(ends + 1, data.size), valid)}


def test_defective_rows_are_valid_in_no_column_and_named() -> None:
    rows: list[Any] = [{"txt": f"é{n}", "jpg": b"j"} for n in range(50)]
    rows[7] = SampleError("bad_json", "line 8")
    for reader in (RawReader, ColumnsReader):
        source = StaticMixtureWorkSource(
            [Dataset("a", reader(rows, 20))], {"a": 1.0}, 0, stop_after_passes=1
        )
        pipeline = Pipeline(source).options(runner="inline", max_error_rate=0.5)
        with pipeline.batch(microbatch_size=1) as batches:
            empty = [batch.keys[0] for batch in batches if not batch.samples[0]]
            metrics = batches.metrics()
        assert empty == [("a/7",)]
        assert metrics["skipped"] == {"bad_json": 1}
        assert "a/s0/7: line 8" in metrics["defects"][0]


def test_text_that_is_not_utf8_is_a_defect_of_its_row() -> None:
    rows = [{"txt": "éé", "jpg": b"j"}] * 20
    source = StaticMixtureWorkSource([Dataset("a", CopyingReader(rows, 20))], {"a": 1.0}, 0)
    pipeline = Pipeline(source).options(runner="inline", canonical_replicas=1, max_error_rate=1.0)
    with pipeline.batch(microbatch_size=20) as batches:
        (batch,) = take(batches, 1)
        assert batch.columns["txt"].valid.sum() == batch.columns["jpg"].valid.sum() == 0
        assert batches.metrics()["skipped"] == {"bad_utf8": 20}


def test_too_many_defective_rows_stop_the_run() -> None:
    rows: list[Any] = [{"txt": "t"}] * 30 + [SampleError("bad_json", "no")] * 10
    source = StaticMixtureWorkSource([Dataset("a", RawReader(rows, 10))], {"a": 1.0}, 0)
    pipeline = Pipeline(source).options(runner="inline", max_error_rate=0.0)
    with (
        pipeline.batch(microbatch_size=4) as batches,
        pytest.raises(DataQualityError, match=r"of the first \d+ documents are defective"),
    ):
        take(batches, 40)


class CrashingReader(ColumnsReader):
    """Ends its process, as native code may: once if there is a file to tell that it did."""

    told: Path | None = None

    def columns(
        self, shard: int, rows: NDArray[np.int64], fields: Sequence[str]
    ) -> dict[str, Column]:
        if shard == 1 and not (self.told and self.told.exists()):
            if self.told:
                self.told.touch()
            os._exit(3)
        return super().columns(shard, rows, fields)


@pytest.mark.parametrize("once", [True, False])
def test_a_crash_does_not_show_and_two_end_the_run_with_the_rows_named(
    tmp_path: Path, once: bool
) -> None:
    reader = CrashingReader(rows_of("a", 40), 20)
    reader.told = tmp_path / "told" if once else None
    source = StaticMixtureWorkSource([Dataset("a", reader)], {"a": 1.0}, 0, shuffle=False)
    pipeline = Pipeline(source).options(runner="process", workers=1, canonical_replicas=1)
    with pipeline.batch(microbatch_size=10) as batches:
        if not once:
            with pytest.raises(WorkerCrashed, match=r"rows, the first a/s\d/\d+: .*exit code 3"):
                take(batches, 10)
            return
        found = [sample["txt"] for batch in take(batches, 4) for sample in batch.samples]
    assert found == [row["txt"] for row in rows_of("a", 40)]


class LostReader(ColumnsReader):
    """Its storage goes away."""

    def columns(
        self, shard: int, rows: NDArray[np.int64], fields: Sequence[str]
    ) -> dict[str, Column]:
        raise RuntimeError("storage went away")


@pytest.mark.parametrize("runner", ["inline", "process"])
def test_what_a_reader_raises_reaches_the_consumer(runner: str) -> None:
    with (
        RawRecipe(reader=LostReader).build(runner=runner, workers=1) as pipeline,
        pytest.raises(RuntimeError, match="storage went away"),
    ):
        take(pipeline, 1)


def test_the_tail_is_padded_with_rows_that_have_no_field() -> None:
    recipe = RawRecipe(rows=(10, 7), passes=1, tail="pad")
    with recipe.build(size=4) as pipeline:
        batches = list(pipeline)
    assert [len(batch.samples) for batch in batches] == [4] * 5
    assert [len(key) for batch in batches for key in batch.keys] == [1] * 17 + [0] * 3
    assert [dict(sample) for sample in batches[-1].samples[1:]] == [{}] * 3


def test_plan_names_the_samples_that_come() -> None:
    with RawRecipe().build(size=2) as pipeline:
        planned = list(pipeline.plan(20))
        batches = take(pipeline, 10)
        keys = [key for batch in batches for key in batch.keys]
        assert [one.keys for one in planned] == keys
        assert [one.number for one in planned] == list(range(20))
        assert [one.keys for one in pipeline.plan(3)] != [one.keys for one in planned[:3]]


def test_batches_larger_than_a_block_and_many_to_a_block_agree() -> None:
    sizes = (BLOCK_ROWS + 7, 1)
    first, second = (run(RawRecipe(), 2 if size > 1 else 60, size=size) for size in sizes)
    assert second.items() <= first.items()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.map(lambda d: d), r"\.map takes documents.*add \.interleave or \.tokenize"),
        (lambda p: p.options(balance=True), "raw samples have no weight"),
        (lambda p: p.batch(microbatch_size=1, fields=["txt", "png"]), r"have no \['png'\], they"),
        (
            lambda p: p.shuffle(buffer_size=2).tokenize(tokenizer_id=None),
            "come before .shuffle|tok",
        ),
    ],
)
def test_what_raw_samples_cannot_have_is_named(change: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        take(change(RawRecipe().build()), 1)


def test_explain_and_metrics_know_raw_samples(capsys: pytest.CaptureFixture[str]) -> None:
    with RawRecipe(fields=("txt",)).build(size=4) as pipeline:
        pipeline.explain()
        take(pipeline, 3)
        assert pipeline.metrics()["documents"] == 12
    assert "read fields: txt" in capsys.readouterr().out
