"""The MDS reader: the contract, the known failures, shards of the real writer."""

import hashlib
import io
import json
import multiprocessing
import os
import shutil
import struct
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.contracts.reader import ReaderContract, blobs_in
from zephon_mm.errors import ConfigError, DatasetError, SampleError
from zephon_mm.io import Dataset, read_blob
from zephon_mm.readers.mds import MDSReader
from zephon_mm.readers.mdsindex import rebuild_index
from zephon_mm.records import FileBlob, RowBlob

FIXTURES = Path(__file__).parents[1] / "fixtures"
CASES, MDS = FIXTURES / "cases", FIXTURES / "mds"
CODECS = ["zstd", "gz", "br", "snappy", "bz2"]


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


class TestContractOfPlainShards(ReaderContract):
    @pytest.fixture
    def reader(self) -> MDSReader:
        return MDSReader(CASES / "MDS-02")


class TestContractOfCompressedShards(ReaderContract):
    @pytest.fixture
    def reader(self, tmp_path: Path) -> MDSReader:
        return MDSReader(MDS / "zstd", cache_dir=tmp_path)


def rows_of(reader: MDSReader, fields: list[str] | None = None) -> list[Any]:
    return [
        row
        for shard, info in enumerate(reader.shards)
        for row in reader.read(shard, range(info.num_rows), fields)
    ]


def expected(case: str) -> Any:
    return json.loads((CASES / case / "expected.json").read_text())


def readable(reader: MDSReader, name: str, value: Any) -> Any:
    """Return a value as the fixture's script writes it: pictures as their pixels."""
    if isinstance(value, list):
        return [readable(reader, name, item) for item in value]
    if isinstance(value, FileBlob | RowBlob):
        data = read_blob(Dataset("d", reader), value)
        if name == "bytes":
            return data.hex()
        with Image.open(io.BytesIO(data)) as image:
            return [image.mode, list(image.size), image.tobytes().hex()]
    if isinstance(value, np.ndarray):
        return [value.dtype.name, list(value.shape), value.ravel().tolist()]
    return str(value) if isinstance(value, Decimal) else value


def test_every_encoding_reads_as_the_library_reads_it() -> None:
    reader = MDSReader(MDS / "every")
    wanted = json.loads((MDS / "every.json").read_text())
    found = [
        {name: readable(reader, name, value) for name, value in row.items() if name != "__key__"}
        for row in rows_of(reader)
    ]
    assert len(found) == len(wanted) == 6
    for row, reference in zip(found, wanted, strict=True):
        assert row == reference
    assert rows_of(reader, ["array"])[0]["array"].flags.writeable


@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_gives_the_rows_and_the_digest_of_plain_shards(
    codec: str, tmp_path: Path
) -> None:
    before = sorted(os.listdir(MDS / codec))
    reader = MDSReader(MDS / codec, cache_dir=tmp_path / "cache", check_hashes=True)
    rows = rows_of(reader)
    assert [row["text"] for row in rows] == [f"text {i} ünï" for i in range(4)]
    for row in rows:
        data = reader.fetch(row["image"])
        assert Image.open(io.BytesIO(data)).format == "JPEG"
        assert np.frombuffer(data, "u1").tolist() == [*columns_of(reader, row["image"], "image")]
    assert sorted(os.listdir(MDS / codec)) == before
    shutil.copytree(MDS / codec, tmp_path / "d")
    for shard, name in enumerate(("shard.00000.mds", "shard.00001.mds")):
        with reader._opened(shard, [0]) as block:
            size = reader.shards[shard].num_bytes
            (tmp_path / "d" / name).write_bytes(os.pread(block._descriptor, size, 0))
        (tmp_path / "d" / f"{name}.{codec}").unlink()
    plain = MDSReader(tmp_path / "d", check_hashes=True)
    assert plain.digest() == reader.digest()
    assert all(isinstance(row["image"], FileBlob) for row in rows_of(plain))


