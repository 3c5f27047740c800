"""The Vortex reader, on files that vortex-data writes; skipped where that is not installed."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.contracts.reader import ReaderContract
from tests.fixtures.columns import cells
from zephon_mm.errors import ConfigError, DatasetError, SampleError
from zephon_mm.io import Dataset, read_blob
from zephon_mm.readers.vortex import VortexReader
from zephon_mm.records import RowBlob

try:
    import vortex
except ImportError:
    vortex = None
needs_vortex = pytest.mark.skipif(vortex is None, reason="vortex-data is not installed")

ROWS: dict[str, list[Any]] = {
    "id": ["a", "b", "c", None],
    "text": ["one é", "", None, "four"],
    "jpg": [b"\xff\xd8 one", None, b"", b"\xff\xd8 four"],
    "pic": [{"bytes": b"1", "path": "x"}, None, {"bytes": None, "path": "y"}, {"bytes": b"4"}],
    "images": [[b"p", b"q"], [], None, [b"r"]],
    "words": [["x", "y"], [], None, ["z"]],
    "n": [1.5, 2.0, None, 4.0],
}


def write(path: Path, **columns: Any) -> Path:
    vortex.io.write(pa.table(columns or ROWS), str(path))
    return path


def image(dataset: Dataset, blob: RowBlob) -> bytes | None:
    """Return an image; None for one that is null."""
    with suppress(SampleError):
        return read_blob(dataset, blob)
    return None


@needs_vortex
class TestContract(ReaderContract):
    @pytest.fixture
    def reader(self, tmp_path: Path) -> VortexReader:
        rows = {name: values[::3] for name, values in ROWS.items()}  # of no null image
        write(tmp_path / "a.vortex", **rows)
        write(tmp_path / "b.vortex", **rows)
        return VortexReader(tmp_path)


@needs_vortex
def test_rows_are_those_that_were_written(tmp_path: Path) -> None:
    dataset = Dataset.from_path("d", write(tmp_path / "a.vortex"), cache_dir=tmp_path / "cache")
    assert dataset.fmt == "vortex"
    rows: list[Any] = dataset.reader.read(0, range(4))
    assert [row["__key__"] for row in rows] == ["a", "b", "c", ""]
    for name in ("text", "words", "n"):
        assert [row[name] for row in rows] == ROWS[name]
    assert [image(dataset, row["jpg"]) for row in rows] == ROWS["jpg"]
    assert [image(dataset, row["pic"]) for row in rows] == [b"1", None, None, b"4"]
    lists = [row["images"] and [read_blob(dataset, blob) for blob in row["images"]] for row in rows]
    assert lists == ROWS["images"]


@needs_vortex
def test_columns_hold_what_rows_hold_and_lists_are_left_out(tmp_path: Path) -> None:
    reader = VortexReader(write(tmp_path / "a.vortex"))
    names = ["text", "jpg", "images", "n", "none"]
    columns = reader.columns(0, np.array([3, 0, 1, 2, 0]), names)
    assert columns.keys() == {"text", "jpg"}
    order = (3, 0, 1, 2, 0)
    assert cells(columns["jpg"]) == [ROWS["jpg"][i] for i in order]
    texts = [ROWS["text"][i] for i in order]
    assert cells(columns["text"]) == [None if text is None else text.encode() for text in texts]


@needs_vortex
def test_a_binary_key_is_an_image_and_rows_are_numbered(tmp_path: Path) -> None:
    reader = VortexReader(write(tmp_path / "a.vortex", id=[b"x", b"y"], n=[1, 2]))
    rows: list[Any] = reader.read(0, [1, 0, 1], ["n"])
    assert rows == [{"n": n, "__key__": str(n - 1)} for n in (2, 1, 2)]


@needs_vortex
def test_a_null_inside_a_list_is_no_image(tmp_path: Path) -> None:
    reader = VortexReader(write(tmp_path / "a.vortex", images=pa.array([[b"p", None]])))
    with pytest.raises(SampleError, match=r"\[no_image\] a\.vortex/0: images/1 is null"):
        reader.fetch(RowBlob(0, 0, "images/1"))


@needs_vortex
@pytest.mark.parametrize("damage", ["empty", "cut", "junk"])
def test_a_file_that_is_not_whole_is_named(tmp_path: Path, damage: str) -> None:
    data = write(tmp_path / "a.vortex").read_bytes()
    (tmp_path / "a.vortex").write_bytes({"empty": b"", "cut": data[:-9], "junk": b"x" * 99}[damage])
    with pytest.raises(DatasetError, match=r"a\.vortex is no whole Vortex file: "):
        VortexReader(tmp_path)


@pytest.mark.skipif(vortex is not None, reason="vortex-data is installed")
def test_without_the_package_the_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.vortex").write_bytes(b"VTXF")
    assert VortexReader.detect(tmp_path)
    with pytest.raises(ConfigError, match=r'pip install "zephon-mm\[vortex\]"'):
        VortexReader(tmp_path)
