"""Known failures of other loaders (CKP-*, ZEP-*): resuming, mixtures, starting. Real files only.

CKP-10 is in tests/laws/test_distributed.py. Tests that hold a case elsewhere name it in a comment.
"""

import io
import json
import os
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data
import webdataset

from tests.fixtures.memory import Recipe, digests, take
from tests.fixtures.rows import (
    alone,
    counted,
    keys_of,
    open_lines,
    picture,
    write_lines,
    write_rows,
)
from zephon_mm.batch import Batch
from zephon_mm.checkpoint import merge_checkpoints
from zephon_mm.errors import CheckpointError, ConfigError, DataQualityError
from zephon_mm.io import Dataset
from zephon_mm.pipeline import Pipeline

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:.* ranks on .* lanes measure each sample"),
    pytest.mark.filterwarnings("ignore:a shuffle buffer of .* never fills"),
    pytest.mark.usefixtures("warm_workers"),
]

State = Mapping[str, Any]


@dataclass(frozen=True)
class Leg:
    """One part of a run: so many ranks, each with its workers, take so many batches."""

    ranks: int
    workers: int
    batches: int
    microbatch: int = 1
    runner: str = "thread"


def run(recipe: Recipe, leg: Leg, state: State | None = None) -> tuple[dict[int, str], Any]:
    """Run all ranks side by side; return their rows and the merged state after JSON."""
    pipelines = [
        recipe.build(
            dp=leg.ranks,
            rank=rank,
            microbatch=leg.microbatch,
            runner=leg.runner,
            workers=leg.workers,
            state=state,
        )
        for rank in range(leg.ranks)
    ]
    for pipeline in pipelines:  # their workers start together
        iter(pipeline)
    found: dict[int, str] = {}
    for pipeline in pipelines:
        rows = digests(take(pipeline, leg.batches))
        assert rows.keys().isdisjoint(found)
        found |= rows
    merged = merge_checkpoints([pipeline.checkpoint() for pipeline in pipelines])
    for pipeline in pipelines:
        pipeline.close()
    return found, json.loads(json.dumps(merged))


def uninterrupted(recipe: Recipe, count: int = 10_000) -> dict[int, str]:
    with replace(recipe, global_batch_size=1).build() as pipeline:
        return digests(take(pipeline, count))


