"""What every accumulator keeps: it ends empty, and its output is a function of its input."""

from collections.abc import Callable, Sequence
from typing import Any

from zephon_mm.protocols import Accumulator


def drain(accumulator: Accumulator[Any, Any], items: Sequence[Any]) -> list[Any]:
    """Return all that an accumulator makes of the items, flush included."""
    return [out for item in items for out in accumulator.push(item)] + list(accumulator.flush())


def check_accumulator(make: Callable[[], Accumulator[Any, Any]], items: Sequence[Any]) -> None:
    """Check one accumulator.

    Args:
        make: Returns a new accumulator, as for a new window; always with the same key.
        items: At least two items that it takes.
    """
    accumulator = make()
    assert isinstance(accumulator, Accumulator)
    assert list(accumulator.flush()) == [], "a new accumulator holds something"
    first = drain(make(), items)
    assert first, "the items give no output: nothing is tested"
    assert drain(make(), items) == first, "the output depends on more than the input"
    accumulator = make()
    drain(accumulator, items)
    assert list(accumulator.flush()) == [], "flush left something behind"
