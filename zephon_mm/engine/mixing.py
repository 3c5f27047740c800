"""A lane whose datasets have exact shares of tokens.

The source guesses how many rows of each dataset a window needs. The lane measures them, and takes
the next row always of the dataset that is furthest behind its share of the tokens taken so far; if
that has none yet, the others wait. What a window has not taken at its end, the next one draws
again. So each dataset's rows are taken in their order, each once a pass, and no decision depends
on how far measuring ran ahead.

Laws (tests/engine/test_mixing.py, tests/laws/test_shares.py):
    1. As those of `engine.lanes`.
    2. What was taken of each dataset is its share of all tokens, to within one document.
    3. A dataset that has no token to give is an error, not a wait without end.

Cost: 3 us a record, and rows that are measured twice without an index: the more, the less lengths
can be guessed; 30 % seen where half of a dataset was too long and dropped.

Imports: errors, ops.pack, packed, records, engine.{lanes, measuring}. Used by: engine.planner.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zephon_mm.engine.lanes import Lane
from zephon_mm.engine.measuring import Items, Measured
from zephon_mm.errors import DataQualityError
from zephon_mm.ops.pack import make_packer
from zephon_mm.packed import AnyRecord, Block
from zephon_mm.records import SampleRef, Skip, State


class MixingLane(Lane):
    """Plans one lane; arguments as for `Lane`. Its source has what `WorkSource` says of tokens."""

    def __init__(self, number: int, **settings: Any) -> None:
        self._dry: Counter[int] = Counter()  # by dataset, the latest rows that all gave no token
        super().__init__(number, **settings)

    def fill(self, tasks_ahead: int, in_window: int = 0) -> None:
        """As the base; where the next window begins is known when this one is over."""
        most = max(tasks_ahead, in_window)
        while self._tasks < most and not (self._source_ended or self._next_states):
            self._draw()

    def _draw(self) -> None:
        drawn = self._drawn
        super()._draw()
        if self._source_ended:  # a lane has ended when nothing of it is left to be taken
            self._source_ended, self._drawn = not drawn, 0

    def _measured(self, refs: NDArray[np.int64]) -> Iterable[Measured]:
        """Yield the records of a chunk in order, also of rows that are left out."""
        if self._plan.omissions.rows:
            _, skips = self._plan.omissions.drawn(refs, self.reading)
            self._left_out |= {skip.ref: skip for skip in skips}
        return self._measure(self.number, refs)

    def _begin_window(self, number: int, state: State) -> None:
        super()._begin_window(number, state)
        source: Any = self._plan.source
        self._account = source.account(state)
        self._left_out: dict[SampleRef, Skip] = {}
        self._held: defaultdict[int, deque[tuple[Any, int, int]]] = defaultdict(deque)
        self._rows: Counter[int] = Counter()
        self._tokens: Counter[int] = Counter()

    def _end_window(self) -> State:
        source: Any = self._plan.source
        window = self._windows[-1]
        number = (window.number + 1) * self._plan.chunks_per_window
        self._state = source.settled(window.state, number, self._rows, self._tokens)
        self._coming.clear()
        super()._end_window()
        return self._state

    def _take_items(self, items: Items) -> None:
        for row in range(len(items)):
            dataset, tokens = self._counted(items, row)
            self._held[dataset].append((items, row, tokens))
        while (dataset := self._account.next()) is not None and self._held[dataset]:
            held, row, tokens = self._held[dataset].popleft()
            self._account.give(dataset, tokens)
            self._rows[dataset] += 1
            self._tokens[dataset] += tokens
            self._dry[dataset] = 0 if tokens else self._dry[dataset] + 1
            if tokens and isinstance(held, Block) and hasattr(self._accumulators[0], "push_block"):
                self._take_rows(held, row, row + 1)
            else:
                item: Any = held[row]
                left_out: Any = self._left_out
                self._take(left_out.get(item.ref, item))
            if not tokens:
                self._check_dry(dataset)

    def _check_dry(self, dataset: int) -> None:
        source: Any = self._plan.source
        found = source.datasets[dataset]
        if self._dry[dataset] >= 2 * len(found):  # each row is one of them, wherever they began
            raise DataQualityError(
                f"no row of dataset {found.name!r} gives a token that can be packed, and others "
                f"wait for its share. {self._metrics.skipped()}. Check its schema, the filters and "
                "max_length, or give it weight 0."
            )

    def _counted(self, items: Items, row: int) -> tuple[int, int]:
        """Return the dataset of a row, and how many tokens the packer will take of it."""
        config = self._plan.mix
        assert config is not None
        only_tokens = config.max_images is None and config.max_patches is None
        if isinstance(items, Block) and only_tokens and not self._left_out:
            size = items.num_tokens[row]
            if 0 < size <= config.max_length:
                return items.dataset(row), size
        item: AnyRecord | Skip = items[row]
        if isinstance(item, Skip) or item.ref in self._left_out:
            return item.ref.dataset, 0
        if not config.room.lacking(item):
            return item.ref.dataset, item.num_tokens
        packer = make_packer(config)
        sequences = [*packer.push(item), *packer.flush()]
        return item.ref.dataset, sum(sequence.num_tokens for sequence in sequences)
