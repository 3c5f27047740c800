"""Folders of Hugging Face datasets: splits and configurations, files of the real library."""

import io
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from PIL import Image

from zephon_mm.errors import ConfigError, DatasetError
from zephon_mm.io import Dataset, read_blob
from zephon_mm.readers.hubfolder import split_files
from zephon_mm.readers.parquet import ParquetReader

HUB = Path(__file__).parents[1] / "fixtures" / "hub"
SUFFIXES = (".parquet", ".arrow")


def files_of(folder: Path, split: str | None = None, config: str | None = None) -> list[str]:
    files = split_files(str(folder), SUFFIXES, config=config, split=split)
    return [str(Path(file).relative_to(folder)) for file in files]


def folder_of(path: Path, *names: str, readme: str = "") -> Path:
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).touch()
    if readme:
        (path / "README.md").write_text(readme)
    return path


def rows_of(folder: Path, cache: Path, split: str | None) -> list[Any]:
    dataset = Dataset.from_path("d", folder, cache_dir=cache, split=split)
    reader = dataset.reader
    rows = [
        r for n, shard in enumerate(reader.shards) for r in reader.read(n, range(shard.num_rows))
    ]
    for row in rows:
        row["image"] = row["image"] and read_blob(dataset, row["image"])
        row["images"] = [read_blob(dataset, blob) for blob in row["images"]]
    return rows


@pytest.mark.parametrize(("split", "count"), [("train", 7), ("sft", 4), ("all", 11)])
def test_what_the_real_library_wrote_reads_the_same_in_both_layouts(
    split: str, count: int, tmp_path: Path
) -> None:
    files = sorted((HUB / "hub" / "data").glob("*.parquet"))
    stored = [
        row
        for f in files
        if split in ("all", f.name.split("-")[0])
        for row in pq.read_table(f).to_pylist()
    ]
    uploaded = rows_of(HUB / "hub", tmp_path, split)
    saved = rows_of(HUB / "saved", tmp_path, split)
    assert uploaded == saved
    assert len(saved) == len(stored) == count
    for row, want in zip(saved, stored, strict=True):
        assert row["__key__"] == row["id"] == want["id"]
        assert row["text"] == want["text"]
        assert row["image"] == (want["image"] and want["image"]["bytes"])
        assert row["images"] == [image["bytes"] for image in want["images"]]
        for image in row["images"]:
            Image.open(io.BytesIO(image)).load()


def test_splits_never_mix_unless_asked() -> None:
    for folder in (HUB / "hub", HUB / "saved"):
        with pytest.raises(ConfigError, match="has sft, train, asked for split=None"):
            ParquetReader(folder)
        with pytest.raises(ConfigError, match="asked for split='test'"):
            ParquetReader(folder, split="test")


def test_names_tell_splits_as_the_hub_has_them(tmp_path: Path) -> None:
    folder = folder_of(
        tmp_path,
        *("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"),
        *("test/0.parquet", "my-validation.parquet", "cache-0123.arrow"),
    )
    train = ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]
    assert files_of(folder, "train") == train
    assert files_of(folder, "test") == ["test/0.parquet"]
    assert files_of(folder, "validation") == ["my-validation.parquet"]
    assert sorted(files_of(folder, "all")) == sorted(
        [*train, "test/0.parquet", "my-validation.parquet"]
    )


@pytest.mark.parametrize(
    "names",
    [
        ["b.parquet", "a/x.parquet"],
        ["part-00000-of-00002.parquet", "part-00001-of-00002.parquet"],
        ["training_data.parquet", "latest.parquet"],
    ],
)
def test_a_folder_without_splits_is_one(names: list[str], tmp_path: Path) -> None:
    assert files_of(folder_of(tmp_path, *names)) == sorted(names)
    assert files_of(tmp_path, "train") == sorted(names)


def test_a_folder_without_files_says_so(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"holds no \.parquet"):
        ParquetReader(folder_of(tmp_path, "a.txt"))


README = """---
license: mit
configs:
- config_name: en
  data_files:
  - split: train
    path: en/*.parquet
  - split: test
    path: [tests/en.parquet, tests/none.parquet]
- config_name: fr
  default: {default}
  data_files: fr.parquet
---
# A dataset
---
"""


def test_a_readme_tells_configurations_and_splits(tmp_path: Path) -> None:
    names = ["en/1.parquet", "en/0.parquet", "tests/en.parquet", "fr.parquet", "other.parquet"]
    folder = folder_of(tmp_path, *names, readme=README.format(default="true"))
    assert files_of(folder) == ["fr.parquet"]
    assert files_of(folder, "train", "en") == ["en/0.parquet", "en/1.parquet"]
    assert files_of(folder, "test", "en") == ["tests/en.parquet"]
    with pytest.raises(ConfigError, match="has en, fr, asked for config='de'"):
        files_of(folder, config="de")
    folder_of(tmp_path, readme=README.format(default="false"))
    with pytest.raises(ConfigError, match="has en, fr, asked for config='default'"):
        files_of(folder)


@pytest.mark.parametrize(
    "readme", ["# Only text\n---\nx\n---\n", "---\n{ no yaml\n---\n", "---\n- 1\n---\n"]
)
def test_a_readme_that_tells_nothing_leaves_it_to_the_names(readme: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "train/0.parquet", "test/0.parquet", readme=readme)
    assert files_of(folder, "test") == ["test/0.parquet"]
    with pytest.raises(ConfigError, match="has no config"):
        files_of(folder, config="en")


@pytest.mark.parametrize("pattern", ["../*.parquet", "a/../../x.parquet", "/etc/x.parquet"])
def test_no_pattern_of_a_readme_leaves_the_folder(pattern: str, tmp_path: Path) -> None:
    readme = f"---\nconfigs:\n- config_name: x\n  data_files: {pattern}\n---\n"
    with pytest.raises(DatasetError, match="outside the folder"):
        files_of(folder_of(tmp_path / "d", "a.parquet", readme=readme))


def test_a_saved_file_that_is_missing_is_named(tmp_path: Path) -> None:
    shutil.copytree(HUB / "saved" / "train", tmp_path / "train")
    lost = sorted((tmp_path / "train").glob("*.arrow"))[1]
    lost.unlink()
    with pytest.raises(DatasetError, match=rf"state\.json lists {lost.name}, which is not there"):
        Dataset.from_path("d", tmp_path / "train", cache_dir=tmp_path / "cache")
    (tmp_path / "train" / "state.json").write_text("{}")  # another's
    with pytest.warns(UserWarning, match="1 of 00002 shards are not there"):
        Dataset.from_path("d", tmp_path / "train", cache_dir=tmp_path / "cache")
