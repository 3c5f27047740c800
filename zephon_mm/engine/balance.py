"""Deal a step's sequences to ranks so that each has the same work. No rank talks to another.

Every rank sees the whole step's plan and computes the same deal, from integers alone: vision work
(pixels of the images) and attention work (sum of squared segment lengths), each in millionths of
the step's total. The set of sequences of a step, and their number on each rank, never change.

Ranks that shard parameters wait for one another in every microbatch, so two things are made even
at once: each rank's work in the step, and in each microbatch the work of its ranks. Rows sorted by
work are laid out in layers, one row to a rank, and then exchanged in pairs, each time the two that
bring down most the variance among the ranks of the microbatches plus that of the ranks' steps.

Laws (tests/engine/test_balance.py):
    1. Every sequence is dealt once; every microbatch of every rank has the same number of rows.
    2. The deal is a function of the costs and the topology.
    3. The heaviest rank is at most as heavy as without dealing.
    4. In a step of up to `BLOCK` sequences no exchange of two of them would lower that variance.

Seen: max / mean over 8 ranks of 16 sequences each, mixed data, vision and attention. In a step
1.22 and 1.11 in order, 1.009 and 1.001 dealt; in a microbatch of 2 rows a rank 1.63 and 1.33, 1.04
and 1.04 (benchmarks/balance.py).

Cost: about 10 ms for 128 sequences, in proportion for more. Imports: records. Used by:
engine.planner.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from zephon_mm.packed import Sequence as PackedSequence

Costs = NDArray[np.int64]
"""(sequences, 2): vision and attention work."""

Floats = NDArray[np.float64]
Hands = NDArray[np.int64]
"""(microbatches, ranks, B): which sequences."""

SCALE = 1_000_000
BLOCK = 128  # rows that are looked at together: all of a small step
MAX_RANKS = 256  # with more, work is counted in coarser units, so that sums stay exact


def costs_of(sequences: Sequence[PackedSequence]) -> Costs:
    """Return the work of each sequence, (n, 2) int64, in millionths of their total."""
    work = np.array(
        [
            (
                sum(math.prod(image.shape) for piece in s.pieces for image in piece.images()),
                sum(piece.num_tokens**2 for piece in s.pieces),
            )
            for s in sequences
        ],
        dtype=np.int64,
    ).reshape(-1, 2)
    shares: Costs = work * SCALE // np.maximum(work.sum(axis=0), 1)
    return shares


def deal(costs: Costs, *, ranks: int, microbatch_size: int) -> list[list[list[int]]]:
    """Return which sequences each rank takes in each microbatch.

    Args:
        costs: (n, 2), where `ranks * microbatch_size` divides n.
        ranks: dp_degree.
        microbatch_size: B.

    Returns:
        [microbatch][rank] -> B positions, ascending.
    """
    plain = in_order(len(costs), ranks=ranks, microbatch_size=microbatch_size)
    count = len(plain)
    if ranks == 1 or not count:
        return plain
    rows = _in_layers(costs, ranks, count)
    _exchange(costs, rows)
    hands: list[list[list[int]]] = np.sort(rows).tolist()
    better = _rank_loads(costs, hands).max() <= _rank_loads(costs, plain).max()
    return hands if better else plain


def in_order(count: int, *, ranks: int, microbatch_size: int) -> list[list[list[int]]]:
    """Return the deal without balancing: the global order, cut."""
    return [
        [
            list(range(first + rank * microbatch_size, first + (rank + 1) * microbatch_size))
            for rank in range(ranks)
        ]
        for first in range(0, count, ranks * microbatch_size)
    ]


def straggler(costs: Costs, hands: Sequence[Sequence[Sequence[int]]]) -> tuple[float, float]:
    """Return max / mean over ranks of vision and of attention work, for a whole deal."""
    loads = _rank_loads(costs, hands)
    means = np.maximum(loads.mean(axis=0), 1e-9)
    vision, attention = loads.max(axis=0) / means
    return float(vision), float(attention)


def _rank_loads(costs: Costs, hands: Sequence[Sequence[Sequence[int]]]) -> Costs:
    """Return each rank's work in a whole deal, (ranks, 2)."""
    loads: Costs = costs[np.array(hands)].sum(axis=(0, 2))
    return loads


def _in_layers(costs: Costs, ranks: int, count: int) -> Hands:
    """Lay rows out by falling work, one to a rank, forth and back, the layers likewise."""
    rows = np.argsort(-costs.sum(axis=1), kind="stable").reshape(-1, count, ranks)
    rows[1::2] = rows[1::2, ::-1, ::-1]
    return np.ascontiguousarray(rows.transpose(1, 2, 0))


def _exchange(costs: Costs, hands: Hands) -> None:
    """Exchange rows in place until, among those that are looked at together, no pair gains.

    With X the work of a rank in a microbatch, T that of a microbatch and S that of a rank, the sum
    of squares that is brought down is R * sum(X^2) - sum(T^2) + R * sum(S^2), R ranks. Exchanging
    rows i and j, which differ by d = c_j - c_i, changes half of it by d * (P_i - P_j) + stiff *
    d^2, where P = R * X - T + R * S at the place of each, and `stiff` depends on the places alone.

    All are whole numbers below 2**53 in float64: exact in any order of summing, on every CPU.
    """
    _, ranks, size = hands.shape
    rows = hands.reshape(-1)
    cells = np.arange(len(rows)) // size
    work = (costs // (1 + ranks // MAX_RANKS)).astype(np.float64)[rows]
    loads = work.reshape(*hands.shape, 2).sum(axis=2)
    for block in _blocks(len(rows)):
        micro, rank = np.divmod(cells[block], ranks)
        stiff = 2.0 * ranks - (micro[:, None] != micro) - ranks * (rank[:, None] == rank)
        for _ in range(2 * len(block)):
            slopes = ranks * (loads + loads.sum(axis=0)) - loads.sum(axis=1, keepdims=True)
            gains = _gains(work[block], slopes[micro, rank], stiff)
            i, j = divmod(int(np.argmin(gains)), len(block))
            if gains[i, j] >= 0:
                break
            pair, turned = block[[i, j]], block[[j, i]]
            change = work[turned] - work[pair]
            loads[micro[i], rank[i]] += change[0]
            loads[micro[j], rank[j]] += change[1]
            rows[pair], work[pair] = rows[turned], work[turned]


def _blocks(count: int) -> list[NDArray[np.int64]]:
    """Split places into neighbours, of like microbatches, then into places far apart."""
    places = np.arange(count)
    number = -(-count // BLOCK)
    if number == 1:
        return [places]
    return [*np.array_split(places, number), *(places[i::number] for i in range(number))]


def _gains(work: Floats, slopes: Floats, stiff: Floats) -> Floats:
    """Return half of what exchanging each row with each other adds to the sum, (n, n).

    Products of thin matrices, since each pass over all pairs costs as much as one of these.
    """
    own = -(work * slopes).sum(axis=1)
    squares = (work**2).sum(axis=1)
    one = np.ones_like(own)
    linear = np.column_stack((work, slopes, own, one)) @ np.stack((*slopes.T, *work.T, one, own))
    apart = np.column_stack((-2 * work, squares, one)) @ np.stack((*work.T, one, squares))
    gains: Floats = linear + stiff * apart
    return gains
