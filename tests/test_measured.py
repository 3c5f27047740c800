"""Rows that cross a process boundary are the rows that were measured."""

import pickle
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zephon_mm.measured import Measured, MeasuredBlock
from zephon_mm.records import (
    FileBlob,
    ImageSlot,
    Record,
    RowBlob,
    SampleRef,
    Skip,
    record_of,
)

NUMBERS = st.integers(0, 2**40)
REFS = st.builds(SampleRef, NUMBERS, NUMBERS, NUMBERS)
BLOBS = st.builds(FileBlob, st.text(), NUMBERS, NUMBERS) | st.builds(
    RowBlob, NUMBERS, NUMBERS, st.text()
)
SLOTS = st.builds(
    ImageSlot,
    BLOBS,
    st.just(0),
    st.just(2),
    st.just((3, 2, 2)),
    st.tuples(NUMBERS) | st.just(()),
    st.integers(0, 3),
    st.integers(-1, 3),
    st.booleans(),
    st.integers(0, 99),
)
SKIPS = st.builds(Skip, REFS, st.text(), st.text(), st.booleans())


@st.composite
def records(draw: st.DrawFn) -> Record:
    size = draw(st.integers(2, 9))
    ids = np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=size, max_size=size)))
    slot = draw(st.none() | SLOTS)
    images = () if slot is None else (slot,)
    trained = np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    return record_of(draw(REFS), ids.astype(np.int32), trained, images, ((0, 2),) * len(images))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Skip):
        return type(other) is Skip and one == other
    plain, ids = one._replace(text_ids=0), one.text_ids
    kinds = [type(image.blob) for image in one.images] == [type(i.blob) for i in other.images]
    return kinds and plain == other._replace(text_ids=0) and np.array_equal(ids, other.text_ids)


@given(st.lists(SKIPS | records(), max_size=5))
def test_what_is_unpickled_gives_the_same_rows(rows: list[Record | Skip]) -> None:
    block = pickle.loads(pickle.dumps(Measured(rows)))
    assert type(block) is MeasuredBlock
    assert len(block) == len(rows)
    assert all(same(one, other) for one, other in zip(rows, block, strict=True))
    assert block.gaps == [at for at, one in enumerate(rows) if isinstance(one, Skip)]
    for at, one in enumerate(rows):
        if isinstance(one, Record):
            counts = (one.num_tokens, one.num_images, one.num_valid_tokens, one.num_patches)
            found = (block.num_tokens, block.num_images, block.num_valid, block.num_patches)
            assert tuple(column[at] for column in found) == counts
