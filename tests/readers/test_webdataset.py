"""The WebDataset reader: the contract, the known failures, archives of the real writer."""

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contracts.reader import ReaderContract
from tests.fixtures.columns import cells
from tests.fixtures.memory import take
from tests.fixtures.rows import alone
from zephon_mm.errors import ConfigError, DatasetError, SampleError
from zephon_mm.io import Dataset, read_blob
from zephon_mm.processors.documents import to_document
from zephon_mm.readers.webdataset import WebDatasetReader
from zephon_mm.records import FileBlob, Image, RowBlob, Text

CASES = Path(__file__).parents[1] / "fixtures" / "cases"
JPEG = b"\xff\xd8\xff not decoded here"


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def rows_of(path: Path, **options: Any) -> list[Any]:
    reader = WebDatasetReader(path, **options)
    return list(reader.read(0, range(reader.shards[0].num_rows)))


def shapes(path: Path, **options: Any) -> list[list[Any]]:
    rows = rows_of(path, **options)
    return [[r["__key__"], [name for name in r if not name.startswith("__")]] for r in rows]


def expected(case: str) -> Any:
    return json.loads((CASES / case / "expected.json").read_text())


class TestContract(ReaderContract):
    @pytest.fixture
    def reader(self, tmp_path: Path) -> WebDatasetReader:
        for shard in range(3):
            pattern = str(tmp_path / f"s-{shard}.tar")
            with webdataset.TarWriter(pattern) as writer:
                for row in range(4):
                    sample = {
                        "jpg": JPEG + bytes([row]),
                        "txt": f"caption {row} é",
                        "json": {"n": 1},
                    }
                    writer.write({"__key__": f"{row:04}", **sample})
        return WebDatasetReader(tmp_path, cache_dir=tmp_path / "cache")


class TestCompressedContract(ReaderContract):
    @pytest.fixture(params=[".tar.gz", ".tgz", ".tar.zst"])
    def reader(self, tmp_path: Path, request: pytest.FixtureRequest) -> WebDatasetReader:
        codec = "zstd" if request.param.endswith("zst") else "gzip"
        for shard in range(2):
            path = write_tar(tmp_path / f"{shard}.tar", captioned(3))
            packed = pyarrow.compress(path.read_bytes(), codec=codec, asbytes=True)
            (tmp_path / f"{shard}{request.param}").write_bytes(packed)
            path.unlink()
        return WebDatasetReader(tmp_path, cache_dir=tmp_path / "cache")


def captioned(count: int) -> list[tuple[str, bytes]]:
    members = []
    for i in range(count):
        members += [(f"{i}.jpg", JPEG + bytes([i])), (f"{i}.txt", b"caption %d" % i)]
    return members


def test_a_compressed_shard_reads_as_the_plain_one(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "s.tar", captioned(4))
    plain = Dataset("d", WebDatasetReader(path))
    (tmp_path / "s.tar.gz").write_bytes(gzip.compress(path.read_bytes()))
    packed = Dataset("d", WebDatasetReader(tmp_path / "s.tar.gz", cache_dir=tmp_path / "cache"))
    assert packed.reader.kind == plain.reader.kind
    for row in range(4):
        (a,), (b,) = plain.reader.read(0, [row]), packed.reader.read(0, [row])
        assert isinstance(a, dict)
        assert isinstance(b, dict)
        assert {**a, "jpg": read_blob(plain, a["jpg"])} == {**b, "jpg": read_blob(packed, b["jpg"])}
    for file in (tmp_path / "cache" / "files").iterdir():
        file.unlink()  # what is in the cache may be made again at any time
    assert packed.reader.fetch(RowBlob(0, 2, "jpg")) == JPEG + b"\2"


def test_several_images_of_a_sample_are_fields_of_their_own(tmp_path: Path) -> None:
    names = ["7.0.jpg", "7.1.jpg", "7.left.jpg", "7.txt", "7.json"]
    members = [(name, b"{}" if name.endswith("json") else name.encode()) for name in names]
    dataset = Dataset("d", WebDatasetReader(write_tar(tmp_path / "s.tar", members)))
    (row,) = dataset.reader.read(0, [0])
    assert isinstance(row, dict)
    for field in ("0.jpg", "1.jpg", "left.jpg"):
        assert read_blob(dataset, row[field]) == f"7.{field}".encode()
    assert (row["txt"], row["json"], row["__key__"]) == ("7.txt", {}, "7")


def test_a_caption_inside_the_json_member_is_the_sample_s_own(tmp_path: Path) -> None:
    text = json.dumps({"caption": "a dog", "width": 8}).encode()
    path = write_tar(tmp_path / "s.tar", [("a.jpg", JPEG), ("a.json", text)])
    (row,) = rows_of(path)
    image, caption = to_document(row).segments
    assert isinstance(image, Image)
    assert caption == Text("a dog")


