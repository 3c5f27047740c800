"""The JSON Lines reader: the contract, the known failures, pictures beside and inside."""

import base64
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contracts.reader import ReaderContract
from tests.fixtures.columns import cells
from zephon_mm.errors import DatasetError, SampleError
from zephon_mm.io import Dataset, read_blob
from zephon_mm.readers.files import find_shards
from zephon_mm.readers.jsonl import JsonlReader, index_lines
from zephon_mm.records import FileBlob, RowBlob

CASES = Path(__file__).parents[1] / "fixtures" / "cases"
PNG = b"\x89PNG not decoded here" * 9
TEXT64 = base64.b64encode(PNG).decode()


def rows_of(path: Path, **options: Any) -> list[Any]:
    reader = JsonlReader(path, **options)
    return list(reader.read(0, range(reader.shards[0].num_rows)))


def write_rows(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ids(rows: list[Any]) -> list[Any]:
    return [row["id"] for row in rows if not isinstance(row, SampleError)]


def bad_lines(path: Path) -> list[int]:
    return [i for i, row in enumerate(rows_of(path), 1) if isinstance(row, SampleError)]


def expected(case: str) -> Any:
    return json.loads((CASES / case / "expected.json").read_text())


class TestContract(ReaderContract):
    @pytest.fixture
    def reader(self, tmp_path: Path) -> JsonlReader:
        (tmp_path / "a.png").write_bytes(PNG)
        for shard in range(2):
            content = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "é"}]
            write_rows(
                tmp_path / f"{shard}.jsonl",
                {"id": "x", "image": "a.png", "text": "one"},
                {"id": 2, "images": [f"data:image/png;base64,{TEXT64}", None, TEXT64]},
                {"messages": [{"role": "user", "content": content}]},
            )
        return JsonlReader(tmp_path, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("name", ["bom.jsonl", "bom_only.jsonl"])
def test_jsl_01_a_byte_order_mark_spoils_nothing(name: str) -> None:
    assert ids(rows_of(CASES / "JSL-01" / name)) == expected("JSL-01")[name]


@pytest.mark.parametrize("block_bytes", [1, 7, 64 << 10])
def test_jsl_03_a_line_may_be_longer_than_a_block(tmp_path: Path, block_bytes: int) -> None:
    path = tmp_path / "d.jsonl"
    size = 3_000 if block_bytes < 64 else 300_000
    write_rows(path, {"id": 0}, {"id": 1, "text": "x" * size}, {"id": 2})
    part = index_lines(find_shards(path, ())[0], block_bytes=block_bytes)
    whole = index_lines(find_shards(path, ())[0], block_bytes=1 << 30)
    assert part.num_rows == 3
    assert all((part.arrays[name] == whole.arrays[name]).all() for name in whole.arrays)
    assert len(rows_of(path)[1]["text"]) == size


def test_jsl_04_lone_surrogates_become_replacement_characters_and_pairs_stay() -> None:
    texts = [row["text"] for row in rows_of(CASES / "JSL-04" / "surrogates.jsonl")]
    assert texts == ["lone � end", "pair 😀 end", "low � first", "nul \0 inside"]


def test_jsl_06_bad_lines_are_named_and_the_rest_goes_on() -> None:
    for name in ("bad_utf8", "not_json"):
        want = expected("JSL-06")[name]
        path = CASES / "JSL-06" / f"{name}.jsonl"
        assert ids(rows_of(path)) == want["good"]
        wanted_lines = want.get("bad_lines") or [want["bad_line"]]
        assert set(wanted_lines) <= set(bad_lines(path))
    error = rows_of(CASES / "JSL-06" / "bad_utf8.jsonl")[1]
    assert str(error).startswith("[bad_utf8] bad_utf8.jsonl, line 2, byte 24: not UTF-8 at byte 22")
    nan = rows_of(CASES / "JSL-06" / "not_json.jsonl")[5]
    assert "line 6" in nan.message
    assert "NaN is not JSON" in nan.message


@pytest.mark.parametrize("name", ["blank_crlf", "empty", "only_newlines"])
def test_jsl_07_count_and_access_agree(name: str) -> None:
    assert ids(rows_of(CASES / "JSL-07" / f"{name}.jsonl")) == expected("JSL-07")[name]


def test_jsl_08_pictures_are_found_or_their_rows_are_errors() -> None:
    want = expected("JSL-08")
    rows = rows_of(CASES / "JSL-08" / "data.jsonl")
    reasons = {i: row.reason for i, row in enumerate(rows) if isinstance(row, SampleError)}
    assert ids(rows) == want["good"]
    assert [i for i, reason in reasons.items() if reason == "missing_file"] == want["missing"]
    outside = [i for i, reason in reasons.items() if reason == "path_outside_root"]
    assert outside == want["outside_root"]
    assert [i for i, reason in reasons.items() if reason == "empty_path"] == want["empty_path"]
    assert rows[3]["image"] == [rows[0]["image"]]
    assert rows[0]["image"].size == 632


LINES = st.lists(
    st.sampled_from([b"", b" \t", b"\r", b'{"a": 1}', b'{"a": 1}\r', b"junk", b'{"b": "\xc3\xa9"}'])
)


@settings(max_examples=60, deadline=None)
@given(lines=LINES, tail=st.booleans(), bom=st.booleans(), block_bytes=st.integers(1, 40))
def test_rows_are_the_lines_that_are_not_blank(
    lines: list[bytes],
    tail: bool,
    bom: bool,
    block_bytes: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("jsonl") / "d.jsonl"
    text = b"\n".join(lines) + b"\n" * tail
    path.write_bytes(b"\xef\xbb\xbf" * bom + text)
    arrays = index_lines(find_shards(path, ())[0], block_bytes=block_bytes).arrays
    data = path.read_bytes()
    spans = zip(arrays["start"], arrays["stop"], strict=True)
    slow = [(i, line) for i, line in enumerate(text.split(b"\n"), 1) if line.strip()]
    found = [data[start:stop].removesuffix(b"\n") for start, stop in spans]
    assert list(zip(arrays["line"].tolist(), found, strict=True)) == slow


def test_every_form_of_a_picture_gives_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    uri = f"data:image/png;base64,{TEXT64}"
    forms: list[Any] = ["a.png", "./a.png", str(tmp_path / "a.png"), uri, TEXT64]
    forms += [{"bytes": TEXT64, "path": None}, {"bytes": None, "path": "a.png"}]
    rows: list[Any] = [{"image": form} for form in forms] + [{"images": form} for form in forms]
    rows += [{"images": forms}, {"x/~y": [{"z": {"type": "image", "image": uri}}]}]
    rows[-1] |= {"parts": [{"image": uri}], "other": {"image": "no picture"}}
    dataset = Dataset("d", JsonlReader(write_rows(tmp_path / "d.jsonl", *rows)))
    *read, nested = dataset.reader.read(0, range(len(rows)))
    for row in read:
        assert isinstance(row, dict)
        found = row.get("image", row.get("images"))
        for blob in found if isinstance(found, list) else [found]:
            assert isinstance(blob, FileBlob | RowBlob)
            assert read_blob(dataset, blob) == PNG
            assert read_blob(dataset, blob, 3) == PNG[:3]
    assert isinstance(nested, dict)
    blob = nested["x/~y"][0]["z"]["image"]
    assert blob == RowBlob(0, len(rows) - 1, "x~1~0y/0/z/image")
    assert nested["parts"][0]["image"] == RowBlob(0, len(rows) - 1, "parts/0/image")
    assert nested["other"]["image"] == "no picture"
    assert read_blob(dataset, blob) == PNG


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        ("https://example.com/a.png", "image_url"),
        ("/etc/passwd", "path_outside_root"),
        ("link.png", "path_outside_root"),
        ("linked/a.png", "path_outside_root"),
        ("sub/../../x.png", "path_outside_root"),
        ("a\0b.png", "missing_file"),
        ("n" * 300, "missing_file"),
        ("sub", "missing_file"),
        (7, "bad_image"),
        ({"url": "x"}, "bad_image"),
    ],
)
def test_a_picture_that_cannot_be_used_is_an_error_of_its_row(
    tmp_path: Path, image: Any, reason: str
) -> None:
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.png").write_bytes(PNG)
    (root / "link.png").symlink_to(tmp_path / "other" / "a.png")
    (root / "linked").symlink_to(tmp_path / "other")
    bad, good = rows_of(write_rows(root / "d.jsonl", {"images": [image]}, {"id": 1}))
    assert isinstance(bad, SampleError)
    assert bad.reason == reason
    assert "d.jsonl, line 1, byte 0: images/0" in bad.message
    assert good["__key__"] == "1"


