"""The header walk agrees with `tarfile`, and refuses what is not whole."""

import gzip
import io
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zephon_mm.errors import DatasetError
from zephon_mm.readers.tarheaders import Member, walk

NAMES = st.text(st.sampled_from("ab/é.日 "), min_size=1, max_size=300).filter(
    lambda name: name.strip("/") == name
)
KINDS = {tarfile.REGTYPE: "file", tarfile.DIRTYPE: "folder", tarfile.SYMTYPE: "link"}


def walk_file(path: Path) -> list[Member]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return list(walk(descriptor, str(path)))
    finally:
        os.close(descriptor)


def write(path: Path, entries: list[tuple[str, bytes, int]], form: int) -> None:
    with tarfile.open(path, "w", format=form) as archive:
        for name, kind, size in entries:
            info = tarfile.TarInfo(name)
            info.type = kind
            info.size = size if kind == tarfile.REGTYPE else 0
            info.linkname = "x" * size if kind == tarfile.SYMTYPE else ""
            archive.addfile(info, io.BytesIO(bytes(info.size)))


@settings(max_examples=60, deadline=None)
@given(
    entries=st.lists(st.tuples(NAMES, st.sampled_from(list(KINDS)), st.integers(0, 1500))),
    form=st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
def test_agrees_with_tarfile(
    entries: list[tuple[str, bytes, int]], form: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("tar") / "s.tar"
    write(path, entries, form)
    with tarfile.open(path) as archive:
        slow = [
            (info.name, KINDS[info.type], info.offset_data, info.size)
            for info in archive.getmembers()
        ]
    fast = [(m.name.decode().rstrip("/"), *m[1:]) for m in walk_file(path)]
    assert fast == slow


def test_sizes_beyond_octal_are_understood(tmp_path: Path) -> None:
    size = 9 << 30
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        info = tarfile.TarInfo("huge.bin")
        info.size = size
        path = tmp_path / f"{form}.tar"
        with path.open("wb") as file:
            file.write(info.tobuf(form))
            file.truncate(file.tell() + size)  # sparse on disk
        (member,) = walk_file(path)
        assert (member.name, member.size) == (b"huge.bin", size)


def test_every_cut_is_found_or_falls_between_members(tmp_path: Path) -> None:
    whole = tmp_path / "whole.tar"
    long_name = "n" * 150
    write(
        whole, [("a", tarfile.REGTYPE, 600), (long_name, tarfile.REGTYPE, 10)], tarfile.GNU_FORMAT
    )
    data, members = whole.read_bytes(), walk_file(whole)
    cut = tmp_path / "cut.tar"
    for size in range(0, members[-1].offset + 10, 37):
        cut.write_bytes(data[:size])
        if 512 + 600 <= size <= 512 + 1024:
            assert walk_file(cut) == members[:1]
            continue
        with pytest.raises(DatasetError, match=str(cut)):
            walk_file(cut)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"hello", "is not a tar archive"),
        (gzip.compress(bytes(9999)), "decompress"),
        (b"x" * 2048, "is not a tar archive"),
    ],
)
def test_what_is_no_tar_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "s.tar"
    path.write_bytes(content)
    with pytest.raises(DatasetError, match=rf"s\.tar .*{message}"):
        walk_file(path)


def test_damaged_headers_and_joined_archives_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "s.tar"
    write(path, [("a", tarfile.REGTYPE, 5), ("b", tarfile.REGTYPE, 5)], tarfile.USTAR_FORMAT)
    data = path.read_bytes()
    path.write_bytes(data[:1030] + b"X" + data[1031:])
    with pytest.raises(DatasetError, match="no tar header at byte 1024"):
        walk_file(path)
    path.write_bytes(data + data)
    with pytest.raises(DatasetError, match="joined with `cat`"):
        walk_file(path)


def test_a_tail_of_zeros_that_no_tar_writes_is_an_archive_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "s.tar"
    write(path, [("a", tarfile.REGTYPE, 5)], tarfile.USTAR_FORMAT)
    for head, members in ((path.read_bytes(), 1), (b"", 0)):
        path.write_bytes(head.ljust(1 << 20, b"\0"))
        assert len(walk_file(path)) == members
        path.write_bytes(head.ljust(3 << 20, b"\0"))
        with pytest.raises(DatasetError, match=r"s\.tar is cut: from byte \d+ of 3145728 on it is"):
            walk_file(path)
