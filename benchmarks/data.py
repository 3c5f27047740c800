"""Photographs with captions for the benchmarks: `python -m benchmarks.data OUT --samples 4000`.

The pictures are seeded crops of the photographs that ship inside scikit-image and scikit-learn,
so nothing is downloaded; the captions are seeded English-looking sentences. Sizes are those of a
web crawl after resizing: sides of 480 to 900 px, JPEG files of 30 to 220 KB with a mean of 92.

Laws:
    1. The files are a function of the arguments (and of Pillow's version).
    2. A complete folder is left alone; a folder that holds something else is refused.

Cost: about 20 ms a sample on one core.

Imports: rng, cli.demo_data. Used by: benchmarks.
"""

import argparse
import itertools
import json
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import skimage.data
import tqdm
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_sample_images

from zephon_mm.cli.demo_data import encode, encode_film, write_shard, write_tokenizer
from zephon_mm.errors import ConfigError
from zephon_mm.rng import Stream

SHARD_SAMPLES = 1_000
SIDE_PX = (480, 900)  # inclusive
CAPTION_WORDS = (40, 200)  # inclusive
MARKER = ".complete.json"
VERSION = 1  # raise it when the same arguments give other files


_FOUND = tomllib.loads(Path(__file__).with_name("words.toml").read_text())
NOUNS, ADJECTIVES, VERBS, SHORT, SYLLABLES = (text.split() for text in _FOUND.values())


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data", description=__doc__)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--samples", type=int, default=4_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    make_data(args.out, num_samples=args.samples, seed=args.seed)
    files = [path for path in sorted(args.out.iterdir()) if not path.name.startswith(".")]
    size_mb = sum(path.stat().st_size for path in files) / 1e6
    print(f"{args.out}: {args.samples} samples in {len(files)} shards, {size_mb:.0f} MB")


