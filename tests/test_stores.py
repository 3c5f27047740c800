"""Stores: a real S3 server behind a proxy that fails, plain HTTP, a hub, all on loopback."""

import gzip
import json
import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from moto.server import ThreadedMotoServer

from tests.fixtures.memory import Recipe, run_ranks
from tests.fixtures.rows import picture
from tests.fixtures.servers import Proxy, running
from tests.fixtures.shards import contents, lines_of, parquet_of, tar_of
from zephon_mm import remote, stores
from zephon_mm.cli.main import main
from zephon_mm.engine.ahead import Ahead
from zephon_mm.errors import ConfigError, DatasetError
from zephon_mm.filecache import _IN_USE
from zephon_mm.io import Dataset
from zephon_mm.packed import Piece, Sequence
from zephon_mm.records import SampleRef, record_of

FORK = multiprocessing.get_context("fork")
SECRETS = ("SEKRETKEY", "AKIDSEKRET", "hf_SEKRET")
FIXTURES = Path(__file__).parent / "fixtures"
SHARDS = 4


@pytest.fixture(scope="module")
def moto() -> Iterator[tuple[str, int]]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    yield server.get_host_and_port()
    server.stop()


@pytest.fixture
def s3(moto: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy before a bucket `data`."""
    monkeypatch.setattr(remote, "RETRY_DELAYS_S", (0.0, 0.0, 0.0, 0.0))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", SECRETS[1])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRETS[0])
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    remote._connect.cache_clear()
    with running(Proxy(*moto)) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        proxy.put("data")
        yield proxy


FORMATS: Mapping[str, Mapping[str, bytes]] = {
    "webdataset": {f"s-{n}.tar": tar_of(n) for n in range(SHARDS)},
    "jsonl": {f"s-{n}.jsonl": lines_of(n) for n in range(SHARDS)},
    "gzip": {f"s-{n}.jsonl.gz": gzip.compress(lines_of(n), mtime=0) for n in range(SHARDS)},
    "parquet": {f"s-{n}.parquet": parquet_of(n) for n in range(SHARDS)},
    "pictures": {
        "a.jsonl": b'{"image": "pics/0.png", "text": "a"}\n{"image": "pics/1.png", "text": "b"}\n',
        "pics/0.png": b"\x89PNG zero",
        "pics/1.png": b"\x89PNG one",
    },
    **{
        fmt: {
            path.relative_to(FIXTURES / fmt).as_posix(): path.read_bytes()
            for path in sorted((FIXTURES / fmt).rglob("*"))
            if path.is_file()
        }
        for fmt in ("mds/zstd", "litdata/plain")
        if (FIXTURES / fmt).is_dir()
    },
}


def upload(s3: Proxy, files: Mapping[str, bytes], prefix: str) -> str:
    for name, data in files.items():
        s3.put(f"data/{prefix}/{name}", data)
    return f"s3://data/{prefix}/"


def write(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_and_digests_are_those_of_local_files(fmt: str, s3: Proxy, tmp_path: Path) -> None:
    here = Dataset.from_path("d", write(tmp_path / "here", FORMATS[fmt]), cache_dir=tmp_path / "c")
    url = upload(s3, FORMATS[fmt], f"formats/{fmt}")
    there = Dataset.from_path("d", url, cache_dir=tmp_path / "cache", progress=False)
    assert there.shards == here.shards
    assert there.digest() == here.digest()
    assert contents(there) == contents(here)
    assert contents(pickle.loads(pickle.dumps(there))) == contents(here)
    wanted = [path for path, _ in s3.gets()]
    assert len(wanted) == len(set(wanted)) == len(FORMATS[fmt])  # each was downloaded once


def test_google_storage_is_read_through_the_same_listing_and_ranges(
    s3: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Google's listing in XML is S3's, so that one server answers both."""
    account = {"gcs_base_url": s3.url, "disable_oauth": True, "client_email": "", "private_key": ""}
    file = tmp_path / "account.json"
    file.write_text(json.dumps(account | {"private_key_id": ""}))
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(file))
    files = FORMATS["webdataset"]
    here = Dataset.from_path("d", write(tmp_path / "here", files), cache_dir=tmp_path / "c")
    url = upload(s3, files, "google").replace("s3://", "gs://")
    s3.faults += ["truncate", 503, "reset"]
    there = Dataset.from_path("d", url, cache_dir=tmp_path / "cache", progress=False)
    assert there.digest() == here.digest()
    assert contents(there) == contents(here)


