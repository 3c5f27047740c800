"""Plain text: the field that holds it becomes a record."""

import json

import pytest

from tests.fixtures import tokenizers as make
from zephon_mm.errors import ConfigError, SampleError
from zephon_mm.ops.interleave import Interleave
from zephon_mm.ops.tokenize import Tokenize
from zephon_mm.ops.tokenizer import TextTokenizer
from zephon_mm.records import Blob, Document, SampleRef, Text

QWEN = TextTokenizer.load(make.byte_level_bpe())
REF = SampleRef(0, 0, 0)


def read(blob: Blob, size: int) -> bytes:
    raise AssertionError("text reads no blob")


def test_a_text_is_measured_as_a_document_of_one_segment() -> None:
    tokenize = Tokenize(QWEN, field="body")
    record = tokenize.measure(REF, tokenize.document({"body": "hello"}), read)
    expected = Interleave(QWEN, None).measure(REF, Document((Text("hello"),)), read)
    assert record.token_ids.tolist() == expected.token_ids.tolist()
    assert record.trained.all()
    assert record.token_ids[-1] == QWEN.eos_id


def test_bytes_are_read_as_utf_8_and_bad_ones_replaced() -> None:
    document = Tokenize(QWEN).document({"text": b"caf\xc3\xa9 \xff", "__key__": "k"})
    assert document == Document((Text("café \ufffd"),), "k")


@pytest.mark.parametrize(
    ("sample", "found"), [({"body": "x"}, "is missing"), ({"text": 3}, "has type int")]
)
def test_a_sample_without_text_is_named(sample: dict[str, object], found: str) -> None:
    with pytest.raises(SampleError, match=f"no_text.*{found}.*field="):
        Tokenize(QWEN).document(sample)


def test_a_missing_end_token_is_found_at_construction() -> None:
    bare = TextTokenizer.load(make.byte_level_bpe(special=[]), eos=False)
    with pytest.raises(ConfigError, match="no end-of-document token"):
        Tokenize(bare)
    assert Tokenize(bare, eos=False).eos is False


def test_the_field_is_part_of_the_fingerprint() -> None:
    prints = [Tokenize(QWEN, field=field).fingerprint() for field in ("text", "body")]
    assert len({json.dumps(part) for part in prints}) == 2
