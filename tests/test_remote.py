"""Objects of plain HTTP servers and of a hub, on loopback."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.servers import SHA, Files, running
from tests.fixtures.shards import contents, parquet_of, tar_of
from zephon_mm import remote, stores
from zephon_mm.errors import ConfigError, DatasetError
from zephon_mm.io import Dataset
from zephon_mm.records import FileBlob

SECRETS = ("SEKRETKEY", "AKIDSEKRET", "hf_SEKRET")


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Iterator[Files]:
    monkeypatch.setattr(remote, "RETRY_DELAYS_S", (0.0, 0.0, 0.0, 0.0))
    remote._connect.cache_clear()
    with running(Files({})) as server:
        yield server


@pytest.mark.parametrize("answers_ranges", [True, False])
def test_http_files_are_named_and_come_with_or_without_ranges(
    answers_ranges: bool, files: Files, tmp_path: Path
) -> None:
    files.files = {f"d/s-{n}.tar": tar_of(n, 40) for n in range(3)}
    files.answers_ranges = answers_ranges
    files.faults.extend(["truncate", "reset"])
    pattern = f"{files.url}/d/s-{{0..2}}.tar"
    dataset = Dataset.from_path("d", pattern, cache_dir=tmp_path)
    assert len(contents(dataset)) == 120
    one = Dataset.from_path("d", f"{files.url}/d/s-1.tar", cache_dir=tmp_path)
    assert contents(one) == contents(dataset)[40:80]
    with pytest.raises(DatasetError, match=r"1 of the 4 objects .* first s-3\.tar"):
        Dataset.from_path("d", f"{files.url}/d/s-{{0..3}}.tar", cache_dir=tmp_path)
    with pytest.raises(ConfigError, match="cannot be listed: name its files"):
        Dataset.from_path("d", f"{files.url}/d/", cache_dir=tmp_path)


README = b"""---
configs:
- config_name: small
  data_files:
  - split: train
    path: small/train-*.parquet
  - split: test
    path: small/test-*.parquet
---
"""


@pytest.mark.slow
def test_a_hub_dataset_is_opened_by_config_and_split(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", files.url)
    monkeypatch.setenv("HF_TOKEN", SECRETS[2])
    files.token = SECRETS[2]
    files.files = {
        "me/data/README.md": README,
        "me/data/small/train-0.parquet": parquet_of(0),
        "me/data/small/train-1.parquet": parquet_of(1),
        "me/data/small/test-0.parquet": parquet_of(2),
        "me/data/large/train-0.parquet": parquet_of(3),
    }
    cache = tmp_path / "cache"
    train = Dataset.from_path("d", "hf://me/data/small/train", "parquet", cache_dir=cache)
    assert [row["text"] for row in contents(train)] == [
        f"text {s} {r}" for s in (0, 1) for r in range(3)
    ]
    test = Dataset.from_path("d", "hf://me/data/small/test", "parquet", cache_dir=cache)
    assert [row["text"] for row in contents(test)] == [f"text 2 {r}" for r in range(3)]
    assert all(f"/resolve/{SHA}/" in path for path, _ in files.gets() if "parquet" in path)
    assert not any("large" in path for path, _ in files.gets())
    with pytest.raises(ConfigError, match="asked for config='huge'"):
        Dataset.from_path("d", "hf://me/data/huge/train", cache_dir=cache)
    with pytest.raises(DatasetError, match="is no dataset at"):
        Dataset.from_path("d", "hf://me/none", cache_dir=cache)
    kept = [path.read_bytes() for path in cache.rglob("*") if path.is_file()]
    assert not any(SECRETS[2].encode() in data for data in kept)


def test_no_name_of_a_hub_leaves_the_mirror(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", files.url)
    for name in ("../../out.json", "a/../../out.parquet", "/out.json", "a//b.parquet", "\0.json"):
        files.files = {f"me/data/{name}": b"{}"}
        with pytest.raises(DatasetError, match="no file can have that name"):
            Dataset.from_path("d", "hf://me/data", cache_dir=tmp_path / "cache")
    assert not list(tmp_path.rglob("out*"))


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    remote._connect.cache_clear()
    with pytest.raises(ConfigError, match=r'pip install "zephon-mm\[stores\]"'):
        Dataset.from_path("d", "s3://data/x/", cache_dir=tmp_path)


def test_local_paths_stay_as_they_are() -> None:
    assert stores.local("/some/where/x.tar") == "/some/where/x.tar"
    assert not stores.is_remote("/s3/x")
    assert not stores.is_remote("x.tar")
    assert isinstance(FileBlob("/x", 0, 1), FileBlob)
