"""What the thread runner promises beyond the contract."""

import os

import pytest
import torch

from tests.contracts.runner import Make, RunnerContract
from zephon_mm.errors import ConfigError
from zephon_mm.runners import RUNNERS, make_runner
from zephon_mm.runners.threads import ThreadRunner


class TestThreadRunner(RunnerContract):
    @pytest.fixture(scope="class")
    @classmethod
    def make(cls) -> Make:
        return lambda context: ThreadRunner(context, workers=3)


def test_process_wide_thread_counts_are_left_alone() -> None:
    before = torch.get_num_threads()
    with ThreadRunner(None, workers=2) as runner:
        runner.submit(lambda context: None).result()
    assert torch.get_num_threads() == before


def test_a_forked_copy_refuses_to_work() -> None:
    with ThreadRunner(None, workers=1) as runner:
        pid = os.fork()
        if pid == 0:
            try:
                runner.submit(id)
            except RuntimeError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


@pytest.mark.parametrize("name", RUNNERS)
def test_a_runner_is_made_by_its_name(name: str) -> None:
    with make_runner(name, 40, workers=1) as runner:
        assert runner.submit(max, 2).result() == 40


def test_an_unknown_runner_or_no_workers_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="'threads': choose one of inline, thread, process"):
        make_runner("threads", None, workers=1)
    for name in ("thread", "process"):
        with pytest.raises(ConfigError, match="workers"):
            make_runner(name, None, workers=0)
