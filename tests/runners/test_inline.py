"""The inline runner is the reference: it runs a task where it is submitted."""

import pytest

from tests.contracts.runner import Make, RunnerContract
from zephon_mm.runners.inline import InlineRunner


class TestInlineRunner(RunnerContract):
    @pytest.fixture(scope="class")
    @classmethod
    def make(cls) -> Make:
        return InlineRunner


def test_a_future_is_done_when_submit_returns() -> None:
    assert InlineRunner(2).submit(pow, 5).done()


def test_an_interrupt_is_the_callers() -> None:
    def interrupted(context: None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        InlineRunner(None).submit(interrupted)
