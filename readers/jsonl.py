"""JSON Lines: one JSON object a line, pictures as files beside it or as base64 inside it.

A file that is one JSON array of objects (LLaVA-Instruct, Qwen-VL, ShareGPT) is read as well.

Laws (tests/readers/test_jsonl.py, tests/contracts/reader.py):
    1. A row is a line with more than white space, or an element of the array. Counting, reading and
       resuming agree on that.
    2. A bad line is the error of that row alone, named by file, line and byte. NaN and Infinity are
       not JSON and are refused; lone surrogates become U+FFFD.
    3. A picture's path never leaves the data's root, not even through a link.

Cost: indexing reads the file once in blocks, an array whole, and parses it; reading, one JSON parse
a row. Compressed files are unpacked once into the file cache.

Imports: errors, records, readers.{files, rowindex, imagerefs}. Used by: io (by entry
point).
"""

import json
import os
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zephon_mm.errors import DatasetError, SampleError
from zephon_mm.protocols import Sample
from zephon_mm.readers import files
from zephon_mm.readers.imagerefs import IMAGE_FIELDS, ImageRefs, decode_base64, value_at
from zephon_mm.readers.rowindex import Part, RowIndex
from zephon_mm.records import Column, RowBlob

_SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".jsonl.zst", ".ndjson.zst")
_OTHERS = frozenset({"shardlist", "shards", "chunks"})  # in the index files of other formats
_BOM = b"\xef\xbb\xbf"
_BLOCK_BYTES = 8 << 20

_ARRAY = re.compile(rb"[ \t\r\n]*\[[ \t\r\n]*(?=\{)")
_BETWEEN = re.compile(r"[ \t\r\n]*([,\]]?)[ \t\r\n]*")
_IS_TEXT = bytes(code not in b" \t\r\n" for code in range(256))  # JSON's white space

Line = tuple[int, int, int, bytes]
"""A row's number, its line's from 1, where that begins, its text."""


class JsonlReader(files.Sharded):
    """Random access to the rows of JSON Lines files.

    Args:
        path: A .jsonl or .ndjson file, perhaps .gz or .zst, a folder of them, a list, or a pattern;
            or a .json file that holds an array.
        cache_dir: Folder for the index and for unpacked files; None keeps the index in memory.
        progress: Show a bar while many shards are indexed.
        image_root: Folder that relative picture paths start from and may not leave; None is the
            folder of each file.
        image_fields: Top-level fields that hold pictures. A nested `{"type": "image", "image": X}`
            is one in any field,
            and so is `{"image": X}` in a list.

    Raises:
        DatasetError: No shard, a missing one, or one that does not unpack.
    """

    def __init__(
        self,
        path: files.Paths,
        *,
        cache_dir: files.PathLike | None = None,
        progress: bool = True,
        image_root: files.PathLike | None = None,
        image_fields: Sequence[str] = IMAGE_FIELDS,
    ) -> None:
        self._root = os.path.realpath(image_root) if image_root is not None else None
        self._cache_dir = cache_dir
        self._image_fields = tuple(image_fields)
        self._index = RowIndex(
            path,
            _SUFFIXES,
            kind="jsonl",
            index_shard=partial(index_lines, block_bytes=_BLOCK_BYTES, cache_dir=cache_dir),
            cache_dir=cache_dir,
            progress=progress,
        )
        self.kind, self.shards = self._index.kind, self._index.shards

    @classmethod
    def detect(cls, path: files.Paths) -> bool:
        """Whether the first file begins with a JSON object or an array of them, or is named so."""
        return files.is_first(path, _SUFFIXES, _is_row, 1 << 20)

    def read(
        self, shard: int, rows: Sequence[int], fields: Sequence[str] | None = None
    ) -> list[Sample | SampleError]:
        """Return the parsed rows, pictures as blobs, with `__key__`.

        Raises:
            IndexError: No such row.
            OSError: A file cannot be read, other than for a picture that is not there.
            DatasetError: The shard is not the one that was indexed.
        """
        lines = self._lines(shard, rows)
        file = os.path.realpath(self._index.files[shard].path)
        root = self._root or os.path.dirname(file)
        return [self._sample(shard, root, line, fields) for line in lines]

    def columns(
        self, shard: int, rows: NDArray[np.int64], fields: Sequence[str]
    ) -> dict[str, Column]:
        """Return fields of text; one with a row that has something else in it is left out.

        Raises: as `read`.
        """
        samples = self.read(shard, rows.tolist(), fields)
        columns = {}
        for name in fields:
            values = [None if isinstance(row, SampleError) else row.get(name) for row in samples]
            if all(value is None or isinstance(value, str) for value in values):
                texts = [(value or "").encode() for value in values]
                ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
                valid = np.array([value is not None for value in values], dtype=np.bool_)
                columns[name] = Column(np.frombuffer(b"".join(texts), np.uint8), ends, valid)
        return columns

    def fetch(self, blob: RowBlob) -> bytes:
        """Return a picture that is base64 inside its row.

        Raises:
            SampleError: It is not base64.
        """
        ((_, number, start, line),) = self._lines(blob.shard, [blob.row])
        try:
            return decode_base64(value_at(parse(line), blob.field))
        except SampleError as error:
            message = f"{self._where(blob.shard, number, start)}, {blob.field}: {error.message}"
            raise SampleError(error.reason, message) from None

    def _lines(self, shard: int, rows: Sequence[int]) -> list[Line]:
        numbers = self.numbers(shard, rows)
        arrays = self._index.part(shard).arrays
        starts = arrays["start"][numbers]
        sizes = arrays["stop"][numbers] - starts
        file = self._index.files[shard]
        with files.open_shard(file, self._cache_dir) as descriptor:
            texts = files.read_pieces(descriptor, file.path, starts, sizes)
        lines = arrays["line"][numbers].tolist()
        return list(zip(numbers.tolist(), lines, starts.tolist(), texts, strict=True))

    def _sample(
        self, shard: int, root: str, found: Line, fields: Sequence[str] | None
    ) -> Sample | SampleError:
        row, number, start, line = found
        try:
            sample = parse(line)
            key = next((sample[name] for name in files.KEYS if sample.get(name) is not None), "")
            if fields is not None:
                sample = {name: sample[name] for name in fields if name in sample}
            refs = ImageRefs(root, shard, row)
            nested = any(word in line for word in (b"image", b"video", b"\\u"))
            refs.resolve(sample, self._image_fields, nested=nested)
        except SampleError as error:
            where = self._where(shard, number, start)
            return SampleError(error.reason, f"{where}: {error.message}")
        sample["__key__"] = str(key)
        return sample

    def _where(self, shard: int, number: int, start: int) -> str:
        return f"{self.shards[shard].name}, line {number}, byte {start}"


