"""Measure an image and its caption as one row, as SigLIP's two towers are trained on them.

Laws (tests/ops/test_pair.py):
    1. A row is the caption and the end token, then padding: the input ids that transformers'
       processors give with padding="max_length" and truncation=True. The image has no tokens.
    2. A caption that is too long keeps the end token as its last, and is counted as `truncated`.

SigLIP's text tower reads out the last position and takes no mask, so a row must have the length
that it was trained with, 64 (transformers PR#26522).

Imports: errors, processors.marks, records, ops.interleave. Used by: builder.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from zephon_mm.errors import ConfigError, SampleError
from zephon_mm.ops.interleave import BlobSource, Interleave
from zephon_mm.processors.marks import count_marks
from zephon_mm.records import (
    Document,
    Image,
    ImageSlot,
    MediaShape,
    Record,
    SampleRef,
    Text,
    patches_of,
)


@dataclass(frozen=True, slots=True)
class Pair(Interleave):
    """Turns documents of one image and one text into records.

    Args:
        length: Tokens of a row, with the end token.
    """

    length: int = field(kw_only=True)

    def measure(
        self,
        ref: SampleRef,
        document: Document,
        blobs: BlobSource,
        known: Sequence[MediaShape | None] = (),
    ) -> Record:
        """Return the record of a document; arguments as for `Interleave`.

        Raises:
            SampleError: It is no pair (`no_pair`), or its image is defective.
            ConfigError: The image is cut into tiles, which SigLIP's image tower does not take.
        """
        images = [one for one in document.segments if isinstance(one, Image)]
        texts = [one.text for one in document.segments if isinstance(one, Text)]
        if len(document.segments) != 2 or len(images) != 1 or len(texts) != 1:
            others = len(document.segments) - len(images) - len(texts)
            found = f"{len(images)} images, {len(texts)} texts, {others} videos"
            raise SampleError("no_pair", f"found {found}, expected one image and one text")
        media = next(iter(known), None) or self._shape(images[0], blobs)
        if media.parts:
            raise ConfigError(
                f".pair takes no tiles; the image processor is {self.image_processor}"
            )
        ids = [*self.tokenizer.bos_ids, *self.tokenizer.encode(texts[0])]
        ids.insert(self.length - 1, self.tokenizer.eos_id)  # type: ignore[arg-type]  # there is one
        patches = patches_of(media, getattr(self.image_processor, "patch_size", None))
        more = (media.grid, 0, -1, False, patches, count_marks(images[0]))
        slot = ImageSlot(images[0].blob, 0, 0, media.shape, *more)
        trained = [(0, len(ids))]
        self._weights(trained, [document.weight * images[0].weight])  # refuses what would be lost
        text = np.array(ids, dtype=np.int32)
        return Record(ref, len(ids), text, tuple(trained), (slot,), (), -1)

    def check_chat(self) -> NoReturn:
        """Refuse conversations.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            ".pair takes images with captions, and the data are conversations: use .interleave, or "
            "a schema function that makes a Document of one image and one text of each sample"
        )

    def _check_ids(self) -> None:
        """Ask for no image token: an image has no place in the text."""

    def fingerprint(self) -> Mapping[str, Any]:
        """Return everything that records depend on, JSON-serialisable."""
        return {**Interleave.fingerprint(self), "pair": self.length}
