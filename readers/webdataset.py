"""WebDataset shards: tar files whose members `key.field` form samples by their key.

Laws (tests/readers/test_webdataset.py, tests/contracts/reader.py):
    1. Members of a sample may lie anywhere in their shard; rows are in order of first appearance.
       Keys are names for people: equal keys in two shards are two samples.
    2. A field that repeats is a defect of its row when its key's members are neighbours, and the
       start of another row of that key when members of other keys lie between.
    3. Nothing is lost in silence: members that are no part of a sample are counted by kind.
       Nothing is ever extracted by its name.
    4. `read` touches text only; pictures and unknown fields come back as regions of the file, those
       of a compressed shard as places that are fetched from its unpacked copy.

Several images of a sample are fields of their own: `7.0.jpg` and `7.left.jpg` are `0.jpg` and
`left.jpg` of the sample `7`.

Cost: indexing reads one header a member; reading, one `pread` a text member. `columns` reads
members that lie close together at once, others one by one into their place.

Imports: errors, records, readers.{files, rowindex, tarheaders, wids}. Used by: io (by
entry point).
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from itertools import islice
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from zephon_mm.errors import ConfigError, DatasetError, SampleError
from zephon_mm.readers import files
from zephon_mm.readers.rowindex import Part, RowIndex
from zephon_mm.readers.tarheaders import Member, is_tar, walk
from zephon_mm.readers.wids import is_wids, require_counts, resolve
from zephon_mm.records import Column, FileBlob, RowBlob

Split = Literal["first_dot", "last_dot"]
Rows = NDArray[np.int64]

_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz")
_TEXTS = frozenset({"txt", "text", "caption", "cls"})
_IMAGES = frozenset({"jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "avif", "heic"})
_WHOLE, _REPEATED, _CLASH = range(3)  # what is wrong with a row


class WebDatasetReader(files.Sharded):
    """Random access to the samples of WebDataset shards.

    Args:
        path: A tar file, perhaps compressed (.tar.gz, .tgz, .tar.zst, .tar.bz2), a folder of them,
            a list, a pattern such as `s-{000..120}.tar`, or a `wids` index (.json) of them.
        cache_dir: Folder for the index and for unpacked shards; None keeps the index in memory.
        progress: Show a bar while many shards are indexed.
        split: Where a member's base name is cut into key and field: the first dot, as WebDataset
            does, or the last, for keys with dots in them.

    Raises:
        DatasetError: No shard, a missing one, one that is not a whole tar, or one that is not what
            a `wids` index beside it says.
    """

    def __init__(
        self,
        path: files.Paths,
        *,
        cache_dir: files.PathLike | None = None,
        progress: bool = True,
        split: Split = "first_dot",
    ) -> None:
        if split not in ("first_dot", "last_dot"):
            raise ConfigError(f"split must be 'first_dot' or 'last_dot', got {split!r}")
        self._split = split
        self._cache_dir = cache_dir
        path, listed = resolve(path)
        self._index = RowIndex(
            path,
            _SUFFIXES,
            kind=f"webdataset-{split}",
            index_shard=partial(_index_shard, split=split, cache_dir=cache_dir),
            cache_dir=cache_dir,
            progress=progress,
        )
        self.kind, self.shards = self._index.kind, self._index.shards
        require_counts(listed, (file.path for file in self._index.files), self.shards)

    @classmethod
    def detect(cls, path: files.Paths) -> bool:
        """Whether the first file that `path` stands for is a tar archive, or a `wids` index."""
        return files.is_first(path, _SUFFIXES, lambda h: is_tar(h[:512]) or is_wids(h), 4096)

    @property
    def skipped_members(self) -> Mapping[str, int]:
        """Members that are no part of a sample, by kind: folder, link, hidden, unsafe, ..."""
        total: Counter[str] = Counter()
        for shard in range(len(self.shards)):
            total.update(self._index.part(shard).meta["skipped"])
        return dict(sorted(total.items()))

    def fetch(self, blob: RowBlob) -> bytes:
        """Return a member of a compressed shard; all other blobs are regions of a file.

        Raises:
            DatasetError: There is no such member.
        """
        column = self.columns(blob.shard, np.array([blob.row]), [blob.field])[blob.field]
        if not column.valid[0]:
            raise DatasetError(
                f"{self.shards[blob.shard].name} has no {blob}: it changed. Restart."
            )
        return column.data.tobytes()

    def columns(self, shard: int, rows: Rows, fields: Sequence[str]) -> dict[str, Column]:
        """Return the stored bytes of members, but of `json`, which `read` parses.

        Raises: as `read`.
        """
        part, file = self._index.part(shard), self._index.files[shard]
        numbers = self.numbers(shard, rows)
        picks, counts = _pick(part.arrays["first_member"], numbers)
        owners = np.repeat(np.arange(numbers.size), counts)
        is_whole = (part.arrays["defect"][numbers] == _WHOLE)[owners]
        codes = np.where(is_whole, part.arrays["field"][picks], -1)
        known = {name: code for code, name in enumerate(part.meta["fields"])}
        columns = {}
        with files.open_shard(file, self._cache_dir) as descriptor:
            for name in (name for name in fields if name != "json"):
                mine = codes == known.get(name, -2)
                starts, sizes = (part.arrays[key][picks[mine]] for key in ("offset", "size"))
                valid = np.zeros(numbers.size, dtype=np.bool_)
                valid[owners[mine]] = True
                ends = np.zeros(numbers.size, dtype=np.int64)
                ends[valid] = sizes
                data = files.read_regions(descriptor, file.path, starts, sizes)
                columns[name] = Column(data, np.cumsum(ends), valid)
        return columns

    def read(self, shard: int, rows: Sequence[int], fields: files.Fields = None) -> files.Samples:
        """Return the rows: text and parsed JSON, blobs for all else, `__key__`, perhaps `__hint__`.

        `__hint__` says that the other `split` would find a known field.

        Raises:
            IndexError: No such row.
            DatasetError: The shard is not the one that was indexed.
        """
        part = self._index.part(shard)
        numbers = self.numbers(shard, rows)
        picks, member_counts = _pick(part.arrays["first_member"], numbers)
        counts, names = member_counts.tolist(), part.meta["fields"]
        columns = (part.arrays[name][picks].tolist() for name in ("field", "offset", "size"))
        members = zip(*columns, strict=True)
        keys = _keys(part, numbers)
        defects = part.arrays["defect"][numbers].tolist()
        samples: files.Samples = []
        file = self._index.files[shard]
        with files.open_shard(file, self._cache_dir) as descriptor:
            source = _Source(descriptor, file.path, shard)
            for row, key, count, defect in zip(rows, keys, counts, defects, strict=True):
                mine = [(names[f], offset, size) for f, offset, size in islice(members, count)]
                sample = (
                    _repeated(defect, mine) if defect else source.sample(int(row), mine, fields)
                )
                if isinstance(sample, SampleError):
                    where = f"{self.shards[shard].name}/{row} (key {key!r})"
                    samples.append(SampleError(sample.reason, f"{where}: {sample.message}"))
                else:
                    hint = _hint(tuple([m[0] for m in mine]), _is_dotted(key), self._split)
                    samples.append({**sample, **hint, "__key__": key})
        return samples


class _Source:
    """Turns member regions of one open shard into values."""

    def __init__(self, descriptor: int, path: str, shard: int) -> None:
        self._descriptor = descriptor
        self._path = path
        self._shard = shard
        self._is_unpacked = files.codec_of(path) is not None

    def sample(
        self, row: int, members: list[tuple[str, int, int]], fields: files.Fields
    ) -> dict[str, Any] | SampleError:
        """Return the wanted fields of one row, or what is wrong with it."""
        sample: dict[str, Any] = {}
        try:
            for name, offset, size in members:
                if fields is not None and name not in fields:
                    continue
                if name in _TEXTS or name == "json":
                    sample[name] = self._text(name, offset, size)
                elif self._is_unpacked:
                    sample[name] = RowBlob(self._shard, row, name)
                else:
                    sample[name] = FileBlob(self._path, offset, size)
        except SampleError as error:
            return error
        return sample

    def _text(self, name: str, offset: int, size: int) -> Any:
        data = os.pread(self._descriptor, size, offset)
        if len(data) < size:
            raise DatasetError(f"{self._path} ended at a member while it was read. Restore it.")
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            at = offset + error.start
            message = f"field {name!r} is not UTF-8 at byte {at} of the shard. Encode it as UTF-8."
            raise SampleError("bad_utf8", message) from None
        if name != "json":
            return text
        try:
            return files.parse_json(text)
        except (ValueError, RecursionError) as error:
            raise SampleError("bad_json", f"field 'json' does not parse: {error}") from None


def _pick(first: Rows, rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the member numbers of all rows, one after the other, and how many each row has."""
    starts = first[rows]
    counts = first[rows + 1] - starts
    ends = np.cumsum(counts)
    total = int(ends[-1]) if rows.size else 0
    return np.repeat(starts - ends + counts, counts) + np.arange(total), counts


