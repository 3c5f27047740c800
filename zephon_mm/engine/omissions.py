"""What a run leaves out since a restore: whole steps, and rows of the data.

A skipped step is planned and not delivered, so those after it are what they would have been, under
the numbers that they would have had. Excluded rows are not drawn any more from a window on that no
lane has begun; in windows that were begun the packing stands, and what such a row has in their
sequences is taken out, which leaves padding.

Laws (tests/laws/test_omissions.py):
    1. Without the skipped steps a run is the run that skips none.
    2. Rows that are excluded from the start are as good as filtered out.
    3. Excluded later, they are in no sequence from there on; all others are those of a source
       that leaves the rows out from that window on.

Imports: errors, io, records. Used by: compiled, planning, pipeline, engine.lanes, engine.planner.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from zephon_mm.errors import ConfigError
from zephon_mm.io import Dataset
from zephon_mm.packed import Sequence as PackedSequence
from zephon_mm.records import SampleRef, Skip

SKIPPED, EXCLUDED = "skip_steps", "exclude_keys"
"""Their names in a lineage."""


@dataclass(frozen=True, slots=True)
class Omissions:
    """What is left out.

    `steps` are numbers of global steps, of `step_size` sequences each. `rows` are (window, refs):
    from that window of every lane on the refs are not drawn.
    """

    step_size: int = 1
    steps: frozenset[int] = frozenset()
    rows: tuple[tuple[int, frozenset[SampleRef]], ...] = ()

    @classmethod
    def of(
        cls, lineage: Sequence[Mapping[str, Any]], datasets: Sequence[Dataset], step_size: int
    ) -> Self:
        """Read a lineage, see `zephon_mm.resume`; the datasets are those of the source.

        Raises:
            ConfigError: A sample is in none of the datasets.
        """
        steps = [entry["new"]["steps"] for entry in lineage if entry["name"] == SKIPPED]
        keys = [(entry["window"], entry["new"]) for entry in lineage if entry["name"] == EXCLUDED]
        numbers = {dataset.name: number for number, dataset in enumerate(datasets)}

        def ref(key: str) -> SampleRef:
            try:
                number = numbers[key.rpartition("/")[0]]
                return SampleRef(number, *datasets[number].locate(key))
            except (KeyError, ValueError, AttributeError):
                raise ConfigError(
                    f"restore(state, exclude_keys=...): {key!r} is no sample of the datasets "
                    f"{sorted(numbers)}. Give names that are in batch.keys."
                ) from None

        return cls(
            step_size,
            frozenset(n for runs in steps for first, stop in runs for n in range(first, stop)),
            tuple((since, frozenset(map(ref, new["keys"]))) for since, new in keys),
        )

    def skips(self, number: int) -> bool:
        """Return whether the sequence of a global number is in a skipped step."""
        return number // self.step_size in self.steps

    def drawn(self, refs: NDArray[np.int64], window: int) -> tuple[NDArray[np.int64], list[Skip]]:
        """Return those of a window's refs, (n, 3) int64, that are measured, and the others."""
        found = [SampleRef._make(ref) for ref in refs.tolist()]
        out = [any(since <= window and ref in rows for since, rows in self.rows) for ref in found]
        skips = [
            Skip(ref, "excluded", "", False) for ref, left in zip(found, out, strict=True) if left
        ]
        return refs[~np.array(out, dtype=np.bool_)], skips

    def cleared(self, sequence: PackedSequence, window: int) -> tuple[PackedSequence, int]:
        """Return a sequence without the rows left out of later windows; how many pieces went."""
        late = [rows for since, rows in self.rows if since > window]
        if not late:
            return sequence, 0
        kept = tuple(p for p in sequence.pieces if not any(p.record.ref in rows for rows in late))
        lost = len(sequence.pieces) - len(kept)
        return (PackedSequence(kept) if lost else sequence), lost


NOTHING = Omissions()
