"""Rows in memory: the contract, what becomes of pictures, and every runner."""

import io
import pickle
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from numpy.typing import NDArray

from tests.contracts.reader import ReaderContract
from tests.fixtures.memory import Recipe, digests, take
from zephon_mm.errors import ConfigError, DatasetError
from zephon_mm.io import Dataset, read_blob
from zephon_mm.readers.memory import MemoryReader
from zephon_mm.records import FileBlob, RowBlob


def pixels(*shape: int) -> NDArray[np.uint8]:
    return np.random.Generator(np.random.Philox(key=3)).integers(0, 256, shape, dtype=np.uint8)


def captioned(count: int) -> list[dict[str, Any]]:
    return [{"image": pixels(9, 4 + i % 7, 3), "text": f"row {i} é"} for i in range(count)]


def first_row(**fields: Any) -> tuple[Dataset, dict[str, Any]]:
    dataset = Dataset.from_rows("d", [fields])
    (row,) = dataset.reader.read(0, [0])
    assert isinstance(row, dict)
    return dataset, row


class TestContract(ReaderContract):
    @pytest.fixture
    def reader(self, tmp_path: Path) -> MemoryReader:
        (tmp_path / "a.png").write_bytes(b"a file")
        rows: list[dict[str, Any]] = [{"n": i} for i in range(1002)]
        rows[0] |= {"image": pixels(3, 3), "x/~y": [{"deep": b"bytes"}, tmp_path / "a.png"]}
        return MemoryReader(rows)


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 1), (5, 7, 3), (5, 7, 4)])
def test_an_array_is_stored_without_loss(shape: tuple[int, ...]) -> None:
    array = pixels(*shape)
    dataset, row = first_row(
        image=array[::-1], picture=PIL.Image.fromarray(array[:, ::-1, ...].squeeze())
    )
    for field, want in (("image", array[::-1]), ("picture", array[:, ::-1])):
        encoded = read_blob(dataset, row[field])
        assert (np.asarray(PIL.Image.open(io.BytesIO(encoded))) == want.squeeze()).all()


def test_a_picture_is_stored_upright() -> None:
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    buffer = io.BytesIO()
    PIL.Image.fromarray(pixels(4, 8, 3)).save(buffer, "JPEG", exif=exif)
    dataset, row = first_row(image=PIL.Image.open(buffer))
    assert PIL.Image.open(io.BytesIO(read_blob(dataset, row["image"]))).size == (4, 8)


def test_bytes_paths_text_and_numbers_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"a file")
    values = {"t": "a.png", "n": np.float32(0.5), "none": None, "ok": True, "l": (1, [np.int8(2)])}
    dataset, row = first_row(b=b"\xff\xd8", p=tmp_path / "a.png", **values)
    assert row["p"] == FileBlob(str(tmp_path / "a.png"), 0, 6)
    assert read_blob(dataset, row["b"]) == b"\xff\xd8"
    assert [row[name] for name in values] == ["a.png", 0.5, None, True, [1, [2]]]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Fraction(1, 2), "row 1, field 'x/0' holds Fraction, expected str, number"),
        (np.zeros((2, 2, 3)), r"holds array of float64 and shape \(2, 2, 3\), expected"),
        (np.zeros((0, 2, 3), np.uint8), r"uint8 and shape \(0, 2, 3\)"),
        (np.zeros((2, 2, 2), np.uint8), r"uint8 and shape \(2, 2, 2\)"),
        (PIL.Image.new("CMYK", (2, 2)), r"holds Image CMYK, .*convert\('RGB'\)"),
    ],
)
def test_what_cannot_be_stored_is_named(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Dataset.from_rows("d", [{"x": 1}, {"x": [value]}])


def test_rows_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="row 1 is a str, expected a mapping"):
        Dataset.from_rows("d", [{}, "text"])  # type: ignore[list-item]
    with pytest.raises(DatasetError, match="'d' is empty: MemoryReader"):
        Dataset.from_rows("d", [])
    with pytest.raises(DatasetError, match=r"row 0, field 'p' names .*none\.png, which is no file"):
        Dataset.from_rows("d", [{"p": tmp_path / "none.png"}])
    with pytest.raises(DatasetError, match="no picture"):
        first_row(a="text")[0].reader.fetch(RowBlob(0, 0, "a"))


def test_the_digest_is_over_contents_and_keys_are_names() -> None:
    rows = captioned(3)
    digest = MemoryReader(rows).digest()
    assert MemoryReader(captioned(3)).digest() == digest
    rows[2]["image"] = rows[2]["image"] ^ 1
    assert MemoryReader(rows).digest() != digest
    assert MemoryReader(reversed(captioned(3))).digest() != digest
    many = MemoryReader([{"__key__": "a"}] + [{}] * 1000)
    assert [shard.num_rows for shard in many.shards] == [1000, 1]
    found: list[Any] = [*many.read(0, [0, 1]), *many.read(1, [0])]
    assert [row["__key__"] for row in found] == ["a", "1", "1000"]


def test_what_the_user_changes_later_does_not_show() -> None:
    rows = captioned(2)
    dataset = Dataset.from_rows("d", rows)
    before = pickle.dumps(dataset.reader)
    rows[0]["image"][:] = 0
    rows[1].clear()
    assert pickle.dumps(dataset.reader) == before


@pytest.mark.parametrize("runner", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_every_runner_gives_the_same_batches(runner: str) -> None:
    recipe = Recipe(datasets=(Dataset.from_rows("d", captioned(40)),), passes=1)
    with recipe.build() as pipeline:
        want = digests(take(pipeline, 99))
    with recipe.build(runner=runner, workers=2) as pipeline:
        assert digests(take(pipeline, 99)) == want
    assert len(want) >= 4
