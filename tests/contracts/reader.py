"""The contract of a reader. A new reader passes it with five lines:

class TestMyReader(ReaderContract):
    @pytest.fixture
    def reader(self, tmp_path):
        return MyReader(write_some_rows(tmp_path))
"""

import os
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.fixtures.columns import cells
from zephon_mm.errors import SampleError
from zephon_mm.io import Dataset, read_blob
from zephon_mm.protocols import ColumnReader, Reader
from zephon_mm.records import FileBlob, RowBlob


def blobs_in(value: Any) -> Iterator[FileBlob | RowBlob]:
    if isinstance(value, FileBlob | RowBlob):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from blobs_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from blobs_in(item)


def stored(dataset: Dataset, value: Any) -> bytes | None:
    if isinstance(value, FileBlob | RowBlob):
        return read_blob(dataset, value)
    return value.encode() if isinstance(value, str) else value


def comparable(rows: list[Any]) -> list[Any]:
    return [(row.reason, row.message) if isinstance(row, SampleError) else row for row in rows]


def every_row(reader: Reader) -> list[Any]:
    return [
        row
        for shard, info in enumerate(reader.shards)
        for row in comparable(reader.read(shard, range(info.num_rows)))
    ]


class ReaderContract:
    """Subclasses give a fixture `reader`: at least two shards, three rows and one image."""

    def test_is_a_reader_with_unique_shard_names(self, reader: Reader) -> None:
        assert isinstance(reader, Reader)
        names = [shard.name for shard in reader.shards]
        assert len(set(names)) == len(names) >= 2
        assert sum(shard.num_rows for shard in reader.shards) >= 3

    def test_rows_come_in_the_order_asked_one_by_one_or_together(self, reader: Reader) -> None:
        for shard, info in enumerate(reader.shards):
            rows = [*range(info.num_rows), *reversed(range(info.num_rows)), 0]
            together = comparable(reader.read(shard, rows))
            assert together == [comparable(reader.read(shard, [row]))[0] for row in rows]
        assert reader.read(0, []) == []

    def test_fields_limit_what_comes_back(self, reader: Reader) -> None:
        for number, full in enumerate(reader.read(0, range(reader.shards[0].num_rows))):
            assert isinstance(full, dict)
            for name in set(full) - {"__key__"}:
                (row,) = reader.read(0, [number], [name])
                assert row == {name: full[name], "__key__": full["__key__"]}

    def test_a_row_that_is_not_there_is_an_index_error(self, reader: Reader) -> None:
        for row in (-1, reader.shards[0].num_rows):
            with pytest.raises(IndexError, match=r"rows 0 to"):
                reader.read(0, [row])

    def test_blobs_give_their_bytes_and_any_prefix(self, reader: Reader) -> None:
        dataset = Dataset("data", reader)
        blobs = list(blobs_in([row for row in every_row(reader) if isinstance(row, dict)]))
        assert blobs
        for blob in blobs:
            whole = read_blob(dataset, blob)
            assert read_blob(dataset, blob, 5) == whole[:5]
            assert read_blob(dataset, blob, len(whole) + 9) == whole
            if isinstance(blob, FileBlob):
                assert os.path.isabs(blob.path)
                assert len(whole) == blob.size

    def test_columns_give_the_bytes_that_read_gives(self, reader: Reader) -> None:
        if not isinstance(reader, ColumnReader):
            pytest.skip("it has no columns")
        dataset = Dataset("data", reader)
        for shard, info in enumerate(reader.shards):
            rows = [*reversed(range(info.num_rows)), 0]
            samples = reader.read(shard, rows)
            named = {name for row in samples if isinstance(row, dict) for name in row}
            names = sorted(name for name in named if not name.startswith("__"))
            columns = reader.columns(shard, np.array(rows), names)
            for name in columns.keys() & names:
                values = [row.get(name) if isinstance(row, dict) else None for row in samples]
                if all(isinstance(v, str | bytes | FileBlob | RowBlob | None) for v in values):
                    assert cells(columns[name]) == [stored(dataset, value) for value in values]

    def test_a_pickled_copy_is_the_same_reader(self, reader: Reader) -> None:
        copy = pickle.loads(pickle.dumps(reader))
        assert copy.digest() == reader.digest()
        assert copy.shards == reader.shards
        assert every_row(copy) == every_row(reader)

    def test_threads_do_not_meet(self, reader: Reader) -> None:
        expected = every_row(reader)
        with ThreadPoolExecutor(4) as pool:
            for rows in pool.map(lambda _: every_row(reader), range(16)):
                assert rows == expected

    def test_a_forked_child_reads_the_same(self, reader: Reader) -> None:
        expected = every_row(reader)
        child = os.fork()
        if child == 0:
            os._exit(0 if every_row(reader) == expected else 1)
        assert os.waitpid(child, 0)[1] == 0
