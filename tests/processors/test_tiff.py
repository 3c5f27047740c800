"""TIFF's ways to store 16 bits: the pixels of the file, or an error, never others."""

import io

import numpy as np
import pytest
import tifffile

from zephon_mm.errors import SampleError
from zephon_mm.processors.image import decode


@pytest.mark.parametrize("byteorder", "<>")
@pytest.mark.parametrize("compression", [None, "zlib"])
def test_16_bit_tiff_is_right_or_refused(compression, byteorder):
    """Pillow inverts `miniswhite` at 8 bits alone, and takes 16-bit planes for 8-bit ones."""
    samples = np.random.default_rng(1).integers(0, 65536, (3, 16, 24), dtype=np.uint16)
    stored = {"compression": compression, "byteorder": byteorder}
    refused = 0
    for pixels, kind in (
        (samples, {"photometric": "rgb", "planarconfig": "separate"}),
        (samples.transpose(1, 2, 0), {"photometric": "rgb"}),
        (samples[0], {"photometric": "miniswhite"}),
        (samples[0], {"photometric": "minisblack"}),
    ):
        buffer = io.BytesIO()
        tifffile.imwrite(buffer, pixels, **kind, **stored)
        wanted = ~pixels if kind["photometric"] == "miniswhite" else pixels
        wanted = wanted[..., None] if wanted.ndim == 2 else wanted
        wanted = wanted.transpose(1, 2, 0) if wanted.shape[0] == 3 else wanted
        try:
            found = decode(buffer.getvalue())
        except SampleError:
            refused += 1
        else:
            assert np.array_equal(found, np.broadcast_to(wanted >> 8, (16, 24, 3)))
    assert refused <= 2