def _is_row(head: bytes) -> bool:
    head = head.removeprefix(_BOM)
    try:
        value = {} if _ARRAY.match(head) else json.loads(head.partition(b"\n")[0])
        return isinstance(value, dict) and _OTHERS.isdisjoint(value)
    except (ValueError, RecursionError):
        return False


def parse(line: bytes) -> dict[str, Any]:
    """Return one line's object.

    Raises:
        SampleError: `bad_utf8`, or `bad_json`: it does not parse, or is not an object.
    """
    try:
        value = files.parse_json(line.decode())
    except UnicodeDecodeError as error:
        message = f"not UTF-8 at byte {error.start} of the line. Encode the file as UTF-8."
        raise SampleError("bad_utf8", message) from None
    except (ValueError, RecursionError) as error:
        raise SampleError("bad_json", f"does not parse as JSON: {error}") from None
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise SampleError("bad_json", f"holds a {kind}, expected an object {{...}}")
    has_surrogates = b"\\ud" in line or b"\\uD" in line
    fixed: dict[str, Any] = _without_lone_surrogates(value) if has_surrogates else value
    return fixed


def _without_lone_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, list):
        return [_without_lone_surrogates(item) for item in value]
    if isinstance(value, dict):
        fixed = _without_lone_surrogates
        return {fixed(key): fixed(item) for key, item in value.items()}
    return value


def index_lines(
    file: files.ShardFile, *, block_bytes: int, cache_dir: files.PathLike | None = None
) -> Part:
    """Find the rows of a file.

    Args:
        file: The shard.
        block_bytes: Read at once; the result does not depend on it.
        cache_dir: Where compressed files are unpacked.

    Raises:
        DatasetError: The file is compressed and its name does not say so, or it does not unpack; or
            it is an array that breaks off.
    """
    with files.open_shard(file, cache_dir) as descriptor:
        if os.pread(descriptor, 4, 0).startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd")):
            raise DatasetError(f"{file.path} is compressed. Name it .jsonl.gz or .jsonl.zst.")
        origin = len(_BOM) if os.pread(descriptor, len(_BOM), 0) == _BOM else 0
        if array := _ARRAY.match(os.pread(descriptor, block_bytes, origin)):
            with os.fdopen(os.dup(descriptor), "rb") as whole:
                return _elements(file.path, whole.read(), origin + array.end())
        ends, texts = [np.array([origin])], []  # of every line: its end, whether it holds text
        at, open_line = origin, 0
        while block := os.pread(descriptor, block_bytes, at):
            after = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n")) + 1
            starts = np.concatenate([[0], after[after < len(block)]])
            is_text = np.frombuffer(block.translate(_IS_TEXT), dtype=np.uint8)
            has_text = np.maximum.reduceat(is_text, starts)
            has_text[0] |= open_line
            open_line = int(has_text[-1]) if starts.size > after.size else 0
            ends.append(after + at)
            texts.append(has_text[: after.size])
            at += len(block)
    ends.append(np.array([at]))
    texts.append(np.array([open_line], dtype=np.uint8))
    return _rows(np.concatenate(ends), np.concatenate(texts) > 0)


def _elements(path: str, data: bytes, start: int) -> Part:
    """Find the objects of an array, the first of which begins at `start`."""
    text = data.decode("latin-1")  # as many characters as bytes; JSON's own are all ASCII
    scan = json.JSONDecoder(strict=False).raw_decode
    rows, line, before, sign = [], 1, 0, ","
    while sign == ",":
        try:
            _, stop = scan(text, start)
        except (ValueError, RecursionError) as error:
            raise DatasetError(f"{path} is no JSON array from byte {start} on: {error}") from None
        line += text.count("\n", before, start)
        rows.append((line, start, stop))
        found: Any = _BETWEEN.match(text, stop)
        before, start, sign = start, found.end(), found[1]
    if sign != "]" or start < len(text):
        behind = text[start : start + 20]
        raise DatasetError(f"{path} is no JSON array from byte {start} on, which is {behind!r}")
    columns = zip(("line", "start", "stop"), np.array(rows, dtype=np.int64).T.copy(), strict=True)
    return Part(len(rows), {}, dict(columns))


def _rows(ends: NDArray[np.int64], has_text: NDArray[np.bool_]) -> Part:
    lines = np.flatnonzero(has_text)
    arrays = {"line": lines + 1, "start": ends[:-1][has_text], "stop": ends[1:][has_text]}
    return Part(lines.size, {}, {name: array.astype(np.int64) for name, array in arrays.items()})
