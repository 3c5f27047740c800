"""Every processor in a pipeline: what is delivered is what the processor alone gives, anywhere."""

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.fixtures.films import film
from tests.fixtures.memory import (
    ELSEWHERE,
    Recipe,
    Row,
    dataset,
    random_rows,
    run_ranks,
    take,
    write_images,
)
from tests.fixtures.processing import measured, written
from zephon_mm.errors import ConfigError
from zephon_mm.io import read_blob
from zephon_mm.processors import (
    AnyResProcessor,
    NaFlexProcessor,
    QwenVLProcessor,
    QwenVLVideoProcessor,
    SigLIPProcessor,
    SigLIPVideoProcessor,
    TileProcessor,
)
from zephon_mm.processors.augment import Augment
from zephon_mm.records import FileBlob, Image, MediaShape, Text, Video

pytestmark = pytest.mark.usefixtures("warm_workers")
SIGLIP = SigLIPProcessor(size=32, patch_size=16)
QWEN = QwenVLProcessor(min_pixels=32 * 32, max_pixels=96 * 96)
PAIRS = {
    "siglip": (SIGLIP, SigLIPVideoProcessor(SIGLIP, fps=4.0, max_frames=20)),
    "naflex": (NaFlexProcessor(max_num_patches=12), None),
    "naflex-packed": (NaFlexProcessor(max_num_patches=12, packed=True), None),
    "qwen3-vl": (QWEN, QwenVLVideoProcessor.preset("qwen3-vl", max_pixels=4096)),
    "qwen2.5-vl": (
        QwenVLProcessor.preset("qwen2.5-vl", max_pixels=56 * 84),
        QwenVLVideoProcessor.preset("qwen2.5-vl", max_pixels=56 * 56),
    ),
    "tiles": (TileProcessor(size=32, max_side=64, patch_size=16, scale_factor=1), None),
    "anyres": (
        AnyResProcessor(size=28, patch_size=14, grid_pinpoints=((28, 56), (56, 28), (56, 56))),
        None,
    ),
}
SEQUENCES = 24


