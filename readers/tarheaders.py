"""The headers of a tar file, without its contents: ustar, GNU long names and sizes, pax.

Laws (tests/readers/test_tarheaders.py): agrees with `tarfile` on names, offsets and sizes of any
archive that `tarfile` writes; a cut or damaged archive is an error, never a shorter one.

Cost: one 512-byte read a member; image bytes are not touched.

Imports: errors. Used by: readers.webdataset.
"""

import os
from collections.abc import Iterator
from typing import NamedTuple

from zephon_mm.errors import DatasetError

_BLOCK = 512
_ZEROS = bytes(_BLOCK)
_LONGEST_END = 1 << 20  # tar fills its last record, which is of 10 KiB unless it was told otherwise
_FILES = frozenset({0, ord("0"), ord("7")})
_KINDS = {
    ord("1"): "link",
    ord("2"): "link",
    ord("3"): "device",
    ord("4"): "device",
    ord("5"): "folder",
    ord("6"): "device",
}
_NO_BODY = frozenset(_KINDS)
_NAMING = b"xXgLK"  # headers that describe the member after them
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")


class Member(NamedTuple):
    """A member: raw name, `file | folder | link | device | other`, region of its content."""

    name: bytes
    kind: str
    offset: int
    size: int


def is_tar(block: bytes) -> bool:
    """Whether a file that begins with this block is a tar archive, perhaps an empty one."""
    return block == _ZEROS or _has_checksum(block)


def walk(descriptor: int, path: str) -> Iterator[Member]:
    """Yield the members of an open archive in order.

    Args:
        descriptor: Read with `pread` only.
        path: For messages.

    Raises:
        DatasetError: The file is no tar, is compressed, cut, damaged, or has sparse members.
    """
    end = os.fstat(descriptor).st_size
    at = 0
    common: dict[bytes, bytes] = {}
    extra: dict[bytes, bytes] = {}
    while at < end or at == 0:
        header = os.pread(descriptor, _BLOCK, at)
        if header == _ZEROS:
            _require_end(descriptor, at, end, path)
            break
        if not _has_checksum(header):
            raise _damaged(header, at, path)
        kind = header[156]
        size = _number(header[124:136], at, path)
        if kind in _NAMING:
            body = _body(descriptor, at + _BLOCK, size, path)
            (common if kind == ord("g") else extra).update(_naming(kind, body, at, path))
            at += _BLOCK + _padded(size)
            continue
        member = _member(header, at, size, {**common, **extra}, path)
        if member.offset + member.size > end:
            raise _cut(path, f"its member {member.name!r} ends at {member.offset + member.size}")
        yield member
        at = member.offset + _padded(member.size)
        extra = {}
    if extra:
        raise _cut(path, "the member that its last header describes is missing")


def _member(header: bytes, at: int, size: int, extra: dict[bytes, bytes], path: str) -> Member:
    kind = header[156]
    if kind == ord("S") or any(key.startswith(b"GNU.sparse") for key in extra):
        raise DatasetError(f"{path} has a sparse member at byte {at}. Write it without --sparse.")
    name = header[:100].split(b"\0", 1)[0]
    prefix = header[345:500].split(b"\0", 1)[0]
    if prefix and header[257:263] == b"ustar\0":
        name = prefix + b"/" + name
    name = extra.get(b"path", name)
    size = _decimal(extra[b"size"], at, path) if b"size" in extra else size
    if kind in _FILES:
        # Before ustar, a folder was a file whose name ends in a slash.
        return Member(name, "folder" if name.endswith(b"/") else "file", at + _BLOCK, size)
    return Member(name, _KINDS.get(kind, "other"), at + _BLOCK, 0 if kind in _NO_BODY else size)


def _naming(kind: int, body: bytes, at: int, path: str) -> dict[bytes, bytes]:
    """Return what a naming header says of the next member, in pax's words."""
    if kind == ord("L"):
        return {b"path": body.split(b"\0", 1)[0]}
    return {} if kind == ord("K") else _pax(body, at, path)


def _pax(body: bytes, at: int, path: str) -> dict[bytes, bytes]:
    """Parse records: bytes of the record in decimal, a space, `key=value`, a newline."""
    records = {}
    while body and body[0]:
        digits, _, _ = body.partition(b" ")
        length = _decimal(digits, at, path)
        key, equals, value = body[len(digits) + 1 : length - 1].partition(b"=")
        if not equals or not len(digits) < length <= len(body):
            raise DatasetError(f"{path} is damaged: bad pax record at byte {at}. Restore it.")
        records[key] = value
        body = body[length:]
    return records


def _has_checksum(header: bytes) -> bool:
    if len(header) < _BLOCK:
        return False
    digits = header[148:156].strip(b"\0 ")
    octal = digits != b"" and not digits.strip(b"01234567")
    return octal and sum(header) - sum(header[148:156]) + 256 == int(digits, 8)


def _number(field: bytes, at: int, path: str) -> int:
    if field[0] == 0x80:  # GNU: a big-endian integer for sizes from 8 GiB
        return int.from_bytes(field[1:], "big")
    digits = field.split(b"\0", 1)[0].strip() or b"0"
    try:
        return int(digits, 8)
    except ValueError:
        raise DatasetError(f"{path} is damaged: bad size at byte {at}. Restore it.") from None


def _decimal(digits: bytes, at: int, path: str) -> int:
    if not digits.isdigit():
        raise DatasetError(f"{path} is damaged: bad number at byte {at}. Restore it.")
    return int(digits)


def _padded(size: int) -> int:
    return size + -size % _BLOCK


def _body(descriptor: int, at: int, size: int, path: str) -> bytes:
    body = os.pread(descriptor, size, at)
    if len(body) < size:
        raise _cut(path, "it ends inside a header")
    return body


def _require_end(descriptor: int, at: int, end: int, path: str) -> None:
    """Refuse archives that were joined with `cat`, of which most tools see the first only.

    Also one with a long tail of zeros: a download, or a file made at its full size, that stopped.
    """
    if end - at > _LONGEST_END:
        raise _cut(path, f"from byte {at} of {end} on it is zeros")
    if os.pread(descriptor, 64 * _BLOCK, at).strip(b"\0"):
        raise DatasetError(
            f"{path} goes on after its end mark at byte {at}. If archives were joined with `cat`, "
            "use them as separate shards, or join them with `tar --concatenate`."
        )


def _damaged(header: bytes, at: int, path: str) -> DatasetError:
    if at == 0 and header.startswith(_COMPRESSED):
        return DatasetError(
            f"{path} is compressed. Name it .tar.gz, .tar.zst or .tar.bz2, or decompress it."
        )
    if at == 0:
        found = f"begins with {header[:8]!r}" if header else "is empty"
        return DatasetError(f"{path} is not a tar archive: it {found}. Restore or remove it.")
    if len(header) < _BLOCK:
        return _cut(path, "it ends inside a header")
    return DatasetError(f"{path} is damaged: no tar header at byte {at}. Restore or remove it.")


def _cut(path: str, detail: str) -> DatasetError:
    return DatasetError(f"{path} is cut: {detail}. Restore it, or write it again.")
