"""Fixtures that several tests share: a few image files, and datasets over them."""

import contextlib
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.fixtures.memory import Recipe, dataset, random_rows, write_images
from tests.fixtures.nursery import Nursery
from zephon_mm.records import FileBlob

# Tests share two cores with other work: how long an example takes says nothing. Examples are the
# same in each run, so that a change is judged by what it changed; `FUZZ=1 make test` draws others.
settings.register_profile("steady", deadline=None, derandomize="FUZZ" not in os.environ)
settings.load_profile("steady")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep indexes out of the user's cache, also those of processes that tests start."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Forks processes that have torch and the package imported."""
    with contextlib.closing(Nursery()) as nursery:
        yield nursery


@pytest.fixture(scope="module")
def warm_workers(nursery: Nursery) -> Iterator[None]:
    """Zygotes come from the nursery: for tests that are not about how a process starts.

    Those of tests/runners, of scripts, PRF-02, the demo and the README start cold.
    """
    with nursery.launching():
        yield


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
