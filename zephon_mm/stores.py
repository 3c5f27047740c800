"""Remote data as local files: a mirror of empty files, whose contents are fetched when needed.

`mirror` lists what a URL names and makes a folder with a file of each object's name and size, but
without its contents: readers find, name and count shards in it as anywhere. `local` gives the path
of the contents, downloaded whole into the file cache, in any process and at any time.

Laws (tests/test_stores.py):
    1. What `local` gives has the size, and where the store tells one the ETag, that was listed; an
       object that changed meanwhile is an error, never mixed bytes.
    2. A download that breaks off goes on where it ended, also in another process.
    3. No credential is in a URL, a message, a log or a file: the environment has them (AWS_*,
       GOOGLE_*, AZURE_*, HF_TOKEN, HF_ENDPOINT).

Formats that must be scanned (tar, JSON Lines) download each shard once when they are indexed.

Cost: one request to list a thousand objects, or one for each that is named; one for each download.
A shard that is here costs a few system calls.

Imports: errors, filecache, rng; obstore and huggingface_hub if a URL is met. Used by: readers, io.
"""

import json
import os
import re
import shutil
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

from zephon_mm.errors import ConfigError, DatasetError, ZephonError
from zephon_mm.filecache import FileCache, PathLike, cache_folder, locked
from zephon_mm.remote import Listing, Object, download, isolated, list_hub, list_objects
from zephon_mm.rng import digest

_URL = re.compile(r"(s3|gs|az|https?|hf)://", re.IGNORECASE)
_MIRRORS = "/zephon_mirrors/"
_NOTES = re.compile(r"(\.json|\.ya?ml|(^|/)README\.md)$")
_NOTE_BYTES = 64 << 20
_DOWNLOADS = 4  # ahead, at a time


def is_remote(path: Any) -> bool:
    """Whether a path is the URL of a store."""
    return isinstance(path, str) and _URL.match(path) is not None


def mirror(url: str, cache_dir: PathLike | None, max_bytes: int) -> tuple[str, dict[str, str]]:
    """Return the local path that stands for a URL, and the reader's options that were in it.

    Args:
        url: Of a folder, a file or a pattern, or `hf://owner/name/config/split`.
        cache_dir: The dataset's; holds mirrors and contents.
        max_bytes: What the contents of all mirrors there may take, in bytes.

    Raises:
        ConfigError: The URL cannot be used, or a package is missing.
        DatasetError: There is nothing, or no access to it.
        OSError: The store did not answer.
    """
    if re.search(r"//[^/]*@|[?#&][\w.%-]+=|^http.*[?#]", url):
        raise ConfigError(
            "a URL holds a user's name, a password or a query. Keep credentials in the "
            "environment, as the store's own tools do, and leave them out of `path`."
        )
    scheme, _, rest = url.partition("://")
    name, options = "", {}
    if scheme.lower() == "hf":
        *repository, config, split = [*rest.strip("/").split("/"), "", ""][:4]
        options = {"config": config, "split": split}
        listing = isolated(list_hub, "/".join(repository))
    else:
        base, name = _split(rest)
        listing = isolated(list_objects, f"{scheme.lower()}://{base}", name)
    files = cache_folder(cache_dir)
    told = re.sub(r"\W+", "-", rest)[-40:]  # for people who read messages
    folder = os.path.dirname(files) + _MIRRORS + f"{digest(url)[:12]}-{told}"
    os.makedirs(folder, exist_ok=True)
    with locked(folder + ".lock"):
        told = json.dumps(listing)
        if not os.path.exists(folder + ".list") or _lines_of(folder)[1] != told:
            _lay_out(folder, listing)
        with open(folder + ".new", "w", encoding="utf-8") as file:
            file.write(f"{json.dumps([files, max_bytes])}\n{told}")
        os.replace(folder + ".new", folder + ".list")
        _listing.cache_clear()
        for note, found in listing.objects.items():
            if _is_note(note, found):
                _bring(folder, note, found)
    chosen = {option: value for option, value in options.items() if value not in ("", "default")}
    return os.path.join(folder, name) if name else folder, chosen


def local(path: str) -> str:
    """Return the path of a file's contents: the path itself, but for a file of a mirror.

    Raises:
        DatasetError: The object is gone, or is not the one that was listed.
        OSError: It cannot be fetched now.
    """
    folder, name = _parts(path)
    if not name or _is_note(name, _object(folder, name)):
        return path
    return _contents(folder, name)


def prefetch(paths: Iterable[str]) -> None:
    """Fetch the contents of files that are needed soon, in the background."""
    _ahead.want([path for path in paths if is_mirror(path)])


