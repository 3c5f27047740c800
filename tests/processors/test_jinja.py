"""Templates are rendered as transformers renders them, in a sandbox."""

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.fixtures import tokenizers as make
from tests.fixtures.conversations import SPECIAL, TEMPLATES, OneToken, document, source, template
from zephon_mm.errors import ConfigError, SampleError
from zephon_mm.ops.interleave import Interleave
from zephon_mm.ops.tokenizer import TextTokenizer
from zephon_mm.processors.template import BUILT_IN, MEDIA
from zephon_mm.records import SampleRef

CHATS: dict[str, list[dict[str, Any]]] = {
    "system": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hi  there\n"},
        {"role": "assistant", "content": "Yes, <b>well</b> 北京 & 'so'"},
        {"role": "user", "content": "\n\nand?"},
        {"role": "assistant", "content": " no \n"},
    ],
    "empty": [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}],
    "thought": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "reasoning_content": "so"},
    ],
    "tools": [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "b",
            "tool_calls": [
                {"type": "function", "function": {"name": "f", "arguments": {"é": "<"}}}
            ],
        },
        {"role": "tool", "content": "c", "name": "f"},
        {"role": "tool", "content": "d", "name": "f"},
        {"role": "assistant", "content": "e"},
    ],
}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d <é>", "parameters": {}}}]
TAKES_PARTS = {"llava_next", "llava_next_training"}


def reference(plain: Tokenizer, name: str) -> PreTrainedTokenizerFast:
    names = {"eos_token": "</s>", "bos_token": "<s>", "chat_template": source(name)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(plain.to_str()), **names)


def same_as_transformers(theirs: PreTrainedTokenizerFast, name: str, *chats: str) -> None:
    ours = TextTokenizer.load(theirs)
    assert ours.chat_template == source(name)
    for chat in chats:
        turns, tools = CHATS[chat], TOOLS if chat == "tools" else None
        if name in TAKES_PARTS:
            turns = [{**t, "content": [{"type": "text", "text": t["content"]}]} for t in turns]
        expected = theirs.apply_chat_template(turns, tools=tools)["input_ids"]
        rendered = ours.chat(source(name), ("assistant",), {}).render(document(turns, tools or ()))
        assert ours.encode_marked(rendered.text)[0] == expected


KNOW_NO_TOOLS = {"chatml", "phi3", "qwen2_5_vl", "vicuna", "llava_next", "llava_next_training"}
NAMES = ["chatml", "vicuna", *sorted(path.stem for path in TEMPLATES.glob("*.jinja"))]
PAIRS = [(n, c) for n in NAMES for c in CHATS if c != "tools" or n not in KNOW_NO_TOOLS]


@pytest.mark.parametrize(("name", "chat"), PAIRS)
def test_tokens_are_those_of_apply_chat_template(name: str, chat: str) -> None:
    plain = make.byte_level_bpe(SPECIAL)
    plain.add_tokens([AddedToken(one, special=False) for one in ("<think>", "</think>")])
    same_as_transformers(reference(plain, name), name, chat)


@pytest.mark.parametrize("name", sorted(KNOW_NO_TOOLS))
def test_a_turn_that_a_template_refuses_is_refused(name: str) -> None:
    with pytest.raises(SampleError, match=r"template.* writes no tools, and the sample has some"):
        template(source(name)).render(document(CHATS["tools"], TOOLS))
    calls = document(CHATS["tools"])
    with pytest.raises(SampleError, match=r"template.*(no tool_calls|no role tool|Only user and)"):
        template(source(name)).render(calls)


def test_spaces_that_control_tokens_take_are_taken() -> None:
    plain = make.byte_level_bpe([*make.VISION, "<s>", "</s>"])
    takes = [AddedToken(one, rstrip=True, special=True) for one in ("<|end|>", "<|user|>")]
    plain.add_special_tokens([*takes, AddedToken("<|assistant|>", lstrip=True, special=True)])
    same_as_transformers(reference(plain, "phi3"), "phi3", "system")


@pytest.mark.parametrize("name", ["vicuna", "llava_next"])
@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_a_space_in_front_is_added_where_the_library_adds_it(name: str, scheme: str) -> None:
    plain = make.unigram()
    plain.pre_tokenizer = make.pre_tokenizers.Metaspace(prepend_scheme=scheme)
    same_as_transformers(reference(plain, name), name, "thought")


@pytest.mark.slow
def test_with_qwens_vocabulary_too() -> None:
    same_as_transformers(reference(make.qwen(), "qwen3"), "qwen3", *CHATS)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "llava_next"])
@pytest.mark.parametrize("numbers", [{}, {"add_vision_id": True}])
def test_images_stand_where_the_template_puts_them(name: str, numbers: dict[str, Any]) -> None:
    image = {"type": "image"}
    turns = [
        {"role": "user", "content": [image, {"type": "text", "text": "a"}, image]},
        {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
        {"role": "user", "content": [{"type": "text", "text": "c"}, image]},
        {"role": "assistant", "content": [{"type": "text", "text": "d"}]},
    ]
    special = ["<image>", "<s>", "</s>"] if name == "llava_next" else SPECIAL
    theirs = reference(make.byte_level_bpe(special), name)
    ours = TextTokenizer.load(theirs)
    chat = ours.chat(source(name), ("assistant",), numbers)
    record = Interleave(ours, OneToken(), chat=chat).measure(
        SampleRef(0, 0, 0), document(turns), None
    )
    assert record.token_ids.tolist() == theirs.apply_chat_template(turns, **numbers)["input_ids"]
    assert [slot.media for slot in record.images] == [0, 1, 2]
    assert chat.render(document(turns)).text.count(MEDIA) == 3


def test_templates_run_in_a_sandbox() -> None:
    for text in (
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ strftime_now.__self__.source }}",
    ):
        with pytest.raises(ConfigError, match="the chat template fails"):
            template(text + BUILT_IN["chatml"]).check()
