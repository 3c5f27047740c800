"""The objects of remote stores: what a URL names, listed and downloaded, with patience.

Laws (tests/test_stores.py, tests/test_remote.py):
    1. A download that breaks off goes on where it ended, also in another process. What it gives has
       the size, and where the store tells one the ETag, that was listed: an object that changed
       meanwhile is an error, never mixed bytes.
    2. What may pass is tried again after growing waits; what will not (no access, no such object)
       is told at once.
    3. No credential is in a message, a log or a file: the environment has them (AWS_*, GOOGLE_*,
       AZURE_*, HF_TOKEN; HF_ENDPOINT, AWS_ENDPOINT_URL for other servers).

Cost: one request to list a thousand objects, or one for each that is named; one for each download.

Imports: errors, rng; huggingface_hub, and obstore when a URL is met. Used by: stores.
"""

import errno
import os
import pickle
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from subprocess import PIPE
from typing import Any, NamedTuple, TypeVar

import huggingface_hub
from braceexpand import braceexpand

from zephon_mm.errors import ConfigError, DatasetError, ZephonError
from zephon_mm.rng import digest

T = TypeVar("T")

RETRY_DELAYS_S = (0.1, 0.4, 1.6, 6.4)
"""Waits between tries of a request, in seconds; a download that got further starts over."""

WILD = re.compile(r"[*?\[]")
_REFUSED = re.compile(
    r"status code: 4(?!08|29)"
)  # will not pass; not: a timeout, too many requests
_BLOCK_BYTES = 1 << 12  # at most, what is lost when a download breaks off
_REQUESTS = 16  # at a time
_CHILD = "from zephon_mm import remote; remote.serve()"


class Object(NamedTuple):
    """What was listed of an object. `stamp_ns` differs if the contents do: a file's mtime."""

    size: int
    stamp_ns: int
    etag: str | None


class Listing(NamedTuple):
    """Objects by their names below `url`; `hub` if that is a Hugging Face one."""

    url: str
    hub: bool
    objects: Mapping[str, Object]


def list_objects(base: str, name: str) -> Listing:
    """Return the objects that a name below a URL is: one, or those of a pattern or a folder."""
    obstore, store = _connect(base, False)
    names = list(braceexpand(name)) if "{" in name else [name]
    url = f"{base}/{name}"
    objects: dict[str, Object] = {}
    if name and not WILD.search(name):
        with ThreadPoolExecutor(_REQUESTS) as pool:
            found = list(pool.map(partial(_head, base), names))
        objects = {name: one for name, one in zip(names, found, strict=True) if one is not None}
        missing = [name for name in names if name not in objects]
        if missing and (len(names) > 1 or base.startswith("http")):
            raise DatasetError(
                f"{len(missing)} of the {len(names)} objects of {url} do not exist, first "
                f"{missing[0]}. Restore them, or name only those that exist."
            )
    elif base.startswith("http"):
        raise ConfigError(f"{url} cannot be listed: name its files, as in s-{{000..120}}.tar.")
    if not objects:
        folder = None if WILD.search(name) else name
        pages = _persistently(url, lambda: list(obstore.list(store, folder, chunk_size=1000)))
        objects = {meta["path"]: _object(meta) for page in pages for meta in page if meta["path"]}
        if WILD.search(name):
            objects = {p: o for p, o in objects.items() if any(fnmatchcase(p, n) for n in names)}
    if not objects:
        raise DatasetError(f"{url} names no object. Check it, and the environment's credentials.")
    return Listing(base, False, objects)


def _head(base: str, name: str) -> Object | None:
    obstore, store = _connect(base, False)
    with suppress(FileNotFoundError):
        return _object(_persistently(f"{base}/{name}", lambda: obstore.head(store, name)))
    return None


def _object(meta: Mapping[str, Any]) -> Object:
    stamp = digest(meta["e_tag"] or str(meta["last_modified"]))
    return Object(meta["size"], int(stamp[:14], 16), meta["e_tag"])


def list_hub(repository: str) -> Listing:
    """Return the files of a Hugging Face dataset, at its newest commit."""
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    api = huggingface_hub.HfApi(endpoint)

    def ask() -> Any:
        try:
            return api.dataset_info(repository, files_metadata=True)
        except huggingface_hub.errors.RepositoryNotFoundError:
            text = f"hf://{repository} is no dataset at {endpoint}, or is not for everybody"
            raise DatasetError(f"{text}. Check it, and HF_TOKEN.") from None
        except Exception as error:  # noqa: BLE001 - whatever its HTTP library raises
            raise OSError(str(error)) from None

    info = _persistently(f"hf://{repository}", ask)
    objects = {
        file.rfilename: Object(file.size or 0, int(digest(file.blob_id or "")[:14], 16), None)
        for file in info.siblings or []
    }
    return Listing(f"{endpoint}/datasets/{repository}/resolve/{info.sha}", True, objects)


