"""THE law: the sequence of global batches is a function of the recipe alone.

Ranks are simulated one after the other, which is all that they share in reality: nothing. The
reference is one rank that delivers one sequence at a time, with the inline runner.
"""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fixtures.memory import Recipe, dataset, digests, random_rows, run_ranks, take
from zephon_mm.errors import DataQualityError
from zephon_mm.records import FileBlob

# Advice on speed, which is what a search of awkward topologies asks for.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.* ranks on .* lanes measure each sample"),
    pytest.mark.filterwarnings("ignore:a shuffle buffer of .* never fills"),
]


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Draw what decides the data; datasets are left out, they need files."""
    return Recipe(
        datasets=(),
        weights=draw(st.sampled_from([(1.0, 0.0), (0.5, 0.5), (0.05, 0.95)])),
        seed=draw(st.integers(0, 5)),
        passes=draw(st.sampled_from([None, None, 1, 3])),
        stop=draw(st.sampled_from(["first_exhausted", "all_exhausted"])),
        lanes=draw(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 9, 64])),
        chunk_size=draw(st.integers(1, 7)),
        chunks_per_window=draw(st.integers(1, 4)),
        max_length=draw(st.sampled_from([64, 100, 256])),
        algorithm=draw(st.sampled_from(["best_fit", "wrap"])),
        max_images=draw(st.sampled_from([None, 0, 2])),
        shuffle=draw(st.sampled_from([None, 1, 2, 5, 100])),
    )


def with_data(recipe: Recipe, blobs: list[FileBlob], rows: tuple[int, int]) -> Recipe:
    first, second = rows
    return replace(
        recipe,
        datasets=(
            dataset("a", random_rows(1, first, blobs)),
            dataset("b", random_rows(2, second, blobs), shard_rows=4),
        ),
    )


@settings(
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    drawn=recipes(),
    rows=st.tuples(st.integers(1, 60), st.integers(1, 30)),
    dp=st.integers(1, 8),
    microbatch=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    steps=st.integers(1, 3),
    ahead=st.integers(1, 9),
)
def test_any_topology_gives_the_batches_of_one_rank(
    blobs: list[FileBlob],
    drawn: Recipe,
    rows: tuple[int, int],
    dp: int,
    microbatch: int,
    accumulation: int,
    steps: int,
    ahead: int,
) -> None:
    total = dp * microbatch * accumulation
    recipe = replace(with_data(drawn, blobs, rows), global_batch_size=total)
    if recipe.max_images == 0:
        recipe = replace(recipe, datasets=with_data(drawn, [], rows).datasets)

    with recipe.build(microbatch=1) as pipeline:
        try:
            expected = digests(take(pipeline, steps * total))
        except DataQualityError:  # the data are less than a step: every rank has to say so
            expected = {}
    if not expected:
        assert recipe.passes is not None
        for rank in range(dp):
            with (
                recipe.build(dp=dp, rank=rank, microbatch=microbatch) as pipeline,
                pytest.raises(DataQualityError, match=f"a step needs {total}"),
            ):
                take(pipeline, 1)
        return
    found = run_ranks(
        recipe, dp=dp, microbatch=microbatch, sequences=steps * total, prefetch_batches=ahead
    )

    assert found == expected
    assert sorted(found) == list(range(len(found)))
    assert len(found) % total == 0
    if recipe.passes is None:
        assert len(found) == steps * total
