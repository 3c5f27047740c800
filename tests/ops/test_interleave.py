"""Measuring documents, checked against a slow reference that works token by token."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures import tokenizers as make
from zephon_mm.errors import ConfigError, SampleError
from zephon_mm.ops.interleave import Interleave
from zephon_mm.ops.tokenize import Tokenize
from zephon_mm.ops.tokenizer import TextTokenizer
from zephon_mm.records import (
    Blob,
    Document,
    FileBlob,
    Image,
    MediaShape,
    Record,
    SampleRef,
    Segment,
    Text,
)

CASES = Path(__file__).parents[1] / "fixtures" / "cases"
REF = SampleRef(0, 1, 2)
QWEN = TextTokenizer.load(make.byte_level_bpe())
LLAMA = TextTokenizer.load(make.unigram())


class SizeByFirstByte:
    """An image processor for bytes whose first one is the token count."""

    def measure(self, read: Callable[[int], bytes]) -> MediaShape:
        count = read(1)[0]
        if not count:
            raise SampleError("not_an_image", "first byte is 0")
        return MediaShape(count, (3, count, 4))

    def write(self, encoded: bytes, out: Any) -> None:
        out[:] = encoded[0]

    def normalize(self, pixels: Any, dtype: Any) -> Any:
        return pixels

    def fingerprint(self) -> Mapping[str, Any]:
        return {"name": "SizeByFirstByte"}


def read(blob: Blob, size: int) -> bytes:
    assert isinstance(blob, FileBlob)
    return bytes([blob.offset, 255, 255])[: size if size >= 0 else None]


def image(num_tokens: int) -> Image:
    return Image(FileBlob("/pictures", num_tokens, 3))


def slow_measure(
    tokenizer: TextTokenizer, segments: list[Segment], *, eos: bool
) -> list[tuple[int, bool]]:
    """Return (token, trained), one by one, straight from the three laws."""
    tokens = [(i, False) for i in tokenizer.bos_ids]
    for segment in segments:
        if isinstance(segment, Text):
            tokens += [(i, segment.train) for i in tokenizer.encode(segment.text)]
        else:
            around = [tokenizer.start_id, *[tokenizer.image_id] * segment.blob.offset]  # type: ignore[union-attr]
            tokens += [(i, False) for i in [*around, tokenizer.end_id] if i is not None]
    if eos:
        tokens.append((tokenizer.eos_id, any(train for _, train in tokens)))  # type: ignore[arg-type]
    return tokens


texts = st.builds(
    Text, st.sampled_from(["", "a", "hello <|image_pad|> world", "</s>"]), st.booleans()
)
documents = st.lists(texts | st.builds(image, st.integers(1, 9)), min_size=1, max_size=7)


@pytest.mark.parametrize("tokenizer", [QWEN, LLAMA], ids=["qwen", "llama"])
@given(segments=documents, eos=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_record_is_what_the_laws_say(
    tokenizer: TextTokenizer, segments: list[Segment], eos: bool
) -> None:
    expected = slow_measure(tokenizer, segments, eos=eos)
    interleave = Interleave(tokenizer, SizeByFirstByte(), eos=eos)
    document = Document(tuple(segments))
    if len(expected) == len(tokenizer.bos_ids) + eos:
        with pytest.raises(SampleError, match="empty_document"):
            interleave.measure(REF, document, read)
        return
    record = interleave.measure(REF, document, read)
    assert list(zip(record.token_ids.tolist(), record.trained.tolist(), strict=True)) == expected
    assert (record.ref, record.num_tokens) == (REF, len(expected))
    assert (record.token_ids.dtype, record.trained.dtype) == (np.int32, np.bool_)
    check_images(tokenizer, record, [s for s in segments if isinstance(s, Image)])


def check_images(tokenizer: TextTokenizer, record: Record, images: list[Image]) -> None:
    """Every placeholder belongs to one slot, and each slot lies just inside its uncut range."""
    positions = np.flatnonzero(record.token_ids == tokenizer.image_id).tolist()
    slots = [p for s in record.images for p in range(s.start, s.start + s.num_tokens)]
    assert positions == slots
    assert [slot.blob for slot in record.images] == [image.blob for image in images]
    for slot, (start, stop) in zip(record.images, record.uncut, strict=True):
        assert start == slot.start - (tokenizer.start_id is not None)
        assert stop == slot.start + slot.num_tokens + (tokenizer.end_id is not None)
        assert slot.shape == (3, slot.num_tokens, 4)


def test_tok_03_a_document_of_no_tokens_is_named() -> None:
    lines = (CASES / "TOK-03" / "data.jsonl").read_text().splitlines()
    tokenize = Tokenize(QWEN)
    counts: list[int | str] = []
    for line in lines:
        try:
            document = tokenize.document(json.loads(line))
            counts.append(tokenize.measure(REF, document, read).num_tokens)
        except SampleError as error:
            counts.append(error.reason)
    assert counts[0] == "empty_document"
    assert all(isinstance(count, int) and count >= 2 for count in counts[1:])


def test_a_defective_image_makes_the_sample_defective() -> None:
    document = Document((Text("a"), image(0)))
    with pytest.raises(SampleError, match="not_an_image"):
        Interleave(QWEN, SizeByFirstByte()).measure(REF, document, read)


def test_an_image_without_an_image_processor_is_an_error_that_names_the_option() -> None:
    with pytest.raises(ConfigError, match="interleave\\(image_processor="):
        Interleave(QWEN, None).measure(REF, Document((image(2),)), read)


def test_tokens_that_are_needed_are_checked_at_construction() -> None:
    bare = TextTokenizer.load(make.byte_level_bpe(special=[]), eos=False)
    with pytest.raises(ConfigError, match="no image token"):
        Interleave(bare, SizeByFirstByte(), eos=False)
    with pytest.raises(ConfigError, match="no end-of-document token"):
        Interleave(bare, None)


def test_fingerprints_name_everything_that_records_depend_on() -> None:
    prints = [
        Interleave(QWEN, None).fingerprint(),
        Interleave(QWEN, SizeByFirstByte()).fingerprint(),
        Interleave(QWEN, None, eos=False).fingerprint(),
        Interleave(LLAMA, None).fingerprint(),
    ]
    assert len({json.dumps(part, sort_keys=True) for part in prints}) == 4