def columns_of(reader: MDSReader, blob: RowBlob, name: str) -> Any:
    return reader.columns(blob.shard, np.array([blob.row]), [name])[name].data.tolist()


@pytest.mark.parametrize("codec", CODECS)
def test_a_damaged_compressed_shard_is_an_error_that_names_it(codec: str, tmp_path: Path) -> None:
    shutil.copytree(MDS / codec, tmp_path / "d")
    path = tmp_path / "d" / f"shard.00000.mds.{codec}"
    whole = path.read_bytes()
    index = json.loads((tmp_path / "d" / "index.json").read_text())
    for data in (whole[:-20], b"not compressed", b"", whole):
        path.write_bytes(data)
        index["shards"][0]["zip_data"]["bytes"] = len(data)
        # The whole one unpacks to more than the index says.
        index["shards"][0]["raw_data"]["bytes"] -= data == whole
        (tmp_path / "d" / "index.json").write_text(json.dumps(index))
        reader = MDSReader(tmp_path / "d", cache_dir=tmp_path / "cache")
        with pytest.raises(DatasetError, match=rf"00000\.mds\.{codec} (does not unpack|has \{{)"):
            reader.read(0, [0])


def unpack_and_read(folder: Path, cache: Path, barrier: Any, results: Any) -> None:
    barrier.wait()
    results.put([row["text"] for row in rows_of(MDSReader(folder, cache_dir=cache))])


def test_mds_01_and_10_processes_that_unpack_at_once_all_get_every_sample(tmp_path: Path) -> None:
    """MDS-01, MDS-10: eight processes at one barrier, and the source folder stays as it was."""
    folder = CASES / "MDS-01"
    before = sorted(os.listdir(folder))
    forked = multiprocessing.get_context("fork")
    barrier, results = forked.Barrier(8), forked.SimpleQueue()
    arguments = (folder, tmp_path / "cache", barrier, results)
    processes = [forked.Process(target=unpack_and_read, args=arguments) for _ in range(8)]
    for process in processes:
        process.start()
    found = [results.get() for _ in processes]
    for process in processes:
        process.join()
    assert found == [expected("MDS-01")["texts"]] * 8
    assert sorted(os.listdir(folder)) == before
    assert len(os.listdir(tmp_path / "cache" / "files")) == 2


def test_mds_02_a_hash_that_does_not_fit_names_the_file_and_both_hashes() -> None:
    """MDS-02: one bit of shard 1 is flipped."""
    reader = MDSReader(CASES / "MDS-02", check_hashes=True)
    assert len(reader.read(0, expected("MDS-02")["good"])) == 3
    found = hashlib.sha1((CASES / "MDS-02" / "shard.00001.mds").read_bytes()).hexdigest()
    with pytest.raises(DatasetError, match=rf"shard\.00001\.mds has .*{found}.* says .*7591522188"):
        reader.read(1, [0])


def test_hashes_of_every_kind_are_checked_or_the_package_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "xxhash", None)
    with pytest.raises(ConfigError, match=r"xxh64 .*zephon-mm\[mds\]"):
        MDSReader(MDS / "every", check_hashes=True)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"no hash of a/shard\.00000\.mds"):
        MDSReader(CASES / "MDS-07", check_hashes=True)
    pytest.importorskip("xxhash")
    assert len(rows_of(MDSReader(MDS / "every", check_hashes=True), ["int"])) == 6


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("index_cut", r"index\.json \(37 bytes\), .*Unterminated string .*column 26"),
        ("index_empty", r"index\.json \(0 bytes\), .*Expecting value"),
        ("index_no_shards", r"index\.json .*lists no shards"),
        ("index_lost", r"has MDS shards and no index\.json"),
    ],
)
def test_mds_03_a_damaged_index_is_named_and_can_be_rebuilt(
    folder: str, message: str, tmp_path: Path
) -> None:
    """MDS-03: cut, empty, without shards, lost."""
    copy = tmp_path / folder
    shutil.copytree(CASES / "MDS-03" / folder, copy)
    assert MDSReader.detect(copy)
    with pytest.raises(DatasetError, match=message) as caught:
        MDSReader(copy)
    assert "rebuild_index" in str(caught.value)
    if (copy / "index.json").exists():
        with pytest.raises(DatasetError, match="to remove first"):
            rebuild_index(copy)
        (copy / "index.json").unlink()
    assert rebuild_index(copy) == expected("MDS-03")["samples_if_rebuilt"]
    assert len(rows_of(MDSReader(copy))) == 3


