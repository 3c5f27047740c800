"""Rows that are in memory already: a list of mappings, pictures as bytes, arrays or PIL images.

Laws (tests/readers/test_memory.py, tests/contracts/reader.py):
    1. A picture is encoded once, without loss and upright; bytes stay as they are.
    2. The digest is over all contents, but of a file's only its path and size.
    3. A pickle holds every byte: a worker pool gets it once, with its context.

Cost: all rows are kept, encoded; for more than memory holds, write a dataset.

Imports: errors, records, rng, readers.imagerefs. Used by: io (`Dataset.from_rows`).
"""

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from zephon_mm.errors import ConfigError, DatasetError, SampleError
from zephon_mm.protocols import Sample
from zephon_mm.readers.imagerefs import Place, place_name, value_at
from zephon_mm.records import FileBlob, RowBlob, ShardInfo
from zephon_mm.rng import digest

_SHARD_ROWS = 1000
_PNG_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16"})


class MemoryReader:
    """Random access to rows in memory, in shards of 1,000.

    Args:
        rows: Mappings of field -> str, number, None, an encoded picture as bytes, `PIL.Image`,
            uint8 array of shape (height, width) or (height, width, 1, 3 or 4), the path of a
            picture as `os.PathLike` (a str is text), or lists and mappings of these.

    Raises:
        ConfigError: A row is no mapping, or holds another type of value; names row and field.
        DatasetError: A path is no file.
    """

    kind = "memory"

    def __init__(self, rows: Iterable[Any]) -> None:
        self._rows: list[dict[str, Any]] = []
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping):
                kind = type(row).__name__
                raise ConfigError(f"row {number} is a {kind}, expected a mapping of field -> value")
            self._rows.append(_mapped(row, (), partial(_taken, number)))
        texts = [json.dumps(row, default=_seal) for row in self._rows]
        self._digest = digest(self.kind, *texts)
        self.shards: list[ShardInfo] = []
        for first in range(0, len(texts), _SHARD_ROWS):
            part = texts[first : first + _SHARD_ROWS]
            name = f"rows-{len(self.shards):06}"
            self.shards.append(ShardInfo(name, len(part), len("".join(part))))

    def digest(self) -> str:
        """Return hex digits that change with any content."""
        return self._digest

    def read(
        self, shard: int, rows: Sequence[int], fields: Sequence[str] | None = None
    ) -> list[Sample | SampleError]:
        """Return the rows, pictures as blobs, with `__key__`: their own, or their number.

        Raises:
            IndexError: No such row.
        """
        samples: list[Sample | SampleError] = []
        for row in map(int, rows):
            stored = self._row(shard, row)
            wanted = {n: value for n, value in stored.items() if fields is None or n in fields}
            sample = _mapped(wanted, (), partial(_blob, shard, row))
            key = stored.get("__key__", shard * _SHARD_ROWS + row)
            samples.append({**sample, "__key__": str(key)})
        return samples

    def fetch(self, blob: RowBlob) -> bytes:
        """Return an encoded picture.

        Raises:
            DatasetError: There is none in that place.
        """
        found = value_at(self._row(blob.shard, blob.row), blob.field)
        if not isinstance(found, bytes):
            raise DatasetError(f"the rows in memory hold no picture at {blob}: they changed.")
        return found

    def _row(self, shard: int, row: int) -> dict[str, Any]:
        name, num_rows, _ = self.shards[shard]
        if not 0 <= row < num_rows:
            raise IndexError(f"{name} has rows 0 to {num_rows - 1}, asked for {row}")
        return self._rows[shard * _SHARD_ROWS + row]


def _mapped(value: Any, place: Place, leaf: Callable[[Place, Any], Any]) -> Any:
    """Return a copy with each value that is no list or mapping replaced by `leaf(place, value)`."""
    if isinstance(value, Mapping):
        return {str(key): _mapped(item, (*place, str(key)), leaf) for key, item in value.items()}
    if type(value) in (list, tuple):
        return [_mapped(item, (*place, number), leaf) for number, item in enumerate(value)]
    return leaf(place, value)


def _blob(shard: int, row: int, place: Place, value: Any) -> Any:
    return RowBlob(shard, row, place_name(place)) if isinstance(value, bytes) else value


def _seal(payload: bytes) -> str:
    return hashlib.blake2b(payload, digest_size=16).hexdigest()


def _taken(row: int, place: Place, value: Any) -> Any:
    """Return what is kept of a value: pictures as bytes, or where their file is."""
    if value is None or isinstance(value, str | bytes | int | float | FileBlob):
        return value
    where = f"row {row}, field {place_name(place)!r}"
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, os.PathLike):
        if not os.path.isfile(value):
            raise DatasetError(f"{where} names {value}, which is no file. Restore or correct it.")
        return FileBlob(os.path.abspath(value), 0, os.stat(value).st_size)
    kind = f"{type(value).__name__} {getattr(value, 'mode', '')}".strip()
    if isinstance(value, np.ndarray):
        kind = f"array of {value.dtype} and shape {value.shape}"
        is_picture = value.ndim == 2 or (value.ndim == 3 and value.shape[2] in (1, 3, 4))
        if is_picture and value.size and value.dtype == np.uint8:
            value = Image.fromarray(value[..., 0] if value.shape[2:] == (1,) else value)
    if not isinstance(value, Image.Image) or value.mode not in _PNG_MODES:
        raise ConfigError(
            f"{where} holds {kind}, expected str, number, bytes, os.PathLike, a uint8 array of "
            "shape (height, width) or (height, width, 1, 3 or 4), or a PIL.Image of a mode among "
            f"{', '.join(sorted(_PNG_MODES))}: use .convert('RGB')"
        )
    buffer = io.BytesIO()
    ImageOps.exif_transpose(value).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()
