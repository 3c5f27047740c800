"""A reader that another package brings: found by its entry point, detected, used by name."""

from pathlib import Path
from textwrap import dedent

import pytest

from zephon_mm.io import Dataset, reader_classes
from zephon_mm.protocols import Reader

SOURCE = '''
    """Text files, a row a line."""

    import hashlib, pathlib

    from zephon_mm.records import ShardInfo


    class LinesReader:
        def __init__(self, path, *, cache_dir, progress, prefix=""):
            self._lines = pathlib.Path(path).read_text().splitlines()
            self._prefix = prefix
            self.shards = [ShardInfo("lines", len(self._lines), 1)]

        @classmethod
        def detect(cls, path):
            """Whether the file ends in .lines."""
            return str(path).endswith(".lines")

        def read(self, shard, rows, fields=None):
            return [{"text": self._prefix + self._lines[row], "__key__": str(row)} for row in rows]

        def fetch(self, blob):
            raise NotImplementedError

        def digest(self):
            return hashlib.sha256(repr(self._lines).encode()).hexdigest()
'''


def test_a_package_that_is_installed_brings_its_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    info = site / "acme_lines-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "acme_lines.py").write_text(dedent(SOURCE))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-lines\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[zephon_mm.readers]\nacme-lines = acme_lines:LinesReader\n"
    )
    (tmp_path / "data.lines").write_text("one\ntwo\n")
    monkeypatch.syspath_prepend(str(site))

    found = Dataset.from_path("d", tmp_path / "data.lines", cache_dir=tmp_path / "cache")
    assert found.fmt == "acme-lines"
    assert isinstance(found.reader, Reader)
    assert [row["text"] for row in found.reader.read(0, [1, 0])] == ["two", "one"]  # type: ignore[index]
    named = Dataset.from_path(
        "d", tmp_path / "data.lines", "acme-lines", cache_dir=tmp_path / "cache", prefix="> "
    )
    assert named.reader.read(0, [0])[0]["text"] == "> one"  # type: ignore[index]
    assert "acme-lines" in reader_classes("acme-lines")