@pytest.mark.parametrize(
    "path",
    [
        "s3://data/named",
        "s3://data/named/x-{0..3}.tar",
        "s3://data/named/x-*.tar",
        ["s3://data/named/x-0.tar", *(f"s3://data/named/x-{n}.tar" for n in (1, 2, 3))],
    ],
)
def test_folders_patterns_and_lists_name_the_same(path: Any, s3: Proxy, tmp_path: Path) -> None:
    upload(s3, {f"x-{n}.tar": tar_of(n) for n in range(4)}, "named")
    dataset = Dataset.from_path("d", path, cache_dir=tmp_path)
    assert [shard.name for shard in dataset.shards] == [f"x-{n}.tar" for n in range(4)]
    assert len(contents(dataset)) == 12


def test_what_is_not_there_is_told_at_the_start(s3: Proxy, tmp_path: Path) -> None:
    upload(s3, {"x-0.tar": tar_of(0)}, "gaps")
    for path, message in {
        "s3://data/gaps/x-{0..3}.tar": r"3 of the 4 objects .* do not exist, first x-1\.tar",
        "s3://data/nothing/": "names no object",
        "s3://data/gaps/y-*.tar": "names no object",
        "s3://nowhere/x/": "may not be read.*404",
    }.items():
        with pytest.raises(DatasetError, match=message):
            Dataset.from_path("d", path, cache_dir=tmp_path)


@pytest.mark.parametrize(
    "faults",
    [
        ["reset"],
        [503, 500, 429],
        ["truncate"],
        ["slow"],
        ["truncate", "reset", 503, "reset in body"],
        ["truncate"] * 6,
    ],
)
def test_a_download_that_breaks_off_goes_on_where_it_ended(
    faults: list[Any], s3: Proxy, tmp_path: Path
) -> None:
    data = bytes(range(256)) * 900  # over what any buffer holds back
    url = upload(s3, {"x.bin": data}, "faults")
    place, _ = stores.mirror(url + "x.bin", tmp_path, 1 << 30)
    s3.faults.extend(faults)
    assert Path(stores.local(place)).read_bytes() == data
    starts = [int(r.removeprefix("bytes=").rstrip("-")) if r else 0 for _, r in s3.gets()]
    assert starts == sorted(starts)
    if "truncate" in faults:
        assert starts[-1] > 0
    assert {path.suffix for path in (tmp_path / "files").iterdir()} == {""}


def test_a_store_that_never_answers_is_an_os_error_and_what_came_stays(
    s3: Proxy, tmp_path: Path
) -> None:
    url = upload(s3, {"x.bin": b"x" * 100_000}, "never")
    place, _ = stores.mirror(url + "x.bin", tmp_path, 1 << 30)
    s3.faults.extend(["truncate"] + [503] * 4)
    with pytest.raises(OSError, match=r"never/x\.bin, after 5 tries: .*503") as caught:
        stores.local(place)
    assert "secret" not in str(caught.value)
    s3.requests.clear()
    assert os.path.getsize(stores.local(place)) == 100_000
    ((_, asked),) = s3.gets()
    assert asked is not None


@pytest.mark.slow
def test_another_process_goes_on_with_a_download_of_a_killed_one(s3: Proxy, tmp_path: Path) -> None:
    data = bytes(range(256)) * 20_000
    url = upload(s3, {"x.bin": data}, "killed")
    place, _ = stores.mirror(url + "x.bin", tmp_path, 1 << 30)
    s3.faults.append("hang")
    child = FORK.Process(target=stores.local, args=(place,))
    child.start()
    assert s3.hanging.wait(30)
    part = next((tmp_path / "files").glob("*.part"), None)
    while part is None or part.stat().st_size < 1 << 20:  # the first block is written
        part = next((tmp_path / "files").glob("*.part"), None)
        assert child.is_alive()
    os.kill(child.pid or 0, signal.SIGKILL)
    child.join()
    s3.released.set()
    s3.requests.clear()
    assert Path(stores.local(place)).read_bytes() == data
    ((_, asked),) = s3.gets()
    assert asked is not None
    assert int(asked[6:-1]) >= 1 << 20


def test_an_object_that_changed_or_went_is_an_error(s3: Proxy, tmp_path: Path) -> None:
    url = upload(s3, {"a.bin": b"one", "b.bin": b"one", "c.bin": b"one"}, "changed")
    place, _ = stores.mirror(url, tmp_path, 1 << 30)
    s3.put("data/changed/a.bin", b"two")
    s3.put("data/changed/b.bin", b"longer")
    for name in ("a.bin", "b.bin"):
        with pytest.raises(DatasetError, match=f"changed/{name} changed since it was listed"):
            stores.local(f"{place}/{name}")
    s3.faults.append(404)
    with pytest.raises(DatasetError, match="is gone since it was listed"):
        stores.local(f"{place}/c.bin")
    place, _ = stores.mirror(url, tmp_path, 1 << 30)
    assert Path(stores.local(f"{place}/a.bin")).read_bytes() == b"two"
    assert os.path.getsize(f"{place}/b.bin") == 6


