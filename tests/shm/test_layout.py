"""Arrays of a layout are aligned, disjoint and inside the slab."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zephon_mm.shm.layout import ALIGN_BYTES, Layout

SHAPES = st.lists(st.integers(0, 7), min_size=1, max_size=4).map(tuple)
DTYPES = st.sampled_from(["uint8", "int32", "int64", "bool"])


@given(st.lists(st.tuples(SHAPES, DTYPES), max_size=8))
def test_arrays_are_aligned_disjoint_and_inside(fields: list[tuple[tuple[int, ...], str]]) -> None:
    layout = Layout({str(i): field for i, field in enumerate(fields)})
    slab = np.zeros(max(layout.num_bytes, 1), dtype=np.uint8)
    for name, array in layout.views(slab).items():
        array[...] = 1
        assert layout.fields[name].offset % ALIGN_BYTES == 0
    ones = sum(
        math.prod(shape) * (np.dtype(dtype).itemsize if dtype == "bool" else 1)
        for shape, dtype in fields
    )
    assert int(np.count_nonzero(slab)) == ones
