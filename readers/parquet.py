"""Parquet files and Hugging Face dataset folders: row groups as shards, images as blobs.

Laws (tests/readers/test_parquet.py, test_parquet_files.py, tests/contracts/reader.py):
    1. A row group is decoded once a machine: its values and its images become two Arrow files in
       the file cache, which are mapped from then on. Memory holds a few pages of it, whatever
       its size, and rows cost the same in any order.
    2. `read` opens no images where the footer and the values tell which of them are there: in
       binary columns without a null, and in structs of `bytes` and `path`, or lists of these, none
       of which lacks its bytes.
    3. Null is apart from empty, at every depth.
    4. Neither a path in the data nor the copy of a URL leaves its root, not even through a link.

A column holds images if binary values are anywhere in its type; texts that are named like images
hold paths, URLs or base64. Arrow files, as `Dataset.save_to_disk` writes them, are mapped as they
are, one shard each.

Cost: indexing reads the footers; the first row of a group decodes it, later ones cost microseconds.

Imports: errors, filecache, records, rng, stores, readers.{arrowtable, files, hubfolder, imagerefs,
rowindex}, pyarrow. Used by: io (by entry point).
"""

import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from zephon_mm.errors import ConfigError, DatasetError, SampleError
from zephon_mm.filecache import FileCache, cache_folder
from zephon_mm.protocols import Sample
from zephon_mm.readers import arrowtable as arrow
from zephon_mm.readers import files
from zephon_mm.readers.hubfolder import split_files
from zephon_mm.readers.imagerefs import IMAGE_FIELDS, ImageRefs, decode_base64, place_name
from zephon_mm.readers.rowindex import Part, RowIndex
from zephon_mm.records import Column, RowBlob, ShardInfo
from zephon_mm.rng import digest
from zephon_mm.stores import local

_SUFFIXES = (".parquet", ".pq", ".arrow")
_BATCH_BYTES, _BATCH_ROWS = 8 << 20, 1 << 16  # of a row group that is unpacked, at once
_SMALL = 2  # decoding a row group that many times costs less than writing it to a disk
_LARGE_BYTES = 1 << 30  # a row group of more is warned of
_DAMAGED = "is no whole Parquet or Arrow file"