def _keys(part: Part, rows: Rows) -> list[str]:
    text, ends = part.arrays["key_text"], part.arrays["key_end"]
    spans = zip(ends[rows].tolist(), ends[rows + 1].tolist(), strict=True)
    return [text[start:stop].tobytes().decode() for start, stop in spans]


def _repeated(defect: int, members: list[tuple[str, int, int]]) -> SampleError:
    counts = Counter(name for name, _, _ in members)
    names = ", ".join(repr(name) for name, count in counts.items() if count > 1)
    how = "in names that differ only in case" if defect == _CLASH else "with one name"
    return SampleError("duplicate_member", f"field {names} occurs more than once, {how}. Keep one.")


def _is_dotted(key: str) -> bool:
    return "." in key[key.rfind("/") + 1 :]


@lru_cache(maxsize=4096)
def _hint(fields: tuple[str, ...], has_dotted_key: bool, split: Split) -> Mapping[str, str]:
    """Say that the other rule would find an image or a text that this one does not."""
    if split == "first_dot":
        other = {name.rpartition(".")[2] for name in fields if "." in name}
        if found := sorted((other & (_TEXTS | _IMAGES)) - set(fields)):
            found_text = f"split='last_dot' would find {', '.join(found)}"
            return {"__hint__": f"has {', '.join(fields)}; {found_text}"}
    elif has_dotted_key and not (_TEXTS & set(fields) and _IMAGES & set(fields)):
        return {"__hint__": "its key has a dot; split='first_dot' would join it to other members"}
    return {}


