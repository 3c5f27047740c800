"""The Lance reader: the contract, the known failures, files of the real writer, old and new."""

import os
import pickle
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lance.blob import Blob, blob_array, blob_field

from tests.contracts.reader import ReaderContract, every_row
from tests.fixtures.lancerows import STRUCT, ids, image, struct, table, written
from zephon_mm.errors import ConfigError, DatasetError, SampleError
from zephon_mm.io import Dataset
from zephon_mm.readers import lancesource
from zephon_mm.readers.lance import LanceReader
from zephon_mm.records import RowBlob
from zephon_mm.work import StaticMixtureWorkSource

FIXTURES = Path(__file__).parents[1] / "fixtures" / "lance"


def read_bytes(reader: LanceReader) -> int:
    """How many bytes the reader's dataset has read since the last call."""
    return int(lancesource._dataset(reader._source).io_stats_incremental().read_bytes)


class TestContract(ReaderContract):
    @pytest.fixture
    def reader(self, tmp_path: Path) -> LanceReader:
        return LanceReader(written(tmp_path / "any name", table()))


class TestContractWithDeletedRows(ReaderContract):
    @pytest.fixture
    def reader(self) -> LanceReader:
        return LanceReader(FIXTURES / "captions", version="clean")


class TestContractOfBlobs(ReaderContract):
    @pytest.fixture(params=["blobs_v1", "blobs_v2"])
    def reader(self, request: pytest.FixtureRequest) -> LanceReader:
        return LanceReader(FIXTURES / request.param)


def test_a_folder_of_any_name_is_recognised_and_odd_paths_are_not(tmp_path: Path) -> None:
    for name in ("captions", "blobs_v1", "blobs_v2"):
        assert LanceReader.detect(FIXTURES / name)
    (tmp_path / "_versions").mkdir()
    assert not LanceReader.detect(tmp_path)
    (tmp_path / "_versions" / "1.manifest").write_bytes(b"LA")
    assert not LanceReader.detect(tmp_path)
    for odd in (FIXTURES, __file__, tmp_path / "no", "nul\0", [], [FIXTURES / "captions"], ""):
        assert not LanceReader.detect(odd)
    assert LanceReader.detect("s3://bucket/a.lance/")
    assert not LanceReader.detect("s3://bucket/a")
    found = Dataset.from_path("d", FIXTURES / "captions", cache_dir=tmp_path)
    assert (found.fmt, len(found)) == ("lance", 9)


def test_values_come_back_as_stored_and_images_as_blobs(tmp_path: Path) -> None:
    reader = LanceReader(written(tmp_path / "d", table()))
    assert [shard.name for shard in reader.shards] == ["fragment-0", "fragment-1", "fragment-2"]
    rows = reader.read(0, range(4))
    assert rows[3] == {
        "id": "key 3",
        "image": RowBlob(0, 3, "image"),
        "large": RowBlob(0, 3, "large"),
        "hf": RowBlob(0, 3, "hf"),
        "images": [RowBlob(0, 3, "images.0"), RowBlob(0, 3, "images.1")],
        "hfs": [RowBlob(0, 3, "hfs.0"), RowBlob(0, 3, "hfs.1")],
        "texts": ["b"],
        "text": "caption 3 é",
        "size": 3,
        "__key__": "key 3",
    }
    for name in ("images", "hfs"):
        assert [row[name] for row in rows][:2] == [None, []]
        assert [item is None for item in rows[2][name]] == [False, True, False]
        assert reader.fetch(rows[2][name][2]) == image(2, 2)
    assert rows[0]["text"] is None
    assert [reader.fetch(rows[3][name]) for name in ("image", "large", "hf")] == [
        image(3),
        image(3, 7),
        image(3),
    ]


@pytest.mark.parametrize("name", ["blobs_v1", "blobs_v2"])
def test_a_null_blob_is_none_and_an_empty_one_is_empty(name: str) -> None:
    reader = LanceReader(FIXTURES / name)
    assert ids(reader, "jpg")[2:4] == [None, RowBlob(1, 0, "jpg")]
    assert reader.fetch(RowBlob(1, 0, "jpg")) == b""
    assert [row["__key__"] for row in every_row(reader)] == [f"k{row}" for row in range(6)]


