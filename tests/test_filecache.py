"""The file cache: one maker, whole files, a bounded folder, and processes that are killed."""

import errno
import multiprocessing
import os
import pickle
import signal
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zephon_mm.errors import ConfigError
from zephon_mm.filecache import _IN_USE, FileCache, cache_folder

FORK = multiprocessing.get_context("fork")


def writer(data: bytes, calls: list[str] | None = None) -> Callable[[str], None]:
    def make(path: str) -> None:
        if calls is not None:
            calls.append(path)
        Path(path).write_bytes(data)

    return make


def no_make(path: str) -> None:
    raise AssertionError(f"{path} should be there")


def names(folder: Path) -> set[str]:
    return {path.suffix for path in folder.iterdir()}


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def read(cache: FileCache, key: str, make: Any, offset: int, size: int) -> bytes:
    while True:
        path = Path(cache.get(key, make))
        with suppress(FileNotFoundError):  # another process needed its room in between
            return path.read_bytes()[offset : offset + size]


def in_child(run: Callable[[], None]) -> int:
    """Run in a forked process, return its exit status."""
    child = os.fork()
    if child == 0:
        try:
            run()
        except BaseException:  # noqa: BLE001 - nothing of pytest may run in the child
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def test_a_file_is_made_once_and_read_again(tmp_path: Path) -> None:
    cache, calls = FileCache(tmp_path / "f"), []
    path = cache.get("k", writer(b"0123456789", calls))
    assert Path(path).read_bytes() == b"0123456789"
    assert read(cache, "k", no_make, 3, 4) == b"3456"
    assert FileCache(tmp_path / "f").get("k", no_make) == path
    assert pickle.loads(pickle.dumps(cache)).get("k", no_make) == path
    assert len(calls) == 1
    assert names(tmp_path / "f") == {""}


def test_the_modification_time_stays_because_indexes_know_shards_by_it(tmp_path: Path) -> None:
    cache = FileCache(tmp_path)

    def make(path: str) -> None:
        Path(path).write_bytes(b"x")
        os.utime(path, ns=(7, 7))

    found = os.stat(cache.get("k", make))
    assert found.st_mtime_ns == 7
    cache.get("k", no_make)
    again = os.stat(FileCache(tmp_path).get("k", no_make))
    assert again.st_mtime_ns == 7
    assert again.st_atime_ns > found.st_atime_ns


def test_what_fails_leaves_nothing_and_may_be_tried_again(tmp_path: Path) -> None:
    def fails(path: str) -> None:
        Path(path).write_bytes(b"half")
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        FileCache(tmp_path).get("k", fails)
    assert list(tmp_path.iterdir()) == []
    assert read(FileCache(tmp_path), "k", writer(b"whole"), 0, 5) == b"whole"


def test_what_can_be_resumed_stays_until_it_is_whole(tmp_path: Path) -> None:
    def goes_on(path: str) -> None:
        with open(path, "ab") as file:
            file.write(b"half")
            if file.tell() < 8:
                raise ConnectionError

    with pytest.raises(ConnectionError):
        FileCache(tmp_path).get("k", goes_on, resume=True)
    path = FileCache(tmp_path).get("k", goes_on, resume=True)
    assert Path(path).read_bytes() == b"halfhalf"
    assert names(tmp_path) == {""}


