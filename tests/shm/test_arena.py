"""The arena's laws, one test each."""

import gc
import itertools
import os
import pickle
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zephon_mm.errors import ConfigError
from zephon_mm.shm.arena import PAGE_BYTES, Arena


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5 * PAGE_BYTES)), max_size=60))
def test_living_leases_never_overlap_and_all_memory_comes_back(
    steps: list[tuple[bool, int]],
) -> None:
    arena = Arena(16 * PAGE_BYTES)
    living: list[np.ndarray] = []
    for drop, size in steps:
        if drop and living:
            living.pop(size % len(living))
        elif (lease := arena.lease(size)) is not None:
            living.append(lease)
            del lease
        spans = sorted((arena.offset_of(a), a.nbytes) for a in living)
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(spans))
    living.clear()
    assert arena.leased_bytes == 0
    arena.close()


def test_a_slice_of_a_tensor_keeps_the_lease_and_the_last_one_ends_it() -> None:
    told: list[int] = []
    arena = Arena(8 * PAGE_BYTES, on_release=lambda: told.append(1))
    lease = arena.lease(1000)
    assert lease is not None
    view = lease[128:928].view(np.int64).reshape(10, 10)
    part = torch.from_numpy(view)[3:5, 2]
    del lease, view
    gc.collect()
    assert arena.leased_bytes == PAGE_BYTES
    del part
    assert arena.leased_bytes == 0
    assert told == [1]
    arena.close()


def test_a_full_arena_says_not_now_and_an_oversized_batch_names_setting_and_size() -> None:
    arena = Arena(4 * PAGE_BYTES)
    first = arena.lease(3 * PAGE_BYTES)
    assert first is not None
    assert arena.lease(2 * PAGE_BYTES) is None
    with pytest.raises(ConfigError, match=r"needs 20480 bytes.*memory_budget_bytes=40960"):
        arena.lease(5 * PAGE_BYTES)
    arena.close()


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="fork warns")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_writes_into_the_lease_and_ends_nothing() -> None:
    arena = Arena(4 * PAGE_BYTES)
    lease = arena.lease(100)
    assert lease is not None
    lease[:] = 0
    attached = pickle.dumps(arena)
    if (child := os.fork()) == 0:
        same = pickle.loads(attached)
        same.view(arena.offset_of(lease), 100)[:] = 7
        del lease
        os._exit(0 if arena._released.empty() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert lease.tolist() == [7] * 100
    arena.close()
