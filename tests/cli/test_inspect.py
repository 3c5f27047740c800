"""`zephon-mm inspect`: what a dataset is, and everything that is wrong with it, by name."""

import io
import shutil
import tarfile
from pathlib import Path

import PIL.Image
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
