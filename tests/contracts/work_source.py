"""What every work source keeps: `next` is pure, states are small and survive JSON.

A new source passes it with two lines:

    def test_it_keeps_the_contract_of_work_sources() -> None:
        check_work_source(MySource(datasets))
"""

import json
import pickle

import numpy as np

from zephon_mm.protocols import WorkSource
from zephon_mm.records import State


def check_work_source(source: WorkSource, *, num_lanes: int = 3, chunk_size: int = 16) -> None:
    """Check the first chunks of every lane of a source."""
    assert isinstance(source, WorkSource)
    json.dumps(source.fingerprint())
    assert source.datasets
    copy = pickle.loads(pickle.dumps(source))
    assert copy.fingerprint() == source.fingerprint()
    for lane in range(num_lanes):
        state = source.start(lane, num_lanes)
        for _ in range(5):
            chunk, after = source.next(state, chunk_size)
            again: State = tuple(json.loads(json.dumps(state)))
            for other in (source, copy):
                same, same_after = other.next(again, chunk_size)
                assert same_after == after, (
                    "the state after a chunk is not a function of that before"
                )
                assert (same is None) == (chunk is None)
                assert same is None or np.array_equal(same.refs, chunk.refs)  # type: ignore[union-attr]
            if chunk is None:
                assert after == state, "the end of a lane must be a fixed point"
                assert getattr(source, "finite", True), "an endless source has ended"
                break
            _check_refs(source, chunk.refs, chunk_size)
            state = after
            assert len(json.dumps(state)) < 100 + 100 * len(source.datasets)


def _check_refs(source: WorkSource, refs: np.ndarray, chunk_size: int) -> None:
    assert refs.dtype == np.int64
    assert refs.shape[1:] == (3,)
    assert 1 <= len(refs) <= chunk_size
    for dataset, shard, row in refs.tolist():
        assert 0 <= row < source.datasets[dataset].shards[shard].num_rows
