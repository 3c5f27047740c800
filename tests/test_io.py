"""Datasets: detection by content, the registry, and the bytes of blobs."""

import os
import pickle
import threading
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import zephon_mm.io as io_module
from zephon_mm.errors import ConfigError, DatasetError
from zephon_mm.io import Dataset, index_dir, read_blob, reader_classes
from zephon_mm.readers.jsonl import JsonlReader
from zephon_mm.readers.webdataset import WebDatasetReader
from zephon_mm.records import FileBlob

CASES = Path(__file__).parent / "fixtures" / "cases"


def test_formats_are_found_by_content_whatever_the_suffix(tmp_path: Path) -> None:
    (tmp_path / "tar.dat").write_bytes((CASES / "TAR-04" / "shard-000000.tar").read_bytes())
    (tmp_path / "rows.dat").write_text('{"id": 1}\n')
    for path, fmt in [
        (tmp_path / "tar.dat", "webdataset"),
        (tmp_path / "rows.dat", "jsonl"),
        (CASES / "TAR-04", "webdataset"),
        ([CASES / "JSL-01" / "bom.jsonl"], "jsonl"),
    ]:
        dataset = Dataset.from_path("d", path, cache_dir=tmp_path / "cache")
        assert dataset.fmt == fmt
        assert isinstance(dataset.reader, reader_classes(fmt)[fmt])


def test_none_and_several_formats_are_errors_that_list_them(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(ConfigError, match=r"none of the known formats.*jsonl.*webdataset.*tar"):
        Dataset.from_path("d", tmp_path / "a.txt")
    (tmp_path / "a.jsonl").write_text('{"id": 1}\n')
    (tmp_path / "a.tar").write_bytes((CASES / "TAR-04" / "shard-000000.tar").read_bytes())
    with pytest.raises(ConfigError, match=r"fits jsonl and webdataset\. Choose one with fmt="):
        Dataset.from_path("d", tmp_path)
    assert len(Dataset.from_path("d", tmp_path, "jsonl", cache_dir=tmp_path / "cache")) == 1
    with pytest.raises(ConfigError, match=r"fmt='tar' is not one of .*jsonl.*webdataset"):
        Dataset.from_path("d", tmp_path, "tar")


def test_what_is_not_there_or_empty_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="nowhere does not exist"):
        Dataset.from_path("d", tmp_path / "nowhere")
    with pytest.raises(DatasetError, match=r"shard-00002\.tar"):
        Dataset.from_path("d", CASES / "TAR-14" / "shard-{00000..00003}.tar")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DatasetError, match=r"'d' is empty: .*empty\.jsonl"):
        Dataset.from_path("d", tmp_path / "empty.jsonl", cache_dir=tmp_path / "cache")
    with pytest.raises(ConfigError, match=r"path is \[\]"):
        Dataset.from_path("d", [])


@pytest.mark.parametrize("name", ["", "a/b"])
def test_a_bad_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="nonempty, without '/'"):
        Dataset(name, JsonlReader(CASES / "JSL-01" / "bom.jsonl"))


def test_options_reach_the_reader_and_unknown_ones_are_errors(tmp_path: Path) -> None:
    path, cache = CASES / "TAR-02", tmp_path / "cache"
    assert len(Dataset.from_path("d", path, cache_dir=cache, split="last_dot")) == 5
    with pytest.raises(ConfigError, match="splitt"):
        Dataset.from_path("d", path, cache_dir=cache, splitt="last_dot")


def test_a_dataset_counts_names_and_pickles(tmp_path: Path) -> None:
    dataset = Dataset.from_path("caps", CASES / "TAR-04", schema="x", cache_dir=tmp_path)
    copy = pickle.loads(pickle.dumps(dataset))
    assert len(dataset) == len(copy) == 6
    assert copy.digest() == dataset.digest() == WebDatasetReader(CASES / "TAR-04").digest()
    assert copy.row_name(1, 2) == "caps/shard-000001.tar/2"
    places = [(s, r) for s, info in enumerate(copy.shards) for r in range(info.num_rows)]
    keys = [copy.key(*place) for place in places]
    assert keys == [f"caps/{number}" for number in range(len(copy))]
    assert [copy.locate(key) for key in keys] == places
    for key in ("caps/9999", "cats/0", "caps/x"):
        with pytest.raises(KeyError, match="none of the"):
            copy.locate(key)
    assert (copy.schema, copy.missing, copy.fmt) == ("x", "skip", "webdataset")


