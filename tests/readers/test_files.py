"""Regions of files, read together or one by one; unpacking and its limit."""

import bz2
import gzip
import os
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zephon_mm.readers.files as files
from zephon_mm.errors import DatasetError
from zephon_mm.readers.files import find_shards, open_shard, read_regions


@settings(max_examples=60, deadline=None)
@given(
    regions=st.lists(st.tuples(st.integers(0, 990), st.integers(0, 10))),
    dense_bytes=st.sampled_from([-1, 50, 1 << 20]),
)
def test_regions_come_in_the_order_asked_read_together_or_not(
    regions: list[tuple[int, int]], dense_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = np.random.Generator(np.random.Philox(key=1)).bytes(1000)
    path = tmp_path_factory.mktemp("regions") / "f"
    path.write_bytes(data)
    starts, sizes = np.array(regions, dtype=np.int64).reshape(-1, 2).T
    descriptor = os.open(path, os.O_RDONLY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_DENSE_BYTES", dense_bytes)
        found = read_regions(descriptor, "f", starts, sizes)
    os.close(descriptor)
    assert found.tobytes() == b"".join(data[at : at + size] for at, size in regions)


@pytest.mark.parametrize("apart", [10, 100_000])
def test_a_region_behind_the_end_is_an_error(tmp_path: Path, apart: int) -> None:
    (tmp_path / "f").write_bytes(bytes(apart + 20))
    descriptor = os.open(tmp_path / "f", os.O_RDONLY)
    with pytest.raises(DatasetError, match=r"f gave 15 of 20 bytes up to byte .* was cut"):
        read_regions(descriptor, "f", np.array([5, apart + 15]), np.array([10, 10]))
    os.close(descriptor)


DATA = os.urandom(100) * 50_000


@pytest.mark.parametrize(
    ("suffix", "packed"),
    [
        (".gz", gzip.compress(DATA[:999], 1) + gzip.compress(DATA[999:], 1)),
        (".tgz", gzip.compress(DATA, 1)),
        (".bz2", bz2.compress(DATA[:5000])),
        (".ZST", pyarrow.compress(DATA, codec="zstd", asbytes=True) * 2),
    ],
)
def test_every_member_of_a_packed_file_is_unpacked(
    tmp_path: Path, suffix: str, packed: bytes
) -> None:
    path = tmp_path / f"f{suffix}"
    path.write_bytes(packed)
    want = {".bz2": DATA[:5000], ".ZST": DATA * 2}.get(suffix, DATA)
    (file,) = find_shards(path, ())
    with open_shard(file, tmp_path / "cache") as descriptor:
        assert os.pread(descriptor, len(want) + 1, 0) == want
    path.write_bytes(packed[:-4])
    with pytest.raises(DatasetError, match="when it was indexed"), open_shard(file, tmp_path):
        pass
    (cut,) = find_shards(path, ())
    with pytest.raises(DatasetError, match="does not unpack as"), open_shard(cut, tmp_path):
        pass


def test_a_file_that_unpacks_to_far_more_than_its_size_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_ALWAYS_BYTES", 1 << 20)
    monkeypatch.setattr(files, "_BLOCK_BYTES", 1 << 16)
    (tmp_path / "f.gz").write_bytes(gzip.compress(bytes(20 << 20)))
    (file,) = find_shards(tmp_path / "f.gz", ())
    refused = pytest.raises(DatasetError, match=r"f\.gz unpacks to over \d+ bytes, 200 times its")
    with refused, open_shard(file, tmp_path / "cache"):
        pass
    assert not [path for path in (tmp_path / "cache" / "files").iterdir() if path.stat().st_size]


def test_shards_that_the_names_of_others_tell_of_are_missed(tmp_path: Path) -> None:
    for number in (0, 2, 3):
        (tmp_path / f"train-{number:05}-of-00005.tar").touch()
    with pytest.warns(UserWarning, match=r"2 of 00005 shards .* first .*train-00001-of-00005\.tar"):
        assert len(find_shards(tmp_path, (".tar",))) == 3
    for number in (1, 4):
        (tmp_path / f"train-{number:05}-of-00005.tar").touch()
    assert len(find_shards(tmp_path, (".tar",))) == 5  # in silence
