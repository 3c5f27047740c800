"""Balancing deals a step's rows otherwise; the rows of each step, and what follows, stay."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.fixtures.memory import Recipe
from zephon_mm import Batch
from zephon_mm.checkpoint import merge_checkpoints
from zephon_mm.errors import CheckpointError

N = 8


def rows_of(batches: list[Batch]) -> dict[int, str]:
    found: dict[int, str] = {}
    for batch in batches:
        for number, digest in zip(batch.sequence_ids.tolist(), batch.row_sha256(), strict=True):
            assert number not in found
            found[number] = digest
    return found


def advance(
    recipe: Recipe, dp: int, size: int, batches: int, state: Any = None, **options: Any
) -> tuple[dict[int, str], Any]:
    """Run all ranks for some batches; return their rows and the merged state."""
    delivered: list[Batch] = []
    parts = []
    for rank in range(dp):
        with recipe.build(dp=dp, rank=rank, microbatch=size, state=state, **options) as pipeline:
            delivered += [batch for _, batch in zip(range(batches), pipeline, strict=False)]
            parts.append(pipeline.checkpoint())
    return rows_of(delivered), json.loads(json.dumps(merge_checkpoints(parts)))


@pytest.mark.parametrize("passes", [None, 1])
@pytest.mark.filterwarnings("ignore:balance=True")
def test_each_step_holds_the_same_rows_on_any_topology(recipe: Recipe, passes: int | None) -> None:
    fixed = replace(recipe, global_batch_size=N, passes=passes)
    plain, _ = advance(fixed, 1, 1, 3 * N)
    for dp, size in ((1, 2), (2, 1), (4, 2), (8, 1)):
        rows, _ = advance(fixed, dp, size, 3 * N // (dp * size), balance=True)
        assert rows == plain


def test_a_state_inside_a_balanced_step_goes_on_with_what_is_left(recipe: Recipe) -> None:
    fixed = replace(recipe, global_batch_size=N)
    plain, _ = advance(fixed, 1, 1, 3 * N)
    first, state = advance(fixed, 4, 1, 3, balance=True)  # 12 of 24: inside the second step
    second, state = advance(fixed, 1, 1, 2, state, balance=True)  # and again inside it
    third, state = advance(fixed, 2, 1, 1, state, balance=True)  # to its end
    last, _ = advance(fixed, 2, 4, 1, state, balance=False)
    assert state["dealt"] == []
    assert {**first, **second, **third, **last} == plain
    assert len(first) + len(second) + len(third) + len(last) == len(plain)


def test_a_state_inside_a_balanced_step_needs_balance(recipe: Recipe) -> None:
    fixed = replace(recipe, global_batch_size=N)
    _, state = advance(fixed, 2, 1, 1, balance=True)
    with pytest.raises(CheckpointError, match=r"balance=True"):
        fixed.build(dp=2, rank=0, microbatch=1, state=state)


def test_metrics_tell_how_uneven_ranks_were_and_are(recipe: Recipe) -> None:
    fixed = replace(recipe, global_batch_size=N)
    with fixed.build(dp=4, rank=0, microbatch=1, balance=True) as pipeline:
        batches = [batch for _, batch in zip(range(4), pipeline, strict=False)]
        found = pipeline.metrics()
    assert found["attention_straggler_after"] <= found["attention_straggler_before"]
    assert len({batch.step_valid_tokens for batch in batches[:2]}) == 1


@pytest.mark.parametrize(("dp", "size"), [(1, 1), (2, 2), (4, 1), (3, 1)])
def test_a_padded_tail_delivers_every_document_once(recipe: Recipe, dp: int, size: int) -> None:
    fixed = replace(recipe, global_batch_size=12, passes=1, stop="all_exhausted", tail="pad")
    seen: list[str] = []
    rows = 0
    for rank in range(dp):
        with fixed.build(dp=dp, rank=rank, microbatch=size) as pipeline:
            batches = list(pipeline)
        seen += [key for batch in batches for row in batch.keys for key in row]
        for batch, row in ((batch, row) for batch in batches for row in range(size)):
            rows += 1
            assert bool(batch.keys[row]) or (batch.segment_ids[row] == 0).all()
            assert bool(batch.keys[row]) or (batch.labels[row] == -100).all()
    assert rows % 12 == 0
    assert len(seen) == len(set(seen))
    with fixed.build(dp=1, rank=0, microbatch=1) as pipeline:
        assert sorted(seen) == sorted(
            key for batch in pipeline for row in batch.keys for key in row
        )
