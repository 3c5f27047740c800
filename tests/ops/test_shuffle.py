"""The shuffle buffer's laws."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contracts.accumulator import check_accumulator, drain
from zephon_mm.errors import ConfigError
from zephon_mm.ops.shuffle import ShuffleBuffer
from zephon_mm.rng import Stream


def buffer(size: int, *key: int) -> ShuffleBuffer[int]:
    return ShuffleBuffer(size, Stream("shuffle", *key))


@given(size=st.integers(1, 70), count=st.integers(0, 300), key=st.integers(0, 99))
def test_the_output_is_a_permutation_and_a_function_of_the_key(
    size: int, count: int, key: int
) -> None:
    out = drain(buffer(size, key), range(count))
    assert sorted(out) == list(range(count))
    assert drain(buffer(size, key), range(count)) == out


def test_it_keeps_the_contract_of_accumulators() -> None:
    check_accumulator(lambda: buffer(8, 1), range(100))


def test_other_keys_give_other_orders() -> None:
    assert drain(buffer(64, 1), range(200)) != drain(buffer(64, 2), range(200))


def test_a_buffer_of_one_keeps_the_order() -> None:
    assert drain(buffer(1, 0), range(50)) == list(range(50))


# PRF-04.
@given(size=st.integers(2, 100))
def test_it_emits_one_for_every_two_until_it_is_full(size: int) -> None:
    shuffle = buffer(size, 0)
    counts = [len(shuffle.push(i)) for i in range(3 * size)]
    held = [i + 1 - sum(counts[: i + 1]) for i in range(len(counts))]
    assert counts[:2] == ([0, 1])
    assert max(held) == held[-1] == size - 1
    assert all(count == 1 for count in counts[2 * size :])


def test_no_item_leaves_before_it_came_and_distances_reach_the_buffer_size() -> None:
    out = drain(buffer(100, 3), range(1000))
    reach = [item - at for at, item in enumerate(out)]
    assert max(reach) <= 100
    assert max(reach) > 90
    assert min(reach) < -100  # a random replacement buffer also delays


def test_a_buffer_without_room_is_an_error() -> None:
    with pytest.raises(ConfigError, match="buffer_size=0"):
        buffer(0)
