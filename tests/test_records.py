"""Records are small, picklable values; a piece knows the images that lie inside it."""

import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zephon_mm.packed import Piece, Sequence
from zephon_mm.records import FileBlob, ImageSlot, Record, SampleRef, record_of


def record(*starts: int) -> Record:
    slots = tuple(ImageSlot(FileBlob("/x", at, 1), at, 3, (3, 2, 2)) for at in starts)
    ids = np.arange(20, dtype=np.int32)
    for at in starts:
        ids[at : at + 3] = 99
    uncut = tuple((at, at + 3) for at in starts)
    return record_of(SampleRef(0, 1, 2), ids, (ids > 3) & (ids < 99), slots, uncut)


@given(st.sets(st.integers(0, 5)), st.integers(0, 20), st.integers(0, 20))
def test_a_piece_has_the_images_whose_tokens_it_has(places: set[int], one: int, two: int) -> None:
    start, stop = sorted((one, two))
    whole = record(*(3 * place for place in sorted(places)))
    piece = Piece(whole, start, stop)
    inside = [
        image
        for image in whole.images
        if set(range(image.start, image.start + 3)) <= set(range(start, stop))
    ]
    assert list(piece.images()) == inside
    assert piece.num_tokens == stop - start


def test_a_sequence_adds_up_its_pieces() -> None:
    sequence = Sequence((Piece(record(0, 6), 0, 9), Piece(record(3), 5, 20)))
    assert (sequence.num_tokens, sequence.num_images) == (24, 2)


def test_records_pickle_to_themselves() -> None:
    again = pickle.loads(pickle.dumps(record(0, 6)))
    assert again.token_ids.tolist() == record(0, 6).token_ids.tolist()
    assert again._replace(text_ids=None) == record(0, 6)._replace(text_ids=None)


@given(st.sets(st.integers(0, 5)), st.lists(st.booleans(), min_size=20, max_size=20))
def test_a_record_gives_back_all_tokens_and_any_part(places: set[int], trained: list[bool]) -> None:
    base = record(*(3 * place for place in sorted(places)))
    ids = base.token_ids
    mask = np.array(trained)
    again = record_of(base.ref, ids, mask, base.images, base.uncut)
    assert again.token_ids.tolist() == ids.tolist()
    assert again.trained.tolist() == trained
    borders = [0, 20, *(at for run in base.uncut for at in run)]
    for start in borders:
        for stop in (at for at in borders if at >= start):
            out = np.full(stop - start, -7)
            again.write_tokens(start, stop, out)
            assert out.tolist() == ids[start:stop].tolist()
