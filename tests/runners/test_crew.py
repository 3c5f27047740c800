"""The verdict on a task whose worker died, case by case."""

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon_mm.errors import WorkerCrashed, WorkerLost
from zephon_mm.runners.crew import Task, cause_of_death, judge

NATIVE = [signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL]
OUTSIDE = [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP]


def decode(context: None, name: str) -> None: ...


def task() -> Task:
    return Task(decode, ("cat.jpg",), b"")


@pytest.mark.parametrize("code", [*(-number for number in NATIVE), 0, 1, 3])
def test_a_death_by_itself_ends_the_task_at_once_and_names_it(code: int) -> None:
    error = judge(task(), code, overdue=False, max_attempts=4)
    assert isinstance(error, WorkerCrashed)
    assert "decode('cat.jpg')" in str(error)
    assert cause_of_death(code) in str(error)


@given(signals=st.lists(st.sampled_from(OUTSIDE), min_size=1, max_size=8), most=st.integers(1, 6))
def test_a_death_from_outside_is_retried_until_the_attempts_are_used(
    signals: list[int], most: int
) -> None:
    victim = task()
    verdicts = [judge(victim, -number, overdue=False, max_attempts=most) for number in signals]
    assert [error is None for error in verdicts] == [n + 1 < most for n in range(len(signals))]
    assert all(error is None or type(error) is WorkerLost for error in verdicts)


@given(code=st.integers(-64, 255))
def test_an_overdue_task_is_never_blamed_for_a_crash(code: int) -> None:
    assert judge(task(), code, overdue=True, max_attempts=2) is None
    error = judge(task(), code, overdue=True, max_attempts=1)
    assert isinstance(error, WorkerLost)
    assert "task_timeout_s" in str(error)


def test_a_task_is_named_in_bounded_space_whatever_its_arguments_are() -> None:
    class Hostile:
        def __repr__(self) -> str:
            raise ValueError("no")

    text = str(Task(decode, (Hostile(), "x" * 10_000, list(range(10_000)), *range(1000)), b""))
    assert text.startswith("decode(<Hostile instance")
    assert len(text) < 250
