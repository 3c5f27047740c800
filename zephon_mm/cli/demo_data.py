"""A small data set, drawn on the spot: pictures, stories, chats, films, and a tokenizer.

Laws:
    1. The files are a function of the arguments (and of Pillow's JPEG encoder).
    2. A caption says what its picture shows, so a model that looks at the picture can learn it.
    3. Nothing is downloaded.

Cost: about 3 s and 5 MB with the default counts.

Imports: rng. Used by: cli.main, benchmarks, tests.
"""

import io
import json
import math
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from zephon_mm.rng import Stream

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|image_pad|>",
    "<|vision_end|>",
    "<|video_pad|>",
)
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COLOURS = {
    "red": (214, 48, 49),
    "green": (39, 158, 84),
    "blue": (45, 100, 220),
    "yellow": (246, 205, 60),
    "orange": (240, 130, 40),
    "purple": (125, 70, 190),
    "pink": (245, 150, 190),
    "white": (245, 245, 245),
    "grey": (140, 145, 150),
    "black": (35, 38, 42),
}
SIZES = {"small": 0.13, "": 0.18, "large": 0.25}  # radius, as a share of the picture's side
SMOOTH = 2  # pictures are drawn this much larger and then reduced, which smooths their edges

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class DemoData:
    """Where the demo's files are.

    `captions` and `films` are folders of WebDataset shards, `stories` and `chats` JSON Lines files
    whose image paths are relative to their folder, `tokenizer` a folder that `AutoTokenizer` loads.
    """

    captions: Path
    stories: Path
    chats: Path
    films: Path
    tokenizer: Path


@dataclass(frozen=True, slots=True)
class Figure:
    """One shape of a picture. `centre` is (x, y), each from 0 to 1; `radius` likewise."""

    shape: str
    colour: str
    size: str
    centre: Point

    def __str__(self) -> str:
        """Return the figure in words, such as `large red circle`."""
        return " ".join(word for word in (self.size, self.colour, self.shape) if word)


