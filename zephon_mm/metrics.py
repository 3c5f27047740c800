"""Plain counters that any thread may add to, and snapshots of them.

Imports: nothing from the package. Used by: engine, pipeline.
"""

import threading
from collections import Counter
from collections.abc import Mapping


class Metrics:
    """Named sums. `add` is cheap enough for once a task; nothing here reaches a decision."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: Counter[str] = Counter()

    def add(self, name: str, amount: float = 1) -> None:
        """Add to a counter; it starts at zero."""
        with self._lock:
            self._sums[name] += amount  # type: ignore[assignment]

    def snapshot(self) -> Mapping[str, float]:
        """Return a copy of all counters, sorted by name."""
        with self._lock:
            return dict(sorted(self._sums.items()))
