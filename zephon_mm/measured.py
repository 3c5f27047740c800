"""What workers found out of samples, on its way to the trainer and while it waits in a window.

A window holds thousands of records. As objects each of them is visited by every collection of
garbage, which took more time than all else in the trainer's threads (seen: 12 us of 30 a sample).
So a reply of a worker process arrives as counts in columns, and bytes for each row, which are not
visited; a record is made of its bytes when its sequence is delivered.

Laws (tests/test_measured.py):
    1. What was pickled gives equal rows, in order, in any process of this machine.

Imports: records. Used by: engine.tasks.
"""

import marshal
from typing import Any

import numpy as np

from zephon_mm.packed import Block
from zephon_mm.records import Blob, FileBlob, ImageSlot, Record, RowBlob, SampleRef, Skip


class Measured(list[Record | Skip]):
    """What rows became. It is pickled as a `MeasuredBlock`."""

    def __reduce__(self) -> Any:
        """Turn each row into bytes of its own, with its counts beside them."""
        counts: list[int] = []
        rows = []
        for one in self:
            if isinstance(one, Skip):
                counts += (0, 0, 0, 0)
                rows.append(marshal.dumps((tuple(one.ref), *one[1:])))
                continue
            counts += (one.num_tokens, one.num_images, one.num_valid_tokens, one.num_patches)
            images = tuple([(tuple(image[0] or ()), *image[1:]) for image in one.images])
            ids = one.text_ids.tobytes()
            plain: Any = (tuple(one.ref), one.num_tokens, ids, one.trained_runs, images, *one[5:])
            rows.append(marshal.dumps(plain))
        return MeasuredBlock, (np.array(counts, dtype=np.int64).tobytes(), rows)


class MeasuredBlock(Block):
    """Rows that a worker measured; as a sequence, what each became.

    Args:
        counts: (n, 4) int64 as bytes: tokens (0: no record), images, tokens that carry loss,
            patches.
        rows: The fields of each `Record` or `Skip`, marshalled.
    """

    def __init__(self, counts: bytes, rows: list[bytes]) -> None:
        columns = np.frombuffer(counts, dtype=np.int64).reshape(-1, 4).T
        self.num_tokens, self.num_images, self.num_valid, self.num_patches = columns.tolist()
        self.gaps = np.flatnonzero(columns[0] == 0).tolist()
        self._rows = rows

    def __getitem__(self, row: int) -> Record | Skip:
        """Return what a row became."""
        ref, *fields = marshal.loads(self._rows[row])
        if not self.num_tokens[row]:
            return Skip(SampleRef._make(ref), *fields)
        num_tokens, ids, runs, images, *others = fields
        slots = tuple([ImageSlot(_blob(blob), *rest) for blob, *rest in images])
        text_ids = np.frombuffer(ids, dtype=np.int32)
        return Record(SampleRef._make(ref), num_tokens, text_ids, runs, slots, *others)


def _blob(fields: tuple[Any, ...]) -> Blob | None:
    if not fields:
        return None
    kind = FileBlob if isinstance(fields[0], str) else RowBlob
    return kind._make(fields)
