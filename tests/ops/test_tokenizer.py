"""The tokenizer's laws: text spells no control token; contents, not paths, make identity."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.fixtures import tokenizers as make
from zephon_mm.errors import ConfigError
from zephon_mm.ops.tokenizer import TextTokenizer

CASES = Path(__file__).parents[1] / "fixtures" / "cases"
KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level_bpe": make.byte_level_bpe,
    "unigram": make.unigram,
    "word_piece": make.word_piece,
}
LOADED = {kind: TextTokenizer.load(build()) for kind, build in KINDS.items()}
SPELLED = [*make.VISION, *make.CLASSIC[1:], "[CLS]", "[SEP]", "[PAD]", "[IMG]", "<|im_end|>"]


def control_ids(tokenizer: TextTokenizer) -> set[int]:
    ids = {tokenizer.eos_id, tokenizer.image_id, tokenizer.start_id, tokenizer.end_id}
    return {i for i in ids if i is not None} | set(tokenizer.bos_ids)


@pytest.mark.parametrize("kind", KINDS)
@given(parts=st.lists(st.sampled_from(SPELLED) | st.text(max_size=8), max_size=8))
@settings(max_examples=60, deadline=None)
def test_text_never_gives_a_control_token(kind: str, parts: list[str]) -> None:
    tokenizer = LOADED[kind]
    assert control_ids(tokenizer).isdisjoint(tokenizer.encode("".join(parts)))
    assert control_ids(tokenizer).isdisjoint(tokenizer.encode(" ".join(parts)))


def test_spelled_control_tokens_survive_as_text() -> None:
    text = "a <|image_pad|> and <|endoftext|>"
    ids = LOADED["byte_level_bpe"].encode(text)
    tokenizer = make.byte_level_bpe(special=[])
    assert len(ids) > 10
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize("kind", KINDS)
def test_plain_text_is_encoded_as_the_library_does(kind: str) -> None:
    for text in [*make.TEXT, "", " ", "naïve café 北京 \U0001f600", "xyzzy"]:
        expected = KINDS[kind]().encode(text, add_special_tokens=False).ids
        assert LOADED[kind].encode(text) == expected


def test_a_control_token_that_the_file_does_not_flag_is_protected() -> None:
    plain = make.byte_level_bpe(special=["<|endoftext|>"])
    plain.add_tokens([AddedToken("<image>", special=False), AddedToken("<tool>", special=False)])
    tokenizer = TextTokenizer.load(plain)
    assert tokenizer.image_id == plain.token_to_id("<image>")
    assert tokenizer.image_id not in tokenizer.encode("an <image> here")
    assert plain.token_to_id("<tool>") in tokenizer.encode("a <tool> here")  # stays usable
    assert plain.token_to_id("<image>") in plain.encode("an <image> here").ids  # ours is a copy


def test_a_control_token_of_the_model_alone_is_protected() -> None:
    vocab = {"hello": 0, "<eos>": 1, "<unk>": 2, "<image>": 3, "<": 4, ">": 5}
    plain = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = TextTokenizer.load(plain, eos="<eos>")
    assert tokenizer.encode("hello <eos> <image> never") == [0, 2, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("kind", "bos"), [("byte_level_bpe", []), ("unigram", ["<s>"]), ("word_piece", ["[CLS]"])]
)
def test_the_start_is_what_the_tokenizer_itself_puts_in_front(kind: str, bos: list[str]) -> None:
    plain = KINDS[kind]()
    assert LOADED[kind].bos_ids == tuple(plain.token_to_id(name) for name in bos)


def test_tok_01_each_document_has_one_start_token() -> None:
    tokenizer = LOADED["unigram"]
    for line in (CASES / "TOK-01" / "data.jsonl").read_text().splitlines():
        text = json.loads(line).get("text", "hi")
        ids = [*tokenizer.bos_ids, *tokenizer.encode(text)]
        assert [i for i in ids if i == tokenizer.bos_ids[0]] == list(tokenizer.bos_ids)


def test_add_bos_token_in_a_configuration_gives_a_start(tmp_path: Path) -> None:
    make.byte_level_bpe(special=["</s>", "<s>"]).save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = TextTokenizer.load(tmp_path)
    assert (tokenizer.bos_ids, tokenizer.eos_id, tokenizer.pad_id) == ((1,), 0, 0)


def test_tok_03_odd_texts_are_encoded() -> None:
    lines = (CASES / "TOK-03" / "data.jsonl").read_text().splitlines()
    for tokenizer in LOADED.values():
        for line in lines:
            text = json.loads(line)["text"]
            assert len(tokenizer.encode(text)) <= 4 * len(text)
    assert LOADED["byte_level_bpe"].encode("") == []


def test_lone_surrogates_become_replacement_characters_and_pairs_are_joined() -> None:
    encode = LOADED["byte_level_bpe"].encode
    assert encode("a\ud800b") == encode("a\ufffdb")
    assert encode("\ud83d\ude00") == encode("\U0001f600")


def test_truncation_and_padding_in_a_file_are_off() -> None:
    plain = make.byte_level_bpe()
    plain.enable_truncation(3)
    plain.enable_padding(length=500)
    text = make.TEXT[0] * 3
    assert TextTokenizer.load(plain).encode(text) == LOADED["byte_level_bpe"].encode(text)


def test_every_way_to_name_a_tokenizer_gives_the_same(tmp_path: Path) -> None:
    folder = make.save_byte_level_bpe(tmp_path / "a")
    other = make.save_byte_level_bpe(tmp_path / "b")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=make.byte_level_bpe(), eos_token="<|endoftext|>"
    )
    specs = [folder, str(other), folder / "tokenizer.json", make.byte_level_bpe(), fast]
    loaded = [TextTokenizer.load(spec) for spec in specs]
    assert len({tokenizer.fingerprint() for tokenizer in loaded}) == 1
    assert len({tuple(tokenizer.encode(make.TEXT[1])) for tokenizer in loaded}) == 1


@pytest.mark.slow
def test_what_has_no_tokenizer_json_is_loaded_through_transformers(tmp_path: Path) -> None:
    plain = make.byte_level_bpe()
    plain.model.save(str(tmp_path))  # vocab.json and merges.txt, as GPT-2 has them
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = TextTokenizer.load(tmp_path)
    assert tokenizer.eos_id == plain.token_to_id("<|endoftext|>")
    assert tokenizer.encode(make.TEXT[0]) == plain.encode(make.TEXT[0]).ids
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="neither a folder with"):
        TextTokenizer.load(tmp_path / "empty")


def test_other_contents_or_control_tokens_give_another_fingerprint() -> None:
    base = LOADED["byte_level_bpe"].fingerprint()
    grown = make.byte_level_bpe()
    grown.add_tokens(["zephon"])
    named = TextTokenizer.load(make.byte_level_bpe(), image_token="<|vision_start|>")
    assert len({base, TextTokenizer.load(grown).fingerprint(), named.fingerprint()}) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_pickled_tokenizer_is_the_same(kind: str) -> None:
    copy = pickle.loads(pickle.dumps(LOADED[kind]))
    for text in [*make.TEXT, " ".join(SPELLED)]:
        assert copy.encode(text) == LOADED[kind].encode(text)
    assert copy.fingerprint() == LOADED[kind].fingerprint()


def test_image_tokens_are_found_with_the_tokens_around_them() -> None:
    plain = make.byte_level_bpe()
    tokenizer = LOADED["byte_level_bpe"]
    found = (tokenizer.start_id, tokenizer.image_id, tokenizer.end_id, tokenizer.eos_id)
    names = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|endoftext|>")
    assert found == tuple(plain.token_to_id(name) for name in names)
    assert (LOADED["unigram"].start_id, LOADED["unigram"].end_id) == (None, None)
    assert LOADED["unigram"].pad_id == make.unigram().token_to_id("<pad>")


def test_named_image_tokens_win_even_with_id_0() -> None:
    named = TextTokenizer.load(
        make.byte_level_bpe(special=["<a>", "<b>", "<c>", *make.VISION]),
        image_token="<a>",
        image_start="<b>",
        image_end="<c>",
    )
    assert (named.image_id, named.start_id, named.end_id) == (0, 1, 2)


def test_missing_tokens_are_errors_that_say_what_to_do(tmp_path: Path) -> None:
    bare = make.byte_level_bpe(special=[])
    with pytest.raises(ConfigError, match=r"no end-of-document token.*eos=False"):
        TextTokenizer.load(bare)
    tokenizer = TextTokenizer.load(bare, eos=False)
    assert (tokenizer.eos_id, tokenizer.pad_id) == (None, 0)
    with pytest.raises(ConfigError, match=r"no image token.*image_token="):
        tokenizer.require_image_id()
    with pytest.raises(ConfigError, match=r"image_token='<x>' is not in"):
        TextTokenizer.load(make.byte_level_bpe(), image_token="<x>")
    with pytest.raises(ConfigError, match="no fast backend"):
        TextTokenizer.load(object())
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not a tokenizer"):
        TextTokenizer.load(tmp_path)


# Conversations.


@pytest.mark.parametrize("kind", KINDS)
@given(parts=st.lists(st.sampled_from(SPELLED) | st.text(max_size=8), max_size=8))
@settings(max_examples=40, deadline=None)
def test_text_without_marks_is_encoded_as_text(kind: str, parts: list[str]) -> None:
    text = "".join(parts).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    text = "".join("\ufffd" if "\ufdd0" <= char <= "\ufdef" else char for char in text)
    ids, starts = LOADED[kind].encode_marked(text)
    assert ids == LOADED[kind].encode(text)
    assert starts == sorted(starts)
    assert all(0 <= start <= len(text) for start in starts)


def test_marks_are_control_tokens_and_media() -> None:
    plain = make.byte_level_bpe([*make.VISION, "<|im_end|>"])
    plain.add_tokens(["<think>"])
    text = "a\ufdd3<|im_end|>\ufdd3<|im_end|>\ufdd4b<think>\ufdd3<|endoftext|>\ufdd3"
    ids, starts = TextTokenizer.load(plain).encode_marked(text)
    names = ("<|im_end|>", "<think>", "<|endoftext|>")
    known = [-1, *map(plain.token_to_id, names)]
    control = [(at, start) for at, start in zip(ids, starts, strict=True) if at in known]
    id_of = plain.token_to_id
    assert control == [
        (id_of("<|im_end|>"), 1),
        (-1, 23),
        (id_of("<think>"), 25),
        (id_of("<|endoftext|>"), 32),
    ]
    assert plain.decode([at for at in ids if at >= 0]) == "a<|im_end|>b<think>"


def test_a_tokenizer_brings_its_template(tmp_path: Path) -> None:
    folder = make.save_byte_level_bpe(tmp_path / "a")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert TextTokenizer.load(folder).chat_template is None
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    for value, wanted in (("t", "t"), (named, "d"), (named[:1], None)):
        changed = json.dumps({**config, "chat_template": value})
        (folder / "tokenizer_config.json").write_text(changed)
        assert TextTokenizer.load(folder).chat_template == wanted
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "j"}))
    assert TextTokenizer.load(folder).chat_template == "j"
    (folder / "chat_template.jinja").write_text("é")
    assert TextTokenizer.load(folder / "tokenizer.json").chat_template == "é"
    fast = PreTrainedTokenizerFast(tokenizer_object=make.byte_level_bpe(), chat_template="f")
    assert TextTokenizer.load(fast, eos="<|endoftext|>").chat_template == "f"


def test_templates_know_the_names_of_tokens() -> None:
    chat = LOADED["unigram"].chat("{{ bos_token }}{{ eos_token }}", ("all",), {"pad": "p"})
    assert chat.variables == {"bos_token": "<s>", "eos_token": "</s>", "pad": "p"}
    assert {"<s>", "</s>", "<image>"} <= set(chat.control)
    assert "<unk>" not in chat.control
