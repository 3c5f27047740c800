"""`zephon-mm inspect`: what a dataset is, and everything that is wrong with it, by name."""

import io
import shutil
import tarfile
from pathlib import Path

import lance
import PIL.Image
import pyarrow as pa
import pytest

from zephon_mm.cli.main import main

CASES = Path(__file__).parents[1] / "fixtures" / "cases"


def inspect(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    status = main(["inspect", *map(str, words)])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def write_tar(path: Path, count: int, broken: int = -1) -> None:
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for number in range(count):
            buffer = io.BytesIO()
            PIL.Image.new("RGB", (40 + number, 30), (number % 255, 90, 10)).save(buffer, "JPEG")
            image = buffer.getvalue()[:-20] if number == broken else buffer.getvalue()
            for name, data in (("jpg", image), ("txt", f"caption {number}".encode())):
                info = tarfile.TarInfo(f"{number:04d}.{name}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def test_it_shows_format_counts_fields_schema_and_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for shard in range(3):
        write_tar(tmp_path / "data" / f"{shard}.tar", 40)
    status, shown = inspect(capsys, tmp_path / "data", "--fmt", "webdataset")
    assert status == 0
    for line in (
        "format   webdataset",
        "shards   3, of 40 to 40 rows",
        "rows     120",
        "field    jpg: bytes",
        "schema   caption",
        "JPEG, 40 x 30 px",
        "'caption 0'",
        "looked at 96 of 120 rows: 0 problems",
    ):
        assert line in shown


def test_a_broken_image_past_the_first_rows_is_found_by_check_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tar(tmp_path / "data" / "0.tar", 300, broken=277)
    path = tmp_path / "data"
    assert inspect(capsys, path, "--fmt", "webdataset")[0] == 0
    status, shown = inspect(capsys, path, "--fmt", "webdataset", "--check")
    assert status == 1
    assert "looked at 300 of 300 rows: 1 problems" in shown
    assert "first: data/0.tar/277: " in shown


def test_what_is_missing_is_counted_by_reason(capsys: pytest.CaptureFixture[str]) -> None:
    status, shown = inspect(capsys, CASES / "TAR-06", "--fmt", "webdataset", "--check")
    assert status == 1
    for reason in ("no_text", "no_image", "empty_image", "empty_text"):
        assert f"1 x {reason}, first: data/missing.tar/" in shown


def test_a_half_written_shard_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tar(tmp_path / "data" / "0.tar", 20)
    write_tar(tmp_path / "data" / "1.tar", 20)
    cut = tmp_path / "data" / "1.tar"
    cut.write_bytes(cut.read_bytes()[:9000])
    status, shown = inspect(capsys, tmp_path / "data", "--fmt", "webdataset", "--check")
    assert status
    assert "1.tar" in shown


def test_rows_that_tell_no_schema_are_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n{"a": 2, "b": [3]}\n')
    status, shown = inspect(capsys, tmp_path / "rows.jsonl", "--fmt", "jsonl")
    assert status == 1
    assert "schema   unknown" in shown
    assert "field    b: list of int, absent in 1 of 2 rows" in shown
    shutil.rmtree(tmp_path)


def test_check_compares_hashes_where_there_are_some(capsys: pytest.CaptureFixture[str]) -> None:
    """MDS-02: one bit of shard 1 is flipped, in a text."""
    assert inspect(capsys, CASES / "MDS-02")[0] == 0
    status, shown = inspect(capsys, CASES / "MDS-02", "--check")
    assert status == 1
    assert "looked at 3 of 6 rows: 1 problems" in shown
    assert "1 x damaged_shard, first: shard.00001.mds: " in shown
    assert "7591522188" in shown


def test_one_damaged_shard_hides_no_other_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(CASES / "LIT-03", tmp_path / "d")
    shutil.copy(tmp_path / "d" / "chunk-0-1.zstd.bin", tmp_path / "d" / "chunk-0-0.zstd.bin")
    status, shown = inspect(capsys, tmp_path / "d", "--check")
    assert status == 1
    assert "schema   unknown: " in shown
    assert "2 x damaged_shard, first: chunk-0-0.zstd.bin: " in shown


def test_what_was_left_out_and_what_another_rule_would_find_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """TAR-02, TAR-10."""
    _, shown = inspect(capsys, CASES / "TAR-10")
    assert "skipped  3 members: hidden" in shown
    _, shown = inspect(capsys, CASES / "TAR-02")
    assert "hint     has 05.png, 05.txt; split='last_dot' would find png, txt" in shown
    _, shown = inspect(capsys, CASES / "TAR-02", "--option", "split=last_dot")
    assert "would find" not in shown


def test_rows_are_read_also_where_no_schema_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """JSL-06."""
    status, shown = inspect(capsys, CASES / "JSL-06" / "not_json.jsonl", "--check")
    assert status == 1
    assert "schema   unknown" in shown
    assert "6 x bad_json, first: data/not_json.jsonl/1: not_json.jsonl, line 2, byte" in shown


def test_a_null_picture_is_shown_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = pa.array([None, b"x"], pa.binary())
    lance.write_dataset(pa.table({"image": images, "text": ["a", "b"]}), tmp_path / "d")
    status, shown = inspect(capsys, tmp_path / "d")
    assert status == 1
    assert "image        cannot be read: [no_image] fragment-0/0, image is null" in shown


class Terminal(io.StringIO):
    """A stream that is shown to somebody."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        write_tar(tmp_path / "data" / f"{number}.tar", 4)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.stderr", shown := Terminal())
    assert main(["inspect", str(tmp_path / "data"), "--check"]) == 0
    assert "index webdataset-first_dot: 100%" in shown.getvalue()
    assert "20/20" in shown.getvalue()
    assert main(["convert", str(tmp_path / "data"), str(tmp_path / "mds"), "--to", "mds"]) == 0
    assert "60/60" in shown.getvalue()  # each row is looked at, written and verified
