"""Counters become rates, shares and the name of what limits."""

import pytest

from zephon_mm.report import summary


def told(elapsed_s: float = 10.0, **counters: float) -> dict[str, object]:
    return summary(counters, elapsed_s=elapsed_s, max_length=100, defects=["a/0/1 [x]"])


def test_a_run_that_has_not_begun_has_zeros_not_errors() -> None:
    found = summary({}, elapsed_s=0.0, max_length=0, defects=[])
    for name in ("batches", "sequences", "documents", "images", "tokens"):
        assert found[name] == found[f"{name}_per_s"] == 0
    assert found["padding"] == 0.0
    assert found["skipped"] == {}


def test_rates_and_shares() -> None:
    counters = {"batches": 5, "sequences": 20, "tokens": 1500, "skipped.x": 3, "skipped.y z": 1}
    found = summary(counters, elapsed_s=10.0, max_length=100, defects=["a/0/1 [x]"])
    assert found["batches_per_s"] == 0.5
    assert found["padding"] == pytest.approx(0.25)
    assert found["skipped"] == {"x": 3, "y z": 1}
    assert found["defects"] == ["a/0/1 [x]"]
    assert not [name for name in found if name.startswith("skipped.")]


@pytest.mark.parametrize(
    ("counters", "limit"),
    [
        ({"wait_s": 0.1, "driver_wait_measure_s": 9.0}, "training loop"),
        ({"wait_s": 5.0, "driver_wait_measure_s": 9.0, "driver_wait_consumer_s": 1.0}, "measuring"),
        ({"wait_s": 5.0, "driver_wait_measure_s": 1.0, "driver_wait_consumer_s": 9.0}, "decoding"),
        ({"wait_s": 5.0, "driver_wait_memory_s": 4.0}, "memory"),
    ],
)
def test_the_limit_is_what_the_others_wait_for(counters: dict[str, float], limit: str) -> None:
    assert told(**counters)["limit"] == limit
