"""Smaller versions of a picture that keeps its aspect ratio, for documents that are too long.

A version is a grid of patches, both sides of which are the same share of those of the full one. So
a smaller version has as many patches or fewer, and its grid is known from how many it has: `write`
needs no more than the size of its array.

Laws (tests/processors/test_shrink.py):
    1. Sides never grow as the step falls, nor fall below one token.
    2. `grid_with` finds each version again.

Imports: nothing. Used by: naflex, qwen.
"""

import math

STEPS = 64
"""Step `STEPS` is the full picture, step 1 the smallest version."""

Grid = tuple[int, int]
"""Rows and columns of patches."""


def shrunk(grid: Grid, step: int, side: int = 1) -> Grid:
    """Return the grid of a version; `side` is that of the squares of patches that stay together."""
    rows, cols = (max(count // side * step // STEPS, 1) * side for count in grid)
    return rows, cols


def grid_with(patches: int, grid: Grid, side: int = 1) -> Grid:
    """Return the grid of the version with so many patches; the full one where there is none."""
    versions = (shrunk(grid, step, side) for step in range(STEPS, 0, -1))
    return next((found for found in versions if math.prod(found) == patches), grid)