@pytest.mark.slow
def test_a_small_cache_is_enough_for_any_data(s3: Proxy, tmp_path: Path) -> None:
    files = {f"s-{n:02}.tar": tar_of(n) for n in range(20)}
    size = len(tar_of(0))
    url = upload(s3, files, "small")
    here = Dataset.from_path("d", write(tmp_path / "here", files), cache_dir=tmp_path / "c")
    there = Dataset.from_path("d", url, cache_dir=tmp_path / "cache", cache_bytes=2 * size)
    expected = contents(here)
    for _ in range(2):
        assert contents(there) == expected
        found = list((tmp_path / "cache" / "files").iterdir())
        assert sum(path.stat().st_size for path in found) <= (2 + _IN_USE) * size
    assert len(s3.gets()) > 40  # so shards did leave


@pytest.mark.slow
def test_a_fork_of_a_process_that_asked_a_store_can_ask_it(s3: Proxy, tmp_path: Path) -> None:
    url = upload(s3, FORMATS["webdataset"], "forks")
    dataset = Dataset.from_path("d", url, cache_dir=tmp_path, cache_bytes=1)

    def child() -> None:
        again = Dataset.from_path("d", url, cache_dir=tmp_path / "other")
        assert contents(again) == contents(dataset)
        with pytest.raises(DatasetError, match="names no object"):
            Dataset.from_path("d", "s3://data/none/", cache_dir=tmp_path)

    process = FORK.Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0


@pytest.mark.slow
def test_many_processes_download_a_shard_once(s3: Proxy, tmp_path: Path) -> None:
    url = upload(s3, FORMATS["webdataset"], "many")
    place, _ = stores.mirror(url, tmp_path, 1 << 30)

    def child() -> None:
        for name in FORMATS["webdataset"]:
            assert Path(stores.local(f"{place}/{name}")).read_bytes() == FORMATS["webdataset"][name]

    children = [FORK.Process(target=child) for _ in range(3)]
    for process in children:
        process.start()
    for process in children:
        process.join()
    assert [process.exitcode for process in children] == [0] * 3
    assert sorted(s3.gets()) == [(f"/data/many/{name}", None) for name in FORMATS["webdataset"]]


def test_what_is_prefetched_is_there_when_it_is_asked_for(s3: Proxy, tmp_path: Path) -> None:
    url = upload(s3, FORMATS["webdataset"], "ahead")
    place, _ = stores.mirror(url, tmp_path, 1 << 30)
    names = sorted(FORMATS["webdataset"])
    s3.faults.append(404)  # who prefetches meets no error
    stores.prefetch([f"{place}/{name}" for name in names] + ["/local/file"])
    wait_for_prefetch()
    s3.requests.clear()
    for name in names:
        assert Path(stores.local(f"{place}/{name}")).read_bytes() == FORMATS["webdataset"][name]
    assert len(s3.gets()) == 1


def wait_for_prefetch() -> None:
    for thread in threading.enumerate():
        if thread.name == "zephon_mm prefetch":
            thread.join()


class HalfIndexed:
    """Knows the rows of even shards."""

    def lookup(self, refs: Any) -> list[Any]:
        return [None if shard % 2 else "known" for shard in refs[:, 1].tolist()]


