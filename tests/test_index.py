"""A table against a dict: what was added is found, whatever was written and merged in between."""

import itertools
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zephon_mm import index as module
from zephon_mm.errors import ConfigError
from zephon_mm.index import Index, Table
from zephon_mm.packed import AnyRecord, IndexedRecord, extents_of
from zephon_mm.records import FileBlob, ImageSlot, Record, SampleRef, ShardInfo, Skip

SHARDS = [ShardInfo("a", 5, 50), ShardInfo("empty", 0, 3), ShardInfo("b", 9, 90)]
REFS = [(0, shard, row) for shard, info in enumerate(SHARDS) for row in range(info.num_rows)]


def result_of(ref: tuple[int, int, int]) -> Record | Skip:
    """Return a result that is a function of the row, and of each kind for some rows."""
    where, number = SampleRef(*ref), 10 * ref[1] + ref[2]
    if number % 7 == 3:
        return Skip(where, "broken", f"row {number} is broken", True)
    if number % 7 == 4:
        return Skip(where, "filtered", "dropped by the user", False)
    images = tuple(
        ImageSlot(FileBlob("/x", n, 1), 9 * n + 1, 4 + n, (3, n + 1, 5)[: 2 + n % 2])
        for n in range(number % 4)
    )
    size = 60 + number
    uncut = tuple((i.start - 1, i.start + i.num_tokens + 1) for i in images)
    runs = tuple((n, n + 2) for n in range(40, 40 + 5 * (number % 3), 5))
    return Record(where, size, np.zeros(size, np.int32), runs, images, uncut, 7)


def comparable(item: AnyRecord | Skip | None) -> Any:
    if isinstance(item, Record | IndexedRecord):
        shapes = [(image.start, image.num_tokens, image.shape) for image in item.images]
        runs = item.trained_runs, item.uncut
        return item.ref, item.num_tokens, item.num_images, shapes, *runs, extents_of(item)
    return item


def lookup(table: Table, refs: list[tuple[int, int, int]]) -> list[Any]:
    block = Index([table], fill=False).lookup(np.array(refs, np.int64).reshape(-1, 3))
    return [comparable(item) for item in block]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.sampled_from(REFS), min_size=1, max_size=9)),
        st.tuples(st.just("save"), st.just([])),
        st.tuples(st.just("other adds"), st.lists(st.sampled_from(REFS), min_size=1, max_size=9)),
        st.tuples(st.just("refresh"), st.just([])),
        st.tuples(st.just("open"), st.just([])),
    ),
    max_size=12,
)


