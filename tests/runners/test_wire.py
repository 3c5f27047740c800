"""Messages are whole or not there."""

import os
import socket

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zephon_mm.runners import wire

HEADER = b"12345678"


@given(sizes=st.lists(st.integers(0, 3 * wire.INLINE_BYTES), max_size=4))
@example(sizes=[wire.INLINE_BYTES, wire.INLINE_BYTES + 1, 3_000_000, 0])
def test_payloads_of_any_size_arrive_in_order_and_leave_no_descriptor(sizes: list[int]) -> None:
    ours, theirs = wire.pair()
    with ours, theirs:
        before = len(os.listdir("/proc/self/fd"))
        payloads = [bytes([n]) * size for n, size in enumerate(sizes)]
        for payload in payloads:
            wire.post(ours, HEADER, payload)
        assert [wire.collect(theirs, len(HEADER)) for _ in payloads] == [
            (HEADER, payload) for payload in payloads
        ]
        assert len(os.listdir("/proc/self/fd")) == before


def test_what_was_sent_before_a_death_counts_even_with_an_unread_request() -> None:
    ours, theirs = wire.pair()
    with ours:
        wire.post(ours, HEADER, b"never read")
        wire.post(theirs, HEADER, b"small")
        wire.post(theirs, HEADER, b"large" * 10_000)
        theirs.close()
        assert wire.collect(ours, len(HEADER)) == (HEADER, b"small")
        assert wire.collect(ours, len(HEADER)) == (HEADER, b"large" * 10_000)
        assert wire.collect(ours, len(HEADER)) == (b"", b"")


def test_the_trainer_never_blocks_on_a_worker_that_does_not_read() -> None:
    ours, theirs = wire.pair()
    with ours, theirs:
        wire.post(ours, HEADER, b"x" * wire.INLINE_BYTES)
        wire.post(ours, HEADER, b"x" * wire.INLINE_BYTES)  # two always fit
        with pytest.raises(BlockingIOError):
            list(wire.post(ours, HEADER, b"x" * wire.INLINE_BYTES) for _ in range(10_000))
        with pytest.raises(BlockingIOError):
            wire.receive(ours)


def test_descriptors_arrive_closed_on_exec() -> None:
    ours, theirs = wire.pair()
    with ours, theirs, socket.socket() as gift:
        wire.send(ours, [b"take this"], [gift.fileno()])
        data, fds = wire.receive(theirs)
        assert data == b"take this"
        assert [os.get_inheritable(fd) for fd in fds] == [False]
        os.close(fds[0])
