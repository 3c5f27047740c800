"""Index files of `wids`: their lists, their counts, and what they may not name."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.readers.test_webdataset import write_tar
from zephon_mm.errors import DatasetError
from zephon_mm.io import Dataset
from zephon_mm.readers.webdataset import WebDatasetReader

FIXTURES = Path(__file__).parents[1] / "fixtures"


def write_index(path: Path, shards: dict[str, int], **more: Any) -> Path:
    """Write what `wids-index create` writes."""
    listed = [
        {"url": url, "md5sum": "0" * 32, "nsamples": count, "filesize": 10240}
        for url, count in shards.items()
    ]
    index = {"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": listed, **more}
    path.write_text(json.dumps(index))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    for name, count in (("a.tar", 1), ("b.tar", 2), ("sub/c.tar", 3)):
        write_tar(tmp_path / name, [(f"{i}.txt", b"x") for i in range(count)])
    return tmp_path


def test_what_the_real_tool_writes_is_read(tmp_path: Path) -> None:
    for source in (*(FIXTURES / "cases" / "TAR-04").glob("*.tar"), *FIXTURES.glob("wids/*")):
        (tmp_path / source.name).write_bytes(source.read_bytes())
    (tmp_path / "shard-000002.tar").write_bytes(b"on no list")
    shards = WebDatasetReader(tmp_path / "shardindex.json").shards
    assert [(shard.name, shard.num_rows) for shard in shards] == [
        ("shard-000000.tar", 3),
        ("shard-000001.tar", 3),
    ]


def test_an_index_is_a_dataset_of_its_shards_in_its_order(folder: Path) -> None:
    index = write_index(folder / "train.json", {"sub/c.tar": 3, "a.tar": 1})
    dataset = Dataset.from_path("d", index, cache_dir=folder / "cache")
    assert dataset.fmt == "webdataset"
    assert [(shard.name, shard.num_rows) for shard in dataset.shards] == [
        ("c.tar", 3),
        ("a.tar", 1),
    ]


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("c.tar", "sub"),
        ("https://example.com/data/a.tar", ""),
        ("a.tar", "s3://bucket/data"),
        ("/cluster/data/a.tar", ""),
        ("../elsewhere/a.tar", ""),
    ],
)
def test_a_shard_is_found_below_the_index_wherever_it_was_written(
    folder: Path, url: str, base: str
) -> None:
    index = write_index(folder / "i.json", {url: 3 if base == "sub" else 1}, base=base)
    (shard,) = WebDatasetReader(index).shards
    assert shard.name == url.rpartition("/")[2]


def test_what_is_listed_beside_a_folder_must_be_there_and_whole(folder: Path) -> None:
    write_index(folder / "train.json", {"a.tar": 1})
    write_index(folder / "val.json", {"b.tar": 2})
    (folder / "a_stats.json").write_text("{}")
    assert [shard.num_rows for shard in WebDatasetReader(folder).shards] == [1, 2, 3]
    write_index(folder / "val.json", {"b.tar": 5})
    with pytest.raises(DatasetError, match=r"b\.tar has 2 samples, .*val\.json says 5"):
        WebDatasetReader(folder)
    write_index(folder / "val.json", {"z.tar": 5})
    with pytest.raises(DatasetError, match=r"val\.json lists 'z\.tar', which is not below"):
        WebDatasetReader(folder)


def test_no_path_of_an_index_leaves_its_folder(folder: Path) -> None:
    for url in ("../a.tar", str(folder / "a.tar")):
        index = write_index(folder / "sub" / "i.json", {url: 1})
        with pytest.raises(DatasetError, match="is not below"):
            WebDatasetReader(index)


@pytest.mark.parametrize(
    "text",
    ['{"shardlist": [', '{"shardlist": [{"url": "a.tar"}]}', '["shardlist"]', '"shardlist"'],
)
def test_a_damaged_index_is_named(folder: Path, text: str) -> None:
    (folder / "i.json").write_text(text)
    with pytest.raises(DatasetError, match=r"i\.json is no wids index .*wids-index create"):
        WebDatasetReader(folder)
