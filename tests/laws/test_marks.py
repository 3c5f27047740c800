"""Boxes and points go through the pipeline with their images: the same bytes on any topology."""

import json
import random
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from tests.fixtures.memory import (
    ELSEWHERE,
    MemoryReader,
    Recipe,
    Row,
    dataset,
    digests,
    random_rows,
    run_ranks,
    take,
)
from tests.fixtures.tokenizers import byte_level_bpe
from tests.laws.test_index import Claims, place
from zephon_mm.batch import Batch
from zephon_mm.errors import StaleIndexError
from zephon_mm.io import Dataset
from zephon_mm.pipeline import Pipeline
from zephon_mm.processors import NaFlexProcessor, SigLIPProcessor, TileProcessor
from zephon_mm.processors.augment import Augment
from zephon_mm.processors.header import header_of
from zephon_mm.processors.marks import shown_marks
from zephon_mm.records import FileBlob, Image, Text
from zephon_mm.work import StaticMixtureWorkSource

pytestmark = pytest.mark.usefixtures("warm_workers")
AUGMENT = Augment(crop=(0.4, 0.9), flip=0.5)
SEQUENCES = 24
STALE = "boxes and 0 points.*make the index anew"
PROCESSORS: dict[str, Any] = {
    "siglip": SigLIPProcessor(size=32, patch_size=16),
    "packed": NaFlexProcessor(max_num_patches=12, packed=True),
    "tiles": TileProcessor(size=32, max_side=64, patch_size=16, scale_factor=1),
}


def marked(row: Row, rng: random.Random) -> Row:
    """Give each image of a row up to 3 boxes and 3 points."""
    assert isinstance(row, tuple)

    def points() -> Iterator[tuple[float, float]]:
        yield from ((rng.uniform(-5, 60), rng.uniform(-5, 60)) for _ in range(rng.randrange(4)))

    return tuple(
        replace(one, boxes=tuple((x, y, x + 9, y + 7) for x, y in points()), points=(*points(),))
        if isinstance(one, Image)
        else one
        for one in row
    )


def rows_of(blobs: list[FileBlob]) -> list[Row]:
    """Return documents, the images of every second of them with marks."""
    rng = random.Random(3)
    rows = random_rows(5, 30, blobs)
    return [marked(row, rng) if at % 2 else row for at, row in enumerate(rows)]


def recipe_of(rows: list[Row], cache: Path | None = None) -> Recipe:
    made = dataset("d", rows, cache_dir=cache)
    return Recipe(datasets=(made,), max_length=256, passes=1, tail="pad")


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(PROCESSORS))
def test_any_topology_runner_and_index_give_the_same_marks(
    kind: str, blobs: list[FileBlob], tmp_path: Path
) -> None:
    rows = rows_of(blobs)
    recipe = recipe_of(rows, tmp_path)
    more: dict[str, Any] = {"processor": PROCESSORS[kind], "augment": AUGMENT}
    wanted = run_ranks(recipe, dp=1, microbatch=2, sequences=SEQUENCES, index="off", **more)
    for options in ELSEWHERE:
        assert run_ranks(recipe, sequences=SEQUENCES, **options, **more) == wanted, options
    with recipe.build(microbatch=2, **more) as pipeline:
        take(pipeline, 1)
        state = pipeline.checkpoint()
    with recipe.build(state=state, microbatch=1, **more) as pipeline:
        rest = digests(take(pipeline, SEQUENCES))
    assert rest.items() < wanted.items()
    assert len(rest) == len(wanted) - 2


@pytest.mark.parametrize("kind", list(PROCESSORS))
def test_marks_are_those_of_the_document_moved_as_its_pixels(
    kind: str, blobs: list[FileBlob]
) -> None:
    rows = rows_of(blobs)
    processor = PROCESSORS[kind]
    with recipe_of(rows).build(processor=processor, augment=AUGMENT, microbatch=2) as pipeline:
        batches = take(pipeline, 4)
    compared = 0
    for batch in batches:
        wanted = list(alone(batch, rows))
        found = batch.images.marks
        assert (found.dtype, batch.images.mark_index.dtype) == (torch.float32, torch.int64)
        assert np.array_equal(found, np.concatenate([np.zeros((0, 4)), *wanted]))
        views = batch.images.mark_index[:, 0].unique().tolist()
        assert len(views) == len(wanted)
        if kind == "tiles":  # the last part of a picture shows all of it
            ends = [*batch.image_index[:, 1].tolist(), 0]
            assert all(ends[view + 1] != ends[view] + 4 for view in views)
        boxes, points = batch.images.boxes, batch.images.points
        assert len(boxes) + len(points) == len(found)
        assert len(boxes) == len(batch.images.boxes_index)
        assert len(points) == len(batch.images.points_index)
        compared += len(found)
    assert compared > 5