def make_data(out: Path, *, num_samples: int, seed: int = 0, films: bool = False) -> Path:
    """Write the data set unless `out` holds it already; return `out`.

    With `films` its pictures move: see `films_of`.

    Raises:
        ConfigError: `out` holds something else.
    """
    wanted: dict[str, Any] = {"samples": num_samples, "format": "webdataset", "seed": seed}
    wanted |= {"version": VERSION} | ({"films": True} if films else {})
    if out.exists():
        marker = out / MARKER
        found = json.loads(marker.read_text()) if marker.exists() else "files of another origin"
        if found == wanted:
            return out
        raise ConfigError(
            f"{out} holds {found}, asked for was {wanted}. Choose another folder, or delete it."
        )
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    rows = films_of(seed, num_samples) if films else samples(seed, num_samples)
    stream = iter(tqdm.tqdm(rows, total=num_samples, unit="img"))
    for shard in range(-(-num_samples // SHARD_SAMPLES)):
        count = min(SHARD_SAMPLES, num_samples - shard * SHARD_SAMPLES)
        write_shard(partial / f"photos-{shard:06d}.tar", itertools.islice(stream, count))
    (partial / MARKER).write_text(json.dumps(wanted))
    partial.rename(out)  # last, so that a folder of this name is always complete
    return out


def samples(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Yield samples as `__key__`, `jpg` (bytes) and `txt` (str)."""
    photos = [Image.fromarray(pixels) for pixels in _photographs()]
    grain = _grain(Stream(seed, "grain"))
    for i in range(count):
        jpg = _picture(Stream(seed, "picture", i), photos, grain)
        yield {"__key__": f"{i:08d}", "jpg": jpg, "txt": caption(seed, i)}


def films_of(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Yield samples as `__key__`, `mp4` (bytes) and `txt`: pans over photographs, 2 to 5 s.

    H.264, 320 x 240 pixels, 25 frames a second, a key frame every 2 s.
    """
    photos = _photographs()
    for i in range(count):
        stream = Stream(seed, "film", i)
        photo = photos[stream.integer(len(photos))]
        frames = 50 + stream.integer(76)
        yield {"__key__": f"{i:08d}", "mp4": _film(photo, frames), "txt": caption(seed, i)}


def _film(photo: NDArray[np.uint8], frames: int) -> bytes:
    def frame(number: int) -> NDArray[np.uint8]:
        top, left = (
            (n - size) * number // frames for n, size in zip(photo.shape, (240, 320), strict=False)
        )
        return np.ascontiguousarray(photo[top : top + 240, left : left + 320])

    return encode_film(map(frame, range(frames)), (320, 240), 25, {"preset": "veryfast", "g": "50"})


def caption(seed: int, index: int) -> str:
    """Return the caption of a sample: sentences of 40 to 200 words in all."""
    stream = Stream(seed, "caption", index)
    low, high = CAPTION_WORDS
    count = low + stream.integer(high - low + 1)
    words: list[str] = []
    while len(words) < count:
        sentence = [_word(stream) for _ in range(min(6 + stream.integer(14), count - len(words)))]
        words += [sentence[0].capitalize(), *sentence[1:]]
        words[-1] += "."
    return " ".join(words)


def write_benchmark_tokenizer(folder: Path, *, seed: int = 0, vocab_size: int = 8_000) -> Path:
    """Train a tokenizer on the first 4,000 captions unless `folder` has one; return `folder`."""
    if not (folder / "tokenizer_config.json").exists():
        write_tokenizer(folder, (caption(seed, i) for i in range(4_000)), vocab_size=vocab_size)
    return folder


def _word(stream: Stream) -> str:
    kind = stream.integer(20)
    if kind < 8:
        return SHORT[stream.integer(len(SHORT))]
    if kind < 13:
        return NOUNS[stream.integer(len(NOUNS))] + ("", "", "s")[stream.integer(3)]
    if kind < 16:
        return ADJECTIVES[stream.integer(len(ADJECTIVES))] + ("", "", "", "ly")[stream.integer(4)]
    if kind < 18:
        return VERBS[stream.integer(len(VERBS))] + ("", "s", "ed", "ing")[stream.integer(4)]
    if kind == 18:  # a proper name: real captions are full of rare words, which cost more tokens
        parts = [SYLLABLES[stream.integer(len(SYLLABLES))] for _ in range(2 + stream.integer(2))]
        return "".join(parts).capitalize()
    return str(1 + stream.integer(2_030))


def _photographs() -> list[NDArray[np.uint8]]:
    """Return the colour photographs that need no download, (height, width, 3) uint8 each."""
    data = skimage.data
    names = ("astronaut", "coffee", "chelsea", "rocket", "hubble_deep_field")
    photos = [getattr(data, name)() for name in names]
    return [*photos, data.stereo_motorcycle()[0], *load_sample_images().images]


def _grain(stream: Stream) -> NDArray[np.int16]:
    """Return a (1024, 1024, 3) int16 field of film grain, standard deviation 2.5."""
    sums = stream.uniform(4 * 1024 * 1024 * 3).reshape(4, 1024, 1024, 3).sum(axis=0)
    return ((sums - 2) * 2.5 * 3**0.5).astype(np.int16)


def _picture(stream: Stream, photos: list[Image.Image], grain: NDArray[np.int16]) -> bytes:
    """Return one JPEG: a crop of a photograph, mirrored or not, tinted, with grain on it."""
    photo = photos[stream.integer(len(photos))]
    low, high = SIDE_PX
    width, height = (low + stream.integer(high - low + 1) for _ in range(2))
    share = 0.6 + 0.4 * float(stream.uniform(1)[0])
    scale = share * min(photo.width / width, photo.height / height)
    left = stream.integer(int(photo.width - scale * width) + 1)
    top = stream.integer(int(photo.height - scale * height) + 1)
    box = (left, top, left + scale * width, top + scale * height)
    image = photo.resize((width, height), Image.Resampling.BICUBIC, box=box)
    if stream.integer(2):
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    tint = 0.85 + 0.3 * stream.uniform(3)
    x, y = stream.integer(1025 - width), stream.integer(1025 - height)
    pixels = np.asarray(image, np.float32) * tint.astype(np.float32)
    pixels += grain[y : y + height, x : x + width]
    return encode(
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)), "jpg", quality=85 + stream.integer(8)
    )


if __name__ == "__main__":
    main()
