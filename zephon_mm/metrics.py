"""Plain counters that any thread may add to, the latest defects, and snapshots of both.

Imports: nothing from the package. Used by: engine, pipeline.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

logger = logging.getLogger("zephon_mm")

KEPT_DEFECTS = 100
"""How many of the latest defect messages are kept for `Metrics.defects`."""


class Metrics:
    """Named sums. `add` is cheap enough for once a task; nothing here reaches a decision."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: Counter[str] = Counter()
        self._running: dict[str, float] = {}
        self._defects: deque[str] = deque(maxlen=KEPT_DEFECTS)

    def add(self, name: str, amount: float = 1) -> None:
        """Add to a counter; it starts at zero."""
        self.add_all({name: amount})

    def add_all(self, amounts: Mapping[str, float]) -> None:
        """Add to several counters."""
        with self._lock:
            for name, amount in amounts.items():
                self._sums[name] += amount  # type: ignore[assignment]

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds inside; snapshots count them as they go. One at a time of each name."""
        with self._lock:
            self._running[name] = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._sums[name] += time.perf_counter() - self._running.pop(name)  # type: ignore[assignment]

    def skip(self, reason: str, message: str) -> None:
        """Count a sample or image that is not used; the first of each reason is logged."""
        name = f"skipped.{reason}"
        with self._lock:
            self._sums[name] += 1
            self._defects.append(f"{message} [{reason}]")
            first = self._sums[name] == 1
        if first:
            logger.warning("%s [%s]; further ones are counted in metrics()", message, reason)

    def defects(self) -> list[str]:
        """Return the latest skipped samples, oldest first."""
        with self._lock:
            return list(self._defects)

    def skipped(self) -> str:
        """Return how often each reason occurred, and the latest defect, in words."""
        latest = "".join(f"; the latest: {one}" for one in self.defects()[-1:])
        return f"Skipped: {skips(self.snapshot())}{latest}"

    def snapshot(self) -> dict[str, float]:
        """Return a copy of all counters, sorted by name."""
        with self._lock:
            sums: dict[str, float] = dict(self._sums)
            for name, began in self._running.items():
                sums[name] = sums.get(name, 0.0) + time.perf_counter() - began
        return dict(sorted(sums.items()))


def skips(counters: Mapping[str, float]) -> dict[str, int]:
    """Return how often each reason occurred, from a snapshot."""
    named = {name.partition(".") for name in counters}
    return {
        reason: int(counters[f"skipped.{reason}"])
        for head, _, reason in sorted(named)
        if head == "skipped"
    }
