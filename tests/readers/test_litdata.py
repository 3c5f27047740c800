"""The LitData reader: the contract, what the real library wrote, damage, the known failures."""

import hashlib
import io
import json
import multiprocessing
import os
import shutil
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.contracts.reader import ReaderContract, every_row
from tests.fixtures.columns import cells
from zephon_mm.errors import ConfigError, DatasetError, SampleError
from zephon_mm.io import Dataset, read_blob
from zephon_mm.processors.documents import schema_of, to_document
from zephon_mm.readers.litdata import LitDataReader
from zephon_mm.readers.litvalues import decode
from zephon_mm.records import FileBlob, RowBlob, Text

FIXTURES = Path(__file__).parents[1] / "fixtures"
WRITTEN = FIXTURES / "litdata"
CASES = FIXTURES / "cases"
FOLDERS = sorted(path.name for path in WRITTEN.iterdir() if path.name != "pickle")
PACKED = ("zstd_chunk", "zstd_batch", "arrow_zstd")


class TestPlain(ReaderContract):
    @pytest.fixture
    def reader(self, tmp_path: Path) -> LitDataReader:
        return LitDataReader(WRITTEN / "plain", cache_dir=tmp_path)


class TestPackedArrow(ReaderContract):
    @pytest.fixture
    def reader(self, tmp_path: Path) -> LitDataReader:
        return LitDataReader(WRITTEN / "arrow_zstd", cache_dir=tmp_path)


class TestPackedFrames(ReaderContract):
    @pytest.fixture
    def reader(self, tmp_path: Path) -> LitDataReader:
        return LitDataReader(WRITTEN / "zstd_batch", cache_dir=tmp_path)


def opened(path: Path, tmp_path: Path, **options: Any) -> LitDataReader:
    return LitDataReader(path, cache_dir=tmp_path / "cache", **options)


def copied(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(WRITTEN / name, tmp_path / name))


def plain(dataset: Dataset, value: Any) -> Any:
    """What `expected.json` has for a value."""
    if isinstance(value, FileBlob | RowBlob):
        data = read_blob(dataset, value)
        if data.startswith(b"\x89PNG"):
            pixels = Image.open(io.BytesIO(data)).convert("RGB").tobytes()
            return {"pixels": hashlib.sha256(pixels).hexdigest()}
        return {"sha256": hashlib.sha256(data).hexdigest()}
    if isinstance(value, np.ndarray):
        return {"array": value.tolist()}
    if isinstance(value, dict):
        return {name: plain(dataset, item) for name, item in value.items() if name != "__key__"}
    return [plain(dataset, item) for item in value] if isinstance(value, list) else value


def failing(make: Any) -> str:
    with pytest.raises(DatasetError) as caught:
        make()
    return str(caught.value)


@pytest.mark.parametrize("name", FOLDERS)
def test_what_litdata_wrote_is_what_comes_back(name: str, tmp_path: Path) -> None:
    dataset = Dataset("data", opened(WRITTEN / name, tmp_path))
    rows = [plain(dataset, row) for row in every_row(dataset.reader)]
    assert rows == json.loads((WRITTEN / name / "expected.json").read_text())


def stored_bytes(dataset: Dataset, value: Any) -> bytes | None:
    if isinstance(value, FileBlob | RowBlob):
        return read_blob(dataset, value)
    return value.encode() if isinstance(value, str) else None


@pytest.mark.parametrize("name", FOLDERS)
def test_columns_hold_what_read_and_read_blob_give(name: str, tmp_path: Path) -> None:
    reader = opened(WRITTEN / name, tmp_path)
    dataset = Dataset("data", reader)
    for shard, info in enumerate(reader.shards):
        rows = np.array([*reversed(range(info.num_rows)), 0])
        samples: list[Any] = reader.read(shard, rows.tolist())
        fields = [field for field in samples[0] if field != "__key__"]
        expected = {f: [stored_bytes(dataset, sample[f]) for sample in samples] for f in fields}
        columns = reader.columns(shard, rows, [*fields, "absent"])
        assert set(columns) == {field for field in fields if any(expected[field])} - {"pil", "grey"}
        for field, column in columns.items():
            assert column.data.dtype == np.uint8
            assert (column.ends.dtype, column.valid.dtype) == (np.int64, np.bool_)
            assert cells(column) == expected[field]
        empty = reader.columns(shard, rows[:0], fields).values()
        assert all(column.ends.size == 0 for column in empty)