class ParquetReader(files.Sharded):
    """Random access to the rows of Parquet and Arrow files.

    Args:
        path: A file, a folder, a list or a pattern. A folder may have the layout of a Hugging Face
            repository, or be what `save_to_disk` wrote.
        cache_dir: Folder for the index and the unpacked row groups; None is a temporary one.
        progress: Show a bar while many files are indexed.
        config: Configuration of a Hugging Face folder, by its README.md; None for the only one.
        split: Of a folder, such as "train"; "all" for all; None for the only one.
        image_root: Folder that picture paths start from and may not leave; None is `path` if that
            is a folder, else the folder of each file.
        image_map: Where pictures that are URLs lie: URL -> path below `image_root`, or a folder as
            `wget --force-directories` fills it. Rows with other URLs are `image_url` errors.

    Raises:
        ConfigError: No such configuration or split, or several and none was chosen.
        DatasetError: No file, a missing one, or one that is not whole.
    """

    def __init__(
        self,
        path: files.Paths,
        *,
        cache_dir: files.PathLike | None = None,
        progress: bool = True,
        config: str | None = None,
        split: str | None = None,
        image_root: files.PathLike | None = None,
        image_map: Mapping[str, str] | files.PathLike | None = None,
    ) -> None:
        folder = _folder(path)
        if folder is not None:
            path = split_files(folder, _SUFFIXES, config=config, split=split) or folder
        elif config or split:
            raise ConfigError(f"config= and split= are for folders, path is {path!r}")
        root = image_root if image_root is not None else folder
        self._root = None if root is None else os.path.realpath(root)
        self._image_map: Mapping[str, str] | str | None = (
            os.path.realpath(image_map) if isinstance(image_map, str | os.PathLike) else image_map
        )
        told = image_map if isinstance(image_map, Mapping) else {}
        self.kind = f"parquet-{digest(*map(repr, sorted(told.items())))}" if told else "parquet"
        self._files = FileCache(cache_folder(cache_dir))
        self._index = RowIndex(
            path,
            _SUFFIXES,
            kind="parquet",
            index_shard=_index_file,
            cache_dir=cache_dir,
            progress=progress,
        )
        shards: list[ShardInfo] = []
        self._groups: list[tuple[int, int]] = []  # of each shard: its file, its number in that
        for number, file in enumerate(self._index.files):
            part = self._index.part(number)
            sizes = zip(part.arrays["rows"].tolist(), part.arrays["bytes"].tolist(), strict=True)
            groups = [ShardInfo(f"{file.name}#{at}", *size) for at, size in enumerate(sizes)]
            shards += groups
            self._groups += [(number, at) for at in range(len(groups))]
            if not part.meta["is_arrow"]:
                _warn_of_large(groups)
        self.shards = tuple(shards)

    @classmethod
    def detect(cls, path: files.Paths) -> bool:
        """Whether the first file that `path` stands for starts as Parquet or Arrow."""
        with suppress(DatasetError, OSError, ValueError):
            for file in files.list_files(path, _SUFFIXES)[:1]:
                if os.path.basename(os.path.dirname(file)).startswith("_"):
                    return False  # another format's own: Lance has its deletions as Arrow files
                with open(local(file), "rb") as opened:
                    head = opened.read(6)
                stem, suffix = os.path.splitext(file)
                if os.path.isfile(f"{stem}.tar") and _folder(path):
                    return False  # img2dataset writes a table of metadata beside each tar
                if suffix.lower() in (".parquet", ".pq"):
                    return True  # also one that is cut, whose error names it
                is_stream = head.startswith(b"\xff\xff\xff\xff") and suffix.lower() == ".arrow"
                return is_stream or head.startswith(b"PAR1") or head == b"ARROW1"
        return False

    def read(
        self, shard: int, rows: Sequence[int], fields: Sequence[str] | None = None
    ) -> list[Sample | SampleError]:
        """Return the rows, images as blobs, with `__key__`.

        Raises:
            IndexError: No such row.
            DatasetError: The row group does not decode, or its file changed.
        """
        numbers = self.numbers(shard, rows)
        table = self._table(shard)
        stored = [name for name in table.schema.names if name not in table.images]
        wanted = [name for name in [*stored, *table.images] if fields is None or name in fields]
        keys = [name for name in files.KEYS if name in stored]
        taken = table.take([name for name in stored if name in {*wanted, *keys}], numbers)
        columns = {name: _listed(array) for name, array in taken.items()}
        refs: list[str] = list(IMAGE_FIELDS)
        for name in set(wanted) & set(table.images):
            columns[name] = self._pictures(shard, name, numbers.tolist(), refs)
        samples: list[Sample | SampleError] = []
        for at, row in enumerate(numbers.tolist()):
            found = (columns[name][at] for name in keys)
            key = next((str(one) for one in found if one is not None), "")
            sample = {**{name: columns[name][at] for name in wanted}, "__key__": key}
            samples.append(self._resolved(sample, refs, shard, row))
        return samples

    def fetch(self, blob: RowBlob) -> bytes:
        """Return the bytes of one image.

        Raises:
            IndexError: No such row.
            SampleError: It is null, or base64 that does not decode.
            DatasetError: The row group does not decode, or its file changed.
        """
        self.numbers(blob.shard, [blob.row])
        name, *steps = (s.replace("~1", "/").replace("~0", "~") for s in blob.field.split("/"))
        is_image = name in self._table(blob.shard).images
        cell = self._table(blob.shard, images=is_image).cell(name, blob.row)
        data = arrow.bytes_at(cell, steps)
        try:
            if data is None:
                raise SampleError("no_image", "null. Remove the row, or restore the image.")
            return decode_base64(data) if isinstance(data, str) else bytes(data)
        except SampleError as error:
            where = f"{self.shards[blob.shard].name}/{blob.row}, field {blob.field!r}"
            raise SampleError(error.reason, f"{where}: {error.message}") from None

    def columns(
        self, shard: int, rows: NDArray[np.int64], fields: Sequence[str]
    ) -> dict[str, Column]:
        """Return the stored bytes of text and image fields, row after row.

        Other fields are left out, and images of which one is a path or URL.

        Raises:
            IndexError: No such row.
            DatasetError: The row group does not decode, or its file changed.
        """
        numbers = self.numbers(shard, rows)
        table = self._table(shard)
        columns = {}
        for name in fields:
            if name in table.images:
                images = self._table(shard, images=True, at_once=numbers.size)
                columns[name] = images.column(name, numbers)
            elif name not in IMAGE_FIELDS:
                columns[name] = table.column(name, numbers)
        return {name: column for name, column in columns.items() if column is not None}

    def _table(self, shard: int, *, images: bool = False, at_once: int = 0) -> arrow.ArrowTable:
        """Return a shard's values, or its images; `at_once` of them are wanted."""
        number, group = self._groups[shard]
        file = self._index.files[number]
        if self._index.part(number).meta["is_arrow"]:
            with files.open_shard(file):
                return _mapped_images(file.path, file.mtime_ns)
        if images and at_once * _SMALL >= self.shards[shard].num_rows:
            return _in_memory(file, group)
        what = "images" if images else "values"
        key = f"{what} of {file.path}#{group}, {file.num_bytes} bytes, mtime {file.mtime_ns}"
        path = self._files.get(key, partial(_unpack, file, group, images=images))
        return (_mapped_images if images else _mapped)(path)

    def _pictures(self, shard: int, name: str, rows: list[int], refs: list[str]) -> list[Any]:
        """Return one image column, nested as it is stored; add its name if it may hold paths."""
        table = self._table(shard)
        told = table.images[name]
        if told and name not in table.schema.names:
            return [RowBlob(shard, row, place_name((name,))) for row in rows]
        if not told:
            table = self._table(shard, images=True)
            refs += (
                [name] if arrow.is_picture(arrow.item_type(table.schema.field(name).type)) else []
            )
        cells = ((table.cell(name, row), row) for row in rows)
        return [arrow.blobs_of(cell, shard, row, (name,), told=told) for cell, row in cells]

    def _resolved(
        self, sample: dict[str, Any], refs: Sequence[str], shard: int, row: int
    ) -> Sample | SampleError:
        """Return a row with its paths and URLs as blobs, or what is wrong with it."""
        file = self._index.files[self._groups[shard][0]]
        root = self._root or os.path.dirname(os.path.realpath(file.path))
        try:
            if bad := [value for value in sample.values() if isinstance(value, SampleError)]:
                raise bad[0]
            ImageRefs(root, shard, row, self._image_map).resolve(sample, refs, nested=True)
        except SampleError as error:
            return SampleError(error.reason, f"{self.shards[shard].name}/{row}: {error.message}")
        return sample


