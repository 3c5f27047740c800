"""Fetches the shards of stores before a worker needs them.

What a lane will have to measure is known some chunks before it is drawn, because sources are pure;
what is in an index is needed only where it is delivered, and known when that is planned.

Imports: index, io, stores. Used by: compiled, engine.driver, engine.lanes.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zephon_mm import stores
from zephon_mm.index import Index
from zephon_mm.io import Dataset
from zephon_mm.packed import Sequence as PackedSequence

CHUNKS_AHEAD = 4
"""How many chunks of a lane are known before they are drawn, if any data is in a store."""


class Ahead:
    """Asks for shards; those of local datasets are where they are.

    Args:
        datasets: As of the refs.
        index: What need not be measured, or None.
    """

    def __init__(self, datasets: Sequence[Dataset], index: Index | None) -> None:
        self._index = index
        self._files = {
            number: stores.shard_files(dataset.mirrors, [shard.name for shard in dataset.shards])
            for number, dataset in enumerate(datasets)
            if dataset.mirrors
        }

    def __bool__(self) -> bool:
        """Whether any data is in a store."""
        return bool(self._files)

    def measured(self, refs: NDArray[np.int64]) -> None:
        """Fetch what measuring a chunk will read."""
        if self._index is not None:
            refs = refs[[item is None for item in self._index.lookup(refs)]]
        self._fetch(refs)

    def delivered(self, sequences: Sequence[PackedSequence]) -> None:
        """Fetch what sequences will be made of."""
        refs = [piece.record.ref for sequence in sequences for piece in sequence.pieces]
        self._fetch(np.array(refs, dtype=np.int64).reshape(-1, 3))

    def _fetch(self, refs: NDArray[Any]) -> None:
        shards = dict.fromkeys(map(tuple, refs[:, :2].tolist()))
        files = (self._files.get(number, {}).get(shard) for number, shard in shards)
        stores.prefetch([file for file in files if file is not None])