def test_a_sample_that_is_no_mapping_is_an_image_and_a_caption(tmp_path: Path) -> None:
    rows = opened(WRITTEN / "tuple", tmp_path).read(0, [1])
    assert set(rows[0]) == {"image", "1", "__key__"}
    assert set(opened(WRITTEN / "single", tmp_path).read(0, [1])[0]) == {"text", "__key__"}


@pytest.mark.parametrize("name", ["plain", "arrow", "zstd_batch"])
def test_an_image_with_a_caption_is_a_document(name: str, tmp_path: Path) -> None:
    dataset = Dataset("data", opened(WRITTEN / name, tmp_path))
    (row,) = dataset.reader.read(0, [2])
    image, text = to_document(row, schema_of(row)).segments
    assert text == Text("caption 2 é")
    assert read_blob(dataset, image.blob).startswith(b"\xff\xd8\xff")


def test_raw_pixels_and_packed_rows_are_fetched_others_are_regions(tmp_path: Path) -> None:
    (row,) = opened(WRITTEN / "kinds", tmp_path).read(0, [2])
    assert row["pil"] == RowBlob(0, 2, "pil")
    assert all(isinstance(blob, FileBlob) for blob in row["jpegs"])
    for name in PACKED:
        (row,) = opened(WRITTEN / name, tmp_path).read(0, [2])
        assert row["image"] == RowBlob(0, 2, "image")


def test_a_pickle_is_refused_unless_it_is_allowed(tmp_path: Path) -> None:
    (row,) = opened(WRITTEN / "pickle", tmp_path).read(0, [2])
    assert isinstance(row, SampleError)
    assert row.reason == "pickle_refused"
    assert "chunk-0-0.bin/2" in row.message
    assert "'object'" in row.message
    assert "allow_pickle=True" in row.message
    (row,) = opened(WRITTEN / "pickle", tmp_path).read(0, [2], ["image"])
    assert isinstance(row["image"], FileBlob)
    trusting = opened(WRITTEN / "pickle", tmp_path, allow_pickle=True)
    assert trusting.read(0, [2])[0]["object"] == complex(2)
    assert trusting.kind != opened(WRITTEN / "pickle", tmp_path).kind


def test_it_is_told_by_content(tmp_path: Path) -> None:
    assert Dataset.from_path("d", WRITTEN / "plain", cache_dir=tmp_path / "c").fmt == "litdata"
    assert LitDataReader.detect(WRITTEN / "plain" / "index.json")
    (tmp_path / "index.json").write_text('{"version": 2, "shards": []}')
    for path in (tmp_path, tmp_path / "nothing", WRITTEN / "plain" / "chunk-0-0.bin", [], "\0"):
        assert not LitDataReader.detect(path)  # type: ignore[arg-type]
    (tmp_path / "index.json").write_text(
        '{"chunks": [], "config": {"item_loader": "ParquetLoader"}}'
    )
    assert not LitDataReader.detect(tmp_path)