def test_a_rebuilt_index_is_the_writers_but_for_its_hashes(tmp_path: Path) -> None:
    shutil.copytree(MDS / "every", tmp_path / "d")
    (tmp_path / "d" / "index.json").unlink()
    rebuild_index(tmp_path / "d")
    rebuilt = json.loads((tmp_path / "d" / "index.json").read_text())
    written = json.loads((MDS / "every" / "index.json").read_text())
    for entry in written["shards"]:
        entry["hashes"], entry["raw_data"]["hashes"] = [], {}
    assert rebuilt == written
    (tmp_path / "d" / "index.json").unlink()
    (tmp_path / "d" / "x.mds").write_bytes(b"\xff" * 30)
    with pytest.raises(DatasetError, match=r"x\.mds is no MDS shard"):
        rebuild_index(tmp_path / "d")


def test_mds_05_an_index_that_does_not_fit_its_shard_is_found_at_the_start(tmp_path: Path) -> None:
    """MDS-05: the size tells at the start; with the right size, the count when it is opened."""
    with pytest.raises(DatasetError, match=r"shard\.00001\.mds has 1542 bytes, expected 2869"):
        MDSReader(CASES / "MDS-05")
    shutil.copytree(CASES / "MDS-05", tmp_path / "d")
    index = json.loads((tmp_path / "d" / "index.json").read_text())
    index["shards"][1]["raw_data"]["bytes"] = 1542
    (tmp_path / "d" / "index.json").write_text(json.dumps(index))
    reader = MDSReader(tmp_path / "d")
    assert len(reader.read(0, range(4))) == 4
    with pytest.raises(DatasetError, match=r"00001\.mds has {'rows': 2, .* says {'rows': 4"):
        reader.read(1, [0])


def test_mds_07_two_shards_with_one_file_name_are_two_shards() -> None:
    """MDS-07: base names that hold a folder."""
    reader = MDSReader(CASES / "MDS-07")
    assert [row["id"] for row in rows_of(reader)] == expected("MDS-07")["ids"]
    assert [shard.name for shard in reader.shards] == ["a/shard.00000.mds", "b/shard.00000.mds"]


def write_mds(
    folder: Path, columns: dict[str, tuple[str, int | None]], rows: list[dict[str, bytes]]
) -> Path:
    """Write one shard, field by field as the format says."""
    names = sorted(columns)
    stored = []
    for row in rows:
        sizes = [len(row[name]) for name in names if columns[name][1] is None]
        stored.append(struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(row[n] for n in names))
    start = 4 * (len(rows) + 2) + 2
    offsets = [start + sum(map(len, stored[:i])) for i in range(len(rows) + 1)]
    data = struct.pack(f"<{len(rows) + 2}I", len(rows), *offsets) + b"{}" + b"".join(stored)
    folder.mkdir(parents=True)
    (folder / "shard.00000.mds").write_bytes(data)
    entry = {
        "format": "mds",
        "version": 2,
        "samples": len(rows),
        "column_names": names,
        "column_encodings": [columns[name][0] for name in names],
        "column_sizes": [columns[name][1] for name in names],
        "compression": None,
        "raw_data": {"basename": "shard.00000.mds", "bytes": len(data), "hashes": {}},
        "zip_data": None,
    }
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [entry]}))
    return folder


