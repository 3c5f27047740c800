"""Writers of five formats: one file, or one fragment, for each shard.

Laws (tests/cli/test_convert.py):
    1. `encode` says what the format's reader will give back. Encoded images and other bytes are
       passed through unchanged.
    2. A value that a format has no place for is a SampleError that names the field.
    3. A shard is there as a whole or not at all; `finish` makes a dataset of the shards.

    webdataset  images as `jpg`, `png`, ... (`left` as `left.jpg`); texts named txt, text, caption
                or cls; all else in `json`; keys that cannot be a member's name become numbers
    mds         str, int, float64, bytes, jpeg, png, lists of images as jpeg_array, all else as json
    litdata     str, int, float, bool, bytes, jpeg, jpeg_array, all else as json
    parquet     one row group a file; values as Arrow infers them, images as structs of bytes and
                path, which `datasets` shows as images
    lance       one fragment a shard; likewise, with images as binaries where all rows have one:
                among binaries its reader cannot see which are null

In mds and litdata a value is json as well where some rows lack it. What no one Arrow type holds
becomes text of JSON in parquet and lance.

Cost: memory for a block of rows; on disk, mds, litdata and parquet hold a shard twice for a moment.

Imports: errors, processors.{documents, formats}, readers.arrowtable, pyarrow, pylance.
Used by: cli.convert.
"""

import io
import json
import os
import shutil
import struct
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from zephon_mm.errors import ConfigError, SampleError
from zephon_mm.processors.documents import IMAGE_FIELDS
from zephon_mm.processors.formats import format_of
from zephon_mm.readers.arrowtable import holds_binary, is_binary, is_list, is_picture

Row = Mapping[str, Any]
Blocks = Iterable[Sequence[Any]]
Encode = Callable[[Any], bytes]

_TEXTS = frozenset({"txt", "text", "caption", "cls"})
_UNFIT = (TypeError, ValueError, AttributeError, OverflowError, struct.error)


class Columns:
    """What the fields of all rows hold, collected block by block.

    Attributes:
        images: Field -> format of its first image, "" where its bytes are no image. Filled by the
            user, before `add` sees the field.
        mixed: Fields whose values no one Arrow type holds.
    """

    def __init__(self) -> None:
        self.images: dict[str, str] = {}
        self.mixed: set[str] = set()
        self._fields: dict[str, Any] = {}
        self._present: Counter[str] = Counter()
        self._num_rows = 0

    def add(self, rows: Sequence[Row]) -> None:
        """Take rows, whose bytes may be left out (b"")."""
        self._num_rows += len(rows)
        for name in dict.fromkeys(name for row in rows for name in row):
            values = [row.get(name) for row in rows]
            self._present[name] += len(values) - values.count(None)
            path = [""] if self.images.get(name) else None
            before = self._fields.setdefault(name, pa.field(name, pa.null()))
            try:
                kind = pa.array([_arrow(value, path) for value in values]).type
                parts = [pa.schema([before]), pa.schema([(name, kind)])]
                self._fields[name] = pa.unify_schemas(parts, promote_options="permissive").field(0)
            except (pa.ArrowException, *_UNFIT):
                self.mixed.add(name)

    def schema(self) -> Any:
        """Return the Arrow schema; a field that no row lacks is not nullable."""
        self.mixed |= {name for name, field in self._fields.items() if not _is_storable(field.type)}
        return pa.schema(
            pa.field(
                name,
                pa.string() if name in self.mixed else field.type,
                nullable=self._present[name] < self._num_rows,
            )
            for name, field in self._fields.items()
            if self._present[name]
        )


