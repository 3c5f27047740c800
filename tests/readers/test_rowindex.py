"""The row index: caching, damage, pickling, many builders at once."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from zephon_mm.errors import DatasetError
from zephon_mm.readers.files import ShardFile, find_shards
from zephon_mm.readers.rowindex import Part, RowIndex


def index_bytes(file: ShardFile) -> Part:
    """A format whose rows are bytes; notes every scan in a file beside the shard."""
    data = Path(file.path).read_bytes()
    with open(file.path + ".scans", "a") as log:
        log.write("x")
    return Part(len(data), {"name": file.name}, {"code": np.frombuffer(data, np.uint8)})


def open_index(folder: Path, cache: Path | None) -> RowIndex:
    return RowIndex(folder, (".b",), kind="bytes", index_shard=index_bytes, cache_dir=cache)


def scans(folder: Path) -> list[int]:
    return [len(path.read_text()) for path in sorted(folder.glob("*.scans"))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.mkdir()
    for i in range(3):
        (path / f"{i}.b").write_bytes(bytes(range(i, 10)))
    return path


def codes(index: RowIndex) -> list[list[int]]:
    return [index.part(i).arrays["code"].tolist() for i in range(len(index.shards))]


def test_a_cached_index_is_equal_and_scans_nothing(folder: Path, tmp_path: Path) -> None:
    first = open_index(folder, tmp_path / "cache")
    again = open_index(folder, tmp_path / "cache")
    assert codes(first) == codes(again) == codes(open_index(folder, None))
    assert first.shards == again.shards
    assert again.part(1).meta == {"name": "1.b"}
    assert scans(folder) == [2, 2, 2]  # once for the cache, once for the index in memory


# ZEP-03.
def test_only_a_changed_or_new_shard_is_scanned_again(folder: Path, tmp_path: Path) -> None:
    open_index(folder, tmp_path / "cache")
    (folder / "1.b").write_bytes(b"new")
    (folder / "3.b").write_bytes(b"more")
    index = open_index(folder, tmp_path / "cache")
    assert codes(index)[1] == list(b"new")
    assert codes(index)[3] == list(b"more")
    assert scans(folder) == [1, 2, 1, 1]
    stat = (folder / "2.b").stat()
    os.utime(folder / "2.b", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    touched = open_index(folder, tmp_path / "cache")
    assert scans(folder) == [1, 2, 2, 1]
    assert touched.digest() == index.digest()


@pytest.mark.parametrize("damage", ["empty", "cut", "flip", "text"])
def test_a_damaged_cache_is_the_same_as_none(folder: Path, tmp_path: Path, damage: str) -> None:
    expected = codes(open_index(folder, tmp_path / "cache"))
    (cache,) = (tmp_path / "cache").iterdir()
    data = cache.read_bytes()
    flipped = data[:-70] + bytes([data[-70] ^ 1]) + data[-69:]
    cache.write_bytes({"empty": b"", "cut": data[:-9], "flip": flipped, "text": b"{}" * 99}[damage])
    assert codes(open_index(folder, tmp_path / "cache")) == expected
    assert scans(folder) == [2, 2, 2]
    open_index(folder, tmp_path / "cache")
    assert scans(folder) == [2, 2, 2]


# PRF-01.
def test_a_pickle_of_a_cached_index_holds_no_rows(folder: Path, tmp_path: Path) -> None:
    (folder / "big.b").write_bytes(bytes(100_000))
    index = open_index(folder, tmp_path / "cache")
    data = pickle.dumps(index)
    assert len(data) < 2_000
    assert codes(pickle.loads(data)) == codes(index)
    assert codes(pickle.loads(pickle.dumps(open_index(folder, None)))) == codes(index)


def test_unpickling_survives_a_lost_cache_but_not_changed_data(
    folder: Path, tmp_path: Path
) -> None:
    index = open_index(folder, tmp_path / "cache")
    data = pickle.dumps(index)
    (cache,) = (tmp_path / "cache").iterdir()
    cache.unlink()
    assert codes(pickle.loads(data)) == codes(index)
    (folder / "0.b").write_bytes(b"other")
    cache.unlink()
    with pytest.raises(DatasetError, match="changed during the run"):
        pickle.loads(data)


def test_a_folder_that_cannot_be_written_warns_and_works(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.warns(UserWarning, match="cannot keep an index"):
        index = open_index(folder, tmp_path / "file" / "cache")
    assert codes(index) == codes(open_index(folder, None))


def test_four_processes_may_build_one_cache_at_once(folder: Path, tmp_path: Path) -> None:
    expected = codes(open_index(folder, None))
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            index = open_index(folder, tmp_path / "cache")
            copy = pickle.loads(pickle.dumps(index))
            os._exit(0 if codes(index) == codes(copy) == expected else 1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".index"]


def test_shards_of_a_folder_are_sorted_and_named_by_their_place(tmp_path: Path) -> None:
    for name in ("b/1.b", "a/1.b", "0.b", "._0.b", "note.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    assert [shard.name for shard in find_shards(tmp_path, (".b",))] == ["0.b", "a/1.b", "b/1.b"]
    listed = find_shards([tmp_path / "b/1.b", tmp_path / "a/1.b"], (".b",))
    assert [shard.name for shard in listed] == ["b/1.b", "a/1.b"]
    assert [s.name for s in find_shards(str(tmp_path / "?" / "*.b"), (".b",))] == ["a/1.b", "b/1.b"]
    with pytest.raises(DatasetError, match="twice"):
        find_shards([tmp_path / "0.b", tmp_path / "0.b"], (".b",))
    with pytest.raises(DatasetError, match=r"holds no \.c file"):
        find_shards(tmp_path, (".c",))