def test_a_full_disk_says_what_to_change(tmp_path: Path) -> None:
    def full(path: str) -> None:
        Path(path).write_bytes(b"x")
        with open("/dev/full", "wb") as device:
            device.write(b"x" * 100)

    with pytest.raises(OSError, match="no space for k; free some, lower the cache") as caught:
        FileCache(tmp_path).get("k", full, resume=True)
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=30, deadline=None)
@given(
    asked=st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=60),
    sizes=st.lists(st.integers(0, 40), min_size=21, max_size=21),
    limit=st.integers(0, 300),
)
def test_the_folder_is_bounded_and_what_is_in_use_stays(
    asked: list[tuple[int, bool]],
    sizes: list[int],
    limit: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    caches = [FileCache(folder, limit), FileCache(folder, limit)]
    recent: list[list[int]] = [[], []]
    for key, which in asked:
        data = bytes([key]) * sizes[key]
        assert read(caches[which], str(key), writer(data), 0, len(data)) == data
        recent[which] = [*(k for k in recent[which] if k != key), key][-_IN_USE:]
        for cache, keys in zip(caches, recent, strict=True):
            for k in keys:
                assert os.path.exists(cache.get(str(k), no_make))
    used = {k for keys in recent for k in keys}
    assert size_of(folder) <= limit + sum(sizes[k] for k in used)


def test_the_least_recently_used_leaves_first(tmp_path: Path) -> None:
    FileCache(tmp_path, 100).get("a", writer(b"a" * 10))
    FileCache(tmp_path, 100).get("b", writer(b"b" * 10))
    FileCache(tmp_path, 100).get("a", no_make)
    FileCache(tmp_path, 25).get("c", writer(b"c" * 10))
    assert read(FileCache(tmp_path, 100), "a", no_make, 0, 1) == b"a"
    calls: list[str] = []
    FileCache(tmp_path, 100).get("b", writer(b"b", calls))
    assert len(calls) == 1


def test_a_file_that_another_process_uses_is_not_removed(tmp_path: Path) -> None:
    ready, go = FORK.Pipe(), FORK.Pipe()

    def use() -> None:
        cache = FileCache(tmp_path, 10)
        path = cache.get("used", writer(b"u" * 10))
        ready[1].send(path)
        go[0].recv()

    child = FORK.Process(target=use)
    child.start()
    path = ready[0].recv()
    FileCache(tmp_path, 10).get("other", writer(b"o" * 10))
    assert os.path.exists(path)
    os.kill(child.pid or 0, signal.SIGKILL)
    child.join()
    FileCache(tmp_path, 10).get("third", writer(b"t" * 10))
    assert not os.path.exists(path)


def test_read_survives_that_its_file_is_removed_and_get_makes_it_anew(tmp_path: Path) -> None:
    cache = FileCache(tmp_path)
    os.unlink(cache.get("k", writer(b"one")))
    calls: list[str] = []
    assert read(cache, "k", writer(b"two", calls), 0, 3) == b"two"
    assert len(calls) == 1


def test_one_of_many_processes_and_threads_makes_a_file(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def make(path: str) -> None:
        with open(log, "a") as file:
            file.write("made\n")
        with open(path, "wb") as out:
            for _ in range(100):
                out.write(b"x" * 100)
                out.flush()

    def ask() -> None:
        cache = FileCache(tmp_path / "f")
        with ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(read, cache, "k", make, 0, 10_000) for _ in range(8)]
            assert all(job.result() == b"x" * 10_000 for job in jobs)

    children = [FORK.Process(target=ask) for _ in range(6)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 6
    assert log.read_text() == "made\n"
    assert names(tmp_path / "f") == {""}


def test_a_killed_maker_hands_over_to_who_waits_and_leaves_nothing(tmp_path: Path) -> None:
    writing = FORK.Pipe()

    def hangs(path: str) -> None:
        Path(path).write_bytes(b"half")
        writing[1].send(1)
        time.sleep(60)

    makers = [
        FORK.Process(target=FileCache(tmp_path).get, args=(key, hangs)) for key in ("k", "other")
    ]
    for maker in makers:
        maker.start()
        writing[0].recv()
    # A maker that lives keeps its file, also when others tidy up.
    FileCache(tmp_path, 1).get("third", writer(b"xx"))
    assert sum(path.suffix == ".new" for path in tmp_path.iterdir()) == 2

    asking = FORK.Pipe()

    def wait() -> None:
        asking[1].send(1)
        assert read(FileCache(tmp_path), "k", writer(b"whole"), 0, 5) == b"whole"

    waiter = FORK.Process(target=wait)
    waiter.start()
    asking[0].recv()
    for maker in makers:
        os.kill(maker.pid or 0, signal.SIGKILL)
        maker.join()
    waiter.join()
    assert waiter.exitcode == 0
    FileCache(tmp_path).get("last", writer(b"x"))
    assert names(tmp_path) == {""}


@pytest.mark.slow
def test_processes_killed_at_any_moment_leave_whole_files_only(tmp_path: Path) -> None:
    folder = tmp_path / "f"

    def work(seed: int) -> None:
        cache = FileCache(folder, 3_000)
        ends = time.monotonic() + 1  # by itself, should the test not come to kill it
        for turn in count():
            if time.monotonic() > ends:
                return
            key = (seed * 7 + turn * 13) % 11
            data = bytes([key]) * 1_000
            assert read(cache, str(key), writer(data), 0, 1_000) == data

    for seed in range(8):
        children = [FORK.Process(target=work, args=(seed + n,)) for n in range(3)]
        for child in children:
            child.start()
        for child in children:
            child.join(0.01 + seed % 5 * 0.01)
            child.kill()  # unless it has ended
        for child in children:  # all are killed before one that failed can end the test
            child.join()
        assert {child.exitcode for child in children} <= {-signal.SIGKILL, 0}
    for key in range(11):
        data = bytes([key]) * 1_000
        assert read(FileCache(folder, 3_000), str(key), writer(data), 0, 1_000) == data
    FileCache(folder, 3_000).get("last", writer(b"x" * 1_000))
    assert names(folder) == {""}
    assert size_of(folder) <= 4_000


def test_a_forked_child_goes_on_with_what_its_parent_uses(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, 10)
    cache.get("k", writer(b"0123456789"))

    def go_on() -> None:
        assert read(cache, "k", no_make, 0, 10) == b"0123456789"
        FileCache(tmp_path, 10).get("other", writer(b"x" * 10))

    assert in_child(go_on) == 0
    assert read(cache, "k", no_make, 0, 10) == b"0123456789"


def test_without_a_cache_dir_the_folder_is_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = Path(cache_folder(None))
    assert folder == tmp_path / f"zephon_mm-{os.getuid()}" / "files"
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert cache_folder("x") == os.path.abspath("x/files")
    monkeypatch.setattr("os.getuid", lambda: os.stat(tmp_path).st_uid + 1)
    (tmp_path / f"zephon_mm-{os.getuid()}").mkdir()
    with pytest.raises(ConfigError, match="belongs to another user"):
        cache_folder(None)
