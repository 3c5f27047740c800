"""Random streams keyed by what they are for, never by when or where they are drawn.

Laws:
    1. A stream is a function of its key alone: (seed, purpose, lane, window, ...).
    2. Only raw Philox counters are used. NumPy keeps those fixed for ever, while the methods of
       `Generator` may change between its versions.

Imports: nothing from the package. Used by: work, ops, user accumulators.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray


def digest(*key: int | str) -> str:
    """Return 32 hex digits that depend on every part of the key, its type and its order."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in key)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class Stream:
    """Uniform random numbers from a keyed counter.

    Args:
        *key: What the stream is for, such as `(seed, "shuffle", lane, window)`. Equal keys give
            equal numbers on every machine and in every version.
    """

    def __init__(self, *key: int | str) -> None:
        self._raw = np.random.Philox(key=int(digest(*key), 16))

    def bits(self, count: int) -> NDArray[np.uint64]:
        """Return (count,) uint64, all bits random."""
        return np.asarray(self._raw.random_raw(count), dtype=np.uint64)

    def uniform(self, count: int) -> NDArray[np.float64]:
        """Return (count,) float64 in [0, 1)."""
        return np.asarray((self.bits(count) >> np.uint64(11)) * 2.0**-53, dtype=np.float64)

    def integer(self, high: int) -> int:
        """Return one integer in [0, high), for `1 <= high <= 2**32`."""
        return (int(self._raw.random_raw()) >> 32) * high >> 32

    def permutation(self, count: int) -> NDArray[np.int64]:
        """Return a random order of `range(count)`, (count,) int64."""
        return np.argsort(self.bits(count), kind="stable").astype(np.int64)