def test_a_broken_reader_matters_only_when_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = EntryPoint("broken", "no_such_package:Reader", "zephon_mm.readers")
    working = io_module.entries_of(io_module._GROUP)
    monkeypatch.setattr(io_module, "entries_of", lambda group: {"broken": broken, **working})
    assert len(Dataset.from_path("d", CASES / "TAR-04", cache_dir=tmp_path)) == 6
    assert list(reader_classes("jsonl")) == ["jsonl"]
    with pytest.raises(ConfigError, match=r"'broken' = no_such_package:Reader cannot be imported"):
        reader_classes()
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(ConfigError, match=r"none of the known.*Also: the reader 'broken'"):
        Dataset.from_path("d", tmp_path / "a.txt")


def test_an_index_folder_that_cannot_be_made_warns(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="cannot be written"):
        assert index_dir(tmp_path / "file" / "cache") is None
    assert index_dir(tmp_path / "new") == tmp_path / "new"


@pytest.fixture
def dataset() -> Dataset:
    return Dataset("d", JsonlReader(CASES / "JSL-01" / "bom.jsonl"))


def test_a_region_is_read_whole_or_in_part_or_refused(dataset: Dataset, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"0123456789")
    blob = FileBlob(str(path), 2, 5)
    assert read_blob(dataset, blob) == b"23456"
    assert read_blob(dataset, blob, 3) == b"234"
    assert read_blob(dataset, blob, 0) == b""
    assert read_blob(dataset, blob, 99) == b"23456"
    assert read_blob(dataset, FileBlob(str(path), 0, 20), 4) == b"0123"
    with pytest.raises(DatasetError, match=r"f gave 8 of 20 bytes at 2: .* rebuild the index"):
        read_blob(dataset, FileBlob(str(path), 2, 20))
    with pytest.raises(FileNotFoundError):
        read_blob(dataset, FileBlob(str(tmp_path / "none"), 0, 1))


def test_many_threads_and_files_share_few_descriptors(dataset: Dataset, tmp_path: Path) -> None:
    blobs = []
    for i in range(150):
        (tmp_path / str(i)).write_bytes(b"%03d" % i)
        blobs.append(FileBlob(str(tmp_path / str(i)), 0, 3))
    wrong: list[int] = []

    def read(start: int) -> None:
        for step in range(600):
            i = (start * 37 + step * 7) % 150
            if read_blob(dataset, blobs[i]) != b"%03d" % i:
                wrong.append(i)

    threads = [threading.Thread(target=read, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    open_here = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert sum(path.startswith(str(tmp_path)) for path in open_here) <= 64


def test_a_forked_child_reads_its_parents_files(dataset: Dataset, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    blob = FileBlob(str(tmp_path / "f"), 0, 3)
    assert read_blob(dataset, blob) == b"abc"
    if (child := os.fork()) == 0:
        os._exit(0 if read_blob(dataset, blob) == b"abc" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert read_blob(dataset, blob) == b"abc"


def test_a_file_that_was_replaced_is_read_anew_by_a_new_dataset(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"image": "a.png", "text": "x"}\n')
    for data in (b"\x89PNG one", b"\x89PNG two"):  # of one size
        (tmp_path / "new").write_bytes(data)
        (tmp_path / "new").replace(tmp_path / "a.png")
        dataset = Dataset.from_path("d", tmp_path / "rows.jsonl", cache_dir=tmp_path)
        (row,) = dataset.reader.read(0, [0])
        assert read_blob(dataset, row["image"]) == data


def test_an_empty_path_is_not_this_folder() -> None:
    with pytest.raises(ConfigError, match="path is ''"):
        Dataset.from_path("d", "")
