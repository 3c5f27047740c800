"""The worker functions: defects are values, faults of the environment are retried, then raised."""

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

from tests.fixtures.films import film
from tests.fixtures.memory import PROCESSOR, MemoryReader, dataset, document_of, random_rows
from tests.fixtures.tokenizers import byte_level_bpe
from zephon_mm.engine import tasks
from zephon_mm.engine.tasks import Context, Failure, ImageJob, materialize, measure
from zephon_mm.errors import SampleError, StaleIndexError
from zephon_mm.io import Dataset
from zephon_mm.ops.interleave import Interleave
from zephon_mm.ops.map import Filter, Map
from zephon_mm.ops.tokenizer import TextTokenizer
from zephon_mm.processors import SigLIPVideoProcessor
from zephon_mm.protocols import Sample
from zephon_mm.records import (
    Document,
    FileBlob,
    Image,
    MediaShape,
    Record,
    SampleRef,
    Skip,
    Text,
    Video,
)
from zephon_mm.shm.arena import Arena

SHAPE = (3, 32, 32)


class FlakyReader(MemoryReader):
    """Fails with an OSError so many times before it gives rows."""

    failures = 0

    def read(
        self, shard: int, rows: Sequence[int], fields: Sequence[str] | None = None
    ) -> list[Sample | SampleError]:
        if self.failures:
            self.failures -= 1
            raise OSError("stale file handle")
        return super().read(shard, rows, fields)


@pytest.fixture(autouse=True)
def _no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "RETRY_DELAYS_S", (0.0, 0.0, 0.0))


@pytest.fixture
def context(blobs: list[FileBlob]) -> Context:
    return Context(
        datasets=(
            dataset("a", random_rows(1, 20, blobs)),
            dataset("b", random_rows(2, 9, blobs), shard_rows=2),
        ),
        schemas=(document_of, document_of),
        operators=(),
        interleave=Interleave(TextTokenizer.load(byte_level_bpe()), PROCESSOR),
        image_processor=PROCESSOR,
    )


def flaky(context: Context, failures: int) -> Context:
    reader = FlakyReader(random_rows(1, 20, []))
    reader.failures = failures
    return replace(context, datasets=(Dataset("a", reader, schema=document_of),))


def told(items: list[Record | Skip]) -> list[Any]:
    """Return the comparable parts of what was measured."""
    return [
        (item.ref, item.token_ids.tolist(), item.trained.tolist(), item.images)
        if isinstance(item, Record)
        else item
        for item in items
    ]


def test_how_samples_are_grouped_into_tasks_does_not_show(context: Context) -> None:
    refs = [(d, s, r) for d, s, r in [(0, 2, 1), (1, 3, 0), (0, 0, 6), (0, 2, 0), (1, 4, 0)]]
    together = told(measure(context, refs))
    assert [item[0] for item in together] == refs
    assert together == [told(measure(context, [ref]))[0] for ref in refs]
    assert told(measure(context, np.array(refs, dtype=np.int64))) == together


def test_a_defective_sample_is_a_skip_that_names_it_and_its_neighbours_are_not(
    context: Context, blobs: list[FileBlob]
) -> None:
    text = (Text("fine"),)
    rows = [
        text,
        SampleError("bad_json", "line 7 is cut"),
        text,
        (Image(blobs[0]._replace(size=5)),),
    ]
    context = replace(context, datasets=(dataset("a", rows),))
    first, second, third, fourth = measure(context, [(0, 0, n) for n in range(4)])
    assert isinstance(first, Record)
    assert isinstance(third, Record)
    assert second == Skip(SampleRef(0, 0, 1), "bad_json", "a/m-0/1: line 7 is cut", True)
    assert isinstance(fourth, Skip)
    assert fourth.message.startswith("a/m-0/3: ")


def upper(document: Document) -> Document:
    return Document(tuple(Text(s.text.upper()) for s in document.segments if isinstance(s, Text)))


def refuse_a(document: Document) -> Document:
    raise SampleError("too_rude", "it says a bad word")


def crash(document: Document) -> Document:
    return {}[document.key]


def nothing(document: Document) -> bool:
    return False


def test_users_functions_change_drop_and_refuse(context: Context) -> None:
    rows = [(Text("fine"),)]
    context = replace(context, datasets=(dataset("a", rows),))

    def run(*operators: Any) -> Record | Skip:
        return measure(replace(context, operators=operators), [(0, 0, 0)])[0]

    plain, changed = run(), run(Map(upper))
    assert isinstance(plain, Record)
    assert isinstance(changed, Record)
    assert plain.token_ids.tolist() != changed.token_ids.tolist()
    dropped = run(Filter(nothing), Map(crash))
    assert dropped == Skip(SampleRef(0, 0, 0), "filtered", "a/m-0/0: dropped by the user", False)
    refused = run(Map(refuse_a))
    assert isinstance(refused, Skip)
    assert (refused.reason, refused.defect) == ("too_rude", True)
    with pytest.raises(KeyError) as caught:
        run(Map(crash))
    assert caught.value.__notes__ == ["raised in .map(crash)", "while measuring sample a/m-0/0"]


