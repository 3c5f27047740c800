"""References to pictures inside JSON rows: file paths below a root, data URIs, plain base64.

Laws (tests/readers/test_jsonl.py):
    1. A path never leaves the root: not by `..`, not as an absolute path, not through a link.
    2. A string where a list is expected is one picture.
    3. No picture's bytes are kept: a blob points at its file, or at its place in the row.

Cost: one `lstat` and one `stat` a file, and one `realpath` a folder and process.

Imports: errors, records. Used by: readers of JSON rows.
"""

import base64
import binascii
import errno
import os
import stat
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from zephon_mm.errors import SampleError
from zephon_mm.records import Blob, FileBlob, RowBlob

IMAGE_FIELDS = (
    *("image", "images", "jpg", "jpeg", "png", "webp", "img"),
    *("video", "videos", "mp4", "webm", "mkv"),
)

_PARTS = ("image", "image_url", "video")  # types of the parts of a conversation's turns

_MAGIC = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"RIFF", b"BM", b"II*\0", b"MM\0*")
_NO_SUCH_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)
_SHORTEST_BASE64 = 80  # characters; shorter strings are paths. No real picture is smaller

Place = tuple[str | int, ...]


class ImageRefs:
    """Replaces the picture references of one row by blobs.

    Args:
        root: Real, absolute folder that paths may not leave.
        shard: Of the row, for blobs inside it.
        row: Likewise.
        image_map: Where pictures that are URLs lie: URL -> path below the root, or a real, absolute
            folder of them in the layout host/path, which copies may not leave either.
    """

    def __init__(
        self, root: str, shard: int, row: int, image_map: Mapping[str, str] | str | None = None
    ) -> None:
        self._root = root
        self._shard = shard
        self._row = row
        self._image_map = image_map or {}

    def resolve(self, sample: dict[str, Any], image_fields: Sequence[str], *, nested: bool) -> None:
        """Replace references in place: named fields, and nested `{"type": "image", "image": X}`.

        The same holds of "image_url" and "video"; X may be `{"url": Y}`.

        Args:
            sample: The parsed row.
            image_fields: Top-level fields that hold pictures; a name that ends in "s" holds a list.
            nested: Whether to look into the other fields.

        Raises:
            SampleError: A picture cannot be used; names its place in the row.
        """
        for name, value in sample.items():
            if name in image_fields:
                many = name.endswith("s") and isinstance(value, str | dict)
                sample[name] = self._picture([value] if many else value, (name,))
            elif nested and isinstance(value, dict | list):
                self._walk(value, (name,))

    def _walk(self, value: Any, place: Place) -> None:
        if isinstance(value, dict):
            short = len(value) == 1 and isinstance(place[-1], int)  # a part of a content
            name = next(iter(value)) if short else value.get("type")
            if name in _PARTS and name in value:
                part, steps = value, (*place, name)
                if isinstance(value[name], dict) and "url" in value[name]:
                    part, steps, name = value[name], (*steps, "url"), "url"
                part[name] = self._picture(part[name], steps)
            items = list(value.items())
        else:
            items = list(enumerate(value))
        for key, item in items:
            if type(item) in (dict, list):
                self._walk(item, (*place, key))

    def _picture(self, value: Any, place: Place) -> Any:
        """Return a blob, None, or a list of these."""
        if value is None or isinstance(value, Blob):
            return value
        if isinstance(value, list):
            return [self._picture(item, (*place, i)) for i, item in enumerate(value)]
        if isinstance(value, dict) and isinstance(value.get("bytes"), str):
            return self._inside((*place, "bytes"))
        if isinstance(value, dict) and value.get("path") is not None:
            value = value["path"]
        if not isinstance(value, str):
            raise SampleError(
                "bad_image",
                f"{place_name(place)} holds a {type(value).__name__}, expected a path, base64, or "
                "a mapping with `path` or `bytes`.",
            )
        try:
            return self._from_text(value, place)
        except SampleError as error:
            raise SampleError(error.reason, f"{place_name(place)}: {error.message}") from None

    def _from_text(self, text: str, place: Place) -> Blob:
        if not text:
            raise SampleError("empty_path", "the path is empty. Leave the field out, or use null.")
        if text.startswith("data:") or _is_base64(text):
            return self._inside(place)
        text = text.removeprefix("file://")
        if "://" in text[:16]:
            return self._from_url(text)
        path = os.path.normpath(os.path.join(self._root, text))
        return FileBlob(path, 0, _size_inside(self._root, path, text))

    def _from_url(self, url: str) -> Blob:
        root, place = self._root, None
        if isinstance(self._image_map, str):
            root, place = self._image_map, url.partition("://")[2]
            place = place if os.path.exists(os.path.join(root, place)) else None
        else:
            place = self._image_map.get(url)
        if place is None:
            message = (
                f"{url[:200]!r} is a URL without a local copy. Download it, and set image_map."
            )
            raise SampleError("image_url", message)
        path = os.path.normpath(os.path.join(root, place))
        return FileBlob(path, 0, _size_inside(root, path, place))

    def _inside(self, place: Place) -> RowBlob:
        return RowBlob(self._shard, self._row, place_name(place))


