"""The global order of sequences, and which of them a rank delivers. Plain arithmetic.

The s-th sequence is the next one of lane `s mod L`. Step t is the sequences `[tN, (t+1)N)`. From a
delivered count S on, the j-th group of `dp*B` sequences is cut into dp microbatches of B, rank by
rank; so any topology is only another way to cut the same line.

In a finite run a lane that is exhausted drops out of later rounds, and the order follows from which
lanes have ended (`Round`).

Imports: errors. Used by: engine.planner, checkpoint reading in pipeline.
"""

from collections.abc import Iterator
from typing import NamedTuple

from zephon_mm.errors import ConfigError


class Topology(NamedTuple):
    """Who materializes what.

    `microbatch_size` B is in sequences; `global_batch_size` N is in sequences a step, over all
    ranks, and a multiple of `dp_degree * microbatch_size`.
    """

    dp_degree: int
    dp_rank: int
    microbatch_size: int
    global_batch_size: int

    @property
    def group_size(self) -> int:
        """Sequences that all ranks together deliver at once: dp * B."""
        return self.dp_degree * self.microbatch_size

    def numbers(self, delivered: int) -> range:
        """Return the global numbers of this rank's next batch after `delivered` sequences."""
        first = delivered + self.dp_rank * self.microbatch_size
        return range(first, first + self.microbatch_size)


def check_topology(topology: Topology) -> None:
    """Raise a ConfigError, naming values that would work, if the topology is impossible."""
    dp, rank, size, total = topology
    for name, value in (("dp_degree", dp), ("microbatch_size", size), ("global_batch_size", total)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    if not 0 <= rank < dp:
        raise ConfigError(f"dp_rank must be in [0, dp_degree = {dp}), got {rank}")
    if total % (dp * size):
        degrees = [d for d in range(1, total // size + 1) if total % (d * size) == 0]
        sizes = [b for b in range(1, total // dp + 1) if total % (b * dp) == 0]
        raise ConfigError(
            f"dp_degree * microbatch_size = {dp} * {size} must divide global_batch_size = {total}. "
            f"With microbatch_size={size}, dp_degree may be {_some(degrees)}; with dp_degree={dp}, "
            f"microbatch_size may be {_some(sizes)}."
        )


def check_resume(delivered: int, topology: Topology) -> None:
    """Raise a ConfigError unless `dp * B` divides what is left of the step at `delivered`."""
    left = topology.global_batch_size - delivered % topology.global_batch_size
    if left % topology.group_size:
        works = [d for d in range(1, left + 1) if left % (d * topology.microbatch_size) == 0]
        raise ConfigError(
            f"the state was taken inside a step: {left} of its {topology.global_batch_size} "
            f"sequences are left, which dp_degree * microbatch_size = {topology.group_size} does "
            f"not divide. With microbatch_size={topology.microbatch_size}, dp_degree may be "
            f"{_some(works)}."
        )


def delivered_of_lane(delivered: int, lane: int, num_lanes: int) -> int:
    """Return how many of the first `delivered` sequences are of a lane; no lane has ended."""
    return (delivered - lane + num_lanes - 1) // num_lanes


class Round:
    """Whose turn it is in a finite run: lanes in rotation, without those that have ended."""

    def __init__(self, num_lanes: int, *, next_lane: int = 0) -> None:
        self.num_lanes = num_lanes
        self.next_lane = next_lane
        self._ended: set[int] = set()

    def turns(self) -> Iterator[int]:
        """Yield the lanes to ask, until each has ended; after `end(lane)` it is not asked again."""
        while len(self._ended) < self.num_lanes:
            lane = self.next_lane
            self.next_lane = (lane + 1) % self.num_lanes
            if lane not in self._ended:
                yield lane

    def end(self, lane: int) -> None:
        """Take a lane out of later rounds."""
        self._ended.add(lane)


def _some(values: list[int]) -> str:
    shown = ", ".join(map(str, values[:12]))
    return (shown + (", ..." if len(values) > 12 else "")) or "none at all"
