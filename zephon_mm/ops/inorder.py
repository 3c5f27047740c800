"""Pack records in the order in which they come: cut where a sequence is full, or whole.

Laws (tests/ops/test_pack.py):
    1. As those of `ops.pack`.
    2. The pieces of all sequences, one after the other, are in the order of arrival.
    3. `WrapPacker` leaves tokens free only in front of an image that does not fit, and in the last.

Cost: 2 us a record. Imports: records, ops.fit. Used by: ops.pack.
"""

from zephon_mm.ops.fit import Report, Room, Span, cut, is_useful, pieces_of, spans_of
from zephon_mm.packed import AnyRecord, Piece, Sequence
from zephon_mm.records import Policy


class WrapPacker:
    """Fills every sequence by cutting documents, but never an image.

    Args:
        room: What a sequence holds.
        policy: What happens to a document with an image that no sequence can hold.
        report: Told of every record that is dropped, or cut other than to fill.
    """

    def __init__(self, room: Room, policy: Policy, report: Report) -> None:
        self._room = self._left = room
        self._policy: Policy = policy
        self._report = report
        self._open: list[Piece] = []

    def push(self, record: AnyRecord) -> list[Sequence]:
        """Append one record; return the sequences that it fills."""
        spans = spans_of(record)
        end = self._cuttable(record, spans)
        start = 0
        closed = []
        while start < end:
            stop = cut(spans, start, end, self._left)
            if stop > start:
                self._append(Piece(record, start, stop))
                start = stop
            if start < end or not self._left.tokens:
                closed += self.flush()
        return closed

    def flush(self) -> list[Sequence]:
        """Return the open sequence, if it holds anything."""
        pieces, self._open = tuple(self._open), []
        self._left = self._room
        return [Sequence(pieces)] if pieces else []

    def _append(self, piece: Piece) -> None:
        self._open.append(piece)
        self._left = self._left.without(piece)

    def _cuttable(self, record: AnyRecord, spans: list[Span]) -> int:
        """Return how many tokens of a record can be placed; 0 if it is dropped."""
        for span in spans:
            if reason := self._room.lacking(span):
                useful = self._policy == "truncate" and is_useful(record, 0, span.start)
                self._report("truncated" if useful else reason, record)
                return span.start if useful else 0
        return record.num_tokens


class KeepPacker(WrapPacker):
    """Puts whole documents into a sequence until one does not fit, which begins the next."""

    def push(self, record: AnyRecord) -> list[Sequence]:
        """Append one record; return the sequences that it closes."""
        closed = []
        for piece in pieces_of(record, self._room, self._policy, self._report):
            if self._left.lacking(piece):
                closed += self.flush()
            self._append(piece)
        return closed
