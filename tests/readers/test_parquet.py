"""The Parquet reader: the contract, the known failures, layouts of Hugging Face datasets."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contracts.reader import ReaderContract
from tests.fixtures.columns import cells
from tests.fixtures.parquetrows import JPEG, PICTURE, rows_of, unpacked, whole, write
from zephon_mm.errors import SampleError
from zephon_mm.readers import parquet
from zephon_mm.readers.parquet import ParquetReader
from zephon_mm.records import ShardInfo

CASES = Path(__file__).parents[1] / "fixtures" / "cases"


def expected(case: str) -> Any:
    return json.loads((CASES / case / "expected.json").read_text())


class TestContract(ReaderContract):
    @pytest.fixture
    def reader(self, tmp_path: Path) -> ParquetReader:
        pictures = [{"bytes": JPEG + bytes([i]), "path": None} for i in range(7)]
        columns = {"image": pictures, "text": [f"é {i}" for i in range(7)], "id": range(7)}
        write(tmp_path / "data" / "a.parquet", columns, row_group_size=3)
        lists = {"images": [[b"x" * 9, None], [], None], "n": [1.5, None, 2.0]}
        write(tmp_path / "data" / "b.parquet", lists)
        return ParquetReader(tmp_path / "data", cache_dir=tmp_path / "cache")


# Law 1: a row group is decoded once; memory is bounded.


def test_each_row_group_is_decoded_once_whatever_the_order(tmp_path: Path) -> None:
    columns = {"image": [JPEG + bytes([i]) for i in range(40)], "text": list(map(str, range(40)))}
    path = write(tmp_path / "a.parquet", columns, row_group_size=10)
    made: dict[str, int] = {}
    for _ in range(2):  # the second reader finds the files of the first
        reader = ParquetReader(path, cache_dir=tmp_path / "cache")
        for row in np.random.default_rng(0).permutation(40).tolist():
            (sample,) = reader.read(row // 10, [row % 10])
            assert whole(reader, sample) == {"image": columns["image"][row], "text": str(row)}
            stored = reader.columns(row // 10, np.array([row % 10]), ["image", "text"])
            assert cells(stored["image"]) == [columns["image"][row]]
            assert cells(stored["text"]) == [str(row).encode()]
            found = unpacked(tmp_path / "cache")
            assert found.items() >= made.items()
            made = found
    assert len(made) == 4 * 2  # values and images of each


def test_columns_of_much_of_a_row_group_do_not_write_its_images(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"image": [JPEG] * 40, "text": ["x"] * 40})
    reader = ParquetReader(path, cache_dir=tmp_path)
    for count, files in ((20, 1), (19, 2)):
        found = reader.columns(0, np.arange(count), ["image"])["image"]
        assert cells(found) == [JPEG] * count
        assert len(unpacked(tmp_path)) == files


_READ_SOME_ROWS = """
import resource, sys
import pyarrow as pa
from zephon_mm.readers.parquet import ParquetReader
reader = ParquetReader(sys.argv[1], cache_dir=sys.argv[2])
rows = reader.read(0, range(10, 21))
sizes = [len(reader.fetch(row["image"])) for row in rows]
print(pa.default_memory_pool().max_memory(), *sizes)
"""


@pytest.mark.slow
def test_pq_02_rows_of_a_huge_group_are_read_in_bounded_memory(tmp_path: Path) -> None:
    columns = {"id": range(6000), "image": [np.random.default_rng(0).bytes(10_000)] * 6000}
    pages = {"use_dictionary": False, "compression": "none", "write_batch_size": 64}
    path = write(tmp_path / "a.parquet", columns, **pages)
    (group,) = ParquetReader(path).shards
    assert group.num_bytes > 60_000_000  # known from the footer
    command = [sys.executable, "-c", _READ_SOME_ROWS, str(path), str(tmp_path / "cache")]
    peak, *sizes = subprocess.run(command, check=True, capture_output=True).stdout.split()
    assert int(peak) < 30_000_000
    assert sizes == [b"10000"] * 11


def test_pq_02_one_group_is_read_by_row_and_large_ones_are_warned_of() -> None:
    reader = ParquetReader(CASES / "PQ-02" / "one_group.parquet")
    assert [shard.num_rows for shard in reader.shards] == [expected("PQ-02")["rows"]]
    rows = reader.read(0, range(10, 21))
    assert [row["id"] for row in rows] == list(range(10, 21))
    assert all(whole(reader, row["image"]).startswith(b"\xff\xd8") for row in rows)
    with pytest.warns(UserWarning, match=r"b#0 holds 5000000000 bytes in 9 rows: .* at most 107"):
        parquet._warn_of_large([ShardInfo("a#0", 9, 1000), ShardInfo("b#0", 9, 5_000_000_000)])


# Law 2: planning reads no image column.


def test_rows_are_read_without_their_images_where_the_footer_tells_which_are_there(
    tmp_path: Path,
) -> None:
    some, none = {"bytes": JPEG, "path": None}, {"bytes": None, "path": None}
    told: dict[str, tuple[Any, Any]] = {
        "raw": (pa.large_binary(), [JPEG, JPEG, JPEG]),
        "struct": (PICTURE, [some, None, some]),
        "lists": (pa.list_(PICTURE), [[some, None], [], None]),
    }
    cases = {
        **told,
        "null": (pa.binary(), [JPEG, None, JPEG]),
        "without_bytes": (PICTURE, [some, none, None]),
        "bare_lists": (pa.list_(pa.binary()), [[JPEG], [], None]),
        "deep": (pa.list_(pa.struct({"x": PICTURE, "y": pa.int8()})), [[{"x": some}], [], None]),
    }
    for name, (kind, values) in cases.items():
        path = write(tmp_path / f"{name}.parquet", {name: values}, {name: kind})
        cache = tmp_path / "caches" / name
        reader = ParquetReader(path, cache_dir=cache)
        rows = reader.read(0, range(3))
        assert len(unpacked(cache)) == (1 if name in told else 2), name
        plain = json.loads(
            json.dumps(values, default=lambda b: b.decode("latin-1")),
            object_hook=lambda d: d.get("bytes", d),
        )
        want = [{name: value} for value in plain]
        found = json.dumps([whole(reader, r) for r in rows], default=lambda b: b.decode("latin-1"))
        if name == "deep":
            want[0]["deep"][0]["y"] = None
        assert json.loads(found) == want, name


# Law 3: null, empty and nested values are what was stored.

PICTURES = st.none() | st.builds(
    dict, bytes=st.none() | st.binary(max_size=9), path=st.none() | st.just(None)
)
TEXTS = st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
ROWS = st.fixed_dictionaries(
    {
        "photo": PICTURES,
        "photos": st.none() | st.lists(PICTURES, max_size=3),
        "raw": st.none() | st.binary(max_size=9),
        "raws": st.none() | st.lists(st.none() | st.binary(max_size=9), max_size=3),
        "text": TEXTS,
        "texts": st.none() | st.lists(TEXTS, max_size=3),
    }
)
TYPES = {
    "photo": PICTURE,
    "photos": pa.list_(PICTURE),
    "raw": pa.binary(),
    "raws": pa.large_list(pa.large_binary()),
    "text": pa.string(),
    "texts": pa.list_(pa.large_string()),
}


def image_of(value: Any) -> Any:
    if isinstance(value, list):
        return [image_of(item) for item in value]
    return value["bytes"] if isinstance(value, dict) else value


@settings(max_examples=30, deadline=None)
@given(rows=st.lists(ROWS, min_size=1, max_size=12), data=st.data())
def test_what_was_written_is_what_is_read(
    rows: list[dict[str, Any]], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("any")
    columns = {name: [row[name] for row in rows] for name in TYPES}
    path = write(folder / "a.parquet", columns, TYPES, row_group_size=5)
    reader = ParquetReader(path, cache_dir=folder)
    want = [{name: image_of(value) for name, value in row.items()} for row in rows]
    assert [whole(reader, row) for row in rows_of(reader)] == want

    numbers = data.draw(st.lists(st.integers(0, reader.shards[0].num_rows - 1)))
    found = reader.columns(0, np.array(numbers, dtype=np.int64), ["photo", "raw", "text", "none"])
    for name in ("photo", "raw", "text"):
        if name not in found:  # a struct without bytes
            assert any(row["photo"] and row["photo"]["bytes"] is None for row in rows)
            continue
        stored = [want[number][name] for number in numbers]
        values = [(v.encode() if isinstance(v, str) else v) for v in stored]
        assert cells(found[name]) == values
    assert not found["none"].valid.any()


def test_pq_01_nested_lists_in_several_chunks_are_read_row_by_row() -> None:
    reader = ParquetReader(CASES / "PQ-01" / "nested.parquet")
    rows, want = rows_of(reader), expected("PQ-01")
    assert len(rows) == want["rows"]
    for number, row in enumerate(rows):
        assert len(row["images"]) == want["images_per_row"][number % 4]
        assert row["texts"] == want["texts"][number % 4]
        assert all(image.startswith(b"\xff\xd8") for image in whole(reader, row["images"]))


def test_pq_04_columns_whose_dictionary_overflows_are_equal_row_by_row() -> None:
    reader = ParquetReader(CASES / "PQ-04" / "dict.parquet")
    rows, want = rows_of(reader), expected("PQ-04")
    assert len(rows) == want["rows"]
    assert [row["lab"] for row in rows] == [row["plain"] for row in rows]
    assert (rows[0]["lab"], rows[-1]["lab"]) == (want["first"], want["last"])


def test_pq_05_each_declared_shape_is_an_image_and_null_is_not_empty() -> None:
    for name in ("hf_image", "large_binary"):
        reader = ParquetReader(CASES / "PQ-05" / f"{name}.parquet")
        heads = {b"\xff\xd8": "jpeg", b"\x89P": "png", b"": "empty bytes", None: "null"}
        found = [
            image and image[:2] for image in (whole(reader, r["image"]) for r in rows_of(reader))
        ]
        assert [heads[head] for head in found] == expected("PQ-05")[name]


def test_views_dictionaries_and_odd_names_are_plain_values(tmp_path: Path) -> None:
    columns = {
        "view": pa.array(["a", None, "c"], pa.string_view()),
        "dictionary": pa.array(["x", "y", "x"]).dictionary_encode(),
        "a/b~c.d": pa.array([JPEG, b"", None]),
        "pairs": pa.array([[("k", 1)], [], None], pa.map_(pa.string(), pa.int64())),
        "id": pa.array([7, None, 9]),
        "key": pa.array(["k0", "k1", "k2"]),
    }
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(columns), path)
    reader = ParquetReader(path, cache_dir=tmp_path)
    rows = reader.read(0, [2, 0, 1, 1])
    assert [row["__key__"] for row in rows] == ["9", "7", "k1", "k1"]
    first = whole(reader, rows[1])
    assert first == {
        **{"view": "a", "dictionary": "x", "a/b~c.d": JPEG, "id": 7, "key": "k0"},
        "pairs": [("k", 1)],
    }
    assert whole(reader, rows[0])["a/b~c.d"] is None


def test_text_that_is_not_utf8_is_a_defect_of_its_row_alone(tmp_path: Path) -> None:
    array = pa.array([b"fine", b"caf\xe9", b"too"]).view(pa.string())
    pq.write_table(pa.table({"text": array}), tmp_path / "a.parquet")
    one, bad, three = rows_of(ParquetReader(tmp_path / "a.parquet", cache_dir=tmp_path))
    assert (one["text"], three["text"]) == ("fine", "too")
    assert isinstance(bad, SampleError)
    assert bad.reason == "bad_utf8"
    assert "a.parquet#0/1" in bad.message