def download(place: tuple[str, bool], name: str, found: Object, temporary: str) -> None:
    """Fetch an object, going on with what is in the file.

    Raises:
        DatasetError: It is gone, or another one by now.
    """
    url, hub = place
    obstore, store = _connect(url, hub)
    with open(temporary, "ab") as file:

        def go_on() -> None:
            start = file.seek(0, os.SEEK_END)
            if start == found.size:
                return
            try:
                answer = obstore.get(
                    store, name, options={"range": {"offset": start}} if start else {}
                )
            except obstore.exceptions.NotSupportedError:  # no ranges: from the start
                file.truncate(0)
                answer = obstore.get(store, name)
            tag = found.etag and answer.meta["e_tag"]  # not all stores quote it everywhere
            if answer.meta["size"] != found.size or _plain(tag) != _plain(tag and found.etag):
                raise DatasetError(f"{url}/{name} changed since it was listed. Start again.")
            for block in answer.stream(min_chunk_size=_BLOCK_BYTES):
                file.write(block)
            if file.tell() != found.size:
                raise OSError(f"{file.tell()} of {found.size} bytes came")

        try:
            _persistently(f"{url}/{name}", go_on, file.tell)
        except FileNotFoundError:
            raise DatasetError(f"{url}/{name} is gone since it was listed. Start again.") from None


def _plain(etag: str | None) -> str:
    return (etag or "").removeprefix("W/").strip('"')


def _persistently(url: str, action: Callable[[], T], progress: Callable[[], int] = int) -> T:
    """Call an action that asks a store, again after a while if that fails.

    Raises:
        FileNotFoundError: There is no such object.
        DatasetError: There is no access.
        OSError: It failed too often, without progress.
    """
    errors = _obstore().exceptions
    tries = 0
    while True:
        before = progress()
        try:
            return action()
        except FileNotFoundError:
            raise
        except (errors.BaseError, OSError) as error:
            if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
                raise
            if _REFUSED.search(text := _harmless(error)):
                raise DatasetError(
                    f"{url} may not be read: {text}. Check it, and the environment's credentials."
                ) from None
            tries = 0 if progress() > before else tries
            if tries == len(RETRY_DELAYS_S):
                text = f"{url}, after {tries + 1} tries: {text}"
                raise OSError(errno.EIO, text) from None  # a number: it is no defect of data
        time.sleep(RETRY_DELAYS_S[tries])
        tries += 1


def _harmless(error: BaseException) -> str:
    """Return an error's first words: later ones may repeat the request, with what it was signed."""
    text = re.split(r"[\n<]", str(error), maxsplit=1)[0]
    return re.sub(r"//[^/\s]*@|\?\S*", "", text)[:300]


@lru_cache
def _connect(url: str, hub: bool) -> tuple[Any, Any]:
    obstore = _obstore()
    options: dict[str, Any] = {"allow_http": True, "timeout": "1d", "read_timeout": "60s"}
    if hub and (token := huggingface_hub.get_token()):
        options["default_headers"] = {"authorization": f"Bearer {token}"}
    # Tries are counted here, where a download knows how far it got.
    store = obstore.store.from_url(url, client_options=options, retry_config={"max_retries": 0})
    return obstore, store


def _obstore() -> Any:
    try:
        import obstore.exceptions
        import obstore.store  # noqa: F401
    except ImportError as error:
        raise ConfigError('URLs need obstore: pip install "zephon-mm[stores]"') from error
    return obstore


_owner: int | None = None  # the process that has obstore's threads


def isolated(function: Callable[..., T], *args: Any) -> T:
    """Call a function that asks a store; in a fork of a process that did so, in a new process.

    The threads of obstore are not in a fork: there it would wait for ever.
    """
    global _owner
    if _owner is None:
        _owner = os.getpid()
    if _owner == os.getpid():
        return function(*args)
    # It inherits the lock of what it writes (no other descriptor), and ends when it is alone.
    command = [sys.executable, "-c", _CHILD]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, close_fds=False) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        pickle.dump((function, args), process.stdin)
        process.stdin.flush()
        answer = process.stdout.read()
    if not answer:
        raise OSError(errno.EIO, f"a process that asks stores ended with {process.returncode}")
    result: T = pickle.loads(answer)
    if isinstance(result, BaseException):
        raise result
    return result


def serve() -> None:
    """Be that new process: call what comes by standard input, answer by standard output."""
    function, args = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        result = function(*args)
    except (OSError, ZephonError) as error:
        result = error
    sys.stdout.buffer.write(pickle.dumps(result))


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)