def make_demo_data(
    folder: Path,
    *,
    seed: int = 0,
    num_captions: int = 600,
    num_shards: int = 4,
    num_stories: int = 150,
    num_chats: int = 150,
    num_films: int = 60,
) -> DemoData:
    """Write the demo's data set; files of the same names are overwritten.

    Args:
        folder: Where to write; made if missing.
        seed: Another seed draws other pictures.
        num_captions: Captioned pictures in all shards together.
        num_shards: Tar shards; sizes differ by at most one sample.
        num_stories: Interleaved documents of two to four pictures each.
        num_chats: Conversations about a picture.
        num_films: Captioned videos of two seconds.
    """
    places = ("captions", "stories/stories.jsonl", "chats/chats.jsonl", "films", "tokenizer")
    data = DemoData(*map(folder.joinpath, places))
    pairs = [_caption_sample(Stream(seed, "caption", i), i) for i in range(num_captions)]
    cuts = (num_captions * shard // num_shards for shard in range(num_shards + 1))
    for shard, (start, stop) in enumerate(pairwise(cuts)):
        write_shard(data.captions / f"demo-{shard:06d}.tar", pairs[start:stop])
    films = [_film_sample(Stream(seed, "film", i), i) for i in range(num_films)]
    write_shard(data.films / "films-000000.tar", films)
    for file in (data.stories, data.chats):
        (file.parent / "images").mkdir(parents=True, exist_ok=True)
    stories = [_story(Stream(seed, "story", i), i, data.stories.parent) for i in range(num_stories)]
    data.stories.write_text("".join(json.dumps(story) + "\n" for story in stories))
    chats = [_chat(Stream(seed, "chat", i), i, data.chats.parent) for i in range(num_chats)]
    data.chats.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    texts = [pair["txt"] for pair in (*pairs, *films)]
    texts += [text for story in stories for text in story["texts"] if text is not None]
    texts += [str(turn["content"]) for chat in chats for turn in chat["messages"]]
    write_tokenizer(data.tokenizer, texts, vocab_size=768)
    return data


def write_shard(path: Path, samples: Iterable[dict[str, Any]]) -> None:
    """Write WebDataset samples (`__key__`, then suffix -> str or bytes) into one tar file."""
    # The header's time, user and group are fixed: the bytes are a function of the samples.
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for sample in samples:
            for suffix in sorted(sample.keys() - {"__key__"}):
                value = sample[suffix]
                content = value.encode() if isinstance(value, str) else value
                member = tarfile.TarInfo(f"{sample['__key__']}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def write_tokenizer(folder: Path, texts: Iterable[str], *, vocab_size: int) -> None:
    """Train a byte-level BPE tokenizer and save it so that `AutoTokenizer` loads it.

    Args:
        folder: Receives `tokenizer.json` and `tokenizer_config.json`; made if missing.
        texts: What to train on.
        vocab_size: Most entries of the vocabulary, at least 262: the bytes and `SPECIAL_TOKENS`.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[0],
        "pad_token": SPECIAL_TOKENS[0],
        "extra_special_tokens": list(SPECIAL_TOKENS[1:]),
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
        "chat_template": CHATML,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _caption_sample(stream: Stream, index: int) -> dict[str, Any]:
    figures, background = _scene(stream)
    image = draw_picture(figures, background, _side_px(stream), _side_px(stream))
    suffix = "png" if stream.integer(5) == 0 else "jpg"
    caption = f"{describe(figures)} on {_with_article(background)} background"
    return {"__key__": f"{index:06d}", suffix: encode(image, suffix), "txt": caption}


def _film_sample(stream: Stream, index: int) -> dict[str, Any]:
    """Return a figure that moves across the picture, and what happens in words."""
    colours = [list(COLOURS)[i] for i in stream.permutation(len(COLOURS))]
    hero = Figure(_choose(stream, list(OUTLINES)), colours[0], _choose(stream, list(SIZES)), (0, 0))
    start, end, way = [
        ((0.2, 0.5), (0.8, 0.5), "to the right"),
        ((0.8, 0.5), (0.2, 0.5), "to the left"),
        ((0.5, 0.2), (0.5, 0.8), "down"),
        ((0.5, 0.8), (0.5, 0.2), "up"),
    ][stream.integer(4)]
    frames = []
    for k in range(24):
        x, y = (a + (b - a) * k / 23 for a, b in zip(start, end, strict=True))
        frames.append(draw_picture([replace(hero, centre=(x, y))], colours[1], 128, 96))
    film = encode_film(map(np.asarray, frames), (128, 96), 12, {"x264-params": "threads=1"})
    text = f"{_with_article(str(hero))} moves {way} on {_with_article(colours[1])} background"
    return {"__key__": f"{index:06d}", "mp4": film, "txt": text}


def encode_film(
    frames: Iterable[NDArray[np.uint8]], size: tuple[int, int], rate: int, options: dict[str, str]
) -> bytes:
    """Return (height, width, 3) frames as MP4, H.264.

    Args:
        frames: In order.
        size: (width, height) of them, in pixels.
        rate: Frames a second.
        options: Of libx264.
    """
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as output:
        track: Any = output.add_stream("libx264", rate=rate, options=options)
        (track.width, track.height), track.pix_fmt = size, "yuv420p"
        for frame in frames:
            output.mux(track.encode(av.VideoFrame.from_ndarray(frame, "rgb24")))
        output.mux(track.encode(None))
    return buffer.getvalue()


def _chat(stream: Stream, index: int, folder: Path) -> dict[str, Any]:
    """Write a picture; return a conversation about it."""
    figures, background = _scene(stream)
    name = f"images/{index:04d}.jpg"
    picture = draw_picture(figures, background, _side_px(stream), _side_px(stream))
    (folder / name).write_bytes(encode(picture, "jpg"))
    hero = figures[0]
    turns = [
        ("user", [{"type": "image"}, {"type": "text", "text": "What do you see?"}]),
        ("assistant", f"I see {describe(figures)}."),
        ("user", f"What colour is the {hero.shape}, and what is behind it?"),
        ("assistant", f"The {hero.shape} is {hero.colour}, on {_with_article(background)} ground."),
    ]
    messages = [{"role": role, "content": content} for role, content in turns]
    return {"id": f"chat-{index:04d}", "images": [name], "messages": messages}


def _scene(stream: Stream) -> tuple[list[Figure], str]:
    """Return one or two figures that do not overlap, and a background of another colour."""
    colours = [list(COLOURS)[i] for i in stream.permutation(len(COLOURS))]
    places: Sequence[Point] = [(0.5, 0.5)]
    if stream.integer(3) > 0:
        places = [((0.5, 0.27), (0.5, 0.73)), ((0.27, 0.5), (0.73, 0.5))][stream.integer(2)]
    figures = [
        Figure(_choose(stream, list(OUTLINES)), colour, _choose(stream, list(SIZES)), place)
        for colour, place in zip(colours, places, strict=False)
    ]
    return figures, colours[-1]


def describe(figures: Sequence[Figure]) -> str:
    """Return one or two figures in words, and where they stand to each other."""
    words = [_with_article(str(figure)) for figure in figures]
    if len(figures) == 1:
        return words[0]
    above = figures[0].centre[1] < figures[1].centre[1]
    return f"{words[0]} {'above' if above else 'to the left of'} {words[1]}"


def draw_picture(
    figures: Sequence[Figure], background: str, width_px: int, height_px: int
) -> Image.Image:
    """Draw figures on a plain ground; returns an RGB picture of the given size."""
    width, height = width_px * SMOOTH, height_px * SMOOTH
    image = Image.new("RGB", (width, height), COLOURS[background])
    pen = ImageDraw.Draw(image)
    for figure in figures:
        radius = SIZES[figure.size] * min(width, height)
        x, y = figure.centre[0] * width, figure.centre[1] * height
        outline = [(x + dx * radius, y + dy * radius) for dx, dy in OUTLINES[figure.shape]]
        pen.polygon(outline, fill=COLOURS[figure.colour])
    return image.resize((width_px, height_px), Image.Resampling.BOX)


def encode(image: Image.Image, suffix: str, *, quality: int = 90) -> bytes:
    """Return the picture as the bytes of a `jpg` (of a quality up to 95) or `png` file."""
    buffer = io.BytesIO()
    if suffix == "png":
        image.save(buffer, "PNG")
    else:
        image.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def _story(stream: Stream, index: int, folder: Path) -> dict[str, Any]:
    """Write a story's pictures; return it with `images` and `texts` of equal length."""
    images: list[str | None] = []
    texts: list[str | None] = []
    background = _choose(stream, list(COLOURS))
    for number, (figures, sentence) in enumerate(_story_pages(stream, background)):
        name = f"images/{index:04d}_{number}.jpg"
        picture = draw_picture(figures, background, _side_px(stream), _side_px(stream))
        (folder / name).write_bytes(encode(picture, "jpg"))
        images += [None, name]
        texts += [sentence, None]
    return {
        "id": f"story-{index:04d}",
        "images": [*images, None],
        "texts": [*texts, "That is the end of the story."],
    }


def _story_pages(stream: Stream, background: str) -> Iterator[tuple[list[Figure], str]]:
    """Yield two to four pages; each changes one thing about the hero and says so."""
    colours = [name for name in COLOURS if name != background]
    hero = Figure(_choose(stream, list(OUTLINES)), _choose(stream, colours), "", (0.27, 0.5))
    yield [hero], f"Once upon a time there was {describe([hero])} in a {background} land."
    for change in stream.permutation(len(CHANGES))[: 1 + stream.integer(len(CHANGES))]:
        hero, sentence = CHANGES[change](stream, hero, colours)
        yield [hero], sentence


def _recolour(stream: Stream, hero: Figure, colours: Sequence[str]) -> tuple[Figure, str]:
    changed = replace(
        hero, colour=_choose(stream, [name for name in colours if name != hero.colour])
    )
    return changed, f"One morning the {hero.shape} was {changed.colour}."


def _resize(stream: Stream, hero: Figure, colours: Sequence[str]) -> tuple[Figure, str]:
    changed = replace(hero, size=_choose(stream, ["small", "large"]))
    return changed, f"After lunch it became {changed.size}."


def _walk(stream: Stream, hero: Figure, colours: Sequence[str]) -> tuple[Figure, str]:
    changed = replace(hero, centre=(0.73, 0.5))
    return changed, f"Then the {changed} walked to the right."


def _with_article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def _choose(stream: Stream, options: Sequence[str]) -> str:
    return options[stream.integer(len(options))]


def _side_px(stream: Stream) -> int:
    return 64 + stream.integer(193)


def _corners(count: int, *, inner: float = 1.0) -> list[Point]:
    """Return points around the unit circle, the first on top; odd ones at radius `inner`."""
    angles = [2 * math.pi * i / count for i in range(count)]
    radii = [inner if i % 2 else 1.0 for i in range(count)]
    return [(r * math.sin(a), -r * math.cos(a)) for a, r in zip(angles, radii, strict=True)]


OUTLINES: dict[str, list[Point]] = {
    "circle": _corners(64),
    "square": [(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)],
    "triangle": _corners(3),
    "diamond": [(0, -1), (0.7, 0), (0, 1), (-0.7, 0)],
    "hexagon": _corners(6),
    "star": _corners(10, inner=0.42),
    "cross": [
        *[(-0.3, -1), (0.3, -1), (0.3, -0.3), (1, -0.3), (1, 0.3), (0.3, 0.3)],
        *[(0.3, 1), (-0.3, 1), (-0.3, 0.3), (-1, 0.3), (-1, -0.3), (-0.3, -0.3)],
    ],
}

Change = Callable[[Stream, Figure, Sequence[str]], tuple[Figure, str]]
CHANGES: list[Change] = [_recolour, _resize, _walk]
