"""Measure a document: text to tokens, images and videos to placeholders, from headers alone.

Laws:
    1. A document is `bos`, its segments in order, `eos`; an image is `start + n x image + end`,
       and so is each part of one that is cut into tiles, and of a video, behind its own text.
    2. Start tokens and image tokens carry no loss; a text's do if the text says so; the end token
       does if any text's do.
    3. No pixel is decoded: an image is asked for its header only, a video for its time stamps.
    4. A conversation is what its template writes, with no `bos` or `eos` but the template's, each
       image or video as in law 1. What the template marks carries loss, except images: a token that
       crosses a border belongs where its first character is that is no space. A conversation none
       of whose tokens are trained is refused, or all of them unless that was asked for.
    5. A token's loss weight is the document's, times that of the image or video before it.

Imports: errors, protocols, records, processors.template, ops.tokenizer. Used by: ops.tokenize,
engine, builder.
"""

import inspect
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, Protocol, TypeVar

import numpy as np

from zephon_mm.errors import ConfigError, SampleError
from zephon_mm.ops.tokenizer import TextTokenizer
from zephon_mm.processors.augment import Augment
from zephon_mm.processors.marks import count_marks
from zephon_mm.processors.template import ChatTemplate
from zephon_mm.protocols import ImageProcessor, VideoProcessor
from zephon_mm.records import (
    Blob,
    Document,
    Image,
    ImageSlot,
    MediaShape,
    Record,
    SampleRef,
    Text,
    Video,
    patches_of,
)

T = TypeVar("T")
LossWeights = Literal["token", "document", "sqrt"]


class BlobSource(Protocol):
    """Where the bytes of a document's images and videos are."""

    def read(self, blob: Blob, size: int) -> bytes:
        """Return the first `size` bytes of a blob; all of it for -1."""
        ...

    def use(self, blob: Blob, action: Callable[[BinaryIO], T]) -> T:
        """Return what an action gives of a blob as a file that can be sought.

        It may be called again, with the file opened anew, where reading failed.
        """
        ...


_Piece = tuple[list[int], bool] | tuple[Image | Video, bool]
"""Tokens of a text, and whether they carry loss; or an image or video, which does not."""


