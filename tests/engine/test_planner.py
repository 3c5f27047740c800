"""The global order is the lanes in rotation, each planned as if it were alone."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.fixtures.memory import PROCESSOR, Recipe, take
from tests.fixtures.tokenizers import byte_level_bpe
from zephon_mm.errors import CheckpointError, DataQualityError
from zephon_mm.pipeline import Pipeline
from zephon_mm.records import Chunk, State
from zephon_mm.work import StaticMixtureWorkSource


@dataclass(frozen=True)
class OneLane:
    """A source whose only lane is lane `lane` of `num_lanes` of another one."""

    source: StaticMixtureWorkSource
    lane: int
    num_lanes: int

    @property
    def datasets(self) -> Sequence[Any]:
        return self.source.datasets

    @property
    def finite(self) -> bool:
        return self.source.finite

    def start(self, lane: int, num_lanes: int) -> State:
        return self.source.start(self.lane, self.num_lanes)

    def next(self, state: State, chunk_size: int) -> tuple[Chunk | None, State]:
        return self.source.next(state, chunk_size)

    def fingerprint(self) -> Mapping[str, Any]:
        return self.source.fingerprint()


def alone(recipe: Recipe, lane: int, count: int) -> list[tuple[str, ...]]:
    """Return the sequences of one lane, by the names in them."""
    pipeline = (
        Pipeline(OneLane(recipe.source(), lane, recipe.lanes))
        .options(
            canonical_replicas=1,
            chunk_size=recipe.chunk_size,
            flush_every_k_chunks=recipe.chunks_per_window,
        )
        .interleave(tokenizer=byte_level_bpe(), image_processor=PROCESSOR)
        .pack_flat(max_length=recipe.max_length)
        .batch(microbatch_size=1)
    )
    return [planned.keys for planned in pipeline.plan(count)]


def in_rotation(lanes: Sequence[Sequence[tuple[str, ...]]]) -> Iterator[tuple[str, ...]]:
    """Yield the first of each lane, the second of each, ..., leaving out lanes that ended."""
    for place in range(max(map(len, lanes))):
        yield from (lane[place] for lane in lanes if place < len(lane))


@pytest.mark.parametrize("lanes", [1, 3, 8])
@pytest.mark.parametrize("passes", [None, 1, 2])
def test_the_global_order_is_the_lanes_in_rotation(
    recipe: Recipe, lanes: int, passes: int | None
) -> None:
    recipe = replace(
        recipe,
        lanes=lanes,
        passes=passes,
        stop="all_exhausted",
        shuffle=None,
        global_batch_size=1,
    )
    each = [alone(recipe, lane, 40 if passes is None else 10_000) for lane in range(lanes)]
    expected = list(in_rotation(each))
    with recipe.build() as pipeline:
        found = [keys for batch in take(pipeline, len(expected) + 1) for keys in batch.keys]
    assert found[: len(expected)] == expected
    assert passes is None or len(found) == len(expected)


@pytest.mark.parametrize("passes", [None, 2])
def test_plan_tells_what_will_come_without_moving(recipe: Recipe, passes: int | None) -> None:
    recipe = replace(recipe, passes=passes, stop="all_exhausted", lanes=3)
    with recipe.build(microbatch=2) as pipeline:
        for _ in range(3):
            planned = list(pipeline.plan(4))
            batches = take(pipeline, 2)
            rows = [keys for batch in batches for keys in batch.keys]
            assert [one.keys for one in planned] == rows
            assert [one.number for one in planned] == [
                n for batch in batches for n in batch.sequence_ids.tolist()
            ]
            assert sum(one.num_images for one in planned) == sum(
                len(batch.pixel_values) for batch in batches
            )
            assert sum(one.num_tokens for one in planned) == sum(
                int((batch.segment_ids > 0).sum()) for batch in batches
            )


def test_a_part_of_one_rank_cannot_plan_lanes_that_it_does_not_know(recipe: Recipe) -> None:
    recipe = replace(recipe, lanes=8, global_batch_size=8)
    with recipe.build(dp=2, rank=0, microbatch=4) as pipeline:
        take(pipeline, 3)
        part = pipeline.checkpoint()
    assert sorted(part["lanes"], key=int) == ["0", "1", "2", "3"]
    with (
        recipe.build(state=part | {"complete": True}) as pipeline,
        pytest.raises(CheckpointError, match=r"no cursor for lane 4.*Merge the parts"),
    ):
        take(pipeline, 5)


def test_a_pass_that_cannot_fill_a_step_is_an_error_on_every_rank(recipe: Recipe) -> None:
    recipe = replace(recipe, passes=1, global_batch_size=1000)
    for rank in (0, 1):
        with (
            recipe.build(dp=2, rank=rank, microbatch=1) as pipeline,
            pytest.raises(DataQualityError, match=r"gives \d+ sequences, a step needs 1000"),
        ):
            take(pipeline, 1)
