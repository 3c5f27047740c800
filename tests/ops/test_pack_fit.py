"""What becomes of a document that no sequence holds: where it is cut, and that nothing is lost."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.ops.test_pack import record, streams
from zephon_mm.ops.fit import NO_LIMIT, Room, cut, ignore, pieces_of, spans_of
from zephon_mm.packed import Piece, extents_of, parsed
from zephon_mm.records import MediaShape, Record, SampleRef, patches_of, record_of

rooms = st.builds(
    Room,
    st.integers(15, 40),
    st.integers(1, 3) | st.just(NO_LIMIT),
    st.integers(11, 30) | st.just(NO_LIMIT),
)


def document(*parts: int) -> Record:
    """Return a record of texts, trained if the number of tokens is positive."""
    ids = np.zeros(sum(map(abs, parts)), dtype=np.int32)
    mask = np.repeat([part > 0 for part in parts], [abs(part) for part in parts])
    return record_of(SampleRef(0, 0, 0), ids, mask)


def cuts(item: Record, room: Room) -> list[int]:
    return [piece.stop for piece in pieces_of(item, room, "split", ignore)]


@given(records=streams, room=rooms)
def test_a_span_has_the_images_that_lie_in_it(records: list[Record], room: Room) -> None:
    for item in records:
        spans = spans_of(item)
        assert [(span.start, span.stop) for span in spans] == list(item.uncut)
        assert sum(span.num_images for span in spans) == item.num_images
        assert sum(span.num_patches for span in spans) == item.num_patches


@given(records=streams, room=rooms, start=st.integers(0, 60))
def test_a_cut_is_as_far_on_as_the_room_allows(
    records: list[Record], room: Room, start: int
) -> None:
    for item in records:
        if any(first < start < last for first, last in item.uncut) or start >= item.num_tokens:
            continue
        allowed = [
            stop
            for stop in range(start, min(item.num_tokens, start + room.tokens) + 1)
            if all(last <= stop or stop <= first for first, last in item.uncut)
            and sum(start <= i.start < stop for i in item.images) <= room.images
            and sum(i.patches for i in item.images if start <= i.start < stop) <= room.patches
        ]
        assert cut(spans_of(item), start, item.num_tokens, room) == max(allowed)


@given(records=streams, room=rooms)
def test_split_pieces_are_the_record_and_each_fits(records: list[Record], room: Room) -> None:
    for item in records:
        pieces = pieces_of(item, room, "split", ignore)  # each image has room
        assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
        assert pieces[-1].stop == item.num_tokens
        assert not any(room.lacking(piece) for piece in pieces)
        assert len(pieces) > 1 or not room.lacking(item)


turns = st.lists(st.integers(-30, 30).filter(bool), min_size=1, max_size=9).map(
    lambda parts: document(*parts)
)


@given(item=st.one_of(turns, streams.filter(bool).map(lambda records: records[0])), room=rooms)
def test_a_split_parts_no_answer_from_its_question_where_both_fit(item: Record, room: Room) -> None:
    ends = [0, *(stop for _, stop in item.trained_runs)]
    for piece in pieces_of(item, room, "split", ignore)[:-1]:
        start = max(at for at in ends if at <= piece.stop)
        stop = min((at for at in ends if at > piece.stop), default=item.num_tokens)
        assert piece.stop == start or start <= piece.start or stop - start > room.tokens


@given(records=streams, room=rooms)
def test_truncating_keeps_the_longest_beginning_within_all_limits(
    records: list[Record], room: Room
) -> None:
    for item in filter(room.lacking, records):
        pieces = pieces_of(item, room, "truncate", ignore)
        stop = cut(spans_of(item), 0, item.num_tokens, room)
        longest = Piece(item, 0, stop)
        assert pieces == ([longest] if longest.num_valid_tokens else [])


def test_patches_are_counted_before_any_merging() -> None:
    assert patches_of(MediaShape(64, (256, 768)), 16) == 256
    assert patches_of(MediaShape(64, (3, 384, 390)), 14) == 27 * 27
    assert patches_of(MediaShape(64, (5, 3, 32, 48)), 16) == 5 * 6
    assert patches_of(MediaShape(64, (3, 32, 48)), None) == 64


def test_a_piece_has_the_patches_of_its_images() -> None:
    item = record(0, 4, (3, 5))  # 5 and 4 patches
    assert item.num_patches == Piece(item, 0, 16).num_patches == 9
    assert Piece(item, 0, 6).num_patches == 5
    images, *_ = parsed(extents_of(item))
    assert [image.patches for image in images] == [5, 4]


def test_split_cuts_between_turns() -> None:
    chat = document(-6, 5, -4, 7, -3, 2)
    assert cuts(chat, Room(16)) == [11, 27]  # and not [15, 27]: the answer would lack its question
    assert cuts(chat, Room(12)) == [11, 22, 27]


def test_split_cuts_a_text_that_is_longer_than_a_sequence_where_it_is_full() -> None:
    assert cuts(document(4, -2, 25), Room(10)) == [10, 20, 30, 31]


def test_split_leaves_no_image_without_a_token_to_train_on() -> None:
    assert cuts(record(0, 14, (6,)), Room(16)) == [16, 22]  # and not [8, 22]


def test_an_image_that_no_sequence_holds_takes_its_document_with_it() -> None:
    told: list[str] = []
    wide = record(0, 3, (2, 30))
    for room in (Room(20), Room(99, NO_LIMIT, 5)):
        assert not pieces_of(wide, room, "split", lambda why, _: told.append(why))
    assert told == ["overlong", "too_many_patches"]
