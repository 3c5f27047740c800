"""Counters add up whoever adds; skips are counted, the latest are named."""

import logging
import threading

import pytest

from zephon_mm.metrics import KEPT_DEFECTS, Metrics, skips


def test_threads_lose_no_count() -> None:
    metrics = Metrics()

    def add() -> None:
        for _ in range(1000):
            metrics.add("a")
            metrics.add("b", 0.5)

    workers = [threading.Thread(target=add) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert metrics.snapshot() == {"a": 4000, "b": 2000.0}


def test_a_snapshot_is_a_copy_sorted_by_name() -> None:
    metrics = Metrics()
    metrics.add("z")
    metrics.add("a")
    snapshot = metrics.snapshot()
    metrics.add("a")
    assert list(snapshot.items()) == [("a", 1), ("z", 1)]


def test_skips_are_counted_by_reason_and_the_latest_are_kept() -> None:
    metrics = Metrics()
    metrics.add("batches")
    for number in range(KEPT_DEFECTS + 5):
        metrics.skip("no_image", f"a/0/{number}")
    metrics.skip("too.long", "a/0/7")
    assert skips(metrics.snapshot()) == {"no_image": KEPT_DEFECTS + 5, "too.long": 1}
    defects = metrics.defects()
    assert len(defects) == KEPT_DEFECTS
    assert defects[0] == "a/0/6 [no_image]"
    assert defects[-1] == "a/0/7 [too.long]"
    assert metrics.skipped().endswith("'too.long': 1}; the latest: a/0/7 [too.long]")
    assert Metrics().skipped() == "Skipped: {}"


def test_the_first_of_each_reason_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    with caplog.at_level(logging.WARNING, "zephon_mm"):
        for number in range(3):
            metrics.skip("no_image", f"a/0/{number}")
        metrics.skip("no_text", "b/0/0")
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == 2
    assert "a/0/0" in logged[0]
    assert "b/0/0" in logged[1]


def test_a_wait_is_counted_while_it_lasts() -> None:
    metrics = Metrics()
    with metrics.timed("wait_s"):
        first = metrics.snapshot()["wait_s"]
        second = metrics.snapshot()["wait_s"]
    done = metrics.snapshot()["wait_s"]
    assert 0 < first < second < done == metrics.snapshot()["wait_s"]
