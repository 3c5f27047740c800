"""The demo's data set: reproducible, readable by the real libraries, true to its captions."""

import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest
from PIL import Image
from transformers import AutoTokenizer

from zephon_mm.cli.demo_data import (
    COLOURS,
    OUTLINES,
    SPECIAL_TOKENS,
    DemoData,
    Figure,
    draw_picture,
    make_demo_data,
)


def make(folder: Path, *, seed: int = 0) -> DemoData:
    return make_demo_data(folder, seed=seed, num_captions=40, num_shards=3, num_stories=20)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DemoData:
    return make(tmp_path_factory.mktemp("demo"))


def pairs(data: DemoData) -> list[tuple[Image.Image, str]]:
    """Return (picture, caption) of every captioned sample, read with the standard library."""
    found = []
    for shard in sorted(data.captions.glob("*.tar")):
        with tarfile.open(shard) as tar:
            files = {m.name: tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]
        for key in sorted({name.split(".")[0] for name in files}):
            picture = files.get(f"{key}.jpg") or files[f"{key}.png"]
            found.append((Image.open(io.BytesIO(picture)), files[f"{key}.txt"].decode()))
    return found


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_equal_seeds_give_equal_files(tmp_path: Path) -> None:
    for name, seed in (("one", 3), ("two", 3), ("other", 4)):
        make(tmp_path / name, seed=seed)
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    assert digests(tmp_path / "one") != digests(tmp_path / "other")


def test_every_sample_is_in_one_of_the_shards(data: DemoData) -> None:
    assert len(list(data.captions.glob("*.tar"))) == 3
    assert len(pairs(data)) == 40


def test_captions_name_the_colours_that_the_pictures_show(data: DemoData) -> None:
    for image, caption in pairs(data):
        assert min(image.size) >= 64
        assert max(image.size) <= 256
        ground = caption.split()[-2]
        corner = image.getpixel((1, 1))
        assert isinstance(corner, tuple)
        distance = max(abs(a - b) for a, b in zip(corner, COLOURS[ground], strict=True))
        assert distance < 16, caption  # JPEG moves a colour a little


@pytest.mark.parametrize("shape", sorted(OUTLINES))
def test_a_figure_covers_its_centre_and_not_the_corners(shape: str) -> None:
    image = draw_picture([Figure(shape, "red", "large", (0.5, 0.5))], "blue", 100, 80)
    assert image.size == (100, 80)
    assert image.getpixel((50, 40)) == COLOURS["red"]
    assert image.getpixel((0, 0)) == image.getpixel((99, 79)) == COLOURS["blue"]


def test_stories_alternate_text_and_pictures_that_exist(data: DemoData) -> None:
    stories = [json.loads(line) for line in data.stories.read_text().splitlines()]
    assert len(stories) == 20
    for story in stories:
        assert len(story["images"]) == len(story["texts"])
        names = [name for name in story["images"] if name is not None]
        assert 2 <= len(names) <= 4
        for name, text in zip(story["images"], story["texts"], strict=True):
            assert (name is None) != (text is None)
        for name in names:
            with Image.open(data.stories.parent / name) as image:
                image.load()


def test_the_tokenizer_loads_and_gives_every_text_back(data: DemoData) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(data.tokenizer))
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(7))
    assert tokenizer.eos_token == "<|endoftext|>"
    assert len(tokenizer) <= 1_000
    for text in [*(caption for _, caption in pairs(data)), "Ünïcode, 漢字 and\ttabs"]:
        assert tokenizer.decode(tokenizer(text).input_ids) == text