@lru_cache(maxsize=16)
def _mapped_images(path: str, age: int = 0) -> arrow.ArrowTable:
    return arrow.ArrowTable.map(local(path))


_mapped = lru_cache(maxsize=256)(_mapped_images.__wrapped__)
"""Without images they are small, and a block of raw samples is of rows from fifty."""


def _listed(array: Any) -> list[Any]:
    """Return an array's values; one that Python cannot hold is a SampleError."""
    try:
        return list(array.to_pylist())
    except ValueError as error:
        if len(array) > 1:
            return [value for at in range(len(array)) for value in _listed(array.slice(at, 1))]
        reason = "bad_utf8" if isinstance(error, UnicodeDecodeError) else "bad_value"
        return [SampleError(reason, f"{error}. Write the column again.")]


def _index_file(file: files.ShardFile) -> Part:
    """Return the rows and uncompressed bytes of a file's row groups."""
    with files.open_shard(file) as descriptor, files.damage_named(file.path, _DAMAGED):
        is_arrow = os.pread(descriptor, 4, 0) != b"PAR1"
        if is_arrow:
            table = arrow.ArrowTable.map(local(file.path))
            for batch in table.batches:
                batch.validate(full=True)  # offsets out of bounds would kill the process later
            sizes = [(sum(batch.num_rows for batch in table.batches), file.num_bytes)]
        else:
            footer = pq.read_metadata(local(file.path))
            _require_clear(footer.schema.to_arrow_schema())
            groups = map(footer.row_group, range(footer.num_row_groups))
            sizes = [(group.num_rows, group.total_byte_size) for group in groups]
    rows, num_bytes = np.array(sizes, dtype=np.int64).reshape(-1, 2).T
    return Part(int(rows.sum()), {"is_arrow": is_arrow}, {"rows": rows, "bytes": num_bytes})


def _require_clear(schema: Any) -> None:
    """Refuse columns of which a path in the footer may mean either."""
    images = [field.name for field in schema if arrow.holds_binary(field.type)]
    for name in schema.names:
        others = [one for one in images if name.startswith(f"{one}.")]
        if others or schema.names.count(name) > 1:
            raise ValueError(f"columns {name!r} and {[*others, name][0]!r} cannot be told apart")