def test_columns_hold_what_members_hold(tmp_path: Path) -> None:
    members = [("a.jpg", JPEG), ("a.txt", "é".encode()), ("b.txt", b""), ("c.jpg", b"1" * 9999)]
    members += [("d.txt", b"1"), ("d.txt", b"2"), ("e.json", b"[1]"), ("b.jpg", b"late")]
    reader = WebDatasetReader(write_tar(tmp_path / "s.tar", members))
    columns = reader.columns(0, np.array([2, 0, 3, 1, 4, 0]), ["txt", "jpg", "json", "png"])
    text = "é".encode()
    assert cells(columns["txt"]) == [None, text, None, b"", None, text]
    assert cells(columns["jpg"]) == [b"1" * 9999, JPEG, None, b"late", None, JPEG]
    assert "json" not in columns
    assert cells(columns["png"]) == [None] * 6
    assert cells(reader.columns(0, np.array([], dtype=np.int64), ["txt"])["txt"]) == []
    with pytest.raises(IndexError, match="rows 0 to 4"):
        reader.columns(0, np.array([5]), ["txt"])


def test_tar_01_a_repeated_member_is_an_error_that_names_member_and_shard() -> None:
    bad, good = rows_of(CASES / "TAR-01" / "dup_member.tar")
    assert isinstance(bad, SampleError)
    assert bad.reason == "duplicate_member"
    assert "dup_member.tar/0" in bad.message
    assert "'a'" in bad.message
    assert "'jpg'" in bad.message
    assert good["__key__"] == "b"


def test_tar_01_the_same_key_again_later_is_another_sample() -> None:
    rows = rows_of(CASES / "TAR-01" / "dup_key_apart.tar")
    assert [row["__key__"] for row in rows] == ["a", "b", "a"]
    assert rows[0]["txt"] != rows[2]["txt"]


def test_tar_02_the_split_is_a_setting_and_the_other_one_is_hinted_at() -> None:
    path = CASES / "TAR-02" / "dots.tar"
    assert shapes(path) == expected("TAR-02")["split_at_first_dot"]
    assert shapes(path, split="last_dot") == expected("TAR-02")["split_at_last_dot"]
    hints = [row.get("__hint__") for row in rows_of(path)]
    assert hints[0] == "has 0 (clean).jpg, 0 (clean).txt; split='last_dot' would find jpg, txt"
    assert "__hint__" in rows_of(path, split="last_dot")[2]
    with pytest.raises(ConfigError, match="split must be"):
        WebDatasetReader(path, split="dot")  # type: ignore[arg-type]


def test_tar_04_equal_keys_in_two_shards_are_six_identities() -> None:
    dataset = Dataset("d", WebDatasetReader(CASES / "TAR-04"))
    assert len(dataset) == expected("TAR-04")["samples"]
    names = {
        dataset.row_name(s, r) for s, i in enumerate(dataset.shards) for r in range(i.num_rows)
    }
    assert len(names) == 6


def test_tar_05_members_that_lie_apart_form_whole_samples() -> None:
    rows = shapes(CASES / "TAR-05" / "apart.tar")
    assert rows == [[f"{i:04}", ["jpg", "txt"]] for i in range(4)]


def test_tar_06_and_13_what_is_there_comes_back_and_empty_is_empty() -> None:
    rows = rows_of(CASES / "TAR-06" / "missing.tar")
    assert shapes(CASES / "TAR-06" / "missing.tar") == [
        ["0000", ["jpg", "txt"]],
        ["0001", ["jpg"]],
        ["0002", ["txt"]],
        ["0003", ["jpg", "txt"]],
        ["0004", ["jpg", "txt"]],
    ]
    assert rows[3]["jpg"].size == 0
    assert rows[4]["txt"] == ""
    half = shapes(CASES / "TAR-13" / "writer_not_closed.tar")
    assert [key for key, fields in half if fields == ["jpg"]] == expected("TAR-13")["half"]
    assert [key for key, fields in half if len(fields) == 2] == expected("TAR-13")["samples"]


def test_tar_08_suffixes_are_lowered_and_a_clash_is_reported() -> None:
    upper = shapes(CASES / "TAR-08" / "upper.tar")
    assert upper == [["IMG_1", ["jpg", "txt"]], ["IMG_2", ["jpeg", "txt"]]]
    (clash,) = rows_of(CASES / "TAR-08" / "clash.tar")
    assert isinstance(clash, SampleError)
    assert "differ only in case" in clash.message


def test_tar_10_odd_members_are_skipped_and_counted() -> None:
    path = CASES / "TAR-10" / "odd_members.tar"
    assert [key for key, _ in shapes(path)] == expected("TAR-10")["samples"]
    skipped = WebDatasetReader(path).skipped_members
    assert skipped == {"hidden": 3, "link": 2, "no_field": 2, "unsafe": 1}


