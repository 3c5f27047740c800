"""One anonymous shared memory segment, leased in ranges ("slabs") to batches.

The segment is a memfd: nothing is named in the file system, nothing is left after SIGKILL, and the
size of /dev/shm does not matter. Pages are taken from the machine when they are first written, so a
large capacity costs nothing until it is used; ranges are handed out lowest first, so that the
same warm pages are used again and again (a fresh page costs a fault, about 0.5 ms an image).

Laws (tests/shm/test_arena.py):
    1. Two leases that are alive never overlap.
    2. A lease ends when the last array or tensor that looks into it is gone, and not before.
    3. Ending a lease takes no lock and is a no-op in a forked child.

A lease's lifetime hangs on one `weakref.finalize` of the *lowest* ndarray: every view of a view has
that array as its base, while a finalizer on a reshaped view would fire too early.

Imports: errors. Used by: engine.
"""

import mmap
import os
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue

import numpy as np
from numpy.typing import NDArray

from zephon_mm.errors import ConfigError

PAGE_BYTES = mmap.PAGESIZE


class Arena:
    """A shared segment that processes attach to by inheriting its descriptor.

    Pickling an arena carries only the descriptor's number; the receiving process must have
    inherited that descriptor. `lease` belongs to the creating process, one thread at a time.

    Args:
        capacity_bytes: Most bytes that all leases together may hold.
        on_release: Called (from any thread, possibly inside garbage collection) when a lease ended.
            It must not take a lock; `SimpleQueue.put` is fine.
    """

    def __init__(
        self, capacity_bytes: int, *, on_release: Callable[[], None] | None = None
    ) -> None:
        if capacity_bytes < PAGE_BYTES:
            raise ConfigError(
                f"memory_budget_bytes must be at least {PAGE_BYTES}, got {capacity_bytes}"
            )
        self.capacity_bytes = _whole_pages(capacity_bytes)
        self.fd = os.memfd_create("zephon_mm", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.capacity_bytes)
        self._on_release = on_release
        self._pid = os.getpid()
        self._released: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self._free = [(0, self.capacity_bytes)]  # (offset, size), ascending, never adjacent
        self._attach()

    def _attach(self) -> None:
        self._map = mmap.mmap(self.fd, self.capacity_bytes)
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)

    def __reduce__(self) -> tuple[Callable[..., "Arena"], tuple[int, int]]:
        return _attached, (self.fd, self.capacity_bytes)

    def view(self, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        """Return (num_bytes,) uint8 at `offset`, for a worker to write. Holds no lease."""
        return self._bytes[offset : offset + num_bytes]

    def lease(self, num_bytes: int) -> NDArray[np.uint8] | None:
        """Take a range; None when no free range is large enough now.

        Returns:
            (num_bytes,) uint8, page aligned, old contents. `offset_of` tells where it lies.

        Raises:
            ConfigError: The range is larger than the whole arena.
        """
        size = max(_whole_pages(num_bytes), PAGE_BYTES)
        if size > self.capacity_bytes:
            raise ConfigError(
                f"one batch needs {num_bytes} bytes of shared memory, the budget is "
                f"{self.capacity_bytes}. Set options(memory_budget_bytes={2 * size}) or more, or "
                "lower microbatch_size or max_images."
            )
        self._collect()
        for position, (offset, free) in enumerate(self._free):
            if free >= size:
                self._free[position : position + 1] = (
                    [(offset + size, free - size)] if free > size else []
                )
                return self._leased(offset, size, num_bytes)
        return None

    def offset_of(self, lease: NDArray[np.uint8]) -> int:
        """Return where a lease begins, in bytes from the start of the segment."""
        return int(lease.ctypes.data - self._bytes.ctypes.data)

    @property
    def leased_bytes(self) -> int:
        """Bytes in leases that have not ended."""
        self._collect()
        return self.capacity_bytes - sum(size for _, size in self._free)

    def close(self) -> None:
        """Close the descriptor. Memory goes back when the last view of it is gone."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _leased(self, offset: int, size: int, num_bytes: int) -> NDArray[np.uint8]:
        lowest = np.frombuffer(self._map, dtype=np.uint8, count=num_bytes, offset=offset)
        finalizer = weakref.finalize(
            lowest, _release, self._pid, self._released, (offset, size), self._on_release
        )
        finalizer.atexit = False
        return lowest

    def _collect(self) -> None:
        """Put ranges whose leases ended back into the free list, joining neighbours."""
        returned = []
        while True:
            try:
                returned.append(self._released.get_nowait())
            except Empty:
                break
        if not returned:
            return
        joined: list[tuple[int, int]] = []
        for offset, size in sorted(self._free + returned):
            if joined and sum(joined[-1]) == offset:
                joined[-1] = (joined[-1][0], joined[-1][1] + size)
            else:
                joined.append((offset, size))
        self._free = joined


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def _release(
    pid: int,
    released: "SimpleQueue[tuple[int, int]]",
    span: tuple[int, int],
    on_release: Callable[[], None] | None,
) -> None:
    if os.getpid() != pid:
        return
    released.put(span)
    if on_release is not None:
        on_release()


def _attached(fd: int, capacity_bytes: int) -> Arena:
    """Attach to a segment whose descriptor this process inherited. Only `view` may be used."""
    arena = Arena.__new__(Arena)
    arena.fd = fd
    arena.capacity_bytes = capacity_bytes
    arena._pid = os.getpid()
    arena._attach()
    return arena
