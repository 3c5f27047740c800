"""Fixtures that several tests share: a few image files, and datasets over them."""

import pytest
from hypothesis import settings

from tests.fixtures.memory import Recipe, dataset, random_rows, write_images
from zephon_mm.records import FileBlob

# Tests share two cores with other work: how long an example takes says nothing.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture(scope="session")
def blobs(tmp_path_factory: pytest.TempPathFactory) -> list[FileBlob]:
    """Five small images on disk."""
    return write_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="session")
def recipe(blobs: list[FileBlob]) -> Recipe:
    """Two datasets of captions and documents, mixed, packed and shuffled."""
    return Recipe(
        datasets=(
            dataset("a", random_rows(1, 40, blobs)),
            dataset("b", random_rows(2, 23, blobs), shard_rows=5),
        ),
        weights=(0.6, 0.4),
        shuffle=3,
    )
