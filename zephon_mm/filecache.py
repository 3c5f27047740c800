"""Files that can be made again, in a folder of bounded size, shared by all processes of a machine.

Laws (tests/test_filecache.py):
    1. A file appears whole or not at all. However many processes ask at once, one makes it.
    2. The folder holds at most `max_bytes`, and what is in use: the last 8 files that each process
       got. Those that were used least recently leave first.
    3. What a dead maker left is removed, what a live one writes never. Nothing depends on a process
       ending well: all locks are `flock`s, which end with their process.

Cost: a file that is in use costs one `utimens`, another one five system calls. Making one lists the
folder once.

Imports: errors, rng. Used by: readers of compressed shards and of columns, stores.
"""

import errno
import fcntl
import os
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from zephon_mm.errors import ConfigError
from zephon_mm.rng import digest

PathLike = str | os.PathLike[str]
Make = Callable[[str], None]

_IN_USE = 8
_NEW, _PART, _LOCK = ".new", ".part", ".lock"


def cache_folder(cache_dir: PathLike | None) -> str:
    """Return the folder for a dataset's files; for None one of this user in the temporary folder.

    Raises:
        ConfigError: Somebody else's folder is in that place.
    """
    if cache_dir is not None:
        return os.path.join(os.path.abspath(cache_dir), "files")
    folder = os.path.join(tempfile.gettempdir(), f"zephon_mm-{os.getuid()}")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    if os.lstat(folder).st_uid != os.getuid():
        raise ConfigError(f"{folder} belongs to another user. Set cache_dir to a folder of yours.")
    return os.path.join(folder, "files")


class FileCache:
    """Files by key. Picklable; threads and forked children may share it.

    Args:
        folder: Made when it is needed; nothing else may be in it.
        max_bytes: What all files together may take, in bytes.
    """

    def __init__(self, folder: PathLike, max_bytes: int = 64 << 30) -> None:
        self.folder = os.path.abspath(folder)
        self.max_bytes = max_bytes
        # Used by single operations only, which are atomic: a lock would not survive a fork.
        self._in_use: OrderedDict[str, _Used] = OrderedDict()

    def get(self, key: str, make: Make, *, resume: bool = False) -> str:
        """Return the path of a key's file, which `make(temporary_path)` writes if it is not there.

        The file stays until this process has got 8 others; who opens it meanwhile has it for good.

        Args:
            key: Of the file: all that its contents depend on.
            make: Writes the file. If it fails, what it wrote is removed.
            resume: `make` goes on with what is in the temporary file, which stays if it fails.

        Raises:
            OSError: The disk is full, or `make` raised it.
        """
        path = os.path.join(self.folder, digest(key))
        used = self._in_use.pop(path, None)
        is_new = False
        if used is None or not used.touch():
            used = _Used.open(path)
            is_new = used is None
            used = used or self._made(key, path, make, resume)
        self._in_use[path] = used
        while len(self._in_use) > _IN_USE:
            with suppress(KeyError):  # another thread was faster
                self._in_use.popitem(last=False)
        if is_new:
            self._shrink()
        return used.path

    def __getstate__(self) -> dict[str, Any]:
        """Leave descriptors out."""
        return {**self.__dict__, "_in_use": OrderedDict()}

    def _made(self, key: str, path: str, make: Make, resume: bool) -> "_Used":
        temporary = path + (_PART if resume else _NEW)
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        with locked(path + _LOCK):
            if used := _Used.open(path):
                return used  # made while this process waited for the lock
            try:
                if not resume:
                    _remove(temporary)  # of a maker that died
                make(temporary)
                used = _Used(temporary)
                os.fsync(used.descriptor)  # else it may be empty after a power failure
                os.rename(temporary, path)  # in use before it has its name: nobody may remove it
                used.path = path
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                _remove(temporary)
                text = (
                    f"no space for {key}; free some, lower the cache's size ({self.max_bytes} "
                    "bytes), or set cache_dir to a folder on a larger disk"
                )
                raise OSError(error.errno, text, self.folder) from error
            finally:
                if not resume:
                    _remove(temporary)
        return used

    def _shrink(self) -> None:
        """Remove what dead makers left, then what was used least recently and is not in use."""
        found = []
        for entry in os.scandir(self.folder):
            with suppress(FileNotFoundError):
                if entry.name.endswith((_NEW, _LOCK)):
                    _remove_leftover(entry.path)
                else:
                    stat = entry.stat()
                    found.append((stat.st_atime_ns, stat.st_size, entry.path))
        excess = sum(size for _, size, _ in found) - self.max_bytes
        for _, size, path in sorted(found):
            if excess <= 0:
                return
            gone = _remove_leftover(path) if path.endswith(_PART) else _remove_unused(path)
            excess -= size * gone


class _Used:
    """An open file under a shared lock, which keeps it from being removed."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(self.descriptor, fcntl.LOCK_SH)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)

    @classmethod
    def open(cls, path: str) -> "_Used | None":
        """Take a file into use; None if there is none, or it was removed before it was locked."""
        with suppress(FileNotFoundError):
            used = cls(path)
            return used if used.touch() else None
        return None

    def touch(self) -> bool:
        """Note that the file was used, in its access time alone; False if it is not there."""
        if not _is_at(self.descriptor, self.path):
            return False
        # Not the modification time: an index knows a shard by it.
        times = (time.time_ns(), os.fstat(self.descriptor).st_mtime_ns)
        os.utime(self.descriptor, ns=times)
        return True


def _is_at(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


@contextmanager
def locked(path: str, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold a lock, whose file is there while somebody holds it or waits for it.

    Raises:
        BlockingIOError: It is held by another one, with `LOCK_NB`.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.set_inheritable(descriptor, True)  # a process that makes a file for this one
            fcntl.flock(descriptor, how)
            if not _is_at(descriptor, path):
                continue  # who held it before removed the file
            try:
                return (yield)
            finally:
                _remove(path)  # before it is unlocked: who waits for it sees that
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for a child forked meanwhile
        finally:
            os.close(descriptor)


def _remove_leftover(path: str) -> bool:
    """Remove what a maker writes, or its lock, unless it is alive; return whether it is gone."""
    lock = os.path.splitext(path)[0] + _LOCK
    with suppress(BlockingIOError), locked(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
        _remove(path)
    return not os.path.exists(path)


def _remove_unused(path: str) -> bool:
    """Remove a file unless it is in use; return whether it is gone."""
    with suppress(FileNotFoundError, BlockingIOError), open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    return not os.path.exists(path)


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)