def _index_shard(file: files.ShardFile, *, split: Split, cache_dir: files.PathLike | None) -> Part:
    """Scan one shard's headers."""
    groups = _Groups(split)
    with files.open_shard(file, cache_dir) as descriptor:
        for member in walk(descriptor, file.path):
            groups.add(member)
    return groups.part()


class _Groups:
    """Collects a shard's members into rows."""

    def __init__(self, split: Split) -> None:
        self._split = split
        self._skipped: Counter[str] = Counter()
        self._newest: dict[bytes, int] = {}  # key -> its last row
        self._keys: list[bytes] = []
        self._defects: list[int] = []
        self._names: list[dict[str, bytes]] = []  # of each row: field -> raw name
        self._fields: dict[str, int] = {}
        self._members: list[tuple[int, int, int, int]] = []  # row, field, offset, size

    def add(self, member: Member) -> None:
        """Take the next member of the shard."""
        name = member.name.removeprefix(b"./")
        folder, slash, base = name.rpartition(b"/")
        dot = base.find(b".") if self._split == "first_dot" else base.rfind(b".")
        if skip := _why_skipped(member, name, base, dot):
            self._skipped[skip] += 1
            return
        key = folder + slash + base[:dot]
        field = files.printable(base[dot + 1 :]).lower()
        row = self._newest.get(key, -1)
        if row < 0 or (field in self._names[row] and row != self._members[-1][0]):
            row = self._newest[key] = len(self._keys)
            self._keys.append(key)
            self._defects.append(_WHOLE)
            self._names.append({})
        if (earlier := self._names[row].setdefault(field, name)) is not name:
            self._defects[row] = _REPEATED if earlier == name else _CLASH
        number = self._fields.setdefault(field, len(self._fields))
        self._members.append((row, number, member.offset, member.size))

    def part(self) -> Part:
        """Return the rows as arrays."""
        table = np.array(self._members, dtype=np.int64).reshape(-1, 4)
        table = table[np.argsort(table[:, 0], kind="stable")]
        texts = [files.printable(key).encode() for key in self._keys]
        counts = np.bincount(table[:, 0], minlength=len(texts))
        arrays: dict[str, NDArray[Any]] = {
            "first_member": np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            "field": table[:, 1].astype(np.int32),
            "offset": table[:, 2],
            "size": table[:, 3],
            "defect": np.array(self._defects, dtype=np.uint8),
            "key_end": np.cumsum([0] + [len(text) for text in texts]).astype(np.int64),
            "key_text": np.frombuffer(b"".join(texts), dtype=np.uint8),
        }
        return Part(len(texts), {"fields": list(self._fields), "skipped": self._skipped}, arrays)


def _why_skipped(member: Member, name: bytes, base: bytes, dot: int) -> str | None:
    if member.kind != "file":
        return member.kind
    if name.startswith(b"/") or b".." in name.split(b"/"):
        return "unsafe"
    if base.startswith(b"."):
        return "hidden"
    return "no_field" if dot < 0 or dot == len(base) - 1 else None
