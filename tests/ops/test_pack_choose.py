"""Choosing documents for a sequence, against every set there is."""

from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zephon_mm.ops.choose import evenly, fullest

documents = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9)), max_size=9)


def total(found: list[int], values: list[int]) -> int:
    assert len(set(found)) == len(found)
    return sum(values[at] for at in found)


@given(found=documents, free=st.integers(0, 100))
def test_without_patches_no_set_is_fuller(found: list[tuple[int, int]], free: int) -> None:
    sizes = [size for size, _ in found]
    chosen = fullest(sizes, [0] * len(sizes), (free, 5), (1.0, 0.0))
    sums = [sum(some) for count in range(10) for some in combinations(sizes, count)]
    assert total(chosen, sizes) == max(one for one in sums if one <= free)
    assert chosen == sorted(chosen)


@given(
    found=documents,
    free=st.integers(0, 100),
    most=st.integers(0, 30),
    weights=st.tuples(st.floats(0.1, 3), st.floats(0, 3)),
)
def test_the_fullest_set_is_within_both_limits_and_worth_each_document_alone(
    found: list[tuple[int, int]], free: int, most: int, weights: tuple[float, float]
) -> None:
    sizes, loads = [size for size, _ in found], [load for _, load in found]
    chosen = fullest(sizes, loads, (free, most), weights)
    used = total(chosen, sizes), total(chosen, loads)
    assert used[0] <= free
    assert used[1] <= most
    worth = weights[0] * used[0] + weights[1] * used[1]
    for size, load in found:
        if size <= free and load <= most:
            assert worth >= weights[0] * size + weights[1] * load - 1e-9


@given(
    needs=st.lists(
        st.tuples(st.integers(1, 40), st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=12
    ),
    left=st.tuples(st.integers(0, 99), st.integers(0, 6), st.integers(0, 30)),
)
def test_evenly_stays_within_all_limits_and_leaves_out_nothing_that_fits(
    needs: list[tuple[int, int, int]], left: tuple[int, int, int]
) -> None:
    chosen = evenly(np.array(needs, dtype=np.int64).T.copy(), left, (1.0, 2.0))
    rest = np.array(left) - sum((np.array(needs[at]) for at in chosen), np.zeros(3, np.int64))
    assert len(set(chosen)) == len(chosen)
    assert (rest >= 0).all()
    for at in set(range(len(needs))) - set(chosen):
        assert (rest < np.array(needs[at])).any()


def test_evenly_uses_what_is_scarce_and_keeps_the_balance() -> None:
    # Texts of 40 tokens, pictures of 10 tokens and 50 patches; two of each fill both.
    needs = np.array([(40, 0, 0), (40, 0, 0), (10, 1, 50), (10, 1, 50), (10, 1, 50)]).T.copy()
    assert sorted(evenly(needs, (100, 9, 100), (1.0, 1.0))) == [0, 1, 2, 3]