def value_at(sample: Any, field: str) -> Any:
    """Return what a place such as `images/3` points to."""
    for step in field.split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(sample, list):
            sample = sample[int(name)]
        elif isinstance(sample, dict) and name in sample:
            sample = sample[name]
        # Else the step is the 0 of a single picture that stands where a list is expected.
    return sample


def decode_base64(text: str) -> bytes:
    """Return the bytes of a data URI, or of plain base64.

    Raises:
        SampleError: `bad_base64`.
    """
    head, comma, body = text.partition(",") if text.startswith("data:") else ("", "", text)
    if comma and not head.endswith(";base64"):
        raise SampleError("bad_base64", f"the data URI {head[:60]!r} is not ;base64.")
    try:
        return base64.b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise SampleError("bad_base64", f"{body[:20]!r}... is not base64: {error}") from None


def place_name(place: Place) -> str:
    """Return a place as a JSON pointer without its first slash."""
    return "/".join(str(step).replace("~", "~0").replace("/", "~1") for step in place)


def _is_base64(text: str) -> bool:
    """Whether a string is a picture itself: long, and its first bytes are an image's."""
    if len(text) < _SHORTEST_BASE64:
        return False
    try:
        head = base64.b64decode(text[:24], validate=True)
    except (binascii.Error, ValueError):
        return False
    return head.startswith(_MAGIC) or head[4:8] == b"ftyp"


def _size_inside(root: str, path: str, given: str) -> int:
    """Return the size of a regular file inside the root.

    Raises:
        OSError: The environment failed.
        SampleError: The file is outside, or is not there.
    """
    if not _is_below(path, root):
        raise _outside(root, given)
    try:
        found = os.lstat(path)
        real = os.path.join(_real_folder(os.path.dirname(path)), os.path.basename(path))
        if stat.S_ISLNK(found.st_mode):
            real, found = os.path.realpath(path), os.stat(path)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        if isinstance(error, OSError) and error.errno not in _NO_SUCH_FILE:
            raise
        message = f"{given[:200]!r} is no file below {root}: {error}"
        raise SampleError("missing_file", message) from None
    if not _is_below(real, root):
        raise _outside(root, given)
    if not stat.S_ISREG(found.st_mode):
        raise SampleError("missing_file", f"{given!r} below {root} is not a regular file.")
    return found.st_size


def _is_below(path: str, root: str) -> bool:
    return path.startswith(root.rstrip("/") + "/")


def _outside(root: str, given: str) -> SampleError:
    message = f"{given!r} lies outside {root}. Set image_root= to a folder that holds all pictures."
    return SampleError("path_outside_root", message)


@lru_cache(maxsize=65536)
def _real_folder(folder: str) -> str:
    return os.path.realpath(folder)