def _unpack(file: files.ShardFile, group: int, target: str, *, images: bool) -> None:
    """Write the images of a row group, or all else that is in it, as an Arrow stream."""
    with pa.OSFile(target, "wb") as sink:
        _write(file, group, sink, images=images)


@lru_cache(maxsize=2)
def _in_memory(file: files.ShardFile, group: int) -> arrow.ArrowTable:
    sink = pa.BufferOutputStream()
    _write(file, group, sink, images=True)
    return arrow.ArrowTable.of(sink.getvalue())


def _write(file: files.ShardFile, group: int, sink: Any, *, images: bool) -> None:
    writer = None
    for batch in _batches(file, group, images=images):
        writer = writer or pa.ipc.new_stream(sink, batch.schema)
        writer.write_batch(batch)
    (writer or pa.ipc.new_stream(sink, pa.schema([]))).close()


def _batches(file: files.ShardFile, group: int, *, images: bool) -> Iterator[Any]:
    """Yield the images of a row group, or all else that is in it, as record batches."""
    with files.open_shard(file), files.damage_named(file.path, _DAMAGED):
        # With a buffer a column's chunk is read piece by piece, without one as a whole.
        options = {"buffer_size": 1 << 20, "pre_buffer": False, "page_checksum_verification": True}
        source = pq.ParquetFile(local(file.path), **options)
        chunks = source.metadata.row_group(group)
        leaves, nulls = _leaves(source, chunks, images=images)
        num_bytes = sum(leaf.total_uncompressed_size for leaf in leaves.values())
        at_once = _BATCH_BYTES * chunks.num_rows // max(num_bytes, 1)
        missing = chunks.num_rows
        for batch in source.iter_batches(
            max(1, min(at_once, _BATCH_ROWS)),
            row_groups=[group],
            columns=list(leaves),
            use_threads=False,
        ):
            missing -= batch.num_rows
            columns = {name: arrow.plain(batch.column(name)) for name in batch.schema.names}
            plain = pa.record_batch(columns) if columns else batch
            yield plain.replace_schema_metadata({arrow.NULLS: json.dumps(nulls)})
        if missing:
            raise pa.ArrowInvalid(f"row group {group} lacks {missing} of {chunks.num_rows} rows")


def _leaves(
    source: Any, chunks: Any, *, images: bool
) -> tuple[dict[str, Any], dict[str, int | None]]:
    """Return the column chunks of a row group's images, or of all else, and what tells of images.

    The paths of images are in both: they tell which images there are, if the number of nulls among
    the bytes agrees. That is the second value, None where nothing would tell.
    """
    schema = source.schema_arrow
    kinds = {field.name: field.type for field in schema if arrow.holds_binary(field.type)}
    wanted, nulls = {}, dict.fromkeys(kinds)
    for number in range(chunks.num_columns):
        leaf, path = chunks.column(number), source.schema.column(number).path
        name = next((one for one in kinds if f"{path}.".startswith(f"{one}.")), "")
        kind = kinds.get(name, pa.null())
        inner = arrow.item_type(kind)
        is_path = arrow.is_picture(inner) and path.endswith(".path")
        if images == bool(name) or is_path:
            wanted[path] = leaf
        is_bytes = arrow.is_binary(kind) or (arrow.is_picture(inner) and not is_path)
        is_lone = arrow.is_list(kind) and inner.num_fields == 1  # no path tells a list's length
        statistics = leaf.statistics
        if is_bytes and not is_lone and statistics and statistics.has_null_count:
            nulls[name] = statistics.null_count
    return wanted, nulls


def _warn_of_large(groups: Sequence[ShardInfo]) -> None:
    for name, num_rows, num_bytes in groups:
        if num_bytes > _LARGE_BYTES:
            warnings.warn(
                f"row group {name} holds {num_bytes} bytes in {num_rows} rows: its first row waits "
                f"until all of it is unpacked. Write groups of at most {_LARGE_BYTES} bytes, with "
                "row_group_size=.",
                stacklevel=3,
            )
            return  # one of a file is enough


def _folder(path: files.Paths) -> str | None:
    """Return a path as an absolute one if it is a folder."""
    if not isinstance(path, str | os.PathLike):
        return None
    text = os.path.abspath(os.path.expanduser(os.fspath(path)))
    return text if os.path.isdir(text) else None