TEXT = {"text": ("str", None)}


def test_mds_08_stored_pictures_are_passed_through_byte_for_byte(tmp_path: Path) -> None:
    """MDS-08: nothing is encoded again."""
    file = io.BytesIO()
    Image.new("RGB", (9, 7), (200, 10, 90)).save(file, "JPEG", quality=31, comment=b"kept")
    columns = {"image": ("jpeg", None), "raw": ("bytes", None)}
    stored = {"image": file.getvalue(), "raw": file.getvalue()}
    reader = MDSReader(write_mds(tmp_path / "d", columns, [stored]))
    (row,) = reader.read(0, [0])
    found = reader.columns(0, np.array([0]), ["image"])["image"]
    assert found.data.tobytes() == stored["image"]
    for name in columns:
        assert read_blob(Dataset("d", reader), row[name]) == stored[name]


def test_mds_11_streams_are_merged_and_none_is_too_small(tmp_path: Path) -> None:
    """MDS-11: streams of 100 and 3 samples are one dataset of 103."""
    for stream, count in (("b/deep", 3), ("a", 100)):
        rows = [{"text": f"{stream} {i}".encode()} for i in range(count)]
        write_mds(tmp_path / "d" / stream, TEXT, rows)
    wanted = [f"a {i}" for i in range(100)] + [f"b/deep {i}" for i in range(3)]
    reader = MDSReader(tmp_path / "d")
    assert [row["text"] for row in rows_of(reader)] == wanted
    assert [s.name for s in reader.shards] == ["a/shard.00000.mds", "b/deep/shard.00000.mds"]
    listed = MDSReader([tmp_path / "d" / "b", tmp_path / "d" / "a"])
    assert [row["text"] for row in rows_of(listed)] == wanted[100:] + wanted[:100]
    (tmp_path / "linked").mkdir()
    for stream in ("a", "b"):
        (tmp_path / "linked" / stream).symlink_to(tmp_path / "d" / stream)
    assert MDSReader(tmp_path / "linked").digest() == reader.digest()
    with pytest.raises(DatasetError, match="shard twice"):
        MDSReader([tmp_path / "d", tmp_path / "d" / "a"])
    (tmp_path / "d" / "a" / "index.json").unlink()
    with pytest.raises(DatasetError, match=r"a has MDS shards and no index"):
        MDSReader(tmp_path / "d")


VALUES = st.fixed_dictionaries(
    {
        "a": st.binary(max_size=6000),
        "n": st.integers(-(2**63), 2**63 - 1).map(lambda n: n.to_bytes(8, "little", signed=True)),
        "text": st.text(max_size=20).map(str.encode),
    }
)
COLUMNS = {"a": ("bytes", None), "n": ("int", 8), "text": ("str", None)}


@settings(max_examples=40)
@given(rows=st.lists(VALUES, min_size=1, max_size=9), data=st.data())
def test_rows_and_columns_in_any_order_are_what_was_written(
    rows: list[dict[str, bytes]], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    reader = MDSReader(write_mds(tmp_path_factory.mktemp("d") / "d", COLUMNS, rows))
    order = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1))
    for number, row in zip(order, reader.read(0, order), strict=True):
        assert isinstance(row, dict)
        assert row["text"] == rows[number]["text"].decode()
        assert row["n"] == int.from_bytes(rows[number]["n"], "little", signed=True)
        assert read_blob(Dataset("d", reader), row["a"]) == rows[number]["a"]
    found = reader.columns(0, np.array(order), ["text", "a", "n", "none"])
    for name in ("text", "a"):
        column = found[name]
        assert column.data.tobytes() == b"".join(rows[number][name] for number in order)
        assert column.ends.tolist() == np.cumsum([len(rows[n][name]) for n in order]).tolist()
        assert column.valid.all()
    assert set(found) == {"text", "a"}


