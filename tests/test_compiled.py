"""What topologies cost, against counting."""

from hypothesis import given
from hypothesis import strategies as st

from zephon_mm.compiled import measure_factor
from zephon_mm.engine.order import Topology

SIZES = st.integers(1, 12)


@given(st.sampled_from([1, 2, 3, 8, 12, 64]), SIZES, SIZES)
def test_how_often_a_sample_is_measured_is_how_many_ranks_meet_its_lane(
    lanes: int, dp: int, size: int
) -> None:
    met = 0
    for rank in range(dp):
        topology = Topology(dp, rank, size, dp * size)
        groups = range(0, lanes * topology.group_size, topology.group_size)
        met += len({number % lanes for at in groups for number in topology.numbers(at)})
    factor = measure_factor(lanes, Topology(dp, 0, size, dp * size))
    assert met / lanes <= factor <= dp
    if lanes % (dp * size) == 0:
        assert factor == met / lanes == 1
