"""A deal gives every rank as many sequences, nearly as much work, and every sequence once."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon_mm.engine.balance import BLOCK, Costs, costs_of, deal, in_order, straggler
from zephon_mm.packed import Piece, Sequence
from zephon_mm.records import FileBlob, ImageSlot, SampleRef, record_of


@st.composite
def steps(draw: st.DrawFn) -> tuple[Costs, int, int]:
    ranks, size, groups = (draw(st.integers(1, 5)) for _ in range(3))
    count = ranks * size * groups
    work = draw(
        st.lists(
            st.tuples(st.integers(0, 9_000), st.integers(0, 9_000)), min_size=count, max_size=count
        )
    )
    return np.array(work, dtype=np.int64).reshape(-1, 2), ranks, size


@given(steps())
def test_every_sequence_is_dealt_once_in_equal_counts(step: tuple[Costs, int, int]) -> None:
    costs, ranks, size = step
    for hands in (
        deal(costs, ranks=ranks, microbatch_size=size),
        in_order(len(costs), ranks=ranks, microbatch_size=size),
    ):
        assert sorted(i for hand in hands for part in hand for i in part) == list(range(len(costs)))
        assert all(len(hand) == ranks for hand in hands)
        assert all(part == sorted(part) and len(part) == size for hand in hands for part in hand)


@given(steps())
def test_a_deal_depends_on_the_costs_alone(step: tuple[Costs, int, int]) -> None:
    costs, ranks, size = step
    assert deal(costs, ranks=ranks, microbatch_size=size) == deal(
        costs.copy(), ranks=ranks, microbatch_size=size
    )


@given(steps())
def test_the_heaviest_rank_is_at_most_as_heavy_as_in_order(step: tuple[Costs, int, int]) -> None:
    costs, ranks, size = step

    def heaviest(hands: list[list[list[int]]]) -> int:
        return max(
            sum(int(costs[i, kind]) for hand in hands for i in hand[rank])
            for rank in range(ranks)
            for kind in (0, 1)
        )

    dealt = deal(costs, ranks=ranks, microbatch_size=size)
    assert heaviest(dealt) <= heaviest(in_order(len(costs), ranks=ranks, microbatch_size=size))


def squares(costs: Costs, hands: list[list[list[int]]]) -> int:
    """What a deal brings down: variance among ranks, in microbatches and in the step."""
    total = 0
    for kind in (0, 1):
        work = [[sum(int(costs[i, kind]) for i in part) for part in hand] for hand in hands]
        ranks = len(work[0])
        total += sum(ranks * sum(x * x for x in row) - sum(row) ** 2 for row in work)
        total += ranks * sum(sum(column) ** 2 for column in zip(*work, strict=True))
    return total


@given(steps())
def test_no_single_exchange_makes_a_deal_more_even(step: tuple[Costs, int, int]) -> None:
    costs, ranks, size = step
    hands = deal(costs, ranks=ranks, microbatch_size=size)
    plain = in_order(len(costs), ranks=ranks, microbatch_size=size)
    if ranks == 1 or hands == plain or len(costs) > 24:  # a slow reference
        return
    even = squares(costs, hands)
    slots = [(part, k) for hand in hands for part in hand for k in range(size)]
    for (part, k), (other, m) in itertools.combinations(slots, 2):
        part[k], other[m] = other[m], part[k]
        assert squares(costs, hands) >= even
        part[k], other[m] = other[m], part[k]


@pytest.mark.parametrize(("ranks", "size", "groups"), [(7, 3, 20), (150, 1, 3), (300, 2, 1)])
def test_a_step_of_many_blocks_is_dealt_whole_and_evenly(
    ranks: int, size: int, groups: int
) -> None:
    count = ranks * size * groups
    assert count > BLOCK
    rng = np.random.default_rng(count)
    costs = (rng.lognormal(0, 0.5, (count, 2)) * 1_000_000 / count).astype(np.int64)
    hands = deal(costs, ranks=ranks, microbatch_size=size)
    assert sorted(i for hand in hands for part in hand for i in part) == list(range(count))
    before = straggler(costs, in_order(count, ranks=ranks, microbatch_size=size))
    assert max(straggler(costs, hands)) < max(before)


def mixed(count: int, seed: int) -> Costs:
    rng = np.random.default_rng(seed)
    vision = rng.integers(0, 16, count)  # images of 256 tokens in 4,096
    attention = (rng.lognormal(0, 0.5, count) * 1000).astype(np.int64)
    costs = np.stack([vision, attention], axis=1)
    return np.asarray(costs * 1_000_000 // costs.sum(axis=0))


@pytest.mark.parametrize("count", [64, 128])
def test_ranks_are_more_even_inside_each_microbatch_too(count: int) -> None:
    for seed in range(10):
        costs = mixed(count, seed)
        waits = [
            np.mean([straggler(costs, [hand]) for hand in hands], axis=0)
            for hands in (
                in_order(count, ranks=8, microbatch_size=2),
                deal(costs, ranks=8, microbatch_size=2),
            )
        ]
        assert (waits[1] - 1 < 0.5 * (waits[0] - 1)).all()


@pytest.mark.parametrize("count", [64, 128])
def test_mixed_sequences_are_even_to_within_the_budget(count: int) -> None:
    for seed in range(10):
        costs = mixed(count, seed)
        hands = deal(costs, ranks=8, microbatch_size=2)
        before = straggler(costs, in_order(count, ranks=8, microbatch_size=2))
        after = straggler(costs, hands)
        assert after[0] <= 1.03
        assert after[1] <= 1.08
        assert max(after) <= max(before)


def test_work_is_pixels_and_squared_lengths() -> None:
    def sequence(*lengths: int, images: int) -> Sequence:
        slots = tuple(ImageSlot(FileBlob("/x", 0, 1), i, 1, (3, 2, 2)) for i in range(images))
        pieces = []
        for number, length in enumerate(lengths):
            ids = np.zeros(length, dtype=np.int32)
            record = record_of(SampleRef(0, 0, 0), ids, ids > 0, slots if number == 0 else ())
            pieces.append(Piece(record, 0, length))
        return Sequence(tuple(pieces))

    costs = costs_of([sequence(3, 1, images=1), sequence(4, images=3), sequence(2, images=0)])
    assert costs.tolist() == [
        [250_000, 10_000_000 // 30],
        [750_000, 16_000_000 // 30],
        [0, 4_000_000 // 30],
    ]
