"""Measure a document: text to tokens, images to placeholders, from headers alone.

Laws:
    1. A document is `bos`, its segments in order, `eos`; an image is `start + n x image + end`.
    2. Start tokens and image tokens carry no loss; a text's do if the text says so; the end token
       does if any text's do.
    3. No pixel is decoded: an image is asked for its header only.

Imports: errors, protocols, records, ops.tokenizer. Used by: ops.tokenize, engine, pipeline.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zephon_mm.errors import ConfigError, SampleError
from zephon_mm.ops.tokenizer import TextTokenizer
from zephon_mm.protocols import ImageProcessor
from zephon_mm.records import Blob, Document, Image, ImageSlot, MediaShape, Record, SampleRef

ReadBlob = Callable[[Blob, int], bytes]
"""`read(blob, n)` gives the first n bytes of a blob; all of it for n = -1."""


@dataclass(frozen=True, slots=True)
class Interleave:
    """Turns documents of text and images into records.

    Args:
        tokenizer: Has an image token if `image_processor` is given.
        image_processor: What images become; None for documents of text only.
        eos: Whether the end token closes a document.
    """

    tokenizer: TextTokenizer
    image_processor: ImageProcessor | None
    eos: bool = True

    def __post_init__(self) -> None:
        if self.image_processor is not None:
            self.tokenizer.require_image_id()
        if self.eos and self.tokenizer.eos_id is None:
            raise ConfigError(
                "eos=True, but the tokenizer has no end-of-document token. Name one when loading "
                "it with eos='...', or set eos=False."
            )

    def measure(
        self,
        ref: SampleRef,
        document: Document,
        read: ReadBlob,
        known: Sequence[MediaShape] | None = None,
    ) -> Record:
        """Return the record of a document.

        Args:
            ref: Where the sample is stored.
            document: What it holds.
            read: Gives a blob's first bytes.
            known: What the headers of its images say, as many as there are; None reads them.

        Raises:
            SampleError: An image is defective, or the document has neither text nor images.
            ConfigError: The document has an image and there is no image processor.
        """
        ids = list(self.tokenizer.bos_ids)  # all tokens but placeholders
        placeholders = 0
        trained: list[tuple[int, int]] = []
        slots: list[ImageSlot] = []
        uncut: list[tuple[int, int]] = []
        for segment in document.segments:
            start = len(ids) + placeholders
            if isinstance(segment, Image):
                shape = self._shape(segment, read) if known is None else known[len(slots)]
                slots.append(self._image(ids, segment, shape, placeholders))
                placeholders += slots[-1].num_tokens
                uncut.append((start, len(ids) + placeholders))
            else:
                ids += self.tokenizer.encode(segment.text)
                if segment.train and len(ids) + placeholders > start:
                    trained.append((start, len(ids) + placeholders))
        if len(ids) + placeholders == len(self.tokenizer.bos_ids):
            raise SampleError(
                "empty_document",
                "the document has no images and its text gives no tokens. Filter such samples, or "
                "check which field holds the text.",
            )
        if self.eos:
            ids.append(self.tokenizer.eos_id)  # type: ignore[arg-type]  # checked when made
            if trained:
                trained.append((len(ids) + placeholders - 1, len(ids) + placeholders))
        return Record(
            ref,
            len(ids) + placeholders,
            np.array(ids, dtype=np.int32),
            tuple(trained),
            tuple(slots),
            tuple(uncut),
            -1 if self.tokenizer.image_id is None else self.tokenizer.image_id,
        )

    def fingerprint(self) -> Mapping[str, Any]:
        """Return everything that records depend on, JSON-serialisable."""
        processor = self.image_processor
        return {
            "tokenizer": self.tokenizer.fingerprint(),
            "image_processor": None if processor is None else dict(processor.fingerprint()),
            "eos": self.eos,
        }

    def _shape(self, image: Image, read: ReadBlob) -> MediaShape:
        if self.image_processor is None:
            raise ConfigError(
                "a document has an image, but there is no image processor. Give one: "
                ".interleave(image_processor=SigLIPProcessor(...)), or use .tokenize() for text."
            )
        return self.image_processor.measure(lambda size: read(image.blob, size))

    def _image(
        self, ids: list[int], image: Image, shape: MediaShape, placeholders: int
    ) -> ImageSlot:
        """Append an image's start and end tokens to `ids`; return where its placeholders are."""
        start_id, end_id = self.tokenizer.start_id, self.tokenizer.end_id
        if start_id is not None:
            ids.append(start_id)
        start = len(ids) + placeholders
        if end_id is not None:
            ids.append(end_id)
        return ImageSlot(image.blob, start, *shape)