class TarWriter:
    """Writes WebDataset shards.

    Args:
        folder: That of the dataset.
        columns: What the fields of all rows hold.
    """

    def __init__(self, folder: str, columns: Columns) -> None:
        self._folder = folder
        self._columns = columns
        self._schema = columns.schema()

    def encode(self, row: Row) -> tuple[Row, Any]:
        """Return what will be read back, and what `write` takes.

        Raises:
            SampleError: `unfit_field`.
        """
        members: list[tuple[str, Any]] = []
        others: list[tuple[str, Any]] = []
        for name, value in row.items():
            if isinstance(value, bytes):
                members.append((_member_name(name, value), value))
            elif isinstance(value, str) and name in _TEXTS:
                members.append((name, value))
            elif name == "json" and isinstance(value, Mapping):
                others += value.items()
            elif value is not None and name != "__key__":
                others.append((name, value))
        fields = _distinct(members + [("json", _distinct(others))] * bool(others))
        data = {name: _fitted(name, value, _member) for name, value in fields.items()}
        return fields, (str(row.get("__key__", "")), data)

    def write(self, number: int, blocks: Blocks) -> Any:
        """Write a shard of what `encode` gave; return what `finish` needs to know of it."""
        path, seen = os.path.join(self._folder, f"{number:06}.tar"), {""}
        with tarfile.open(f"{path}.tmp", "w") as tar:
            for at, (key, members) in enumerate(row for block in blocks for row in block):
                steps = key.split("/")
                if key in seen or "." in steps[-1] or not {"", "..", "."}.isdisjoint(steps):
                    key = f"{number:06}-{at:08}"
                seen.add(key)
                for name, data in members.items():
                    info = tarfile.TarInfo(f"{key}.{name}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        os.replace(f"{path}.tmp", path)
        return {}

    def finish(self, entries: Sequence[Any]) -> None:
        """Make a dataset of the shards."""


class MDSWriter(TarWriter):
    """Writes MDS shards and their index."""

    kinds = ("int", "float64", "", "json")

    def __init__(self, folder: str, columns: Columns) -> None:
        super().__init__(folder, columns)
        self._names = sorted(self._schema.names)
        encoders = [_encoder(self._schema.field(n), columns, self.kinds) for n in self._names]
        self._kinds, self._encoders = [kind for kind, _ in encoders], [e for _, e in encoders]
        self._sizes = [8 if kind in ("int", "float64") else None for kind in self._kinds]

    def encode(self, row: Row) -> tuple[Row, Any]:
        """As `TarWriter.encode`."""
        fields = {name: row.get(name) for name in self._names}
        data = list(map(_fitted, self._names, fields.values(), self._encoders))
        sizes = [len(d) for d, size in zip(data, self._sizes, strict=True) if size is None]
        return fields, np.array(sizes, "<u4").tobytes() + b"".join(data)

    def write(self, number: int, blocks: Blocks) -> Any:
        """As `TarWriter.write`."""
        said = {
            **{"column_names": self._names, "column_encodings": self._kinds},
            **{"column_sizes": self._sizes, "format": "mds", "version": 2},
            **{"compression": None, "hashes": [], "size_limit": None},
        }
        name = f"shard.{number:05}.mds"
        rows, size = self._write_table(name, json.dumps(said).encode(), blocks)
        raw = {"basename": name, "bytes": size, "hashes": {}}
        return {**said, "samples": rows, "raw_data": raw, "zip_data": None}

    def finish(self, entries: Sequence[Any]) -> None:
        """As `TarWriter.finish`."""
        self._write_index({"version": 2, "shards": entries})

    def _write_index(self, index: Any) -> None:
        with open(os.path.join(self._folder, "index.json"), "w") as file:
            json.dump(index, file)

    def _write_table(self, name: str, extra: bytes, blocks: Blocks) -> tuple[int, int]:
        """Write a count, a table of where rows begin and end, `extra`, and the rows.

        Returns:
            Rows, and bytes of the file.

        Raises:
            ConfigError: The file would hold 4 GiB or more.
        """
        path, ends = os.path.join(self._folder, name), [0]
        with open(f"{path}.rows", "w+b") as body, open(f"{path}.tmp", "wb") as file:
            for row in (row for block in blocks for row in block):
                body.write(row)
                ends.append(body.tell())
            table = np.array(ends) + 4 * (len(ends) + 1) + len(extra)
            if table[-1] >= 1 << 32:
                message = f"{name} would hold {table[-1]} bytes, its format 4 GiB at most"
                raise ConfigError(f"{message}. Choose fewer rows for it, with --shard-rows.")
            file.write(struct.pack("<I", len(ends) - 1) + table.astype("<u4").tobytes() + extra)
            body.seek(0)
            shutil.copyfileobj(body, file, 1 << 20)
        os.remove(f"{path}.rows")
        os.replace(f"{path}.tmp", path)
        return len(ends) - 1, int(table[-1])


class LitDataWriter(MDSWriter):
    """Writes LitData chunks, whose rows are like those of MDS, and their index."""

    kinds = ("int", "float", "bool", "json")

    def __init__(self, folder: str, columns: Columns) -> None:
        super().__init__(folder, columns)
        self._sizes = [None] * len(self._names)  # each value's is in its row

    def write(self, number: int, blocks: Blocks) -> Any:
        """As `TarWriter.write`."""
        name = f"chunk-0-{number}.bin"
        rows, size = self._write_table(name, b"", blocks)
        return {"filename": name, "chunk_size": rows, "chunk_bytes": size, "dim": None}

    def finish(self, entries: Sequence[Any]) -> None:
        """As `TarWriter.finish`."""
        leaf: Row = {"type": None, "context": None, "children_spec": []}
        leaves = {"context": json.dumps(self._names), "children_spec": [leaf] * len(self._names)}
        config = {
            "data_format": self._kinds,
            "data_spec": json.dumps([1, {"type": "builtins.dict", **leaves}]),
            "item_loader": "PyTreeLoader",
            "chunk_size": max((entry["chunk_size"] for entry in entries), default=0),
            **dict.fromkeys(("chunk_bytes", "compression", "encryption")),
        }
        self._write_index({"chunks": entries, "config": config, "updated_at": "0"})


class ParquetWriter(TarWriter):
    """Writes Parquet files of one row group."""

    def __init__(self, folder: str, columns: Columns) -> None:
        super().__init__(folder, columns)
        shown = {field.name: _feature(field.type) for field in self._schema}
        features = {name: feature for name, feature in shown.items() if feature}
        self._schema = pa.schema(
            [field.with_nullable(True) for field in self._schema],  # as `datasets` wants to see it
            {"huggingface": json.dumps({"info": {"features": features}})} if features else None,
        )

    def encode(self, row: Row) -> tuple[Row, Any]:
        """As `TarWriter.encode`."""
        fields = {name: row.get(name) for name in self._schema.names}
        for name in self._columns.mixed & fields.keys():
            if fields[name] is not None:
                fields[name] = _fitted(name, fields[name], _json).decode()
        return fields, fields

    def write(self, number: int, blocks: Blocks) -> Any:
        """As `TarWriter.write`."""
        path = os.path.join(self._folder, f"{number:06}.parquet")
        with pa.ipc.new_stream(f"{path}.rows", self._schema) as rows:
            for batch in self._batches(blocks):
                rows.write_batch(batch)
        # From a mapped file a row group is written column by column, whatever its size.
        with pa.memory_map(f"{path}.rows") as mapped:
            table = pa.ipc.open_stream(mapped).read_all()
            flat = [field.name for field in self._schema if not holds_binary(field.type)]
            options = {
                "use_dictionary": False,
                "compression": dict.fromkeys(flat, "zstd") or "none",
            }
            pq.write_table(table, f"{path}.tmp", row_group_size=table.num_rows, **options)
        os.remove(f"{path}.rows")
        os.replace(f"{path}.tmp", path)
        return {}

    def _batches(self, blocks: Blocks) -> Iterator[Any]:
        for block in blocks:
            arrays = []
            for name, kind in zip(self._schema.names, self._schema.types, strict=True):
                path = [None] if self._columns.images.get(name) and not is_binary(kind) else None
                arrays.append(pa.array([_arrow(row[name], path) for row in block], kind))
            yield pa.record_batch(arrays, schema=self._schema)


class LanceWriter(ParquetWriter):
    """Writes the fragments of a Lance dataset, which `finish` commits."""

    def __init__(self, folder: str, columns: Columns) -> None:
        super().__init__(folder, columns)
        always = {field.name for field in columns.schema() if not field.nullable}
        for at, field in enumerate(self._schema):
            if is_picture(field.type) and field.name in always:
                self._schema = self._schema.set(at, field.with_type(pa.large_binary()))

    def write(self, number: int, blocks: Blocks) -> Any:
        """As `TarWriter.write`."""
        import lance  # not at the top: from then on it warns at every fork of the process

        batches = pa.RecordBatchReader.from_batches(self._schema, self._batches(blocks))
        return lance.LanceFragment.create(self._folder, batches, schema=self._schema).to_json()

    def finish(self, entries: Sequence[Any]) -> None:
        """As `TarWriter.finish`."""
        import lance

        parts = [lance.fragment.FragmentMetadata.from_json(json.dumps(entry)) for entry in entries]
        lance.LanceDataset.commit(self._folder, lance.LanceOperation.Overwrite(self._schema, parts))


WRITERS = {
    **{"webdataset": TarWriter, "mds": MDSWriter, "litdata": LitDataWriter},
    **{"parquet": ParquetWriter, "lance": LanceWriter},
}


def image_format(data: bytes) -> str:
    """Return the format of an encoded image, "" if it is none."""
    try:
        return format_of(data)
    except SampleError:
        return ""


def _encoder(field: Any, columns: Columns, kinds: tuple[str, str, str, str]) -> tuple[str, Encode]:
    """Return encoding and encoder of a field; `kinds` are those of int, float, bool and JSON."""
    kind, is_mds = field.type, not kinds[2]
    if is_picture(kind):
        return "png" if is_mds and columns.images[field.name] == "PNG" else "jpeg", bytes
    if is_binary(kind):
        return "bytes", bytes
    if is_list(kind) and is_picture(kind.value_type):
        return "jpeg_array", _jpeg_array
    if not field.nullable and field.name not in columns.mixed:
        if pa.types.is_string(kind):
            return "str", str.encode
        tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
        for test, name, code in zip(tests, kinds, ("<q", "<d", "?"), strict=False):
            if name and test(kind):
                return name, struct.Struct(code).pack
    return kinds[3], _json if is_mds else _tagged_json


def _distinct(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    names = Counter(name for name, _ in pairs)
    if len(names) < len(pairs):
        message = f"two fields would be named {names.most_common(1)[0][0]!r}. Rename one."
        raise SampleError("unfit_field", message)
    return dict(pairs)


def _fitted(name: str, value: Any, encode: Encode) -> bytes:
    try:
        return encode(value)
    except _UNFIT as error:
        message = f"field {name!r} is {str(value)[:60]!r}, for which the format has no place"
        raise SampleError("unfit_field", f"{message}: {error}. Parquet may have one.") from None


def _json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False).encode()


def _tagged_json(value: Any) -> bytes:
    return b"\0" + struct.pack("<I", len(_json(value))) + _json(value)


def _member(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    return value.encode() if isinstance(value, str) else _json(value)


def _jpeg_array(images: Sequence[bytes]) -> bytes:
    return np.array([len(images), *map(len, images)], "<u4").tobytes() + b"".join(images)


def _member_name(name: str, data: bytes) -> str:
    """Return the field of a WebDataset member: one that tells the kind of its bytes."""
    name, found = name.lower(), image_format(data)  # as the format reads it
    if not found or (name != "image" and name.rpartition(".")[2] in IMAGE_FIELDS):
        return name
    suffix = {"JPEG": "jpg", "JPEG2000": "jp2"}.get(found, found.lower())
    return suffix if name == "image" else f"{name}.{suffix}"


def _arrow(value: Any, path: Any) -> Any:
    """Return a value as Arrow takes it: bytes as they are, or with a list of a path as structs."""
    if isinstance(value, bytes):
        return {"bytes": value, "path": path[0]} if path else value
    if isinstance(value, Mapping):
        return {key: _arrow(part, path) for key, part in value.items()}
    return [_arrow(part, path) for part in value] if isinstance(value, list) else value


def _is_storable(kind: Any) -> bool:
    """Whether Parquet and Lance have a type, and all that is inside it."""
    inner = [kind.field(i).type for i in range(kind.num_fields)]
    is_empty = pa.types.is_null(kind) or (pa.types.is_struct(kind) and not inner)
    return not is_empty and all(map(_is_storable, inner))


def _feature(kind: Any) -> Any:
    """Return what `datasets` calls a column of images, or of lists of them."""
    if is_list(kind) and is_picture(kind.value_type):
        return {"_type": "Sequence", "feature": {"_type": "Image"}}
    return {"_type": "Image"} if is_picture(kind) else None