@dataclass(frozen=True, slots=True)
class Interleave:
    """Turns documents of text and images into records.

    Args:
        tokenizer: Has an image token if `image_processor` is given.
        image_processor: What images become; None for documents without.
        eos: Whether the end token closes a document.
        video_processor: What videos become; None for documents without.
        chat: How conversations are written; None for documents that are none.
        augment: What happens to decoded images at random; None for nothing.
        loss_weights: See `Builder.interleave`; None gives tokens no weights.
    """

    tokenizer: TextTokenizer
    image_processor: ImageProcessor | None
    eos: bool = True
    video_processor: VideoProcessor | None = None
    chat: ChatTemplate | None = None
    augment: Augment | None = None
    loss_weights: LossWeights | None = None

    def __post_init__(self) -> None:
        write = getattr(self.image_processor, "write", None)
        if self.augment is not None and (
            write is None or "change" not in inspect.signature(write).parameters
        ):
            raise ConfigError(
                "augment= needs an image processor whose `write` takes `change`, got "
                f"{self.image_processor!r}"
            )
        self._check_ids()
        if self.eos and self.tokenizer.eos_id is None:
            raise ConfigError(
                "eos=True, but the tokenizer has no end-of-document token. Name one when loading "
                "it with eos='...', or set eos=False."
            )

    def _check_ids(self) -> None:
        video = self.video_processor is not None and self.tokenizer.video_id is None
        if self.image_processor is not None or video:
            self.tokenizer.require_image_id()

    def measure(
        self,
        ref: SampleRef,
        document: Document,
        blobs: BlobSource,
        known: Sequence[MediaShape | None] = (),
    ) -> Record:
        """Return the record of a document.

        Args:
            ref: Where the sample is stored.
            document: What it holds.
            blobs: Gives the headers of its images and videos.
            known: What the first of them become, in order; None reads a header.

        Raises:
            SampleError: An image is defective, or the document has neither text nor images; of a
                conversation no token is trained (`untrained`), or each (`all_trained`), or its
                template refuses it.
            ConfigError: The document has an image or video and there is no processor for it, or it
                is a conversation and there is no template.
        """
        ids: list[int] = []  # all tokens but placeholders
        placeholders = 0
        trained: list[tuple[int, int]] = []
        slots: list[ImageSlot] = []
        uncut: list[tuple[int, int]] = []
        weights: list[float] = []
        weight = document.weight
        for content, train in (self._chat if document.messages else self._segments)(document):
            start = len(ids) + placeholders
            if isinstance(content, list):
                ids += content
                if train and content:
                    trained.append((start, len(ids) + placeholders))
                    weights.append(weight)
            else:
                number = len(uncut)
                shape = known[number] if number < len(known) else None
                shape = shape or self._shape(content, blobs)
                placeholders += self._media(ids, placeholders, content, number, shape, slots)
                uncut.append((start, len(ids) + placeholders))
                weight = document.weight * content.weight
        if not document.messages:
            self._end(ids, placeholders, trained)
        weights += [weight] * (len(trained) - len(weights))  # that of the end token
        return Record(
            ref,
            len(ids) + placeholders,
            np.array(ids, dtype=np.int32),
            tuple(trained),
            tuple(slots),
            tuple(uncut),
            -1 if self.tokenizer.image_id is None else self.tokenizer.image_id,
            -1 if self.tokenizer.video_id is None else self.tokenizer.video_id,
            self._weights(trained, weights),
        )

    def _weights(self, trained: list[tuple[int, int]], weights: list[float]) -> tuple[float, ...]:
        """Return the loss weights of runs, as the setting wants them."""
        if wrong := [weight for weight in weights if not 0 <= weight < math.inf]:
            raise SampleError(
                "bad_weight", f"found the loss weight {wrong[0]}, expected a number, 0 or more"
            )
        if self.loss_weights is None:
            if weights.count(1) < len(weights):
                raise ConfigError(
                    f"a document has the loss weights {sorted(set(weights))[:4]}, but batches have "
                    "none: set .interleave(loss_weights='token')"
                )
            return ()
        count = max(1, sum(stop - max(start, 1) for start, stop in trained))
        power = {"token": 0.0, "sqrt": 0.5, "document": 1.0}[self.loss_weights]
        return tuple([weight / count**power for weight in weights])

    def _segments(self, document: Document) -> Iterator[_Piece]:
        yield list(self.tokenizer.bos_ids), False
        for segment in document.segments:
            if isinstance(segment, Text):
                yield self.tokenizer.encode(segment.text), segment.train
            else:
                yield segment, False

    def _end(self, ids: list[int], placeholders: int, trained: list[tuple[int, int]]) -> None:
        """Close a document that is no conversation."""
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

    def _chat(self, document: Document) -> Iterator[_Piece]:
        chat = self.check_chat()
        text, trained = chat.render(document)
        ids, starts = self.tokenizer.encode_marked(text)
        edges = [_token_at(text, starts, edge) for run in trained for edge in run]
        media = iter(document.media)
        places = [at for at, token in enumerate(ids) if token < 0]
        cuts = {0, len(ids), *edges, *places, *(at + 1 for at in places)}
        num_trained = 0
        for start, stop in itertools.pairwise(sorted(cuts)):
            if ids[start] < 0:
                yield next(media), False
            else:
                is_trained = bisect_right(edges, start) % 2 == 1
                num_trained += (stop - start) * is_trained
                yield ids[start:stop], is_trained
        if num_trained in (0, len(ids) - len(places)) and chat.train_on != ("all",):
            roles = [message.role for message in document.messages]
            raise SampleError(
                "all_trained" if num_trained else "untrained",
                f"{num_trained} tokens of the turns {roles} carry loss, expected some but not all. "
                f"Filter such samples, or change train_on={chat.train_on}.",
            )

    def check_chat(self) -> ChatTemplate:
        """Return how conversations are written.

        Raises:
            ConfigError: There is no template, or it cannot be used.
        """
        if self.chat is None:
            raise ConfigError(
                "the data are conversations, and the tokenizer has no chat template. Give one: "
                ".interleave(template='chatml'), or a file of Jinja text."
            )
        self.chat.check()
        return self.chat

    def fingerprint(self) -> Mapping[str, Any]:
        """Return everything that records depend on, JSON-serialisable."""
        processor, video = self.image_processor, self.video_processor
        found: dict[str, Any] = {
            "tokenizer": self.tokenizer.fingerprint(),
            "image_processor": None if processor is None else dict(processor.fingerprint()),
            "eos": self.eos,
        }
        if video is not None:
            found["video_processor"] = [self.tokenizer.video_id, dict(video.fingerprint())]
        if self.chat is not None:
            found["chat"] = dict(self.chat.fingerprint())
        if self.augment is not None:
            found["augment"] = dict(self.augment.fingerprint())
        if self.loss_weights is not None:
            found["loss_weights"] = self.loss_weights
        return found

    def _shape(self, media: Image | Video, blobs: BlobSource) -> MediaShape:
        if isinstance(media, Video) and self.video_processor is not None:
            return blobs.use(media.blob, self.video_processor.measure)
        if isinstance(media, Image) and self.image_processor is not None:
            return self.image_processor.measure(lambda size: blobs.read(media.blob, size))
        kind = type(media).__name__
        name = "SigLIPProcessor" if isinstance(media, Image) else "SigLIPVideoProcessor"
        raise ConfigError(
            f"a document has an {kind}, but there is no {kind.lower()} processor. Give one: "
            f".interleave({kind.lower()}_processor={name}(...)), or use .tokenize() for text."
        )

    def _media(
        self,
        ids: list[int],
        placeholders: int,
        media: Image | Video,
        number: int,
        shape: MediaShape,
        slots: list[ImageSlot],
    ) -> int:
        """Append to `ids` all tokens but placeholders, and the slots; return the placeholders."""
        start_id, end_id = self.tokenizer.start_id, self.tokenizer.end_id
        num_tokens, each, parts, grid, closing = shape
        video = isinstance(media, Video)
        processor = self.video_processor if video else self.image_processor
        patches = patches_of(shape, getattr(processor, "patch_size", None))
        marks = count_marks(media) if isinstance(media, Image) else ()
        whole = 0 if getattr(processor, "global_first", True) else len(parts) - 1
        for part in range(len(parts)) if parts else (-1,):
            if parts and parts[part]:
                ids += self.tokenizer.control(parts[part])
            if start_id is not None:
                ids.append(start_id)
            start = len(ids) + placeholders + max(part, 0) * num_tokens
            more = (grid, number, part, video, patches, marks if part in (whole, -1) else ())
            slots.append(ImageSlot(media.blob, start, num_tokens, each, *more))
            if end_id is not None:
                ids.append(end_id)
        if closing:
            ids += self.tokenizer.control(closing)
        return num_tokens * max(len(parts), 1)


def _token_at(text: str, starts: Sequence[int], at: int) -> int:
    """Return the first token that begins at a character or behind it, spaces in front aside."""
    token = bisect_left(starts, at)
    end = starts[token] if token < len(starts) else len(text)
    crosses = token > 0 and at < end and text[starts[token - 1] : at].isspace()
    return token - crosses