@pytest.fixture(scope="module")
def lines64(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """One pass over 64 rows, each a sequence."""
    return alone(open_lines(tmp_path_factory.mktemp("data") / "lines", 64), lanes=4)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A WebDataset with images and a JSONL file, mixed, packed and shuffled."""
    folder = tmp_path_factory.mktemp("mixed")
    with webdataset.TarWriter(str(folder / "captions.tar")) as writer:
        for number in range(48):
            caption = "a lazy dog in the sun " * (number % 3 + 1)
            writer.write({"__key__": f"{number:04}", "png": picture(number), "txt": caption})
    texts = [f"{number} " + "fox " * (number % 9 + 1) for number in range(64)]
    write_lines(folder / "stories.jsonl", texts)
    opened = [
        Dataset.from_path(path.stem, path, cache_dir=folder / "cache")
        for path in sorted(folder.iterdir())
    ]
    return Recipe(
        datasets=tuple(opened),
        weights=(0.4, 0.6),
        shuffle=8,
        chunks_per_window=8,
        global_batch_size=None,
    )


# Resuming elsewhere.


@pytest.mark.parametrize("leg", [Leg(1, 3, 22, 2, "process"), Leg(4, 1, 11)])
def test_ckp_01_other_ranks_and_workers_go_on_in_the_same_global_order(
    lines64: Recipe, leg: Leg
) -> None:
    first, state = run(lines64, Leg(2, 2, 5, 2, "process"))
    rest, end = run(lines64, leg, state)
    assert sorted(first) == list(range(20))
    assert sorted(rest) == list(range(20, 64))
    assert first | rest == uninterrupted(lines64)
    assert run(lines64, replace(leg, runner="inline"), end)[0] == {}


@pytest.mark.parametrize("leg", [Leg(1, 3, 11, 2, "process"), Leg(4, 1, 6)])
def test_ckp_20_packing_mixing_and_shuffling_resume_elsewhere_too(mixed: Recipe, leg: Leg) -> None:
    first, state = run(mixed, Leg(2, 2, 5, 2, "process"))
    rest, _ = run(mixed, leg, state)
    assert first | rest == uninterrupted(mixed, len(first) + len(rest))
    assert len(first) + len(rest) in (42, 44)


def test_ckp_02_a_state_does_not_know_whether_there_were_workers(mixed: Recipe) -> None:
    found: dict[int, str] = {}
    states: list[Any] = [None]
    for runner in ("inline", "process", "inline"):
        rows, state = run(mixed, Leg(1, 2, 7, 1, runner), states[-1])
        found |= rows
        states.append(state)
    assert found == uninterrupted(mixed, 21)
    assert states[2] == run(mixed, Leg(1, 1, 14, 1, "inline"))[1]


@pytest.mark.parametrize("saved_at", [1, 13, 39])
def test_ckp_05_what_waits_in_a_shuffle_buffer_is_neither_lost_nor_doubled(
    tmp_path: Path, saved_at: int
) -> None:
    recipe = alone(open_lines(tmp_path / "lines", 40), lanes=1, shuffle=8, chunks_per_window=20)
    first, state = run(recipe, Leg(1, 1, saved_at))
    rest, _ = run(recipe, Leg(1, 1, 100), state)
    assert sorted(first | rest) == list(range(40))
    assert first | rest == uninterrupted(recipe)
    with recipe.build() as pipeline:
        assert keys_of(take(pipeline, 100)) != [str(row) for row in range(40)]


def test_ckp_11_lanes_that_end_early_leave_the_others_to_go_on(tmp_path: Path) -> None:
    recipe = alone(open_lines(tmp_path / "lines", 5, 5, 1), lanes=3)
    expected = uninterrupted(recipe)
    assert len(expected) == 11
    for delivered in range(12):
        first, state = run(recipe, Leg(1, 1, delivered, 1, "inline"))
        runner = "process" if delivered == 8 else "inline"
        rest, _ = run(recipe, Leg(1, 3, 100, 1, runner), state)
        assert first | rest == expected
        assert len(first) == delivered


def test_zep_01_a_run_may_go_on_with_more_ranks_than_it_has_lanes(lines64: Recipe) -> None:
    recipe = replace(lines64, lanes=2)
    first, state = run(recipe, Leg(2, 1, 5))
    rest, _ = run(recipe, Leg(6, 1, 9), state)
    assert sorted(first | rest) == list(range(64))
    assert first | rest == uninterrupted(recipe)


# Passes.


def test_ckp_03_the_passes_after_a_resumed_one_are_whole(lines64: Recipe) -> None:
    recipe = replace(lines64, passes=3, lanes=1, chunk_size=16, chunks_per_window=4)
    with recipe.build() as pipeline:
        first = keys_of(take(pipeline, 25))
        state = pipeline.checkpoint()
    with recipe.build(state=state) as pipeline:
        found = first + keys_of(take(pipeline, 1_000))
    passes = [found[start : start + 64] for start in range(0, 192, 64)]
    assert len(found) == 192
    assert all(set(one) == set(map(str, range(64))) for one in passes)


def test_ckp_14_workers_that_stay_alive_see_every_pass(lines64: Recipe) -> None:
    recipe = replace(lines64, passes=3, lanes=1, chunk_size=16, chunks_per_window=4)
    with recipe.build(runner="process", workers=2) as pipeline:
        kept = take(pipeline, 192)
        assert pipeline.metrics()["worker_restarts"] == 0
    orders = [keys_of(kept[start : start + 64]) for start in range(0, 192, 64)]
    assert len({tuple(order) for order in orders}) == 3

    state = None
    for order in orders:  # each pass in a pipeline of its own
        with recipe.build(state=state) as pipeline:
            assert keys_of(take(pipeline, 64)) == order
            state = pipeline.checkpoint()


@pytest.mark.parametrize("runner", ["inline", "thread", "process"])
def test_ckp_19_a_state_of_the_last_sample_gives_the_end_and_no_hang(
    lines64: Recipe, runner: str
) -> None:
    with lines64.build() as pipeline:
        states = [pipeline.checkpoint(after=batch) for batch in take(pipeline, 64)]
    for left, state in enumerate(reversed(states[-2:])):
        with lines64.build(runner=runner, workers=2, state=state) as pipeline:
            assert len(list(pipeline)) == left
            assert list(pipeline) == []
    endless = replace(lines64, passes=None, global_batch_size=1)
    with endless.build() as pipeline:
        state = pipeline.checkpoint(after=take(pipeline, 64)[-1])
        expected = digests(take(pipeline, 3))
    with endless.build(runner=runner, workers=2, state=state) as pipeline:
        assert digests(take(pipeline, 3)) == expected


# Mixtures.


def two_sources(folder: Path, weights: tuple[float, float]) -> Recipe:
    """A thousand rows and three, each a sequence, in one lane."""
    for name, count in (("big", 1000), ("small", 3)):
        (folder / name).mkdir(parents=True)
        text = f"{name} " + "the quick brown fox jumps " * 3
        write_lines(folder / name / "rows.jsonl", [text] * count)
    names = [Dataset.from_path(n, folder / n, cache_dir=folder / "cache") for n in ("big", "small")]
    return Recipe(
        datasets=tuple(names),
        weights=weights,
        lanes=1,
        max_length=32,
        chunk_size=8,
        global_batch_size=1,
    )


def test_ckp_07_a_weight_of_zero_leaves_a_source_out_and_all_zero_is_an_error(
    tmp_path: Path,
) -> None:
    with two_sources(tmp_path / "one", (1.0, 0.0)).build() as pipeline:
        found = [key for batch in take(pipeline, 50) for key in batch.keys[0]]
    assert len(found) == 50
    assert all(key.startswith("big/") for key in found)
    with pytest.raises(ConfigError, match=r"all weights .* are 0: give one dataset a share"):
        two_sources(tmp_path / "none", (0.0, 0.0)).build()


def test_ckp_08_each_stop_rule_gives_its_counts_and_passes_are_counted(tmp_path: Path) -> None:
    recipe = two_sources(tmp_path, (0.5, 0.5))

    def counts(count: int = 10_000, **changes: Any) -> tuple[Counter[str], list[int]]:
        with replace(recipe, **changes).build() as pipeline:
            keys = [key for batch in take(pipeline, count) for key in batch.keys[0]]
            places = pipeline.checkpoint()["lanes"]["0"][1][3:]
        return Counter(key.partition("/")[0] for key in keys), places

    first, _ = counts(passes=1, stop="first_exhausted")
    assert first["small"] == 3
    assert 2 <= first["big"] <= 4
    assert counts(passes=1, stop="all_exhausted")[0] == {"big": 1000, "small": 3}
    endless, places = counts(count=480)  # 30 windows of 16
    assert endless == {"big": 240, "small": 240}
    assert places == [0, 240, 79, 3]  # pass and rows of it, for each source


# What a resume costs, in samples.


@pytest.fixture(scope="module")
def rows20000(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows"), 20_000)


@pytest.mark.parametrize("place", [1_000, 19_000])
def test_ckp_13_a_resume_measures_the_open_windows_and_decodes_only_what_comes(
    rows20000: Path, place: int
) -> None:
    recipe, reader, processor = counted(rows20000)
    options: dict[str, Any] = {"microbatch": 4, "prefetch_batches": 1, "index": "off"}
    with recipe.build(processor=processor, **options) as pipeline:
        seen = 0
        for batch in pipeline:
            seen += len(keys_of([batch]))
            if seen >= place:
                break
        delivered = processor.decoded.copy()
        state = pipeline.checkpoint()
        expected = digests(take(pipeline, 2))
    assert reader.rows_read >= place

    recipe, reader, processor = counted(rows20000)
    with recipe.build(processor=processor, state=state, **options) as pipeline:
        first = take(pipeline, 1)
        open_windows = 4 * 32 * 8
        assert reader.rows_read <= 2 * open_windows  # those that are open, and what is read ahead
        assert sum(processor.decoded.values()) <= 4 * len(first[0].image_index)
        assert not processor.decoded.keys() & delivered.keys()
        assert digests(first + take(pipeline, 1)) == expected


def test_zep_03_a_jsonl_file_is_read_through_once_and_again_only_when_it_changed(
    tmp_path: Path,
) -> None:
    path, cache = tmp_path / "rows.jsonl", tmp_path / "cache"
    line = json.dumps({"id": 0, "text": "the quick brown fox " * 40}) + "\n"
    path.write_text(line * (20_000_000 // len(line)))
    size = path.stat().st_size
    assert first_sequence_reads(path, cache) >= size
    assert first_sequence_reads(path, cache) < size / 10
    with open(path, "a") as file:
        file.write(line)
    assert first_sequence_reads(path, cache) >= size  # another size
    assert first_sequence_reads(path, cache) < size / 10
    os.utime(path, ns=(0, 1))
    assert first_sequence_reads(path, cache) >= size  # another time


def first_sequence_reads(path: Path, cache: Path) -> int:
    """Return the bytes that this process reads from files to make the first sequence."""

    def read_bytes() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = read_bytes()
    recipe = Recipe(datasets=(Dataset.from_path("rows", path, cache_dir=cache),), max_length=512)
    with recipe.build() as pipeline:
        assert take(pipeline, 1)[0].keys[0]
    return read_bytes() - before


# Damage, and states that are lost.


@pytest.mark.parametrize("passes", [1, None])
@pytest.mark.parametrize(("rate", "skipped"), [(0.0, 1), (0.003, 4), (1.0, None)])
def test_ckp_17_zero_stops_at_the_first_failure_and_bad_data_alone_never_loops(
    tmp_path: Path, passes: int | None, rate: float, skipped: int | None
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": \n' * 200)
    bad = Dataset.from_path("bad", path, schema="text", cache_dir=tmp_path / "cache")
    recipe = alone(bad, passes=passes, lanes=1, max_error_rate=rate)
    with recipe.build(runner="thread", workers=2) as pipeline:
        with pytest.raises(DataQualityError, match="bad_json"):
            take(pipeline, 1)
        found = pipeline.metrics()["skipped"]["bad_json"]
    assert found == skipped if skipped else found >= 200


DYING = """
import json, os, pathlib, pickle, signal, sys
from tests.fixtures.memory import take
recipe, state, part = (pathlib.Path(name) for name in sys.argv[1:])
pipeline = pickle.loads(recipe.read_bytes()).build(
    dp=2, rank=1, state=json.loads(state.read_text()), runner="thread", index="off"
)
take(pipeline, 3)
text = json.dumps(pipeline.checkpoint())
with part.open("w") as file:
    file.write(text[: len(text) // 2])
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_zep_05_a_save_that_one_rank_did_not_finish_is_known_and_the_one_before_is_used(
    lines64: Recipe, tmp_path: Path
) -> None:
    # A finite run or a full index would make every rank's part a whole.
    endless = replace(lines64, passes=None)
    first, state = run(endless, Leg(2, 1, 4))
    (tmp_path / "recipe").write_bytes(pickle.dumps(endless))
    for step in (1, 2):
        (tmp_path / str(step)).mkdir()
    for rank in range(2):
        with endless.build(dp=2, rank=rank, state=state, index="off") as pipeline:
            (tmp_path / f"1/{rank}.json").write_text(json.dumps(pipeline.checkpoint()))
            if rank == 0:  # goes on to the next save, which rank 1 does not live to finish
                take(pipeline, 3)
                (tmp_path / "2/0.json").write_text(json.dumps(pipeline.checkpoint()))
    (tmp_path / "whole.json").write_text(json.dumps(state))
    names = ["recipe", "whole.json", "2/1.json"]
    died = subprocess.run(
        [sys.executable, "-c", DYING, *(str(tmp_path / name) for name in names)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert died.returncode < 0

    for spoil in (lambda: None, (tmp_path / "2/1.json").unlink):
        spoil()
        with pytest.raises(CheckpointError):
            merged(tmp_path / "2")
        found, _ = run(endless, Leg(1, 1, 56), latest(tmp_path))
        assert first | found == uninterrupted(endless, 64)


def merged(folder: Path) -> dict[str, Any]:
    """Return the state whose parts lie in a folder; a part that is no JSON is passed as it is."""
    parts: list[Any] = []
    for path in sorted(folder.glob("*.json")):
        try:
            parts.append(json.loads(path.read_text()))
        except ValueError:
            parts.append(path.read_text())
    return merge_checkpoints(parts)


def latest(folder: Path) -> dict[str, Any]:
    """Return the newest state that is whole, as a training script looks for it."""
    for step in ("2", "1"):
        try:
            return merged(folder / step)
        except CheckpointError:
            continue
    raise AssertionError("no state is whole")


# Trainers that wrap the loader.


class Wrapped(torch.utils.data.IterableDataset[Any]):
    """A pipeline as the dataset of a plain DataLoader."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.pipeline)


class Prefetching:
    """Reads one batch ahead, as accelerate's loaders do to know the last one."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.state: State = {}

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self.pipeline)
        current = next(batches, None)
        while current is not None:
            following = next(batches, None)
            self.state = self.pipeline.checkpoint(after=current)
            yield current
            current = following


def test_ckp_18_a_plain_state_dict_works_behind_a_dataloader(mixed: Recipe) -> None:
    expected = uninterrupted(mixed, 9)
    with mixed.build() as pipeline:
        loader = torch.utils.data.DataLoader(Wrapped(pipeline), batch_size=None)
        first = digests([batch for _, batch in zip(range(4), loader, strict=False)])
        saved = io.BytesIO()
        torch.save({"step": 4, "data": loader.dataset.pipeline.state_dict()}, saved)  # type: ignore[attr-defined]
    saved.seek(0)
    with mixed.build() as pipeline:
        pipeline.load_state_dict(torch.load(saved, weights_only=True)["data"])
        loader = torch.utils.data.DataLoader(Wrapped(pipeline), batch_size=None)
        rest = digests([batch for _, batch in zip(range(5), loader, strict=False)])
    assert first | rest == expected


def test_ckp_18_a_wrapper_that_reads_ahead_says_after_which_batch(mixed: Recipe) -> None:
    expected = uninterrupted(mixed, 9)
    with mixed.build() as pipeline:
        loader = Prefetching(pipeline)
        first = digests([batch for _, batch in zip(range(4), loader, strict=False)])
        assert pipeline.checkpoint()["delivered"] > 4
    with mixed.build(state=loader.state) as pipeline:
        assert first | digests(take(pipeline, 5)) == expected