@pytest.mark.parametrize("name", ["plain", *PACKED])
def test_a_chunk_that_is_cut_is_an_error_that_names_it(name: str, tmp_path: Path) -> None:
    folder = copied(name, tmp_path)
    (chunk,) = folder.glob("chunk-0-1.*")
    whole = chunk.read_bytes()
    for size in (len(whole) - 1, len(whole) // 2, 7, 0):
        chunk.write_bytes(whole[:size])
        said = failing(lambda: every_row(opened(folder, tmp_path)))
        assert chunk.name in said
        assert "estore" in said


@pytest.mark.parametrize("name", ["plain", "kinds", "arrow", "tokens", *PACKED])
@settings(max_examples=20)
@given(place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_a_changed_byte_is_an_error_or_another_value(name: str, place: float, flip: int) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(shutil.copytree(WRITTEN / name, Path(temporary) / "data"))
        for chunk in folder.glob("*.bin"):
            data = bytearray(chunk.read_bytes())
            data[int(place * len(data))] ^= flip
            chunk.write_bytes(data)
        said = str(folder)
        reader = LitDataReader(folder, cache_dir=temporary)
        try:
            rows = every_row(reader)
            reader.columns(0, np.arange(reader.shards[0].num_rows), list(rows[0]) or ["text"])
        except DatasetError as error:
            said = str(error)
        assert str(folder) in said


def test_opening_reads_no_chunk(tmp_path: Path) -> None:
    folder = copied("plain", tmp_path)
    for chunk in folder.glob("*.bin"):
        chunk.write_bytes(bytes(chunk.stat().st_size))  # as a file in a store is before it is read
    reader = opened(folder, tmp_path)
    assert reader.shards == opened(WRITTEN / "plain", tmp_path).shards
    assert "says: 0 rows" in failing(lambda: reader.read(0, [0]))


def edited(tmp_path: Path, **changes: Any) -> Path:
    folder = copied("plain", tmp_path)
    index = json.loads((folder / "index.json").read_text())
    index["chunks"][0].update({k: v for k, v in changes.items() if k in index["chunks"][0]})
    index["config"].update({k: v for k, v in changes.items() if k not in index["chunks"][0]})
    (folder / "index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"filename": "../plain/chunk-0-0.bin"}, "no chunk in its folder"),
        ({"filename": "chunk-0-7.bin"}, "chunk-0-7.bin does not exist"),
        ({"filename": "chunk-0-1.bin"}, "twice"),
        ({"chunk_size": 2}, "says 2 rows"),
        ({"chunk_size": 1 << 40}, "rows"),
        ({"chunk_size": -3}, "do not add up"),
        ({"chunk_size": None}, "damaged"),
        ({"data_format": ["int"]}, "do not add up"),
        ({"data_spec": "[1, {}]"}, "damaged"),
        ({"data_spec": "[" * 9000}, "damaged"),
        ({"encryption": {"algorithm": "fernet"}}, "has 'encryption'"),
        ({"compression_level": "sample"}, "has 'sample'"),
        ({"item_loader": "ParquetLoader"}, "fmt='parquet'"),
    ],
)
def test_an_index_that_does_not_fit_is_an_error(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = edited(tmp_path, **changes)
    assert said in failing(lambda: every_row(opened(folder, tmp_path)))


def test_several_folders_are_several_datasets(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one folder"):
        opened([WRITTEN / "plain"], tmp_path)  # type: ignore[arg-type]


def test_what_unpacks_to_more_than_is_said_is_refused(tmp_path: Path) -> None:
    folder = copied("zstd_chunk", tmp_path)
    index = json.loads((folder / "index.json").read_text())
    index["chunks"][0]["chunk_bytes"] = 99
    (folder / "index.json").write_text(json.dumps(index))
    reader = opened(folder, tmp_path)
    assert "more than is said" in failing(lambda: reader.read(0, [0]))
    assert not list((tmp_path / "cache" / "files").iterdir())


def test_a_value_that_does_not_decode_is_the_error_of_its_row(tmp_path: Path) -> None:
    folder = copied("single", tmp_path)
    chunk = folder / "chunk-0-0.bin"
    chunk.write_bytes(chunk.read_bytes().replace(b"line 1", b"line\xff1"))
    good, bad, last = opened(folder, tmp_path).read(0, [0, 1, 2])
    assert (good["text"], last["text"]) == ("line 0", "line 2")
    assert isinstance(bad, SampleError)
    assert bad.reason == "bad_value"
    assert "chunk-0-0.bin/1" in bad.message
    assert "'text'" in bad.message


@given(
    st.sampled_from(["numpy", "tensor", "no_header_tensor:10", "no_header_numpy:13", "json"]),
    st.binary(max_size=40),
)
def test_any_bytes_give_a_value_or_a_sample_error(kind: str, data: bytes) -> None:
    reason = "bad_value"
    try:
        decode("", kind, data, allow_pickle=False)
    except SampleError as error:
        reason = error.reason
    assert reason == "bad_value"


def test_sizes_in_headers_are_not_believed() -> None:
    huge = [
        ("numpy", struct.pack("<IIII", 3, 2, 1 << 31, 1 << 31)),
        ("tensor", struct.pack(">II", 0, 1 << 31)),
        ("json", struct.pack("<BI", 2, 1 << 31)),
        ("json", struct.pack("<BII", 6, 1 << 31, 0)),
        ("json", b"\x05\xff\xff\xff\xff" * 2000),
    ]
    for kind, data in huge:
        with pytest.raises(SampleError, match="bad_value"):
            decode("", kind, data, allow_pickle=False)


def test_bfloat16_is_exact() -> None:
    stored = np.array([0x3F80, 0xC000, 0x7F80, 0x0001], dtype="<u2").tobytes()
    values = decode("", "no_header_tensor:10", stored, allow_pickle=False)
    assert values.tolist() == [1.0, -2.0, float("inf"), 2.0**-133]


def test_an_unknown_serializer_is_named() -> None:
    with pytest.raises(SampleError, match="'graph'") as caught:
        decode("", "graph", b"", allow_pickle=True)
    assert caught.value.reason == "unknown_serializer"


def test_lit_01_a_chunk_is_complete_by_its_own_table(tmp_path: Path) -> None:
    """LIT-01: the index's chunk_bytes is smaller than the file; all 8 samples are there."""
    rows = every_row(opened(CASES / "LIT-01", tmp_path))
    ids = json.loads((CASES / "LIT-01" / "expected.json").read_text())["ids"]
    assert [row["id"] for row in rows] == ids
    folder = Path(shutil.copytree(CASES / "LIT-01", tmp_path / "part"))
    chunk = folder / "chunk-0-0.bin"
    chunk.write_bytes(chunk.read_bytes()[:2640])  # more than chunk_bytes, less than the chunk
    assert "chunk-0-0.bin" in failing(lambda: every_row(opened(folder, tmp_path)))


def test_lit_03_a_cut_zstd_chunk_is_named_and_the_source_stays(tmp_path: Path) -> None:
    """LIT-03: the first chunk's samples come, the cut one is an error; the folder is unchanged."""
    folder = Path(shutil.copytree(CASES / "LIT-03", tmp_path / "data"))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    reader = opened(folder, tmp_path)
    assert [row["id"] for row in reader.read(0, range(4))] == [0, 1, 2, 3]
    assert "chunk-0-1.zstd.bin" in failing(lambda: reader.read(1, range(4)))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_lit_04_a_picture_is_what_its_bytes_are(tmp_path: Path) -> None:
    """LIT-04: written as jpeg, PNG bytes come as they are, none as an empty blob (as IMG-18)."""
    dataset = Dataset("data", opened(CASES / "LIT-04", tmp_path))
    blobs = [row["image"] for row in dataset.reader.read(0, [0, 1, 2])]
    assert read_blob(dataset, blobs[0]).startswith(b"\xff\xd8\xff")
    assert read_blob(dataset, blobs[1]).startswith(b"\x89PNG")
    assert blobs[2].size == 0


def rows_of_a_process(folder: Path, cache: Path, barrier: Any, answers: Any) -> None:
    barrier.wait()
    reader = LitDataReader(folder, cache_dir=cache)
    rows = [row["text"] for row in every_row(reader)]
    answers.put((reader.digest(), rows, sorted(path.name for path in folder.iterdir())))


@pytest.mark.slow
def test_lit_06_processes_that_start_together_agree(tmp_path: Path) -> None:
    """LIT-06: 4 ranks start at once; one makes each file of the cache, the data is untouched."""
    folder = copied("zstd_chunk", tmp_path)
    names = sorted(path.name for path in folder.iterdir())
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(4), context.SimpleQueue()
    arguments = (folder, tmp_path / "cache", barrier, answers)
    ranks = [context.Process(target=rows_of_a_process, args=arguments) for _ in range(4)]
    for rank in ranks:
        rank.start()
    found = [answers.get() for _ in ranks]
    for rank in ranks:
        rank.join()
        assert rank.exitcode == 0
    texts = [row["text"] for row in json.loads((folder / "expected.json").read_text())]
    assert found == [(found[0][0], texts, names)] * 4
    assert len(list((tmp_path / "cache" / "files").iterdir())) == 2


def test_lit_07_what_a_killed_writer_left_is_named(tmp_path: Path) -> None:
    """LIT-07: chunks, and perhaps a part of the index, without index.json."""
    folder = copied("plain", tmp_path)
    os.rename(folder / "index.json", folder / "0.index.json")
    assert LitDataReader.detect(folder)
    said = failing(lambda: Dataset.from_path("d", folder, cache_dir=tmp_path / "cache"))
    assert "interrupted" in said
    assert "0.index.json" in said
    assert "chunk-0-0.bin" in said
    (folder / "index.json").write_text('{"chunks": [{"chunk_by')
    assert "no JSON" in failing(lambda: opened(folder, tmp_path))


def test_what_a_writer_left_that_got_no_row_is_named(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"chunks": [], "config": null, "updated_at": "1"}')
    said = failing(lambda: Dataset.from_path("d", tmp_path, cache_dir=tmp_path / "cache"))
    assert "index.json lists no chunks" in said
