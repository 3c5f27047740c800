"""Measuring documents, checked against a slow reference that works token by token."""

import json
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from tests.fixtures import tokenizers as make
from zephon_mm.errors import ConfigError, SampleError
from zephon_mm.ops.interleave import Interleave
from zephon_mm.ops.tokenize import Tokenize
from zephon_mm.ops.tokenizer import TextTokenizer
from zephon_mm.processors.template import BUILT_IN, MEDIA
from zephon_mm.records import (
    Blob,
    Document,
    FileBlob,
    Image,
    MediaShape,
    Message,
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


class Pictures:
    """Blobs whose first byte is their offset."""

    def read(self, blob: Blob, size: int) -> bytes:
        assert isinstance(blob, FileBlob)
        return bytes([blob.offset, 255, 255])[: size if size >= 0 else None]

    def use(self, blob: Blob, action: Callable[[BinaryIO], Any]) -> Any:
        return action(BytesIO(self.read(blob, -1)))


PICTURES = Pictures()


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
            interleave.measure(REF, document, PICTURES)
        return
    record = interleave.measure(REF, document, PICTURES)
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
            counts.append(tokenize.measure(REF, document, PICTURES).num_tokens)
        except SampleError as error:
            counts.append(error.reason)
    assert counts[0] == "empty_document"
    assert all(isinstance(count, int) and count >= 2 for count in counts[1:])


def test_a_defective_image_makes_the_sample_defective() -> None:
    document = Document((Text("a"), image(0)))
    with pytest.raises(SampleError, match="not_an_image"):
        Interleave(QWEN, SizeByFirstByte()).measure(REF, document, PICTURES)


def test_an_image_without_an_image_processor_is_an_error_that_names_the_option() -> None:
    with pytest.raises(ConfigError, match="interleave\\(image_processor="):
        Interleave(QWEN, None).measure(REF, Document((image(2),)), PICTURES)


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


# Conversations.

CHAT = TextTokenizer.load(make.byte_level_bpe([*make.VISION, "<|im_start|>", "<|im_end|>"]))
chat_texts = st.sampled_from(
    [
        *("", " ", "a", "  b", "\n\n", "fox.", ": x", "ASSISTANT:", "<|im_end|>", "</s>"),
        *("<|image_pad|>", "<image>", "<|vision_end|>"),
    ]
)
chat_segments = st.lists(
    st.builds(Text, chat_texts) | st.builds(image, st.integers(1, 5)), max_size=3
)
conversations = st.lists(st.tuples(chat_segments, chat_segments), min_size=1, max_size=3).map(
    lambda pairs: tuple(
        Message(role, tuple(segments))
        for pair in pairs
        for role, segments in zip(("user", "assistant"), pair, strict=True)
    )
)


def stage(tokenizer: TextTokenizer, template: str, *train_on: str) -> Interleave:
    chat = tokenizer.chat(BUILT_IN.get(template, template), train_on or ("assistant",), {})
    return Interleave(tokenizer, SizeByFirstByte(), chat=chat)


def slow_chat(interleave: Interleave, document: Document) -> list[tuple[int, bool]]:
    """Return (token, trained) one by one: a token is where its first character is, spaces aside."""
    assert interleave.chat is not None
    text, spans = interleave.chat.render(document)
    loaded = interleave.tokenizer
    ids, starts = loaded.encode_marked(text)
    media = iter(document.media)
    found: list[tuple[int, bool]] = []
    for token, start, stop in zip(ids, starts, [*starts[1:], len(text)], strict=True):
        if token < 0:
            assert text[start] == MEDIA
            around = [loaded.start_id, *[loaded.image_id] * next(media).blob.offset, loaded.end_id]  # type: ignore[union-attr, list-item]
            found += [(i, False) for i in around if i is not None]
            continue
        whole = text[start:stop] if stop > start else text[start : start + 1]
        own = start + len(whole) - len(whole.lstrip()) if whole.strip() else start + len(whole) - 1
        found.append((token, any(a <= own < b for a, b in spans)))
    return found


@pytest.mark.parametrize(
    ("tokenizer", "template"),
    [(CHAT, "chatml"), (CHAT, "vicuna"), (LLAMA, "vicuna"), (LLAMA, "chatml")],
    ids=["chatml", "vicuna", "llama", "llama-chatml"],
)
@given(messages=conversations)
@settings(max_examples=60, deadline=None)
def test_cnv_09_loss_is_by_where_a_token_of_the_whole_begins(
    tokenizer: TextTokenizer, template: str, messages: tuple[Message, ...]
) -> None:
    """CNV-09, CNV-03: one tokenisation; as many placeholders as images; no image is trained."""
    document = Document((), "", messages)
    interleave = stage(tokenizer, template)
    record = interleave.measure(REF, document, PICTURES)
    expected = slow_chat(interleave, document)
    assert list(zip(record.token_ids.tolist(), record.trained.tolist(), strict=True)) == expected
    check_images(tokenizer, record, document.media)  # type: ignore[arg-type]
    known = [MediaShape(slot.num_tokens, slot.shape) for slot in record.images]
    again = interleave.measure(REF, document, Pictures(), known)
    assert again.token_ids.tolist() == record.token_ids.tolist()


def test_cnv_09_a_border_inside_a_token_moves_no_other_label() -> None:
    """CNV-09: turns tokenised alone would give other tokens than the whole."""
    letters = sorted(set("ask:tel yn#") | {"\n"})
    pairs = [(":", ":"), ("\n", "\n"), (" ", "y"), ("#", "#")]
    vocabulary = {token: at for at, token in enumerate([*letters, "::", "\n\n", " y", "##"])}
    plain = Tokenizer(models.BPE(vocabulary, pairs))
    loaded = TextTokenizer.load(plain, eos=False)
    for colon, answer, wanted in (
        (":", ":y", "y##\n"),  # `::` begins in the header
        (":\n", "\ny", "\n\ny##\n"),  # spaces belong to what is behind them
        (": ", "y", " y##\n"),
    ):
        template = (
            "{% for turn in messages %}{{ 'tell' if turn.role == 'assistant' else 'ask' }}"
            f"{colon}{{{{ turn.content }}}}##\n{{% endfor %}}"
            f"{{% if add_generation_prompt %}}tell{colon}{{% endif %}}"
        )
        chat = loaded.chat(template, ("assistant",), {})
        document = Document(
            (), "", (Message("user", (Text("a"),)), Message("assistant", (Text(answer),)))
        )
        record = Interleave(loaded, None, eos=False, chat=chat).measure(REF, document, PICTURES)
        assert (
            record.token_ids.tolist() == plain.encode(f"ask{colon}a##\ntell{colon}{answer}##\n").ids
        )
        names = [plain.id_to_token(token) for token in record.token_ids.tolist()]
        assert "".join(n for n, t in zip(names, record.trained, strict=True) if t) == wanted


def test_tok_01_a_conversation_has_the_start_token_of_its_template_alone() -> None:
    """TOK-01."""
    lines = (CASES / "TOK-01" / "data.jsonl").read_text().splitlines()
    texts = [json.loads(line).get("text", "hi") for line in lines]
    (bos,) = LLAMA.bos_ids
    for text in [*texts, "<s></s>"]:
        messages = (Message("user", (Text(text),)), Message("assistant", (Text(text),)))
        record = stage(LLAMA, "vicuna").measure(REF, Document((), "", messages), PICTURES)
        assert record.token_ids.tolist().count(bos) == 1
        assert record.token_ids[0] == bos
        assert record.token_ids.tolist().count(LLAMA.eos_id) == 1


def test_no_end_token_is_added_to_a_conversation() -> None:
    messages = (Message("user", (Text("a"),)), Message("assistant", (Text("b"),)))
    record = stage(CHAT, "chatml").measure(REF, Document((), "", messages), PICTURES)
    assert CHAT.eos_id not in record.token_ids
    assert not record.trained[-1]


def test_conversations_without_loss_or_without_a_mask_are_refused() -> None:
    asked = Document((), "", (Message("user", (Text("a"),)),))
    with pytest.raises(SampleError, match=r"untrained.*turns \['user'\] carry loss"):
        stage(CHAT, "chatml").measure(REF, asked, PICTURES)
    turn = "{% generation %}{{ turn.content }}{% endgeneration %}"
    whole = f"{{% for turn in messages %}}{turn}{{% endfor %}}"
    with pytest.raises(SampleError, match="all_trained"):
        stage(CHAT, whole).measure(REF, asked, PICTURES)
    for template in ("chatml", whole):
        assert stage(CHAT, template, "all").measure(REF, asked, PICTURES).trained.all()
    assert stage(CHAT, "chatml", "user").measure(REF, asked, PICTURES).num_valid_tokens == 2


def test_with_everything_trained_images_are_not() -> None:
    document = Document((), "", (Message("user", (Text("a"), image(3), Text("b"))),))
    record = stage(CHAT, "chatml", "all").measure(REF, document, PICTURES)
    ((start, stop),) = record.uncut
    assert not record.trained[start:stop].any()
    assert record.trained.sum() == record.num_tokens - (stop - start)


def test_conversations_need_a_template() -> None:
    document = Document((), "", (Message("user", (Text("a"),)),))
    with pytest.raises(ConfigError, match=r"no chat template.*template='chatml'"):
        Interleave(CHAT, None).measure(REF, document, PICTURES)


def test_a_template_is_part_of_the_fingerprint() -> None:
    prints = [
        Interleave(CHAT, None).fingerprint(),
        stage(CHAT, "chatml").fingerprint(),
        stage(CHAT, "vicuna").fingerprint(),
        stage(CHAT, "chatml", "user").fingerprint(),
    ]
    assert len({json.dumps(part, sort_keys=True) for part in prints}) == 4
