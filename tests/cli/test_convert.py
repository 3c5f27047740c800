"""`zephon-mm convert`: what goes in comes out, or an error names it."""

import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zephon_mm.cli.main import main
from zephon_mm.errors import SampleError
from zephon_mm.io import Dataset, read_blob
from zephon_mm.processors.documents import to_document
from zephon_mm.records import Blob
from zephon_mm.writers import image_format

FORMATS = ("webdataset", "mds", "litdata", "parquet", "lance")


def picture(number: int, fmt: str = "JPEG") -> bytes:
    file = io.BytesIO()
    PIL.Image.new("RGB", (20 + number % 7, 16), (number, 90, 10)).save(file, fmt)
    return file.getvalue()


def write_tar(path: Path, rows: Sequence[Mapping[str, bytes]]) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    with tarfile.open(path, "w") as tar:
        for number, row in enumerate(rows):
            for name, data in row.items():
                info = tarfile.TarInfo(f"{path.stem}-{number:04}.{name}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return path.parent


def captions(folder: Path, sizes: Sequence[int] = (5, 3, 40)) -> Path:
    for shard, size in enumerate(sizes):
        texts = (f"caption {shard} {row} é".encode() for row in range(size))
        rows = [{"jpg": picture(row), "txt": text} for row, text in enumerate(texts)]
        write_tar(folder / f"{shard}.tar", rows)
    return folder


def convert(*words: object) -> int:
    return main(["convert", *map(str, words)])


def read(path: Path) -> list[list[dict[str, Any]]]:
    """Return the rows of each shard, with their bytes, without what is null."""
    data = Dataset.from_path("data", path, cache_dir=path.parent / "cache")

    def plain(value: Any) -> Any:
        if isinstance(value, Blob):
            return read_blob(data, value)
        return [plain(one) for one in value] if isinstance(value, list) else value

    shards = []
    for number, shard in enumerate(data.shards):
        rows = []
        for sample in data.reader.read(number, range(shard.num_rows)):
            assert not isinstance(sample, SampleError)
            rows.append({k: plain(v) for k, v in sample.items() if v is not None})
        shards.append(rows)
    return shards


@pytest.mark.parametrize("fmt", FORMATS)
def test_shards_rows_texts_and_the_bytes_of_images_stay(fmt: str, tmp_path: Path) -> None:
    """MDS-08."""
    source = captions(tmp_path / "source")
    assert convert(source, tmp_path / "target", "--to", fmt) == 0
    found, wanted = read(tmp_path / "target"), read(source)
    assert [len(rows) for rows in found] == [5, 3, 40]
    hashes = [[sha256(row["jpg"]).digest() for row in rows] for rows in wanted]
    assert [[sha256(row["jpg"]).digest() for row in rows] for rows in found] == hashes
    assert [[(row["txt"], row["__key__"]) for row in rows] for rows in found] == [
        [(row["txt"], row["__key__"]) for row in rows] for rows in wanted
    ]


@pytest.mark.parametrize("fmt", FORMATS)
def test_values_keep_their_type_where_the_format_has_it(fmt: str, tmp_path: Path) -> None:
    rows = [
        {
            **{"id": n, "score": n / 4, "ok": n % 2 == 0, "text": f"text {n}", "tags": ["a", "b"]},
            **{"meta": {"url": f"u{n}", "deep": [{"n": n}]}, "some": None if n % 2 else "x"},
            **{"any": n if n % 2 else "x", "big": n << 40},
        }
        for n in range(70)
    ]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert convert(source, tmp_path / "target", "--to", fmt) == 0
    for row, found in zip(rows, chain(*read(tmp_path / "target")), strict=True):
        found.pop("__key__")
        wanted = {name: value for name, value in row.items() if value is not None}
        if fmt == "webdataset":
            found = found["json"] | {"text": found["text"]}
        elif fmt in ("parquet", "lance"):  # a column has one type
            wanted["any"] = json.dumps(wanted["any"])
        assert found == wanted
        assert [type(found[name]) for name in wanted] == [type(v) for v in wanted.values()]


@pytest.mark.parametrize("fmt", FORMATS)
def test_shards_may_be_cut_anew(fmt: str, tmp_path: Path) -> None:
    source = captions(tmp_path / "source")
    assert convert(source, tmp_path / "target", "--to", fmt, "--shard-rows", 7) == 0
    found = read(tmp_path / "target")
    assert [len(rows) for rows in found] == [7] * 6 + [6]
    assert [r["txt"] for r in chain(*found)] == [r["txt"] for r in chain(*read(source))]


def test_an_interrupted_run_goes_on_where_it_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = captions(tmp_path / "source"), tmp_path / "target"
    assert convert(source, target, "--to", "parquet") == 0
    partial = target.rename(tmp_path / "target.partial")  # as it was after the first shard
    first = (partial / "000000.parquet").stat()
    for number in (1, 2):
        (partial / f"00000{number}.parquet").unlink()
    (partial / "000001.parquet.rows").write_bytes(b"half a shard")
    manifest = partial / ".zephon-convert"
    manifest.write_text("".join(manifest.read_text().splitlines(keepends=True)[:2]) + '{"cut')
    assert convert(source, target, "--to", "parquet") == 0
    assert (target / "000000.parquet").stat().st_mtime_ns == first.st_mtime_ns
    assert [len(rows) for rows in read(target)] == [5, 3, 40]
    assert convert(source, target, "--to", "parquet") == 0
    assert "holds this conversion already" in capsys.readouterr().out


def test_what_is_there_is_replaced_only_if_that_is_asked_and_only_a_conversion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "target"
    assert convert(captions(tmp_path / "a"), target, "--to", "parquet") == 0
    other = captions(tmp_path / "b", sizes=(2,))
    assert convert(other, target, "--to", "parquet") == 2
    assert convert(tmp_path / "a", target, "--to", "lance") == 2
    assert "another conversion" in capsys.readouterr().err
    assert convert(other, target, "--to", "parquet", "--overwrite") == 0
    assert [len(rows) for rows in read(target)] == [2]
    assert convert(other, tmp_path / "a", "--to", "mds", "--overwrite") == 2
    assert "no conversion" in capsys.readouterr().err
    assert len(list((tmp_path / "a").iterdir())) == 3


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_defective_row_is_named_or_left_out_and_counted(
    fmt: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [b"one", b"\xff\xfe", b"three", b"four"]
    rows = [{"jpg": picture(n), "txt": text} for n, text in enumerate(texts)]
    source = write_tar(tmp_path / "source" / "0.tar", rows)
    write_tar(tmp_path / "source" / "1.tar", [rows[1]])  # nothing of it stays
    write_tar(tmp_path / "source" / "2.tar", rows[2:])
    assert convert(source, tmp_path / "target", "--to", fmt) == 2
    shown = capsys.readouterr().err
    assert "source/0.tar/1" in shown
    assert "--skip-bad" in shown
    assert convert(source, tmp_path / "target", "--to", fmt, "--skip-bad") == 0
    assert "5 rows" in (shown := capsys.readouterr().out)
    assert "skipped: 2 bad_utf8" in shown
    texts = [[row["txt"] for row in rows] for rows in read(tmp_path / "target")]
    assert texts == [["one", "three", "four"], ["three", "four"]]


def test_a_field_that_the_format_cannot_hold_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lacking = [{"txt": b"a"}, {"jpg": picture(2), "txt": b"b"}]
    source = write_tar(tmp_path / "source" / "0.tar", lacking)
    for fmt in ("mds", "litdata"):
        assert convert(source, tmp_path / fmt, "--to", fmt) == 2
        assert "source/0.tar/0: [unfit_field] field 'jpg' is 'None'" in capsys.readouterr().err
    assert convert(source, tmp_path / "parquet", "--to", "parquet") == 0
    assert convert(tmp_path / "parquet", tmp_path / "tar", "--to", "webdataset") == 0
    assert read(tmp_path / "tar") == read(source)


def test_lists_of_images_are_held_by_all_formats_but_webdataset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = [picture(n) for n in range(4)]
    for number, data in enumerate(images):
        (tmp_path / f"{number}.jpg").write_bytes(data)
    rows = [{"images": ["0.jpg", "1.jpg"], "texts": ["a", "b"]}, {"images": ["2.jpg"]}]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for fmt in FORMATS[1:]:
        assert convert(source, tmp_path / fmt, "--to", fmt) == 0
        (found,) = read(tmp_path / fmt)
        assert [row["images"] for row in found] == [images[:2], images[2:3]]
    assert convert(source, tmp_path / "tar", "--to", "webdataset") == 2
    assert "field 'json' is" in capsys.readouterr().err


def test_a_row_that_reads_back_otherwise_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = captions(tmp_path / "source"), tmp_path / "target"
    assert convert(source, target, "--to", "mds") == 0
    partial = target.rename(tmp_path / "target.partial")
    shard = partial / "shard.00002.mds"
    at = shard.read_bytes().index("caption 2 17 é".encode())
    with shard.open("r+b") as file:
        file.seek(at)
        file.write(b"C")
    assert convert(source, target, "--to", "mds") == 2
    assert "source/2.tar/17: txt read back otherwise" in capsys.readouterr().err
    assert not target.exists()


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.slow
@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    fmt=st.sampled_from(FORMATS),
    rows=st.lists(st.dictionaries(st.sampled_from("abc"), VALUES), min_size=1, max_size=4),
)
def test_any_json_comes_back_or_a_row_is_named(
    fmt: str,
    rows: list[dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path_factory.mktemp("any")
    source = folder / "rows.jsonl"
    source.write_text("".join(f"{json.dumps({'text': 'x', **row})}\n" for row in rows))
    status = convert(source, folder / "target", "--to", fmt)
    if status:
        assert "unfit_field" in capsys.readouterr().err
        return
    capsys.readouterr()
    for row, found in zip(rows, chain(*read(folder / "target")), strict=True):
        for name, value in row.items():
            if fmt in ("mds", "litdata") or (fmt == "webdataset" and value is not None):
                there = found["json"] if fmt == "webdataset" else found
                assert there.get(name) == value


def test_keys_that_no_member_can_have_become_numbers(tmp_path: Path) -> None:
    keys = ["a.b", "../x", "same", "same", "/abs", ""]
    source = tmp_path / "rows.jsonl"
    rows = ({"__key__": key, "id": n, "text": f"t{n}"} for n, key in enumerate(keys))
    source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert convert(source, tmp_path / "tar", "--to", "webdataset") == 0
    (found,) = read(tmp_path / "tar")
    assert [row["text"] for row in found] == [f"t{n}" for n in range(6)]


def pictures(source: Path) -> Path:
    """Write three JPEGs and three PNGs in turn, with texts."""
    source.mkdir()
    with tarfile.open(source / "0.tar", "w") as tar:
        for number in range(6):
            kind = "PNG" if number % 2 else "JPEG"
            buffer = io.BytesIO()
            PIL.Image.new("RGB", (9, 9), (number, 0, 0)).save(buffer, kind)
            parts = {"png" if number % 2 else "jpg": buffer.getvalue(), "txt": b"a text"}
            for name, data in parts.items():
                info = tarfile.TarInfo(f"{number}.{name}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return source


@pytest.mark.parametrize("fmt", ["mds", "litdata"])
def test_pictures_of_several_formats_become_one_field(fmt: str, tmp_path: Path) -> None:
    assert convert(pictures(tmp_path / "source"), tmp_path / "target", "--to", fmt) == 0
    (found,) = read(tmp_path / "target")
    assert [sorted({*row} - {"__key__"}) for row in found] == [["image", "txt"]] * 6


@pytest.mark.parametrize("fmt", ["parquet", "lance", "webdataset"])
def test_a_picture_that_a_row_lacks_is_no_picture_there(fmt: str, tmp_path: Path) -> None:
    source = pictures(tmp_path / "source")
    assert convert(source, tmp_path / "target", "--to", fmt) == 0
    target = Dataset.from_path("t", tmp_path / "target", cache_dir=tmp_path / "cache")
    for number, sample in enumerate(target.reader.read(0, range(6))):
        (image,) = to_document(sample, "caption").media
        assert image_format(read_blob(target, image.blob)) == ("JPEG", "PNG")[number % 2]


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["mds", "lance"])
def test_a_run_that_was_killed_goes_on(fmt: str, tmp_path: Path) -> None:
    source, target = captions(tmp_path / "source", (30,) * 12), tmp_path / "target"
    words = ["convert", str(source), str(target), "--to", fmt]
    manifest = tmp_path / "target.partial" / ".zephon-convert"
    with subprocess.Popen([sys.executable, "-m", "zephon_mm.cli.main", *words]) as child:
        while child.poll() is None and (
            not manifest.exists() or manifest.read_text().count("\n") < 4
        ):
            pass
        child.kill()
    assert convert(*words[1:]) == 0
    assert [[row["txt"] for row in rows] for rows in read(target)] == [
        [row["txt"] for row in rows] for rows in read(source)
    ]