@pytest.mark.parametrize("name", ["latin1_gnu.tar", "latin1_pax.tar"])
def test_tar_11_names_that_are_not_utf8_can_be_logged_and_kept_in_json(name: str) -> None:
    keys = [key for key, _ in shapes(CASES / "TAR-11" / name)]
    assert keys == ["caf\\xe9_01", "日本_02"]
    assert json.loads(json.dumps(keys, ensure_ascii=False).encode()) == keys


def test_tar_14_a_gap_in_a_pattern_is_found_at_the_start_and_named() -> None:
    pattern = CASES / "TAR-14" / expected("TAR-14")["pattern"]
    with pytest.raises(DatasetError, match=r"1 of the 4 files .* do not exist.*shard-00002\.tar"):
        WebDatasetReader(pattern)
    with pytest.raises(DatasetError, match="matches nothing"):
        WebDatasetReader(CASES / "TAR-14" / "none-*.tar")
    assert len(WebDatasetReader(CASES / "TAR-14" / "shard-{00000..00001}.tar").shards) == 2


def test_tar_15_every_sample_comes_once_though_workers_outnumber_shards(tmp_path: Path) -> None:
    dataset = Dataset.from_path("d", CASES / "TAR-04", cache_dir=tmp_path)
    keys: list[str] = []
    batches = []
    for rank in range(3):
        recipe = alone(dataset, max_length=24)  # two samples do not fit into a sequence
        with recipe.build(dp=3, rank=rank, runner="thread", workers=4) as pipeline:
            found = take(pipeline, 99)
        batches.append(len(found))
        keys += [key for batch in found for row in batch.keys for key in row]
    names = [dataset.key(shard, row) for shard in range(2) for row in range(3)]
    assert sorted(keys) == names
    assert batches == [2, 2, 2]


FIELDS = ["jpg", "txt", "json", "bin"]


@settings(max_examples=40, deadline=None)
@given(
    members=st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(FIELDS), st.binary(max_size=40)),
        min_size=1,
        unique_by=lambda m: m[:2],
    )
)
def test_members_in_any_order_read_back_equal(
    members: list[tuple[int, str, bytes]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    contents = {
        (f"dir/{key}é", field): {"txt": data.hex(), "json": json.dumps(data.hex())}.get(field, data)
        for key, field, data in members
    }
    named = [
        (f"{key}.{field}", data if isinstance(data, bytes) else data.encode())
        for (key, field), data in contents.items()
    ]
    path = write_tar(tmp_path_factory.mktemp("tar") / "s.tar", named)
    dataset = Dataset("d", WebDatasetReader(path))
    rows = dataset.reader.read(0, range(len(dataset)))

    found = {}
    for row in rows:
        assert isinstance(row, dict)
        for field in set(row) - {"__key__"}:
            value = row[field]
            if isinstance(value, FileBlob):
                value = read_blob(dataset, value)
            found[row["__key__"], field] = json.dumps(value) if field == "json" else value
    assert found == contents
    order = [row["__key__"] for row in rows if isinstance(row, dict)]
    assert order == list(dict.fromkeys(key for key, _ in contents))


def test_bad_text_is_a_defect_of_its_row_alone(tmp_path: Path) -> None:
    members = [("a.txt", b"caf\xe9"), ("b.json", b'{"x": NaN}'), ("c.txt", b"fine")]
    first, second, third = rows_of(write_tar(tmp_path / "s.tar", members))
    assert isinstance(first, SampleError)
    assert first.reason == "bad_utf8"
    assert "byte 515" in first.message
    assert isinstance(second, SampleError)
    assert second.reason == "bad_json"
    assert third["txt"] == "fine"


def test_a_shard_that_changed_size_is_an_error_that_says_so(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "s.tar", [("a.txt", b"x")])
    reader = WebDatasetReader(path)
    with path.open("ab") as file:
        file.write(b"more")
    with pytest.raises(DatasetError, match="when it was indexed"):
        reader.read(0, [0])


def test_a_place_that_is_not_there_is_an_error() -> None:
    reader = WebDatasetReader(CASES / "TAR-04")
    with pytest.raises(DatasetError, match=r"shard-000000\.tar has no .*'webp'"):
        reader.fetch(RowBlob(0, 0, "webp"))


def test_the_digest_knows_the_split_and_not_the_place(tmp_path: Path) -> None:
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        write_tar(tmp_path / place / "s.tar", [("k.txt", b"x")])
    first, second = WebDatasetReader(tmp_path / "a"), WebDatasetReader(tmp_path / "b")
    assert first.digest() == second.digest()
    assert WebDatasetReader(tmp_path / "a", split="last_dot").digest() != first.digest()
