"""What every work source keeps: `next` is pure, states are small and survive JSON.

A new source passes it with a few lines:

    def test_it_keeps_the_contract_of_work_sources() -> None:
        check_work_source(MySource(datasets))
        check_in_another_process(MySource(datasets))

`tests/contracts/test_work_source.py` plants faults that it finds.
"""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

from zephon_mm.protocols import WorkSource
from zephon_mm.records import State

CHUNKS = 20
"""Of each lane that are looked at; give few rows, so that they are all among these."""

_CHILD = """
import sys, time
time.time, time.time_ns = (lambda: 0.0), (lambda: 0)
import cloudpickle
source, asked = cloudpickle.load(sys.stdin.buffer)
sys.stdout.buffer.write(cloudpickle.dumps([source.next(state, size) for state, size in asked]))
"""


class Told(NamedTuple):
    """What a source said once."""

    state: State
    chunk_size: int
    refs: Any  # (n, 3) int64, None at a lane's end
    after: State

    @property
    def asked(self) -> tuple[State, int]:
        """The question again, as it is after a restore."""
        return tuple(json.loads(json.dumps(self.state))), self.chunk_size


def check_work_source(source: WorkSource, *, num_lanes: int = 3, chunk_size: int = 16) -> None:
    """Check the first chunks of every lane of a source."""
    assert isinstance(source, WorkSource)
    json.dumps(source.fingerprint())
    assert source.datasets
    copy = cloudpickle.loads(cloudpickle.dumps(source))
    lanes = [list(_lane(source, lane, num_lanes, chunk_size)) for lane in range(num_lanes)]
    # A copy that was asked nothing yet is asked the other way round.
    told = [one for lane in lanes for one in lane][::-1]
    for other in (copy, source):
        _compare(told, [other.next(*one.asked) for one in told])
    assert copy.fingerprint() == source.fingerprint()
    drawn = [b"".join(t.refs.tobytes() for t in told if t.refs is not None) for told in lanes]
    assert len(set(filter(None, drawn))) == len([*filter(None, drawn)]), "two lanes draw the same"


def check_in_another_process(source: WorkSource, *, chunk_size: int = 16) -> None:
    """Check that a process with another id, hash seed and clock is told the same; takes seconds."""
    told = [one for lane in (1, 0) for one in _lane(source, lane, 2, chunk_size)]
    done = subprocess.run(
        [sys.executable, "-c", _CHILD],
        input=cloudpickle.dumps((source, [one.asked for one in told])),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "1"},
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr.decode()
    _compare(told, pickle.loads(done.stdout))


def _lane(source: WorkSource, lane: int, num_lanes: int, chunk_size: int) -> Iterator[Told]:
    """Yield what the first chunks of a lane are, and its first one of another size."""
    state = source.start(lane, num_lanes)
    for size in (chunk_size // 3, *(chunk_size,) * CHUNKS):
        _check_state(source, state)
        chunk, after = source.next(state, size)
        yield Told(state, size, chunk and chunk.refs, after)
        if chunk is None:
            assert after == state, "the end of a lane must be a fixed point"
            assert getattr(source, "finite", True), "an endless source has ended"
            break
        _check_refs(source, chunk.refs, size)
        state = after if size == chunk_size else state


def _check_state(source: WorkSource, state: State) -> None:
    assert isinstance(state, tuple), f"a state is a tuple, got {state!r}"
    assert {type(part) for part in state} <= {int, str}, f"integers and strings, got {state!r}"
    assert len(json.dumps(state)) < 100 + 100 * len(source.datasets), f"it grows: {state!r}"


def _check_refs(source: WorkSource, refs: np.ndarray, chunk_size: int) -> None:
    assert refs.dtype == np.int64
    assert refs.shape[1:] == (3,)
    assert 1 <= len(refs) <= chunk_size, f"{len(refs)} rows, a chunk has 1 to {chunk_size}"
    assert refs.min() >= 0, f"negative numbers: {refs.min(axis=0)}"
    for dataset, shard, row in refs.tolist():
        shards = source.datasets[dataset].shards
        assert row < shards[shard].num_rows, f"row {row} is not in shard {shard} of {dataset}"


def _compare(told: list[Told], again: list[Any]) -> None:
    for one, (chunk, after) in zip(told, again, strict=True):
        assert after == one.after, "the state after a chunk is not a function of that before"
        assert (chunk is None) == (one.refs is None)
        assert chunk is None or np.array_equal(chunk.refs, one.refs), (
            "the rows of a chunk are not a function of the state, or were changed later"
        )
