"""A batch of raw samples: values when they are asked for, digests of what is stored."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon_mm.records import Column
from zephon_mm.samples import Kind, SampleBatch, stored

KINDS: dict[str, Kind] = {"txt": "text", "jpg": "bytes", "meta": "json"}


class Named:
    """Names rows as a dataset does."""

    def key(self, shard: int, row: int) -> str:
        return f"d/s{shard}/{row}"


def column_of(values: Sequence[bytes | None]) -> Column:
    data = np.frombuffer(b"".join(value or b"" for value in values), dtype=np.uint8)
    ends = np.cumsum([len(value or b"") for value in values], dtype=np.int64)
    return Column(data, ends, np.array([value is not None for value in values], dtype=np.bool_))


def batch_of(columns: dict[str, list[bytes | None]], kinds: dict[str, Kind]) -> SampleBatch:
    size = len(next(iter(columns.values())))
    refs = np.stack([np.zeros(size), np.full(size, 3), np.arange(size)], axis=1).astype(np.int64)
    made = {name: column_of(values) for name, values in columns.items()}
    return SampleBatch(made, kinds, refs, np.arange(size), size, [Named()])


@pytest.fixture
def batch() -> SampleBatch:
    columns: dict[str, list[bytes | None]] = {
        "txt": ["é".encode(), None, b""],
        "jpg": [b"\xff\xd8", b"", None],
        "meta": [b'{"a": [1, null]}', b"5", b'"x"'],
    }
    return batch_of(columns, KINDS)


def test_values_are_those_that_were_stored(batch: SampleBatch) -> None:
    assert [dict(sample) for sample in batch.samples] == [
        {"txt": "é", "jpg": b"\xff\xd8", "meta": {"a": [1, None]}},
        {"jpg": b"", "meta": 5},
        {"txt": "", "meta": "x"},
    ]
    assert [len(sample) for sample in batch.samples] == [3, 2, 2]
    with pytest.raises(KeyError, match="txt"):
        batch.samples[1]["txt"]


def test_samples_are_a_sequence(batch: SampleBatch) -> None:
    assert len(batch.samples) == 3
    assert batch.samples[-1]["txt"] == ""
    assert [list(sample) for sample in batch.samples[1:]] == [["jpg", "meta"], ["txt", "meta"]]
    with pytest.raises(IndexError):
        batch.samples[3]


def test_padding_has_no_key(batch: SampleBatch) -> None:
    batch.refs[2] = -1
    assert batch.keys == (("d/s3/0",), ("d/s3/1",), ())


values = st.lists(st.none() | st.binary(max_size=5), min_size=3, max_size=3)


@given(values, values, st.permutations(range(3)))
def test_a_rows_digest_is_that_of_its_fields_alone(
    a: list[Any], b: list[Any], order: list[int]
) -> None:
    kinds: dict[str, Kind] = {"a": "bytes", "b": "bytes"}
    digests = batch_of({"a": a, "b": b}, kinds).row_sha256()
    turned = batch_of({"b": [b[i] for i in order], "a": [a[i] for i in order]}, kinds)
    assert turned.row_sha256() == tuple(digests[i] for i in order)
    rows = list(zip(a, b, strict=True))
    for one in range(3):
        for other in range(3):
            assert (digests[one] == digests[other]) == (rows[one] == rows[other])


def test_a_batchs_digest_is_that_of_its_rows_in_global_order(batch: SampleBatch) -> None:
    joined = "".join(batch.row_sha256()).encode()
    assert batch.sha256() == hashlib.sha256(joined).hexdigest()
    assert stored(batch.columns["txt"], 1).size == 0