@pytest.mark.parametrize("failures", [1, 3])
def test_a_hiccup_of_the_environment_does_not_show(context: Context, failures: int) -> None:
    expected = told(measure(flaky(context, 0), [(0, 0, 3)]))
    assert told(measure(flaky(context, failures), [(0, 0, 3)])) == expected


def test_a_lasting_fault_is_raised_with_the_samples_name_never_skipped(context: Context) -> None:
    with pytest.raises(OSError, match="stale file handle") as caught:
        measure(flaky(context, 4), [(0, 0, 3)])
    assert caught.value.__notes__ == ["while reading sample a/m-0/3, after 4 tries"]


def test_a_file_that_vanished_is_the_environment_while_measuring_and_while_decoding(
    context: Context, tmp_path: Path
) -> None:
    gone = FileBlob(str(tmp_path / "gone.jpg"), 0, 100)
    context = replace(context, datasets=(dataset("a", [(Image(gone),)]),))
    calls: list[Callable[[], Any]] = [
        lambda: measure(context, [(0, 0, 0)]),
        lambda: materialize(context, [ImageJob(SampleRef(0, 0, 0), gone, -1, SHAPE)]),
    ]
    for call in calls:
        with pytest.raises(FileNotFoundError) as caught:
            call()
        assert any("sample a/m-0/0" in note for note in caught.value.__notes__)


def test_images_are_written_where_they_belong_or_returned(
    context: Context, blobs: list[FileBlob]
) -> None:
    size = int(np.prod(SHAPE))
    arena = Arena(1 << 20)
    slab = arena.lease(3 * size)
    assert slab is not None
    slab[:] = 0xA5
    ref = SampleRef(0, 0, 0)
    jobs = [ImageJob(ref, blob, n * size, SHAPE) for n, blob in enumerate(blobs[:2])]
    assert materialize(replace(context, arena=arena), jobs) == [None, None]
    for number, blob in enumerate(blobs[:2]):
        ((returned, marks),) = materialize(context, [ImageJob(ref, blob, -1, SHAPE)])
        expected = np.empty(SHAPE, dtype=np.uint8)
        PROCESSOR.write(Path(blob.path).read_bytes(), expected)
        assert np.array_equal(returned, expected)
        assert not len(marks)
        assert np.array_equal(slab[number * size : (number + 1) * size].reshape(SHAPE), expected)
    assert (slab[2 * size :] == 0xA5).all()
    arena.close()


def test_a_broken_image_is_a_failure_and_its_neighbours_are_not(
    context: Context, blobs: list[FileBlob], tmp_path: Path
) -> None:
    cut = tmp_path / "cut.png"
    cut.write_bytes(Path(blobs[1].path).read_bytes()[:1000])
    blob = FileBlob(str(cut), 0, 1000)
    ref = SampleRef(1, 2, 1)
    jobs = [ImageJob(ref, one, -1, SHAPE) for one in (blobs[0], blob, blobs[2])]
    first, second, third = materialize(context, jobs)
    assert first[0].shape == third[0].shape == SHAPE
    assert isinstance(second, Failure)
    assert second.message.startswith("b/m-2/1: ")


def test_a_video_that_is_not_what_the_index_says_is_an_error(
    context: Context, tmp_path: Path
) -> None:
    """It is checked and decoded as one open file, which is demuxed once."""
    path, files = tmp_path / "film.mp4", []
    path.write_bytes(film("h264"))
    blob, ref = FileBlob(str(path), 0, path.stat().st_size), SampleRef(0, 0, 0)

    class Seen(SigLIPVideoProcessor):
        def measure(self, file: BinaryIO) -> MediaShape:
            files.append(file)
            return super().measure(file)

        def write(self, file: BinaryIO, first: int, out: Any) -> None:
            files.append(file)
            super().write(file, first, out)

    processor = Seen(PROCESSOR, fps=4.0)
    context = replace(
        context,
        datasets=(dataset("a", [(Text("a film"), Video(blob))]),),
        interleave=replace(context.interleave, video_processor=processor),
        video_processor=processor,
    )
    (record,) = measure(context, [ref])
    assert isinstance(record, Record)
    job = ImageJob(ref, None, -1, (len(record.images), *SHAPE), video=True)
    ((found, _),) = materialize(context, [job])
    assert len(files) == 3
    assert files[1] is files[2]
    out = np.empty_like(found)
    processor.write(io.BytesIO(path.read_bytes()), 0, out)
    assert np.array_equal(found, out)
    with pytest.raises(StaleIndexError, match="sample a/m-0/0 is not what was measured"):
        materialize(context, [job._replace(shape=(len(record.images), 3, 16, 16))])
    path.write_bytes(bytes(blob.size))
    with pytest.raises(StaleIndexError, match=r"sample a/m-0/0 .*FFmpeg"):
        materialize(context, [job])


def test_what_crashed_its_worker_is_a_defect_that_names_itself(context: Context) -> None:
    skip = tasks.poisoned_sample(context, (1, 2, 1), "signal 11")
    assert skip == Skip(SampleRef(1, 2, 1), "crashed_worker", "b/m-2/1: signal 11", True)
    job = ImageJob(SampleRef(1, 2, 1), FileBlob("/x", 0, 1), 0, SHAPE)
    failure = tasks.poisoned_job(context, job, "signal 11")
    assert failure == Failure("crashed_worker", "b/m-2/1: signal 11")
