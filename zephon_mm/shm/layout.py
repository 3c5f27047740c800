"""Where each array of a batch lies inside its slab, known before a pixel is decoded.

Imports: nothing from the package. Used by: engine.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

ALIGN_BYTES = 64  # a cache line, and what vector instructions like


class Field(NamedTuple):
    """One array: where it begins in the slab, in bytes, its shape and dtype."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]


class Layout:
    """Byte ranges of named arrays, one after the other, each aligned to `ALIGN_BYTES`.

    Args:
        fields: name -> (shape, dtype), laid out in this order. A zero-size array takes no bytes.
    """

    def __init__(self, fields: Mapping[str, tuple[tuple[int, ...], DTypeLike]]) -> None:
        self.fields: dict[str, Field] = {}
        end = 0
        for name, (shape, dtype) in fields.items():
            offset = -(-end // ALIGN_BYTES) * ALIGN_BYTES
            kind = np.dtype(dtype)
            self.fields[name] = Field(offset, shape, kind)
            end = offset + math.prod(shape) * kind.itemsize
        self.num_bytes = end

    def views(self, slab: NDArray[np.uint8]) -> dict[str, NDArray[np.generic]]:
        """Return the arrays as views of a slab of at least `num_bytes` uint8."""
        arrays = {}
        for name, field in self.fields.items():
            count = math.prod(field.shape) * field.dtype.itemsize
            flat = slab[field.offset : field.offset + count]
            arrays[name] = flat.view(field.dtype).reshape(field.shape)
        return arrays