@pytest.mark.parametrize(("index", "fetched"), [(None, [1, 2, 3]), (HalfIndexed(), [1, 3])])
def test_what_will_be_measured_is_fetched_and_what_an_index_knows_when_it_is_delivered(
    index: Any, fetched: list[int], s3: Proxy, tmp_path: Path
) -> None:
    url = upload(s3, FORMATS["webdataset"], f"measured{len(fetched)}")
    dataset = Dataset.from_path("d", url, cache_dir=tmp_path, cache_bytes=1)
    stores._cache.cache_clear()
    shutil.rmtree(tmp_path / "files")
    ahead = Ahead((dataset,), index)
    s3.requests.clear()
    ahead.measured(np.array([[0, 3, 0], [0, 1, 2], [0, 2, 0], [0, 1, 0]]))
    wait_for_prefetch()
    assert sorted(path[-5] for path, _ in s3.gets()) == [str(shard) for shard in fetched]
    nothing = np.zeros(0, dtype=np.int32)
    record = record_of(SampleRef(0, 0, 1), nothing, nothing.astype(bool))
    s3.requests.clear()
    ahead.delivered([Sequence((Piece(record, 0, 0),))])
    wait_for_prefetch()
    assert [path[-5] for path, _ in s3.gets()] == ["0"]


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["inline", "process"])
def test_training_from_a_store_gives_the_batches_of_local_files(
    runner: str, s3: Proxy, tmp_path: Path
) -> None:
    shards = {}
    for shard in range(10):
        fields = [("txt", f"{shard} fox".encode()), ("png", picture(shard))]
        shards[f"s-{shard}.tar"] = tar_of(shard, 6, fields)
    here = Dataset.from_path("d", write(tmp_path / "here", shards), cache_dir=tmp_path / "c")
    url = upload(s3, shards, f"train-{runner}")
    cache_bytes = 3 * len(shards["s-0.tar"])
    there = Dataset.from_path("d", url, cache_dir=tmp_path / "cache", cache_bytes=cache_bytes)
    settings = {"dp": 2, "microbatch": 2, "sequences": 24}
    expected = run_ranks(Recipe(datasets=(here,)), **settings)
    s3.faults.extend([None, "reset", 503, "truncate", None, "slow", "reset in body"])
    found = run_ranks(Recipe(datasets=(there,)), runner=runner, workers=2, **settings)
    assert found == expected
    assert not s3.faults


def test_shards_are_found_by_their_names(s3: Proxy, tmp_path: Path) -> None:
    names = ["a/s-0.mds", "a/s-1.mds.zstd", "b/t.parquet", "index.json"]
    url = upload(s3, dict.fromkeys(names, b"x"), "shards")
    place, _ = stores.mirror(url, tmp_path, 1 << 30)
    wanted = ["s-0.mds", "a/s-1.mds", "t.parquet#0", "t.parquet#1", "unknown"]
    found = stores.shard_files([place], wanted)
    files = ["a/s-0.mds", "a/s-1.mds.zstd", "b/t.parquet", "b/t.parquet"]
    assert found == {number: f"{place}/{name}" for number, name in enumerate(files)}


def test_no_credential_is_logged_told_or_kept(
    s3: Proxy, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    url = upload(s3, FORMATS["webdataset"], "secret")
    dataset = Dataset.from_path("d", url, cache_dir=tmp_path)
    s3.faults.append(403)
    told = [repr(dataset), repr(pickle.dumps(dataset))]
    for path in (
        "s3://AKIDSEKRET:SEKRETKEY@data/x/",
        "https://host/x.tar?X-Amz-Signature=SEKRETKEY",
        "s3://data/x/?secret=SEKRETKEY",
    ):
        with pytest.raises(ConfigError, match="Keep credentials in the environment") as wrong:
            Dataset.from_path("d", path, cache_dir=tmp_path)
        told.append(str(wrong.value))
    place, _ = stores.mirror(upload(s3, {"x.bin": b"x"}, "secret2"), tmp_path, 1)
    with pytest.raises(DatasetError, match="may not be read") as refused:
        stores.local(f"{place}/x.bin")
    told += [str(refused.value), repr(refused.value.__cause__)]
    told += [record.getMessage() for record in caplog.records if record.name != "werkzeug"]
    told += [*capfd.readouterr()]
    told += [repr(path.read_bytes()) for path in tmp_path.rglob("*") if path.is_file()]
    assert any(SECRETS[1] in (request.authorization or "") for request in s3.requests)
    assert not [text for text in told if any(secret in text for secret in SECRETS)]


def test_inspect_and_convert_take_urls(
    s3: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fields = [("txt", b"a fox"), ("png", picture(1))]
    url = upload(s3, {f"s-{n}.tar": tar_of(n, 6, fields) for n in range(2)}, "commands")
    s3.faults.extend(["reset", 503, "truncate"])
    assert main(["inspect", url, "--check"]) == 0
    assert "looked at 12 of 12 rows: 0 problems" in capsys.readouterr().out
    assert main(["convert", url, str(tmp_path / "mds"), "--to", "mds"]) == 0
    assert "12 rows as mds, all verified" in capsys.readouterr().out
    assert main(["inspect", f"{url}s-{{0..2}}.tar"]) == 2
    assert main(["inspect", url.replace("//", "//me:SEKRETKEY@")]) == 2
    told = capsys.readouterr().err
    assert "first s-2.tar" in told
    assert "SEKRETKEY" not in told
    with pytest.raises(ConfigError, match="is none of the known formats") as caught:
        Dataset.from_path("d", upload(s3, {"x.bin": b"x"}, "unknown"), cache_dir=tmp_path)
    assert str(caught.value).startswith("s3://data/unknown/ ")
