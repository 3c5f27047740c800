"""Shuffle a stream through a bounded buffer that starts to emit while it fills.

Laws:
    1. The output is a permutation of the input, a function of input order and key alone.
    2. Until the buffer is full, one item leaves for every two that enter: a first batch waits for
       two items, not for a full buffer.
    3. A buffer of one item keeps the order.

Cost: one random number an item, drawn in blocks.

Imports: errors, rng. Used by: engine, pipeline.
"""

from typing import Generic, TypeVar

from zephon_mm.errors import ConfigError
from zephon_mm.rng import Stream

Item = TypeVar("Item")

_BLOCK = 256  # random numbers drawn at once


class ShuffleBuffer(Generic[Item]):
    """A random-replacement buffer.

    Args:
        buffer_size: Items that a departing one is drawn from, at least 1.
        rng: The stream of this buffer alone.
    """

    def __init__(self, buffer_size: int, rng: Stream) -> None:
        if buffer_size < 1:
            raise ConfigError(f"shuffle(buffer_size={buffer_size}): use 1 (no shuffling) or more")
        self._size = buffer_size
        self._rng = rng
        self._items: list[Item] = []
        self._numbers: list[int] = []
        self._pushed = 0

    def push(self, item: Item) -> list[Item]:
        """Take one item; return the one that leaves, if any."""
        items = self._items
        items.append(item)
        self._pushed += 1
        if len(items) < self._size and self._pushed % 2:
            return []
        if not self._numbers:
            self._numbers = self._rng.bits(_BLOCK).tolist()
        at = (self._numbers.pop() >> 32) * len(items) >> 32
        items[at], items[-1] = items[-1], items[at]
        return [items.pop()]

    def flush(self) -> list[Item]:
        """Return the rest in random order."""
        rest = [self._items[i] for i in self._rng.permutation(len(self._items))]
        self._items.clear()
        return rest