def test_a_null_image_is_told_when_it_is_fetched(tmp_path: Path) -> None:
    null = pa.table(
        {"image": pa.array([None, b""], pa.binary()), "hf": pa.array([None, {}], STRUCT)}
    )
    reader = LanceReader(written(tmp_path / "d", null))
    assert reader.fetch(RowBlob(0, 1, "image")) == b""
    for where in (RowBlob(0, 0, "image"), RowBlob(0, 0, "hf"), RowBlob(0, 1, "hf")):
        with pytest.raises(SampleError, match=rf"no_image.* fragment-0/{where.row}, {where.field}"):
            reader.fetch(where)


def test_a_null_struct_is_none_where_its_path_tells(tmp_path: Path) -> None:
    rows = [{"bytes": b"a", "path": "a.png"}, None, {"bytes": b"b"}, {"bytes": b""}]
    path = written(tmp_path / "d", pa.table({"hf": pa.array(rows, STRUCT), "text": [*"abcd"]}))
    reader = LanceReader(path)
    found = [row["hf"] for row in reader.read(0, [3, 1, 0, 1, 2])]
    assert [hf if hf is None else reader.fetch(hf) for hf in found] == [b"", None, b"a", None, b"b"]


def test_reading_all_fields_loads_no_payload(tmp_path: Path) -> None:
    payloads = [os.urandom(50_000) for _ in range(40)]
    rows = {
        "text": ["a caption"] * 40,
        "image": payloads,
        "hf": pa.array([{"bytes": data, "path": "x"} for data in payloads], STRUCT),
        "hfs": pa.array([[{"bytes": data, "path": "x"}] for data in payloads], pa.list_(STRUCT)),
    }
    blobs = pa.table([blob_array(payloads)], schema=pa.schema([blob_field("jpg")]))
    for number, stored in enumerate((pa.table(rows), blobs)):
        reader = LanceReader(
            written(tmp_path / str(number), stored, per_file=100, data_storage_version="2.2")
        )
        read_bytes(reader)
        (first, *_) = reader.read(0, range(40))
        assert read_bytes(reader) < 50_000
        for field, blob in first.items():
            if isinstance(blob, RowBlob):
                assert reader.fetch(blob) == payloads[0]
                assert read_bytes(reader) < 150_000, field


@lru_cache
def shared(folder: Path) -> tuple[LanceReader, list[Any]]:
    """One dataset with deleted rows for all examples, and its live rows, read the slow way."""
    path = written(folder / "d", table(60), per_file=25)
    dataset = lance.dataset(str(path))
    dataset.delete("size % 7 = 3")
    return LanceReader(path), lance.dataset(str(path)).to_table().to_pylist()


def payload(reader: LanceReader, value: Any) -> Any:
    if isinstance(value, list):
        return [payload(reader, item) for item in value]
    return reader.fetch(value) if isinstance(value, RowBlob) else value