def test_rows_of_fixed_sizes_alone_have_no_table_of_sizes(tmp_path: Path) -> None:
    rows = [{"n": bytes([i])} for i in range(5)]
    reader = MDSReader(write_mds(tmp_path / "d", {"n": ("uint8", 1)}, rows))
    assert [row["n"] for row in reader.read(0, [4, 0, 3, 3])] == [4, 0, 3, 3]
    assert MDSReader([]).shards == ()


@settings(max_examples=60)
@given(flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), min_size=1))
def test_damage_is_an_error_of_a_row_or_of_the_shard_and_nothing_worse(
    flips: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("d") / "d"
    shutil.copytree(MDS / "every", folder)
    data = bytearray((folder / "shard.00000.mds").read_bytes())
    for at, bits in flips:
        data[at % len(data)] ^= bits
    (folder / "shard.00000.mds").write_bytes(data)
    reader = MDSReader(folder)
    with suppress(DatasetError):
        rows = reader.read(0, range(reader.shards[0].num_rows))
        reader.columns(0, np.array([0]), ["pil", "str"])
        for blob in blobs_in([row for row in rows if isinstance(row, dict)]):
            with suppress(SampleError):
                read_blob(Dataset("d", reader), blob)


def test_a_row_whose_sizes_do_not_add_up_is_an_error_of_that_row_alone(tmp_path: Path) -> None:
    columns = {**TEXT, "image": ("png", None)}
    folder = write_mds(tmp_path / "d", columns, [{"text": b"abc", "image": b"png"}] * 3)
    data = bytearray((folder / "shard.00000.mds").read_bytes())
    at = struct.unpack_from("<I", data, 8)[0]
    data[at : at + 4] = struct.pack("<I", 2**31)
    (folder / "shard.00000.mds").write_bytes(data)
    reader = MDSReader(folder)
    first, second, third = reader.read(0, range(3))
    assert isinstance(second, SampleError)
    assert (second.reason, first["text"], third["text"]) == ("bad_row", "abc", "abc")
    assert "shard.00000.mds/1: " in second.message
    found = reader.columns(0, np.arange(3), ["text"])["text"]
    assert (found.valid.tolist(), found.data.tobytes()) == ([True, False, True], b"abcabc")
    with pytest.raises(SampleError, match="bad_row"):
        reader.fetch(RowBlob(0, 1, "image"))
    with pytest.raises(DatasetError, match="no field 'other'"):
        reader.fetch(RowBlob(0, 0, "other"))


@pytest.mark.parametrize(
    ("encoding", "stored", "reason"),
    [
        ("str", b"caf\xe9", "bad_utf8"),
        ("json", b"{", "bad_json"),
        ("json", b'{"x": NaN}', "bad_json"),
        ("str_int", b"1x", "bad_value"),
        ("str_decimal", b"1x", "bad_value"),
        ("ndarray", b"", "bad_value"),
        ("ndarray", b"\x0c\x04\x03abc", "bad_value"),
        ("ndarray:uint8", b"\xff" + b"\xff" * 504, "bad_value"),
        ("ndarray:object:1", b"12345678", "bad_value"),
        ("list[png]", b"\0\0\0\0\xff\xff\xff\xff", "bad_value"),
        ("jpeg_array", b"\1\0", "bad_value"),
        ("pkl", b"N.", "pickle_refused"),
    ],
)
def test_a_value_that_is_none_is_an_error_that_names_its_field(
    encoding: str, stored: bytes, reason: str, tmp_path: Path
) -> None:
    reader = MDSReader(write_mds(tmp_path / "d", {"f": (encoding, None)}, [{"f": stored}]))
    (error,) = reader.read(0, [0])
    assert isinstance(error, SampleError)
    assert error.reason == reason
    assert "field 'f'" in error.message


def test_pickles_are_loaded_only_when_that_is_allowed() -> None:
    refused = rows_of(MDSReader(MDS / "pkl"))[0]
    assert refused.reason == "pickle_refused"
    assert "allow_pickle=True" in refused.message
    assert rows_of(MDSReader(MDS / "pkl"), ["id"]) == [{"id": 7, "__key__": "0"}]
    assert rows_of(MDSReader(MDS / "pkl", allow_pickle=True))[0]["object"] == {"a": (1, 2)}


@pytest.mark.parametrize(
    "stored",
    [
        b"short",
        struct.pack("<3I", 2**31, 2**31, 3) + b"RGB" + b"few",
        struct.pack("<3I", 2, 2, 3) + b"RGB" + b"few",
        struct.pack("<3I", 1, 1, 4) + b"what" + b"few",
        struct.pack("<3I", 0, 9, 1) + b"L",
    ],
)
def test_raw_pixels_that_do_not_fit_their_header_take_no_memory(
    stored: bytes, tmp_path: Path
) -> None:
    reader = MDSReader(write_mds(tmp_path / "d", {"f": ("pil", None)}, [{"f": stored}]))
    with pytest.raises(SampleError, match=r"not_an_image.*field 'f'"):
        reader.fetch(RowBlob(0, 0, "f"))
    assert not reader.columns(0, np.array([0]), ["f"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 3}, "format mds 3, expected mds 2"),
        ({"format": "json"}, "format json 2, expected mds 2"),
        ({"samples": 10**9}, "1000000000 rows cannot be in"),
        ({"column_encodings": ["webp"]}, "has an encoding or a size"),
        ({"column_names": []}, "is longer than"),
        ({"raw_data": {"basename": "../other.mds", "bytes": 99}}, "lies outside of"),
        ({"raw_data": {"basename": "/etc/passwd", "bytes": 99}}, "lies outside of"),
        ({"raw_data": {"basename": "none.mds", "bytes": 99}}, r"none\.mds is missing"),
        ({"raw_data": 3}, "not subscriptable"),
    ],
)
def test_an_index_that_cannot_be_is_refused_with_a_reason(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write_mds(tmp_path / "d", TEXT, [{"text": b"x"}])
    index = json.loads((folder / "index.json").read_text())
    index["shards"][0] |= change
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(DatasetError, match=message):
        MDSReader(folder)
    del index["shards"][0]["samples"]
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(DatasetError, match=r"index\.json \(\d+ bytes\), after 0 shards: "):
        MDSReader(folder)


def test_detection_looks_into_the_index_and_never_fails(tmp_path: Path) -> None:
    assert MDSReader.detect(MDS / "every")
    assert MDSReader.detect([MDS / "zstd"])
    assert MDSReader.detect(tmp_path / "none") is False
    assert MDSReader.detect([]) is False
    (tmp_path / "index.json").write_text('{"chunks": [], "config": {}}')
    assert MDSReader.detect(tmp_path) is False
    with pytest.raises(DatasetError, match="there is no 'shards'"):
        MDSReader(tmp_path)
    (tmp_path / "index.json").unlink()
    with pytest.raises(DatasetError, match=r"has no index\.json"):
        MDSReader(tmp_path)


def test_a_dataset_opens_from_its_path_and_keeps_a_key_of_its_own(tmp_path: Path) -> None:
    columns = {**TEXT, "__key__": ("str", None)}
    folder = write_mds(tmp_path / "d", columns, [{"text": b"x", "__key__": b"name"}])
    dataset = Dataset.from_path("d", folder, cache_dir=tmp_path / "cache", fmt="mds")
    assert dataset.reader.read(0, [0], ["text"]) == [{"text": "x", "__key__": "name"}]
    assert dataset.digest() == MDSReader(folder).digest()
    assert dataset.digest() != MDSReader(folder, allow_pickle=True).digest()


def test_a_folder_may_be_named_by_its_index(tmp_path: Path) -> None:
    assert MDSReader.detect(MDS / "every" / "index.json")
    assert MDSReader(MDS / "every" / "index.json").digest() == MDSReader(MDS / "every").digest()