@pytest.fixture(scope="module")
def blobs(tmp_path_factory: pytest.TempPathFactory) -> list[FileBlob]:
    return write_images(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> list[FileBlob]:
    """Whole files, and one that is a region of a larger file."""
    folder = tmp_path_factory.mktemp("films")
    data = [film("h264", 30), film("mkv", 7)]
    path = folder / "both.bin"
    path.write_bytes(b"-" * 100 + data[0] + b"-" * 50 + data[1])
    first, second = len(data[0]), len(data[1])
    return [FileBlob(str(path), 100, first), FileBlob(str(path), 150 + first, second)]


def rows_of(kind: str, blobs: Sequence[FileBlob], films: Sequence[FileBlob]) -> list[Row]:
    rows = random_rows(5, 30, blobs)
    if PAIRS[kind][1] is not None:
        for number in range(0, 30, 6):
            rows[number] = (Text(f"{number} a film"), Video(films[number % 4 // 2]), *rows[number])
    return rows


def recipe_of(
    kind: str, blobs: Sequence[FileBlob], films: Sequence[FileBlob], cache: Path | None = None
) -> Recipe:
    made = dataset("d", rows_of(kind, blobs, films), cache_dir=cache)
    return Recipe(datasets=(made,), max_length=1024, passes=1, tail="pad")


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(PAIRS))
def test_any_topology_runner_and_index_give_the_same_bytes(
    kind: str, blobs: list[FileBlob], films: list[FileBlob], tmp_path: Path
) -> None:
    image, video = PAIRS[kind]
    recipe = recipe_of(kind, blobs, films, tmp_path)
    more: dict[str, Any] = {"processor": image, "video_processor": video}
    wanted = run_ranks(recipe, dp=1, microbatch=2, sequences=SEQUENCES, index="off", **more)
    assert wanted
    for options in ELSEWHERE:
        assert run_ranks(recipe, sequences=SEQUENCES, **options, **more) == wanted, options


@pytest.mark.parametrize("kind", list(PAIRS))
def test_the_pixels_are_those_of_the_processor_alone(
    kind: str, blobs: list[FileBlob], films: list[FileBlob]
) -> None:
    image, video = PAIRS[kind]
    recipe = recipe_of(kind, blobs, films)
    rows = [row for row in rows_of(kind, blobs, films) if not isinstance(row, Exception)]
    with recipe.build(processor=image, video_processor=video, microbatch=2) as pipeline:
        for batch in take(pipeline, 4):
            keys = [key for row in batch.keys for key in row]
            segments = [one for key in keys for one in rows[int(key.rpartition("/")[2])]]
            for media, wanted, processor in (
                (batch.images, Image, image),
                (batch.videos, Video, video),
            ):
                blobs_of = [one.blob for one in segments if type(one) is wanted]  # type: ignore[union-attr]
                data = [read_blob(recipe.datasets[0], blob) for blob in blobs_of]
                expected = [p for one in data for p in alone(processor, one, wanted is Video)]
                found = [media.pixels_of(number).numpy() for number in range(len(media))]
                assert len(found) == len(expected)
                assert all(map(np.array_equal, found, expected))


def alone(processor: Any, data: bytes, is_video: bool) -> list[np.ndarray]:
    """Return what a processor gives of one image or video, part by part."""
    if not is_video:
        shape, out = measured(processor, data), written(processor, data)
        return list(out) if shape.parts else [out]
    shape = processor.measure(io.BytesIO(data))
    lead = (len(shape.parts),) if shape.parts else ()
    out = np.empty((*lead, *shape.shape), dtype=np.uint8)
    processor.write(io.BytesIO(data), 0, out)
    return list(out) if shape.parts else [out]


@pytest.mark.parametrize("kind", ["siglip", "qwen3-vl", "tiles"])
def test_one_bad_part_takes_the_whole_clip_or_picture_with_it(
    kind: str, blobs: list[FileBlob], films: list[FileBlob], tmp_path: Path
) -> None:
    image, video = PAIRS[kind]
    broken = tmp_path / "cut"
    if video is None:
        data = bytearray(Path(blobs[1].path).read_bytes())
        middle = data.rindex(b"IDAT") + 40
    else:
        data = bytearray(film("h264", 30))
        middle = (data.index(b"mdat") + data.index(b"moov")) // 2
    data[middle : middle + 60] = bytes(60)
    broken.write_bytes(data)
    segment = (Image if video is None else Video)(FileBlob(str(broken), 0, len(data)))
    rows = [*random_rows(5, 7, blobs), (Text("a damaged one"), segment)]
    recipe = Recipe(
        datasets=(dataset("d", rows),), max_length=1024, passes=1, tail="pad", global_batch_size=8
    )
    more: dict[str, Any] = {"processor": image, "video_processor": video}
    with recipe.build(max_error_rate=0.9, microbatch=8, **more) as pipeline:
        (batch,) = take(pipeline, 1)
        assert pipeline.metrics()["skipped"]
    media = batch.images if video is None else batch.videos
    bad = (~media.valid).nonzero().flatten().tolist()
    assert len(bad) > 1
    for number in bad:
        row, first, _ = media.index[number].tolist()
        mine = batch.segment_ids[row] == batch.segment_ids[row, first]
        assert not (batch.labels[row, mine] >= 0).any()
        assert not media.pixels_of(number).any()


def test_augmented_pixels_differ_by_pass_and_by_nothing_else(
    blobs: list[FileBlob], tmp_path: Path
) -> None:
    rows: list[Row] = [(Text(f"{n}"), Image(blobs[n % 3])) for n in range(8)]
    recipe = Recipe(datasets=(dataset("d", rows, cache_dir=tmp_path),), max_length=24)
    augment = Augment(crop=(0.4, 0.9), flip=0.5)
    more: dict[str, Any] = {"processor": SIGLIP, "augment": augment}
    wanted = run_ranks(recipe, dp=1, microbatch=2, sequences=24, **more)
    assert run_ranks(recipe, dp=2, microbatch=1, sequences=24, runner="process", **more) == wanted
    with recipe.build(processor=SIGLIP, augment=augment) as pipeline:
        batches = take(pipeline, 24)
    pixels: dict[str, set[bytes]] = {}
    for batch in batches:
        for key in batch.keys[0]:
            pixels.setdefault(key, set()).add(batch.pixel_values.numpy().tobytes())
    assert all(len(found) > 1 for found in pixels.values())
    with pytest.raises(ConfigError, match="whose `write` takes `change`"):
        recipe.build(processor=None, augment=augment)


@dataclass(frozen=True)
class FlakyVideo(SigLIPVideoProcessor):
    """Reads from a store that fails the first time that each step asks it."""

    failed: set[str] = field(default_factory=set)

    def _fail_once(self, step: str) -> None:
        if step not in self.failed:
            self.failed.add(step)
            raise OSError("the store is away")

    def measure(self, file: BinaryIO) -> MediaShape:
        self._fail_once("measure")
        return super().measure(file)

    def write(self, file: BinaryIO, first: int, out: NDArray[np.uint8]) -> None:
        self._fail_once("write")
        super().write(file, first, out)


def test_a_video_that_cannot_be_read_for_a_while_is_read_again(films: list[FileBlob]) -> None:
    flaky = FlakyVideo(SIGLIP, fps=4.0)
    rows: list[Row] = [(Text("a film"), Video(films[0]))]
    recipe = Recipe(datasets=(dataset("d", rows),), max_length=1024, passes=1, tail="pad")
    with recipe.build(video_processor=flaky) as pipeline:
        (batch, *_) = take(pipeline, 1)
    assert flaky.failed == {"measure", "write"}
    assert len(batch.videos) > 1
    assert batch.videos.valid.all()
