"""Data sets whose rows say only how long they are, so that planning costs what planning costs.

A row is a text such as "120 2": 120 tokens of text behind two images. `Lengths` stands in the place
of `.tokenize` and makes records of that; all that follows (mixing, packing, shuffling, checkpoints)
is the package's own. There may be any number of rows, since a row is looked up in a table of 4,096.

Laws: a row is a function of the kind's name, the shard and the row.

Cost: about 5 us a record. Imports: the package, tests.fixtures. Used by: benchmarks.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.fixtures.tokenizers import byte_level_bpe
from zephon_mm import Dataset, Pipeline
from zephon_mm.ops.interleave import BlobSource
from zephon_mm.ops.tokenize import Tokenize
from zephon_mm.ops.tokenizer import TextTokenizer
from zephon_mm.protocols import Sample
from zephon_mm.records import Document, FileBlob, ImageSlot, Record, RowBlob, SampleRef, ShardInfo
from zephon_mm.rng import Stream, digest

IMAGE_TOKENS = IMAGE_PATCHES = 729  # 384 px in patches of 14
IMAGE_SHAPE = (3, 384, 384)
TABLE_ROWS = 4_096
SHARDS, SHARD_ROWS = 100, 100_000

Row = tuple[int, int]
"""Tokens of text, images in front of it."""

_IDS = np.zeros(1 << 16, dtype=np.int32)


def captions(stream: Stream) -> Row:
    """Return one image with a caption of 20 to 200 tokens."""
    return 20 + stream.integer(181), 1


def interleaved(stream: Stream) -> Row:
    """Return one to four images in a text of 50 to 1,000 tokens, short ones more often."""
    return round(50 * 20 ** float(stream.uniform(1)[0])), 1 + stream.integer(4)


def text(stream: Stream) -> Row:
    """Return a text of 40 to 4,000 tokens, short ones more often."""
    return round(40 * 100 ** float(stream.uniform(1)[0])), 0


def short_text(stream: Stream) -> Row:
    """Return a text of 8 to 40 tokens."""
    return 8 + stream.integer(33), 0


KINDS = {kind.__name__: kind for kind in (captions, interleaved, text, short_text)}


def table(kind: str) -> list[Row]:
    """Return the rows of a kind, `TABLE_ROWS` of them."""
    return [KINDS[kind](Stream(0, kind, number)) for number in range(TABLE_ROWS)]


def mean_tokens(kind: str) -> float:
    """Return the mean tokens of a kind's rows."""
    rows = table(kind)
    return math.fsum(tokens + images * (IMAGE_TOKENS + 2) for tokens, images in rows) / len(rows)


def equal_tokens(*kinds: str) -> dict[str, float]:
    """Return the shares of documents in which each kind has as many tokens, adding up to 1."""
    weights = {kind: 1 / mean_tokens(kind) for kind in kinds}
    return {kind: weight / math.fsum(weights.values()) for kind, weight in weights.items()}


MIXED = equal_tokens("captions", "interleaved", "text")
"""Shares of documents in mixed data: 0.42 captions, 0.17 interleaved, 0.41 texts."""


class LengthReader:
    """Implements `protocols.Reader` over rows of one kind, 10 million of them."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._texts = [f"{tokens} {images}" for tokens, images in table(kind)]
        self.shards = [
            ShardInfo(f"{kind}-{number:06d}", SHARD_ROWS, 1_000 * SHARD_ROWS)
            for number in range(SHARDS)
        ]

    def read(self, shard: int, rows: Sequence[int], fields: Any = None) -> list[Sample]:
        """Return rows of one text each."""
        return [{"text": self._texts[(shard * 1_031 + row) % TABLE_ROWS]} for row in rows]

    def fetch(self, blob: RowBlob) -> bytes:
        """Raise: there is nothing to decode."""
        raise NotImplementedError

    def digest(self) -> str:
        """Return the digest of the kind's name."""
        return digest("lengths", self._kind)


class Lengths(Tokenize):
    """Makes the record that a row describes."""

    def measure(
        self, ref: SampleRef, document: Document, blobs: BlobSource, known: Any = ()
    ) -> Record:
        """Return the record of a row; its token ids are zeros."""
        tokens, images = map(int, document.segments[0].text.split())  # type: ignore[union-attr]
        return record(ref, tokens, images)


def record(ref: SampleRef, tokens: int, images: int, *, image_tokens: int = IMAGE_TOKENS) -> Record:
    """Return a record of images, each between two control tokens, and a text behind them."""
    each = image_tokens + 2
    front = images * each
    slots = tuple(
        ImageSlot(
            FileBlob("", 0, 1), i * each + 1, image_tokens, IMAGE_SHAPE, patches=IMAGE_PATCHES
        )
        for i in range(images)
    )
    uncut = tuple((i * each, (i + 1) * each) for i in range(images))
    ids = _IDS[: tokens + 2 * images]
    return Record(ref, front + tokens, ids, ((front, front + tokens),), slots, uncut, 0)


def pipeline(
    kinds: Mapping[str, str],
    source: Any,
    *,
    max_length: int,
    shuffle: int,
    **options: Any,
) -> Pipeline:
    """Return a pipeline without `.batch` over what `source(datasets)` draws from.

    Args:
        kinds: Data set name -> kind.
        source: datasets -> WorkSource.
        max_length: Tokens of a sequence.
        shuffle: Sequences of the shuffle buffer.
        **options: Those of `Pipeline.options`.
    """
    datasets = [Dataset(name, LengthReader(kind)) for name, kind in kinds.items()]
    made = Pipeline(source(datasets)).options(**options)
    stage = Lengths(TextTokenizer.load(byte_level_bpe()))
    made._build(stages=made._stages.with_interleave(stage, None))
    return made.pack_flat(max_length=max_length).shuffle(buffer_size=shuffle)