def test_image_root_may_be_another_folder_and_links_inside_it_are_fine(tmp_path: Path) -> None:
    for name in ("pictures", "rows"):
        (tmp_path / name).mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(PNG)
    (tmp_path / "pictures" / "b.png").symlink_to("a.png")
    path = write_rows(tmp_path / "rows" / "d.jsonl", {"pic": "b.png"}, {"pic": None})
    first, second = rows_of(path, image_root=tmp_path / "pictures", image_fields=["pic"])
    assert first["pic"] == FileBlob(str(tmp_path / "pictures" / "b.png"), 0, len(PNG))
    assert second["pic"] is None


def test_bad_base64_is_named_when_it_is_fetched(tmp_path: Path) -> None:
    uri = "data:image/png;base64,%%%%"
    reader = JsonlReader(write_rows(tmp_path / "d.jsonl", {}, {"image": [None, uri]}))
    (row,) = reader.read(0, [1])
    assert isinstance(row, dict)
    with pytest.raises(SampleError, match=r"\[bad_base64\] d\.jsonl, line 2, byte 3, image/1: "):
        reader.fetch(row["image"][1])


def pack(path: Path, codec: str) -> Path:
    """Replace a file by its compressed form."""
    target = path.with_name(path.name + {"gzip": ".gz", "zstd": ".zst"}[codec])
    target.write_bytes(pyarrow.compress(path.read_bytes(), codec=codec, asbytes=True))
    path.unlink()
    return target


