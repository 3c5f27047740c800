"""The Lance reader in many processes, and from a store: forks, spawns, and what they leave."""

import logging
import multiprocessing
import os
import pickle
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from moto.server import ThreadedMotoServer

from tests.contracts.reader import every_row
from tests.fixtures.lancerows import image, table, written
from tests.fixtures.servers import Proxy, running
from zephon_mm.errors import ConfigError, DatasetError
from zephon_mm.io import Dataset, read_blob
from zephon_mm.readers import lancesource
from zephon_mm.readers.lance import LanceReader
from zephon_mm.records import RowBlob

FIXTURES = Path(__file__).parents[1] / "fixtures" / "lance"


def child_reads(reader: LanceReader, expected: list[Any], told: int) -> int:
    """Fork a child that reads within 20 s and tells who served it; return its pid."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        same = every_row(reader) == expected
        bytes_of = reader.fetch(RowBlob(1, 2, "image"))
        os.write(told, b"%d " % lancesource._fresh(os.getpid())._process.pid)
        os._exit(0 if same and bytes_of == image(6) else 1)
    return child


@pytest.mark.slow
def test_lan_01_forked_workers_read_while_their_parent_does_and_leave_nothing(
    tmp_path: Path,
) -> None:
    """LAN-01."""
    reader = LanceReader(written(tmp_path / "d", table()))
    expected = every_row(reader)
    done = threading.Event()

    def read_on() -> None:
        while not done.is_set():
            every_row(reader)

    thread = threading.Thread(target=read_on)
    thread.start()
    told, tell = os.pipe()
    try:
        children = [child_reads(reader, expected, tell) for _ in range(2)]
        assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    finally:
        done.set()
        thread.join()
        os.close(tell)
    with open(told, "rb") as pids:
        servers = [int(pid) for pid in pids.read().split()]
    assert len(servers) == 2
    for server in servers:
        with suppress(ProcessLookupError):  # it has ended, or does so now
            assert select.select([os.pidfd_open(server)], [], [], 20)[0]
    assert every_row(reader) == expected


def in_a_fork(action: Callable[[], None]) -> int:
    """Run something in a forked child; return its exit code."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.slow
def test_lan_01_a_forked_worker_opens_datasets_and_sees_errors_as_its_parent_does() -> None:
    """LAN-01."""
    rows = every_row(LanceReader(FIXTURES / "captions"))

    def opens() -> None:
        assert every_row(LanceReader(FIXTURES / "captions")) == rows
        with pytest.raises(ConfigError, match="Check path and version"):
            LanceReader(FIXTURES / "captions", version=99)
        with pytest.raises(DatasetError, match="cannot be opened"):
            LanceReader(FIXTURES)

    assert in_a_fork(opens) == 0


@pytest.mark.slow
def test_lan_01_spawned_workers_read_the_same(tmp_path: Path) -> None:
    """LAN-01."""
    reader = LanceReader(written(tmp_path / "d", table()))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(every_row, (reader,)) == every_row(reader)


def test_lan_01_unpickling_opens_nothing(tmp_path: Path) -> None:
    """LAN-01: a parent that only hands the reader on never starts pylance's threads."""
    copy = pickle.loads(pickle.dumps(LanceReader(written(tmp_path / "d", table()))))
    shutil.rmtree(tmp_path / "d")
    assert len(copy.shards) == 3


@pytest.mark.slow
def test_lan_01_the_module_imports_no_pylance() -> None:
    """LAN-01: so that a process that only forks workers neither pays for it nor is warned."""
    code = "import sys, zephon_mm.readers.lance; sys.exit('lance' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_blobs_are_read_through_the_dataset(tmp_path: Path) -> None:
    dataset = Dataset("d", LanceReader(FIXTURES / "captions"))
    assert read_blob(dataset, RowBlob(2, 0, "image"), 2) == b"\xff\xd8"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of the captions in an S3 store, under a name that tells nothing."""
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "REGION"):
        monkeypatch.setenv(f"AWS_{name}", "us-east-1")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    with running(Proxy(host, port)) as store:
        store.put("data")
        for path in (FIXTURES / "captions").rglob("*"):
            if path.is_file():
                store.put(f"data/x/{path.relative_to(FIXTURES / 'captions')}", path.read_bytes())
    yield "s3://data/x"
    server.stop()


@pytest.mark.slow
def test_a_dataset_in_a_store_is_the_same_also_to_a_forked_process(
    bucket: str, tmp_path: Path
) -> None:
    local = LanceReader(FIXTURES / "captions", version="clean")
    remote = Dataset.from_path("d", bucket, "lance", version="clean", cache_dir=tmp_path).reader
    assert (remote.digest(), remote.shards) == (local.digest(), local.shards)
    expected = every_row(local)
    image = local.fetch(RowBlob(1, 2, "image"))

    def reads() -> None:
        assert every_row(remote) == expected
        assert remote.fetch(RowBlob(1, 2, "image")) == image

    reads()
    assert in_a_fork(reads) == 0