def is_mirror(path: str) -> bool:
    """Whether a path is in a mirror."""
    return _MIRRORS in path


def shard_files(mirrors: Sequence[str], names: Sequence[str]) -> dict[int, str]:
    """Return the numbers of shards whose files in mirrors are told by their names, and those.

    A name may be a path below a folder, or a file's alone; a part of it may follow a "#", and a
    suffix for how it is compressed may be left out.
    """
    found: dict[str, str] = {}
    for folder in {_parts(place)[0] for place in mirrors}:
        for name in _listing(folder)[1].objects:
            stem = os.path.splitext(name)[0]
            for known in (name, stem, os.path.basename(name), os.path.basename(stem)):
                found.setdefault(known, os.path.join(folder, name))
    files = ((number, found.get(name.partition("#")[0])) for number, name in enumerate(names))
    return {number: path for number, path in files if path is not None}


def _parts(path: str) -> tuple[str, str]:
    """Return the mirror that a path is in, and the object's name; both empty if in none."""
    head, mark, rest = path.partition(_MIRRORS)
    folder, _, name = rest.partition("/")
    return (head + mark + folder, name) if mark else ("", "")


def _contents(folder: str, name: str) -> str:
    cache, listing = _listing(folder)
    found = _object(folder, name)
    key = f"{listing.url}/{name} {found.etag or found.stamp_ns} {found.size}"
    return cache.get(key, partial(isolated, download, listing[:2], name, found), resume=True)


def _object(folder: str, name: str) -> Object:
    listing = _listing(folder)[1]
    if name not in listing.objects:
        raise DatasetError(f"{listing.url} has no {name}. Check the data's index, or restart.")
    return listing.objects[name]


def _is_note(name: str, found: Object) -> bool:
    """Whether a file says what the others are, and lies in the mirror itself."""
    return found.size <= _NOTE_BYTES and _NOTES.search(name) is not None


@lru_cache(64)
def _listing(folder: str) -> tuple[FileCache, Listing]:
    settings, told = _lines_of(folder)
    url, hub, objects = json.loads(told)
    named = {name: Object(*values) for name, values in objects.items()}
    return _cache(*json.loads(settings)), Listing(url, hub, named)


@lru_cache
def _cache(files: str, max_bytes: int) -> FileCache:
    return FileCache(files, max_bytes)


def _lines_of(folder: str) -> list[str]:
    """Return the settings of a mirror and its listing, as JSON."""
    with open(folder + ".list", encoding="utf-8") as file:
        return file.read().split("\n")


def _lay_out(folder: str, listing: Listing) -> None:
    """Make the empty files of a mirror."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, found in listing.objects.items():
        if not all(part not in ("", ".", "..") for part in name.split("/")) or "\0" in name:
            raise DatasetError(f"{listing.url} has an object {name!r}: no file can have that name.")
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if not _is_note(name, found):
            with open(path, "wb") as file:
                file.truncate(found.size)
            os.utime(path, ns=(found.stamp_ns, found.stamp_ns))


def _bring(folder: str, name: str, found: Object) -> None:
    """Put a small file itself into the mirror."""
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        shutil.copyfile(_contents(folder, name), folder + ".note")
        os.utime(folder + ".note", ns=(found.stamp_ns, found.stamp_ns))
        os.replace(folder + ".note", path)


def _split(place: str) -> tuple[str, str]:
    """Return the folder that a URL names for sure, and what follows it."""
    at = re.split(r"[*?\[{]", place)[0].rfind("/")
    return (place, "") if at < 0 else (place[:at], place[at + 1 :])


class _Ahead:
    """Files that are wanted soon, and the threads that fetch them, which end when none is left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: OrderedDict[str, None] = OrderedDict()
        self._threads = 0

    def want(self, paths: Sequence[str]) -> None:
        """Add files."""
        with self._lock:
            self._wanted.update(dict.fromkeys(paths))
            more = min(len(self._wanted), _DOWNLOADS - self._threads)
            self._threads += more
        for _ in range(more):
            threading.Thread(target=self._fetch, name="zephon_mm prefetch", daemon=True).start()

    def _fetch(self) -> None:
        while True:
            with self._lock:
                if not self._wanted:
                    self._threads -= 1
                    return
                path, _ = self._wanted.popitem(last=False)
            with suppress(OSError, ZephonError):  # who needs it meets the error
                local(path)


_ahead = _Ahead()
os.register_at_fork(after_in_child=_ahead.__init__)  # type: ignore[misc]
