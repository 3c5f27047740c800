"""Deal a step's sequences to ranks so that each has the same work. No rank talks to another.

Every rank sees the whole step's plan and computes the same deal, from integers alone: vision work
(pixels of the images) and attention work (sum of squared segment lengths), each in millionths of
the step's total. The set of sequences of a step, and their number on each rank, never change.

Laws (tests/engine/test_balance.py):
    1. Every sequence is dealt once; every microbatch of every rank has the same number of rows.
    2. The deal is a function of the costs and the topology.
    3. The heaviest rank is at most as heavy as without dealing.

Cost: about 10 ms for 128 sequences. Imports: records. Used by: engine.planner.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from zephon_mm.records import Sequence as PackedSequence

Costs = NDArray[np.int64]
"""(sequences, 2): vision and attention work."""

SCALE = 1_000_000
MAX_SWAPS = 200


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
    shares = _even_parts(costs, np.arange(len(costs)), ranks)
    count = len(costs) // (ranks * microbatch_size)
    by_rank = []
    for share in shares:
        parts = _even_parts(costs, share, count)
        # The heaviest first on every rank, so that heavy microbatches meet heavy ones.
        parts.sort(key=lambda part: (-int(costs[part].sum()), int(part.min())))
        by_rank.append([sorted(part.tolist()) for part in parts])
    return [[by_rank[rank][number] for rank in range(ranks)] for number in range(count)]


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
    ranks = len(hands[0])
    loads = np.array(
        [costs[[i for hand in hands for i in hand[rank]]].sum(axis=0) for rank in range(ranks)]
    )
    means = np.maximum(loads.mean(axis=0), 1e-9)
    vision, attention = loads.max(axis=0) / means
    return float(vision), float(attention)


def _even_parts(costs: Costs, members: NDArray[np.int64], count: int) -> list[NDArray[np.int64]]:
    """Split members into `count` parts of equal size and nearly equal work."""
    if count == 1:
        return [members]
    size = len(members) // count
    order = members[np.argsort(-costs[members].max(axis=1), kind="stable")]
    parts: list[list[int]] = [[] for _ in range(count)]
    loads = np.zeros((count, 2), dtype=np.int64)
    for member in order.tolist():
        open_parts = [part for part in range(count) if len(parts[part]) < size]
        after = loads[open_parts] + costs[member]
        chosen = open_parts[int(np.argmin(after.max(axis=1) * 4 + after.min(axis=1)))]
        parts[chosen].append(member)
        loads[chosen] += costs[member]
    arrays = [np.array(part, dtype=np.int64) for part in parts]
    for _ in range(MAX_SWAPS):
        if not _swap(costs, arrays, loads):
            break
    return arrays


def _swap(costs: Costs, parts: list[NDArray[np.int64]], loads: Costs) -> bool:
    """Exchange two members so that the heaviest part gets lighter; False when none does."""
    heaviest = int(np.argmax(loads.max(axis=1)))
    peak = int(loads[heaviest].max())
    best, found = peak, None
    for other in range(len(parts)):
        if other == heaviest:
            continue
        change = costs[parts[other]][None, :, :] - costs[parts[heaviest]][:, None, :]
        worst = np.maximum(
            (loads[heaviest] + change).max(axis=2), (loads[other] - change).max(axis=2)
        )
        lowest = int(worst.min())
        if lowest < best:
            best, found = lowest, (other, int(np.argmin(worst)))
    if found is None:
        return False
    other, flat = found
    mine, theirs = divmod(flat, len(parts[other]))
    a, b = parts[heaviest][mine], parts[other][theirs]
    loads[heaviest] += costs[b] - costs[a]
    loads[other] += costs[a] - costs[b]
    parts[heaviest][mine], parts[other][theirs] = b, a
    return True
