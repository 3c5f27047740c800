"""The queue in front of a runner: due first, limits, crashes isolated; driven by hand."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon_mm.engine.schedule import TaskQueue
from zephon_mm.errors import RunnerError, WorkerCrashed, WorkerLost
from zephon_mm.records import SampleRef, Skip


def double(context: Any, items: list[int]) -> list[int]:
    return [2 * item for item in items]


def negate(context: Any, items: list[int]) -> list[int]:
    return [-item for item in items]


def poison(context: Any, item: int, cause: str) -> Skip:
    return Skip(SampleRef(0, 0, item), "crashed_worker", f"{item}: {cause}", True)


class HandRunner:
    """Implements `protocols.Runner`; its tasks run when the test says so.

    A task with an item in `deadly` ends its worker with `error`, as often as the count says.
    """

    def __init__(
        self,
        workers: int = 1,
        deadly: Mapping[int, int] | None = None,
        error: type[RunnerError] = WorkerCrashed,
    ) -> None:
        self.workers = workers
        self.broken = False
        self.inside: list[tuple[Callable[..., Any], tuple[Any, ...], Future[Any]]] = []
        self.started: list[list[int]] = []
        self._deadly = dict(deadly or {})
        self._error = error

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        if self.broken:
            raise RunnerError("no worker can live here")
        future: Future[Any] = Future()
        self.inside.append((fn, args, future))
        self.started.append(args[0])
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        pass

    def stats(self) -> Mapping[str, int]:
        return {}

    def run(self, position: int = 0) -> None:
        fn, args, future = self.inside.pop(position)
        killers = [] if fn is poison else [n for n in args[0] if self._deadly.get(n, 0)]
        for item in killers:
            self._deadly[item] -= 1
        if killers:
            future.set_exception(self._error("signal 11"))
        else:
            future.set_result(fn(None, *args))

    def run_all(self) -> None:
        while self.inside:
            self.run()


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=3, max_size=12),
    st.integers(1, 2),
)
def test_what_waits_starts_by_priority_then_by_age(
    priorities: list[tuple[int, int]], workers: int
) -> None:
    runner = HandRunner(workers)
    queue = TaskQueue(runner)
    for number, priority in enumerate(priorities):
        queue.submit(priority, double, [number], poison)
    at_once = queue.slots
    waiting = sorted((p, n) for n, p in enumerate(priorities) if n >= at_once)
    runner.run_all()
    expected = [[n] for n in range(min(at_once, len(priorities)))] + [[n] for _, n in waiting]
    assert runner.started == expected


@given(st.integers(1, 4), st.integers(1, 20), st.data())
def test_no_more_than_the_slots_are_in_the_runner_and_results_find_their_task(
    workers: int, count: int, data: st.DataObject
) -> None:
    runner = HandRunner(workers)
    queue = TaskQueue(runner)
    futures = [queue.submit((0,), double, [n, -n], poison) for n in range(count)]
    while runner.inside:
        waiting = queue.depth - len(runner.inside)
        assert len(runner.inside) <= queue.slots
        assert not waiting or len(runner.inside) > queue.slots // 2
        runner.run(data.draw(st.integers(0, len(runner.inside) - 1)))
    assert [future.result(0) for future in futures] == [[2 * n, -2 * n] for n in range(count)]
    assert queue.depth == 0


def test_a_limit_holds_back_its_function_only() -> None:
    runner = HandRunner(2)
    queue = TaskQueue(runner)
    queue.limit(double, 1)
    for number in range(3):
        queue.submit((0,), double, [number], poison)
    for number in range(3, 6):
        queue.submit((1,), negate, [number], poison)
    assert runner.started == [[0], [3], [4], [5]]
    runner.run(1)
    assert runner.started[4:] == []  # room, but the limited ones wait
    runner.run(0)
    assert runner.started[4:] == [[1]]
    runner.run_all()
    assert runner.started[5:] == [[2]]


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True),
    st.dictionaries(st.integers(0, 9), st.integers(1, 4)),
)
def test_an_item_that_crashes_alone_twice_is_poisoned_and_no_other(
    items: list[int], deadly: dict[int, int]
) -> None:
    runner = HandRunner(1, deadly)
    queue = TaskQueue(runner)
    future = queue.submit((0,), double, items, poison)
    runner.run_all()
    # With others, an item's first crash is the shared one; then it has two tries alone.
    tries = 2 if len(items) == 1 else 3
    expected = [
        poison(None, item, "signal 11") if deadly.get(item, 0) >= tries else 2 * item
        for item in items
    ]
    assert future.result(0) == expected
    assert queue.depth == 0


@pytest.mark.parametrize("items", [[5], [4, 5, 6]])
def test_an_item_whose_workers_are_lost_alone_too_is_named(items: list[int]) -> None:
    runner = HandRunner(1, {5: 9}, WorkerLost)
    queue = TaskQueue(runner)
    lost = queue.submit((0,), double, items, poison)
    runner.run_all()
    with pytest.raises(WorkerLost, match=r"^5: signal 11$"):
        lost.result(0)
    assert queue.depth == 0
    later = queue.submit((0,), double, [2], poison)
    runner.run_all()
    assert later.result(0) == [4]


def test_a_task_that_is_lost_only_in_company_is_saved() -> None:
    runner = HandRunner(1, {5: 1}, WorkerLost)
    queue = TaskQueue(runner)
    slow = queue.submit((0,), double, [4, 5, 6], poison)
    runner.run_all()
    assert slow.result(0) == [8, 10, 12]


def test_a_runner_that_fails_for_good_fails_every_task_and_leaves_none_waiting() -> None:
    runner = HandRunner(1)
    queue = TaskQueue(runner)
    futures = [queue.submit((0,), double, [n], poison) for n in range(queue.slots + 20)]
    runner.broken = True
    while runner.inside:
        runner.inside.pop(0)[2].set_exception(RunnerError("no worker can live here"))
    assert all(isinstance(future.exception(0), RunnerError) for future in futures)
    late = queue.submit((0,), double, [9], poison)
    assert isinstance(late.exception(0), RunnerError)


def test_a_part_that_fails_otherwise_fails_the_whole() -> None:
    runner = HandRunner(1, {1: 1})
    queue = TaskQueue(runner)
    whole = queue.submit((0,), double, [1, 2], poison)
    runner.run()
    runner.inside.pop(0)[2].set_exception(OSError("gone"))
    runner.run_all()
    with pytest.raises(OSError, match="gone"):
        whole.result(0)


def test_closing_cancels_what_waits_and_what_comes_later() -> None:
    runner = HandRunner(1)
    queue = TaskQueue(runner)
    inside = queue.slots
    futures = [queue.submit((0,), double, [n], poison) for n in range(inside + 2)]
    queue.close()
    late = queue.submit((0,), double, [9], poison)
    assert [future.cancelled() for future in futures] == [False] * inside + [True] * 2
    assert late.cancelled()
    runner.run_all()
    assert [future.result(0) for future in futures[:inside]] == [[2 * n] for n in range(inside)]
    assert runner.started == [[n] for n in range(inside)]