def plain(value: Any) -> Any:
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value["bytes"] if isinstance(value, dict) else value


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_live_rows_in_any_order_are_those_of_a_whole_scan(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    reader, expected = shared(tmp_path_factory.getbasetemp())
    shard = data.draw(st.integers(0, 2))
    size = reader.shards[shard].num_rows
    rows = data.draw(st.lists(st.integers(0, size - 1), max_size=12))
    fields = data.draw(st.lists(st.sampled_from(list(expected[0])), unique=True))
    start = sum(info.num_rows for info in reader.shards[:shard])
    for row, sample in zip(rows, reader.read(shard, rows, fields), strict=True):
        assert isinstance(sample, dict)
        whole = expected[start + row]
        assert sample.pop("__key__") == whole["id"]
        found = {name: payload(reader, value) for name, value in sample.items()}
        assert found == {name: plain(whole[name]) for name in fields}


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_columns_hold_the_stored_bytes_row_after_row(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    reader, _ = shared(tmp_path_factory.getbasetemp())
    rows = data.draw(st.lists(st.integers(0, reader.shards[1].num_rows - 1), max_size=12))
    fields = ["image", "hf", "text", "large", "id"]
    columns = reader.columns(1, np.array(rows, dtype=np.int64), fields)
    samples = reader.read(1, rows, fields)
    for name, column in columns.items():
        starts = [0, *column.ends.tolist()][: len(rows)]
        spans = zip(starts, column.ends.tolist(), column.valid.tolist(), strict=True)
        found = [column.data[i:j].tobytes() if valid else None for i, j, valid in spans]
        values = [payload(reader, sample[name]) for sample in samples]
        assert found == [
            value if value is None or isinstance(value, bytes) else str(value).encode()
            for value in values
        ]


@pytest.mark.parametrize("name", ["blobs_v1", "blobs_v2"])
def test_columns_of_blobs_hold_their_payloads(name: str) -> None:
    reader = LanceReader(FIXTURES / name)
    column = reader.columns(0, np.array([2, 1, 0]), ["jpg"])["jpg"]
    assert column.valid.tolist() == [False, True, True]
    assert column.data[column.ends[0] : column.ends[1]].tobytes() == reader.fetch(
        RowBlob(0, 1, "jpg")
    )


def test_columns_leave_out_what_is_neither_text_nor_image_and_null_is_no_value(
    tmp_path: Path,
) -> None:
    reader = LanceReader(written(tmp_path / "d", table()))
    assert reader.columns(0, np.arange(3), ["texts", "images", "size", "none"]) == {}
    hf = pa.array([None, {"path": "x"}, struct(2)], STRUCT)
    reader = LanceReader(written(tmp_path / "nulls", pa.table({"hf": hf})))
    column = reader.columns(0, np.arange(3), ["hf"])["hf"]
    assert column.valid.tolist() == [False, False, True]
    assert column.data.tobytes() == image(2)


def test_the_version_is_pinned_whatever_is_written_later(tmp_path: Path) -> None:
    path = written(tmp_path / "d", table())
    reader = LanceReader(path)
    before = (reader.digest(), reader.kind, ids(reader))
    lance.dataset(str(path)).delete("size = 0")
    written(path, table(3), mode="append")
    for same in (reader, pickle.loads(pickle.dumps(reader)), LanceReader(path, version=1)):
        assert (same.digest(), same.kind, ids(same)) == before
    newest = LanceReader(path)
    assert newest.digest() != reader.digest()
    assert newest.kind == "lance-3"
    assert len(ids(newest)) == 12


def test_from_path_takes_the_version_of_the_data_or_of_a_schema_function(tmp_path: Path) -> None:
    def opened(**options: Any) -> Dataset:
        return Dataset.from_path("d", FIXTURES / "captions", cache_dir=tmp_path, **options)

    for version in (2, "clean"):
        dataset = opened(version=version)
        assert (len(dataset), dataset.reader.kind) == (8, "lance-2")
    assert opened(schema=lambda sample: None, version="mine").reader.kind == "lance-3"


def test_a_tag_is_a_version_and_the_digest_does_not_know_the_place(tmp_path: Path) -> None:
    reader = LanceReader(FIXTURES / "captions", version="clean")
    assert reader.kind == "lance-2"
    shutil.copytree(FIXTURES / "captions", tmp_path / "copy")
    assert LanceReader(tmp_path / "copy", version=2).digest() == reader.digest()
    for version in (99, "no such tag"):
        with pytest.raises(ConfigError, match="Check path and version"):
            LanceReader(FIXTURES / "captions", version=version)


def test_a_dataset_that_went_away_or_was_replaced_is_found_by_the_next_process(
    tmp_path: Path,
) -> None:
    path = written(tmp_path / "d", table())
    other = pickle.dumps(LanceReader(path))
    lancesource._dataset.cache_clear()  # as in another process
    shutil.rmtree(path)
    with pytest.raises(DatasetError, match=r"version 1 of .* removed .*found .*not found"):
        pickle.loads(other).read(0, [0])
    written(path, table())
    with pytest.raises(DatasetError, match=r"version 1 of .* was replaced .*found"):
        pickle.loads(other).read(0, [0])


def test_damage_is_found_at_the_start_and_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="cannot be opened as a Lance dataset"):
        LanceReader(tmp_path)
    with pytest.raises(ConfigError, match="one folder or URI"):
        LanceReader([tmp_path])  # type: ignore[arg-type]
    path = written(tmp_path / "d", table())
    file = sorted((path / "data").iterdir())[1]
    data = file.read_bytes()
    file.write_bytes(data[:-9])
    with pytest.raises(DatasetError, match=rf"{file.name} of fragment-. .*found {len(data) - 9}, "):
        LanceReader(path)
    file.unlink()
    with pytest.raises(DatasetError, match=rf"{file.name} .*found no file, expected {len(data)}"):
        LanceReader(path)
    manifest = next((path / "_versions").glob("*.manifest"))
    manifest.write_bytes(manifest.read_bytes()[:40])
    with pytest.raises(DatasetError, match="cannot be opened"):
        LanceReader(path)


def test_a_blob_outside_the_dataset_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    blobs = blob_array([Blob.from_uri(f"file://{tmp_path}/secret"), image(1)])
    path = written(
        tmp_path / "d",
        pa.table([blobs], schema=pa.schema([blob_field("jpg")])),
        data_storage_version="2.2",
        allow_external_blob_outside_bases=True,
    )
    reader = LanceReader(path)
    first, second = ids(reader, "jpg")
    with pytest.raises(SampleError, match=r"path_outside_root.*fragment-0, jpg points to file:"):
        reader.fetch(first)
    assert reader.columns(0, np.arange(2), ["jpg"]) == {}
    assert reader.columns(0, np.arange(1, 2), ["jpg"])["jpg"].data.tobytes() == image(1)
    assert reader.fetch(second) == image(1)


@pytest.mark.parametrize("stable", [False, True])
def test_lan_02_positions_count_live_rows(tmp_path: Path, stable: bool) -> None:
    """LAN-02, and LAN-04: nothing is taken by row id, so that no result is ever shorter."""
    rows = pa.table({"n": range(10), "image": [image(row) for row in range(10)]})
    path = written(tmp_path / "d", rows, per_file=10, enable_stable_row_ids=stable)
    lance.dataset(str(path)).delete("n in (3, 7)")
    reader = LanceReader(path)
    samples = reader.read(0, [2, 3, 6])
    assert [sample["n"] for sample in samples] == [2, 4, 8]
    assert [reader.fetch(sample["image"]) for sample in samples] == [image(2), image(4), image(8)]
    assert ids(reader, "n") == [0, 1, 2, 4, 5, 6, 8, 9]
    with pytest.raises(IndexError, match="rows 0 to 7"):
        reader.read(0, [8])


def test_lan_04_a_deleted_row_leaves_no_gap_and_shifts_no_blob() -> None:
    """LAN-04."""
    reader = LanceReader(FIXTURES / "captions", version="clean")
    assert ids(reader) == [0, 1, 2, 4, 5, 6, 8, 9]
    for row in every_row(reader):
        assert reader.fetch(row["image"]) == b"\xff\xd8\xff%d" % row["id"]


def test_lan_06_the_order_of_a_pass_is_a_function_of_seed_and_pass(tmp_path: Path) -> None:
    """LAN-06: three passes over three fragments."""
    dataset = Dataset("d", LanceReader(written(tmp_path / "d", table(12))))

    def passes(seed: int) -> list[list[Any]]:
        source = StaticMixtureWorkSource([dataset], {"d": 1.0}, seed=seed)
        chunk, _ = source.next(source.start(0, 1), 36)
        assert chunk is not None
        refs = chunk.refs[:, 1:].tolist()
        return [refs[at : at + 12] for at in (0, 12, 24)]

    first = passes(1)
    assert first == passes(1)
    assert first != passes(2)
    assert first[0] != first[1] != first[2] != first[0]
    assert all(sorted(one) == sorted(first[0]) for one in first)


def test_lan_07_a_pass_in_order_reads_each_byte_about_once(tmp_path: Path) -> None:
    """LAN-07: what is counted is bytes read, against the library's own scan."""
    noise = np.random.default_rng(7)
    rows = {"data": [noise.bytes(4096) for _ in range(5000)]}
    reader = LanceReader(written(tmp_path / "d", pa.table(rows), per_file=2500))
    read_bytes(reader)
    scanned = sum(batch.num_rows for batch in lancesource._dataset(reader._source).to_batches())
    once = read_bytes(reader)
    for shard in range(2):
        for at in range(0, 2500, 125):
            taken = reader.columns(shard, np.arange(at, at + 125), ["data"])
            scanned -= len(taken["data"].ends)
            assert taken["data"].data.size == 125 * 4096
    assert scanned == 0
    assert read_bytes(reader) < 1.1 * once


def test_a_fragment_whose_bytes_are_damaged_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "d", table())
    reader = LanceReader(path)
    (file,) = lance.dataset(str(path)).get_fragment(1).data_files()
    stored = path / "data" / file.path
    stored.write_bytes(bytes(stored.stat().st_size))
    with pytest.raises(DatasetError, match=r"/d, fragment-1 is damaged: .*invalid magic"):
        reader.read(1, [0], ["text"])
    assert len(reader.read(0, [0], ["text"])) == 1


def test_a_folder_in_a_store_is_told_to_name_its_format(tmp_path: Path) -> None:
    mirrored = tmp_path / "zephon_mirrors" / "x" / "d"
    (mirrored / "_versions").mkdir(parents=True)
    (mirrored / "_versions" / "1.manifest").touch()  # as `stores` lays it out
    with pytest.raises(DatasetError, match="fmt='lance'"):
        LanceReader.detect(mirrored)
