"""The contract of work sources finds the faults that people make."""

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.contracts.work_source import check_in_another_process, check_work_source
from zephon_mm.io import Dataset
from zephon_mm.records import Chunk, State

ROWS = 31


class Honest:
    """Rows in their order, again and again: lane l of L has every L-th of them."""

    finite = False

    def __init__(self) -> None:
        rows = [{"text": str(number)} for number in range(ROWS)]
        self.datasets = [Dataset.from_rows("texts", rows)]

    def start(self, lane: int, num_lanes: int) -> Any:
        return (lane, num_lanes)

    def next(self, state: Any, chunk_size: int) -> tuple[Chunk | None, Any]:
        position, num_lanes = state[:2]
        refs = np.zeros((chunk_size, 3), dtype=np.int64)
        refs[:, 2] = (position + num_lanes * np.arange(chunk_size)) % ROWS
        return Chunk(refs), (position + num_lanes * chunk_size, num_lanes)

    def fingerprint(self) -> dict[str, Any]:
        return {"rows": self.datasets[0].digest()}


class Faulty(Honest):
    """What `fault` makes of a chunk's refs: of (source, refs, the state before)."""

    def __init__(self, fault: Callable[[Any, Any, State], Any]) -> None:
        super().__init__()
        self.fault = fault
        self.asked = 0
        self.buffer = np.zeros((100, 3), dtype=np.int64)
        self.known: dict[State, int] = {}

    def next(self, state: Any, chunk_size: int) -> tuple[Chunk | None, Any]:
        chunk, after = super().next(state, chunk_size)
        assert chunk is not None
        return Chunk(self.fault(self, chunk.refs, state)), after


def by_call(source: Any, refs: Any, state: State) -> Any:
    source.asked += 1
    return np.roll(refs, source.asked, axis=0)


def by_first_call(source: Any, refs: Any, state: State) -> Any:
    source.known.setdefault(state, len(source.known))  # lanes share what a state was given
    return np.roll(refs, source.known[state], axis=0)


def by_reader(source: Any, refs: Any, state: State) -> Any:
    reader = source.datasets[0].reader
    reader.seen = getattr(reader, "seen", 0) + 1
    return np.roll(refs, reader.seen, axis=0)


def in_one_buffer(source: Any, refs: Any, state: State) -> Any:
    source.buffer[: len(refs)] = refs
    return source.buffer[: len(refs)]


def test_an_honest_source_keeps_it() -> None:
    check_work_source(Honest())


CHUNKS: dict[str, Callable[[Any, Any, State], Any]] = {
    "by call": by_call,
    "by first call": by_first_call,
    "by reader": by_reader,
    "in one buffer": in_one_buffer,
    "by time": lambda _, refs, state: np.roll(refs, time.time_ns() % 7919 % len(refs), axis=0),
    "too long": lambda _, refs, state: np.concatenate((refs, refs[:1])),
    "empty": lambda _, refs, state: refs[:0],
    "of its own size": lambda _, refs, state: np.resize(refs, (10, 3)),
    "beyond the shard": lambda _, refs, state: np.add(refs, [0, 0, ROWS]),
    "beyond it later": lambda _, refs, state: np.add(refs, [0, 0, ROWS * (int(state[0]) > 500)]),
    "negative dataset": lambda _, refs, state: np.subtract(refs, [1, 0, 0]),
    "negative shard": lambda _, refs, state: np.subtract(refs, [0, 1, 0]),
    "int32": lambda _, refs, state: refs.astype(np.int32),
}


@pytest.mark.parametrize("fault", CHUNKS)
def test_chunks_that_break_it_are_found(fault: str) -> None:
    with pytest.raises(AssertionError):
        check_work_source(Faulty(CHUNKS[fault]))


STATES: dict[str, Callable[[int, int], Any]] = {
    "of numpy": lambda lane, num_lanes: (np.int64(lane), num_lanes),
    "list": lambda lane, num_lanes: [lane, num_lanes],
    "float": lambda lane, num_lanes: (float(lane), num_lanes),
    "large": lambda lane, num_lanes: (lane, num_lanes, "x" * 1000),
    "nested": lambda lane, num_lanes: (lane, num_lanes, ("nested",)),
    "the same in all lanes": lambda lane, num_lanes: (0, 1),
}


@pytest.mark.parametrize("fault", STATES)
def test_states_that_break_it_are_found(fault: str) -> None:
    source: Any = Honest()
    source.start = STATES[fault]
    with pytest.raises(AssertionError):
        check_work_source(source)


@pytest.mark.slow
@pytest.mark.parametrize("told", [os.getpid, lambda: hash("text"), lambda: int(time.time()), int])
def test_what_is_true_in_one_process_only_is_found(told: Callable[[], int]) -> None:
    source = Faulty(lambda _, refs, state: np.roll(refs, told() % 7919 % len(refs), axis=0))
    if told is int:
        check_in_another_process(source)
    else:
        with pytest.raises(AssertionError, match="not a function of the state"):
            check_in_another_process(source)