@settings(max_examples=60)
@given(steps=steps)
def test_what_was_added_is_found_after_any_history(
    steps: list[tuple[str, list[Any]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("index")
    table, other = Table(folder, SHARDS), Table(folder, SHARDS)
    added: set[Any] = set()
    for step, refs in steps:
        writer = other if step == "other adds" else table
        for ref in refs:
            writer.add(result_of(ref))
        added |= set(refs)
        if step == "other adds":
            other.save()
        elif step == "save":
            table.save()
        elif step == "refresh":
            table.refresh()
        elif step == "open":
            table.save()
            table = Table(folder, SHARDS)
    table.save()
    table.refresh()
    for found in (table, Table(folder, SHARDS), Table(folder, SHARDS, write=False)):
        expected = [comparable(result_of(ref)) if ref in added else None for ref in REFS]
        assert lookup(found, REFS) == expected
        assert lookup(found, REFS[::-1]) == expected[::-1]
        assert found.num_known == len(added)
        shards = range(len(SHARDS))
        unknown = {(0, shard, row) for shard in shards for row in found.unknown(shard).tolist()}
        assert unknown == set(REFS) - added


def test_rows_follow_their_shard_and_a_changed_shard_is_unknown(tmp_path: Path) -> None:
    table = Table(tmp_path, SHARDS)
    for ref in REFS:
        table.add(result_of(ref))
    table.save()
    moved = [ShardInfo("new", 4, 40), SHARDS[2], ShardInfo("a", 5, 51)]  # "a" has another size
    found = Table(tmp_path, moved)
    b_rows = [(0, 1, row) for row in range(9)]
    expected = [result_of((0, 2, row)) for row in range(9)]
    placed = [item._replace(ref=SampleRef(0, 1, item.ref.row)) for item in expected]
    assert lookup(found, b_rows) == [comparable(item) for item in placed]
    assert lookup(found, [(0, 0, row) for row in range(4)]) == [None] * 4
    assert lookup(found, [(0, 2, row) for row in range(5)]) == [None] * 5


def test_files_are_few_and_a_kill_loses_only_what_was_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SAVED_ROWS", 2)
    shards = [ShardInfo("a", 301, 1)]
    table = Table(tmp_path, shards)
    for row in range(301):
        table.add(result_of((0, 0, row)))
    assert len(list(tmp_path.iterdir())) <= 9  # each is twice as large as those after it
    assert Table(tmp_path, shards).num_known == 300


def test_a_damaged_or_strange_file_is_the_same_as_none(tmp_path: Path) -> None:
    table = Table(tmp_path, SHARDS)
    for ref in REFS[:6]:
        table.add(result_of(ref))
    table.save()
    (file,) = tmp_path.iterdir()
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    (tmp_path / "cut.rows").write_bytes(bytes(data[:40]))
    (tmp_path / "README").write_text("not an index")
    found = Table(tmp_path, SHARDS)
    assert lookup(found, REFS) == [None] * len(REFS)
    for ref in REFS:
        found.add(result_of(ref))
    found.save()
    assert Table(tmp_path, SHARDS).num_known == len(REFS)


def test_a_folder_that_cannot_be_written_is_a_warning_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    table = Table(tmp_path / "file" / "folder", SHARDS)
    for ref in REFS:
        table.add(result_of(ref))
    with pytest.warns(UserWarning, match=r"cannot keep an index.*cache_dir"):
        table.save()
    assert lookup(table, REFS) == [comparable(result_of(ref)) for ref in REFS]
    table.add(result_of(REFS[0]))
    table.save()


def test_many_writers_at_once_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAVED_ROWS", 3)
    shards = [ShardInfo("a", 400, 1)]

    def fill(offset: int) -> None:
        table = Table(tmp_path, shards)
        for row in range(offset, 400, 4):
            table.add(result_of((0, 0, row)))
            if row % 5 == 0:
                table.refresh()
        table.save()

    threads = [threading.Thread(target=fill, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    table = Table(tmp_path, shards)
    assert table.num_known == 400
    assert len(list(tmp_path.iterdir())) == 1


def test_an_index_looks_each_dataset_up_in_its_own_table(tmp_path: Path) -> None:
    tables = [Table(tmp_path / "0", SHARDS), None, Table(tmp_path / "2", SHARDS)]
    index = Index(tables, fill=True)
    some = [ref for ref in REFS if ref[2] % 2]
    index.add([result_of((d, s, r)) for d in range(3) for _, s, r in some])
    index.save()
    refs = [(d, s, r) for (_, s, r), d in zip(REFS * 3, itertools.cycle(range(3)), strict=False)]
    found = [comparable(item) for item in index.lookup(np.array(refs, np.int64))]
    assert found == [
        comparable(result_of(ref)) if ref[0] != 1 and ref[2] % 2 else None for ref in refs
    ]
    assert not index.complete
    index = Index(tables[:1], fill=True)
    index.add([result_of(ref) for ref in REFS])
    index.save()
    assert index.complete
    tables[0].clear()  # type: ignore[union-attr]
    assert not index.complete
    assert not list((tmp_path / "0").iterdir())


def test_an_index_that_is_only_read_takes_nothing_up(tmp_path: Path) -> None:
    index = Index([Table(tmp_path, SHARDS, write=False)], fill=False)
    index.add([result_of(ref) for ref in REFS])
    index.save()
    assert not list(tmp_path.iterdir())
    shutil.rmtree(tmp_path)
    assert Table(tmp_path, SHARDS, write=False).num_known == 0


def test_a_record_out_of_an_index_says_where_its_tokens_are(tmp_path: Path) -> None:
    table = Table(tmp_path, SHARDS)
    table.add(result_of(REFS[0]))
    table.save()
    (record,) = Index([table], fill=False).lookup(np.array(REFS[:1], np.int64))
    assert isinstance(record, IndexedRecord)
    with pytest.raises(ConfigError, match=r"options\(index='off'\)"):
        _ = record.token_ids
