"""Records are small, picklable values; a piece knows the images that lie inside it."""

import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zephon_mm.records import FileBlob, ImageSlot, Piece, Record, SampleRef, Sequence


def record(*starts: int) -> Record:
    slots = tuple(ImageSlot(FileBlob("/x", at, 1), at, 3, (3, 2, 2)) for at in starts)
    ids = np.arange(20, dtype=np.int32)
    uncut = tuple((at, at + 3) for at in starts)
    return Record(SampleRef(0, 1, 2), 20, ids, ids > 3, slots, uncut)


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
    assert again.token_ids.tolist() == list(range(20))
    assert again._replace(token_ids=None, trained=None) == record(0, 6)._replace(
        token_ids=None, trained=None
    )