def alone(batch: Batch, rows: list[Row]) -> Iterator[np.ndarray]:
    """Yield the marks of each image of a batch that has some."""
    sequences = zip(batch.keys, batch.sequence_ids.tolist(), strict=True)
    for row, sequence in [(int(k.rpartition("/")[2]), s) for keys, s in sequences for k in keys]:
        images = [one for one in rows[row] if isinstance(one, Image)]  # type: ignore[union-attr]
        for number, image in enumerate(images):
            header = header_of(Path(image.blob.path).read_bytes())  # type: ignore[union-attr]
            drawn = AUGMENT.draw(0, row // 7, row % 7, number, sequence)
            if image.boxes or image.points:
                size = header.height_px, header.width_px
                yield shown_marks(image, header, size, drawn)


def test_a_row_without_marks_has_the_digest_that_it_has_without_any(
    blobs: list[FileBlob],
) -> None:
    plain, marked_rows = random_rows(5, 30, blobs), rows_of(blobs)
    with recipe_of(plain).build() as first, recipe_of(marked_rows).build() as second:
        pairs = zip(take(first, SEQUENCES), take(second, SEQUENCES), strict=True)
        same = [(len(two.images.marks), one.sha256() == two.sha256()) for one, two in pairs]
    assert {(bool(marks), equal) for marks, equal in same} == {(True, False), (False, True)}


def test_marks_in_ordinary_memory_and_of_other_processes_are_the_same(
    blobs: list[FileBlob],
) -> None:
    recipe = replace(recipe_of(rows_of(blobs)), passes=None, tail="drop")
    wanted = run_ranks(recipe, dp=1, microbatch=2, sequences=SEQUENCES)
    small: dict[str, Any] = {"runner": "process", "memory_budget_bytes": 1 << 16}
    with recipe.build(microbatch=2, **small) as pipeline:
        held = take(pipeline, SEQUENCES // 2)
        assert pipeline.metrics()["batches_in_ordinary_memory"] > 0
    assert sum(len(batch.images.marks) for batch in held) > 20
    assert digests(held) == wanted


def test_the_marks_of_a_broken_image_are_zero(blobs: list[FileBlob], tmp_path: Path) -> None:
    cut = tmp_path / "cut.png"
    cut.write_bytes(Path(blobs[1].path).read_bytes()[:-40])
    bad = FileBlob(str(cut), 0, cut.stat().st_size)
    marks: dict[str, Any] = {"boxes": ((1, 2, 9, 9),), "points": ((3, 3),)}
    rows: list[Row] = [(Image(bad, **marks), Image(blobs[0], **marks), Text("a text"))] * 4
    recipe = replace(recipe_of(rows), max_error_rate=1.0)
    with recipe.build(runner="thread", microbatch=1, index="off") as pipeline:
        batch, *_ = take(pipeline, 4)
    media = batch.images
    assert media.valid.tolist() == [False, True] * (len(media) // 2)
    assert not media.boxes[~media.valid[media.boxes_index[:, 0]]].any()
    assert not media.points[~media.valid[media.points_index[:, 0]]].any()
    assert (media.points[media.valid[media.points_index[:, 0]]] > 0).all()


@pytest.mark.parametrize("boxes", [(), ((9, 9, 9, 9),), ((1, 2, 3, 4),) * 2])
def test_other_marks_than_the_index_knows_are_an_error(
    blobs: list[FileBlob], tmp_path: Path, boxes: Any
) -> None:
    image = Image(blobs[0], boxes=((1, 2, 3, 4),))
    before = MemoryReader([(Text(f"{n}"), image) for n in range(8)])
    after = Claims([(Text(f"{n}"), replace(image, boxes=boxes)) for n in range(8)], as_if=before)
    first, second = (
        Recipe(datasets=(place("d", reader, tmp_path),), lanes=1) for reader in (before, after)
    )
    with first.build() as pipeline:
        pipeline.build_index(progress=False)
    wanted = nullcontext() if len(boxes) == 1 else pytest.raises(StaleIndexError, match=STALE)
    with second.build(index="read") as pipeline, wanted:
        take(pipeline, 1)


def test_a_box_of_a_file_is_where_its_rectangle_is_in_the_pixels(tmp_path: Path) -> None:
    """Through files, a schema, EXIF, crop, mirroring and resizing: red is where the box is."""
    rng = np.random.default_rng(0)
    with (tmp_path / "data.jsonl").open("w") as file:
        for orientation in range(1, 9):
            pixels = rng.integers(0, 60, (240, 320, 3), dtype=np.uint8) + np.uint8(90)
            left, top = int(rng.integers(60, 110)), int(rng.integers(60, 90))
            right, bottom = left + int(rng.integers(80, 130)), top + int(rng.integers(60, 90))
            pixels[top:bottom, left:right] = (250, 10, 10)
            exif = PIL.Image.Exif()
            exif[0x0112] = orientation
            name = f"{orientation}.jpg"
            PIL.Image.fromarray(pixels).save(tmp_path / name, exif=exif, quality=92)
            boxes, points = [[left, top, right, bottom]], [[(left + right) / 2, (top + bottom) / 2]]
            line = {"image": name, "text": f"picture {orientation}"}
            file.write(json.dumps(line | {"boxes": boxes, "points": points}) + "\n")
    source = StaticMixtureWorkSource(
        [Dataset.from_path("d", tmp_path, cache_dir=tmp_path / "cache")], {"d": 1.0}, seed=0
    )
    pipeline = (
        Pipeline(source)
        .options(canonical_replicas=1, runner="inline")
        .interleave(
            tokenizer=byte_level_bpe(),
            image_processor=SigLIPProcessor(size=160, patch_size=16),
            augment=Augment(crop=(0.6, 1.0), flip=0.5),
        )
        .pack_flat(max_length=512, algorithm="best_fit")
        .batch(microbatch_size=4)
    )
    with pipeline:
        batches = take(pipeline, 5)
    found = [
        each
        for batch in batches
        for each in zip(
            batch.pixel_values.numpy(),
            batch.images.boxes.numpy(),
            batch.images.points.numpy(),
            strict=True,
        )
    ]
    assert len(found) > 40
    for pixels, box, point in found:
        red = (pixels[0] > 160) & (pixels[1] < 80)
        rows, columns = np.flatnonzero(red.any(axis=1)), np.flatnonzero(red.any(axis=0))
        edges = np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])
        assert np.abs(edges - 160 * box).max() <= 2
        if (box > 0).all() and (box < 1).all():  # the crop left all of it
            assert np.allclose(point, [box[::2].mean(), box[1::2].mean()], atol=1e-5)