class TestCompressedContract(ReaderContract):
    @pytest.fixture(params=["gzip", "zstd"])
    def reader(self, tmp_path: Path, request: pytest.FixtureRequest) -> JsonlReader:
        (tmp_path / "a.png").write_bytes(PNG)
        for shard in range(2):
            rows = [{"id": 1, "image": "a.png"}, {"image": TEXT64}, {"text": "é"}]
            pack(write_rows(tmp_path / f"{shard}.jsonl", *rows), request.param)
        return JsonlReader(tmp_path, cache_dir=tmp_path / "cache")


def test_a_compressed_file_reads_as_its_contents_and_is_unpacked_once(tmp_path: Path) -> None:
    rows = [{"id": i, "text": "x" * i, "image": TEXT64} for i in range(20)]
    plain = rows_of(write_rows(tmp_path / "d.jsonl", *rows))
    packed = pack(tmp_path / "d.jsonl", "gzip")
    cache = tmp_path / "cache"
    assert rows_of(packed, cache_dir=cache) == plain
    (unpacked,) = (path for path in (cache / "files").iterdir() if path.suffix == "")
    written = unpacked.stat().st_mtime_ns
    dataset = Dataset("d", JsonlReader(packed, cache_dir=cache))
    assert read_blob(dataset, RowBlob(0, 7, "image")) == PNG
    assert unpacked.stat().st_mtime_ns == written


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (
            "d.jsonl.gz",
            gzip.compress(b"{}" * 99, mtime=0)[:-5],
            r"d\.jsonl\.gz does not unpack as gzip: .*",
        ),
        ("d.jsonl.zst", b"no zstd", r"d\.jsonl\.zst does not unpack as zstd"),
        ("d.jsonl", gzip.compress(b"{}", mtime=0), r"d\.jsonl is compressed\. Name it \.jsonl\.gz"),
    ],
)
def test_what_does_not_unpack_is_named(
    tmp_path: Path, name: str, data: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DatasetError, match=message):
        JsonlReader(tmp_path / name, cache_dir=tmp_path / "cache")
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file() and p.suffix == ""]


def test_columns_hold_the_texts_of_rows_and_leave_other_fields_out(tmp_path: Path) -> None:
    rows: list[Any] = [{"text": "é", "n": 1}, {"text": ""}, {"n": 2}, {"image": "none.png"}]
    reader = JsonlReader(write_rows(tmp_path / "d.jsonl", *rows))
    columns = reader.columns(0, np.array([1, 0, 2, 0]), ["text", "n", "none"])
    assert columns.keys() == {"text", "none"}
    assert cells(columns["text"]) == [b"", "é".encode(), None, "é".encode()]
    assert cells(columns["none"]) == [None] * 4
    assert cells(reader.columns(0, np.array([3]), ["text", "image"])["text"]) == [None]
    assert cells(reader.columns(0, np.array([], dtype=np.int64), ["n"])["n"]) == []


def test_an_index_of_another_format_is_no_json_lines(tmp_path: Path) -> None:
    for name in ("shardlist", "shards", "chunks"):
        path = write_rows(tmp_path / "index.json", {name: []})
        assert not JsonlReader.detect(path)
    assert JsonlReader.detect(write_rows(tmp_path / "rows.json", {"id": 1}))


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("start", ["", "\ufeff", " \n"])
def test_an_array_of_objects_reads_as_its_elements_in_lines(
    tmp_path: Path, indent: int | None, start: str
) -> None:
    rows: list[Any] = [{"id": "é[{,"}, {"id": 2, "turns": [{"a": "]\n"}, {}]}]
    rows += [{"id": float("nan")}, {"id": 5}, [1]]
    lines = rows_of(write_rows(tmp_path / "a.jsonl", *rows))
    text = start + json.dumps(rows, indent=indent, ensure_ascii=False) + "\n"
    (tmp_path / "a.json").write_text(text)
    dataset = Dataset.from_path("a", tmp_path / "a.json", progress=False)
    found = dataset.reader.read(0, range(len(rows)))
    assert len(dataset) == len(rows)
    assert ids(found) == ids(lines)
    assert [type(row) for row in found] == [type(row) for row in lines]
    before = text[: text.rindex("{", 0, text.index("NaN"))]
    place = f"a.json, line {before.count(chr(10)) + 1}, byte {len(before.encode())}"
    assert place in str(found[2])


@pytest.mark.parametrize("text", ['[{"a": 1}', '[{"a": 1},]', '[{"a": 1}] {"b": 2}', '[{"a": 1}2]'])
def test_an_array_that_breaks_off_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DatasetError, match=r"a\.json is no JSON array"):
        Dataset.from_path("a", tmp_path / "a.json", progress=False)
