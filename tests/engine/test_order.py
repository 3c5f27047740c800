"""The global order is cut, never changed: any topology covers the same numbers once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon_mm.engine.order import (
    Round,
    Topology,
    check_resume,
    check_topology,
    delivered_of_lane,
)
from zephon_mm.errors import ConfigError

SMALL = st.integers(1, 7)


@given(SMALL, SMALL, SMALL, st.integers(0, 50))
def test_ranks_together_cover_each_step_once(dp: int, size: int, steps: int, start: int) -> None:
    total = dp * size * steps
    numbers = []
    for rank in range(dp):
        topology = Topology(dp, rank, size, total)
        check_topology(topology)
        for group in range(steps):
            numbers += topology.numbers(start + group * topology.group_size)
    assert sorted(numbers) == list(range(start, start + total))


@given(st.integers(1, 9), st.integers(0, 100))
def test_a_lanes_delivered_count_is_what_counting_gives(lanes: int, delivered: int) -> None:
    for lane in range(lanes):
        counted = sum(1 for s in range(delivered) if s % lanes == lane)
        assert delivered_of_lane(delivered, lane, lanes) == counted


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_a_lane_that_ended_drops_out_of_later_rounds(lengths: list[int]) -> None:
    left, order, turn = list(lengths), [], Round(len(lengths))
    for lane in turn.turns():
        if left[lane]:
            left[lane] -= 1
            order.append((lengths[lane] - left[lane] - 1, lane))
        else:
            turn.end(lane)
    assert order == sorted((k, lane) for lane, n in enumerate(lengths) for k in range(n))


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        (Topology(3, 0, 2, 8), r"3 \* 2 must divide .* 8.*dp_degree may be 1, 2, 4; .*none at all"),
        (Topology(2, 2, 1, 2), r"dp_rank must be in \[0, dp_degree = 2\), got 2"),
        (Topology(0, 0, 1, 2), r"dp_degree must be at least 1"),
    ],
)
def test_an_impossible_topology_names_values_that_work(topology: Topology, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_topology(topology)


def test_a_state_inside_a_step_may_only_be_cut_evenly() -> None:
    check_resume(6, Topology(2, 0, 1, 8))
    with pytest.raises(ConfigError, match=r"2 of its 8 .*= 4 does not divide.*dp_degree may be 1,"):
        check_resume(6, Topology(4, 0, 1, 8))
