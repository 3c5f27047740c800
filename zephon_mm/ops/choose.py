"""Which of the documents at hand go into a sequence, where longest first is not good enough.

Laws (tests/ops/test_pack_choose.py):
    1. What is chosen is within all limits.
    2. `evenly` leaves nothing out that would still fit.
    3. `fullest`, of documents without patches: no set has more tokens within the limit.

Cost: `evenly` 20 us for each document that it chooses among 1,000. `fullest` 10 to 20 us for each
that it looks at, in proportion to the tokens of a sequence, here 4,096; it ends early where a set
fills all. Floats are computed element by element, and are the same on every CPU.

Imports: nothing from the package. Used by: ops.pack.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def evenly(
    needs: NDArray[np.int64], left: Sequence[int], weights: tuple[float, float]
) -> list[int]:
    """Choose, again and again, what leaves least: the weighted squares of what is left, added.

    So what is scarce is used first, and neither capacity runs out long before the other.

    Args:
        needs: (3, n): tokens, images and patches of each document; written to.
        left: Of each, how many there is room for.
        weights: Of the square of a token, and of a patch.

    Returns:
        Positions, in the order in which they were chosen.
    """
    free = np.array(left, dtype=np.int64)
    taken: list[int] = []
    while True:
        after = free[:, None] - needs
        fits = (after >= 0).all(axis=0)
        if not fits.any():
            return taken
        tokens, patches = weights[0] * after[0] * after[0], weights[1] * after[2] * after[2]
        taken.append(int(np.where(fits, tokens + patches, np.inf).argmin()))
        free = after[:, taken[-1]]
        needs[0, taken[-1]] = 1 << 62  # not again


def fullest(
    sizes: Sequence[int],
    loads: Sequence[int],
    limits: tuple[int, int],
    weights: tuple[float, float],
) -> list[int]:
    """Choose the set that fills best, by dynamic programming.

    For each number of tokens the set with the most patches is kept. Where documents have patches
    that is a heuristic, as one with fewer may leave room for more.

    Args:
        sizes: Tokens of each document, at least 1.
        loads: Patches of each; those of earlier documents are preferred.
        limits: Tokens and patches of all together, at most.
        weights: What a token and a patch are worth.

    Returns:
        Positions, ascending.
    """
    free, most = limits
    goal = most if any(loads) else 0
    best = np.full(free + 1, -1, dtype=np.int64)  # by tokens: the most patches; -1: there is no set
    best[0] = 0
    chosen = []  # of each document, by tokens: whether the best set has it
    for size, load in zip(sizes, loads, strict=True):
        if best[free] >= goal:
            break
        base = best[: max(free + 1 - size, 0)]
        found = np.where((base >= 0) & (base + load <= most), base + load, -1)
        chosen.append(found > best[size:])
        np.maximum(found, best[size:], out=best[size:])
    worth = weights[0] * np.arange(free + 1) + weights[1] * best
    at = int(np.where(best >= 0, worth, -1.0).argmax())
    taken = []
    for number in reversed(range(len(chosen))):
        if at >= sizes[number] and chosen[number][at - sizes[number]]:
            taken.append(number)
            at -= sizes[number]
    return taken[::-1]
