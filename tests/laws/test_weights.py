"""Loss weights: what documents and images say reaches their tokens, the same on any topology."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.fixtures.memory import (
    ELSEWHERE,
    MemoryReader,
    Recipe,
    dataset,
    document_of,
    random_rows,
    run_ranks,
    take,
    write_images,
)
from zephon_mm.batch import IGNORE, Batch
from zephon_mm.errors import ConfigError
from zephon_mm.io import Dataset
from zephon_mm.protocols import Sample
from zephon_mm.records import Document, Image, Segment, Text

pytestmark = pytest.mark.usefixtures("warm_workers")
SEQUENCES = 16


def weight_of(row: int) -> float:
    return 0.25 * (row % 4)


def weighted(sample: Sample) -> Document:
    """Weigh a document by its number, its n-th image by 1 / (n + 2)."""
    document = document_of(sample)
    segments: list[Segment] = []
    for segment in document.segments:
        if isinstance(segment, Image):
            images = sum(isinstance(one, Image) for one in segments)
            segments.append(replace(segment, weight=1 / (images + 2)))
        else:
            segments.append(segment)
    return replace(document, segments=tuple(segments), weight=weight_of(int(document.key)))


def recipe_of(folder: Path) -> Recipe:
    reader = MemoryReader(random_rows(5, 30, write_images(folder)), shard_rows=100)
    cache = folder / "cache"
    return Recipe(
        datasets=(Dataset("d", reader, schema=weighted, version="1", cache_dir=cache),),
        max_length=256,
        passes=1,
        tail="pad",
    )


def expected(batch: Batch, kind: str) -> torch.Tensor:
    """Return the weights out of a batch's keys, labels and places of images."""
    found = torch.zeros(batch.labels.shape)
    power = {"token": 0.0, "sqrt": 0.5, "document": 1.0}[kind]
    for row, keys in enumerate(batch.keys):
        for segment, key in enumerate(keys, start=1):
            columns = (batch.segment_ids[row] == segment).nonzero().flatten().tolist()
            trained = [at for at in columns if batch.labels[row, at] != IGNORE]
            starts = [s for r, s, _ in batch.image_index.tolist() if r == row and s in columns]
            for at in trained:
                before = sum(start < at for start in starts)
                weight = weight_of(int(key.rpartition("/")[2]))
                weight *= 1 / (before + 1) if before else 1
                found[row, at] = weight / len(trained) ** power
    return found


@pytest.mark.parametrize("kind", ["token", "document", "sqrt"])
def test_a_token_has_the_weight_of_its_document_times_that_of_the_image_before(
    kind: str, tmp_path: Path
) -> None:
    recipe = recipe_of(tmp_path)
    with recipe.build(loss_weights=kind, microbatch=2) as pipeline:
        batches = take(pipeline, 4)
    for batch in batches:
        assert batch.loss_weights is not None
        np.testing.assert_allclose(batch.loss_weights, expected(batch, kind), rtol=1e-6)
        given = batch.to_training(shift_labels=True)
        flat = torch.cat([batch.loss_weights[:, 1:], torch.zeros(2, 1)], dim=1).reshape(1, -1)
        assert torch.equal(given["loss_weights"], flat)
    assert sum(float(batch.loss_weights.sum()) for batch in batches) > 1


def test_any_topology_runner_and_index_give_the_same_weights(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    more: dict[str, Any] = {"loss_weights": "sqrt", "sequences": SEQUENCES}
    wanted = run_ranks(recipe, dp=1, microbatch=2, index="off", **more)
    assert wanted != run_ranks(recipe, dp=1, microbatch=2, **(more | {"loss_weights": "token"}))
    little = {**ELSEWHERE[-1], "memory_budget_bytes": 1 << 16}
    for options in (*ELSEWHERE[:-1], little):
        assert run_ranks(recipe, **options, **more) == wanted, options


def test_a_broken_image_takes_the_weights_of_its_document_with_it(tmp_path: Path) -> None:
    whole = write_images(tmp_path)[1]
    Path(whole.path).write_bytes(Path(whole.path).read_bytes()[:-40])
    rows = [(Image(whole._replace(size=whole.size - 40)), Text("a text")), (Text("another"),)]
    recipe = Recipe(
        datasets=(dataset("d", rows),), lanes=1, passes=1, tail="pad", max_error_rate=1.0
    )
    with recipe.build(loss_weights="token", microbatch=4) as pipeline:
        (batch,) = take(pipeline, 1)
    assert batch.image_valid.tolist() == [False]
    assert batch.loss_weights is not None
    assert torch.equal(batch.loss_weights > 0, batch.labels != IGNORE)


def test_weights_that_no_batch_would_carry_are_refused(tmp_path: Path) -> None:
    with (
        recipe_of(tmp_path).build() as pipeline,
        pytest.raises(ConfigError, match=r"loss_weights='token'"),
    ):
        take(pipeline, 1)
    with pytest.raises(ConfigError, match="loss_weights"):
        recipe_of(tmp_path).build(loss_weights="tokens")
