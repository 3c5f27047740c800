"""Chat templates: what transformers renders, with text that stays text and loss where it belongs.

`CONVERSATIONS.md` at the root of the repository is written by the last test of this file:
`ZEPHON_WRITE=1 pytest tests/processors/test_template.py -k page`.
"""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures import tokenizers as make
from tests.fixtures.conversations import (
    SPECIAL,
    OneToken,
    document,
    source,
    talk,
    template,
    tokenizer,
)
from zephon_mm.errors import ConfigError, SampleError
from zephon_mm.ops.interleave import Interleave
from zephon_mm.ops.tokenizer import TextTokenizer
from zephon_mm.processors.template import (
    BREAK,
    BUILT_IN,
    CONTROL,
    Rendered,
    template_source,
)
from zephon_mm.records import Document, FileBlob, Image, Message, SampleRef, Text

PAGE = Path(__file__).parents[2] / "CONVERSATIONS.md"
NASTY = [
    *("<|im_end|>", "<|im_end|>\n", "<|im_start|>assistant\n", "<|im_start|>", "</s>", "<s>"),
    *("<|image_pad|>", "<image>", "USER: ", "ASSISTANT:", "ASSISTANT: ", "ASSISTANT", "<|end|>"),
    *("\ufdd0", "\ufdd3<s>\ufdd3", "\ufdd4", "{{ 1 }}", "{% raw %}", "\n", " ", "a", "é北"),
]


def plain(rendered: Rendered) -> str:
    return rendered.text.replace(CONTROL, "")


def trained(rendered: Rendered) -> list[str]:
    return [rendered.text[a:b].replace(CONTROL, "") for a, b in rendered.trained]


# Law 1: text stays text. The reference writes the conversation by hand, piece by piece.


def write_chatml(turns: list[tuple[str, str]]) -> list[tuple[str, bool]]:
    pieces = []
    for role, text in turns:
        is_trained = role == "assistant"
        pieces += [
            (f"<|im_start|>{role}\n", False),
            (f"{text}<|im_end|>", is_trained),
            ("\n", False),
        ]
    return pieces


def write_vicuna(turns: list[tuple[str, str]]) -> list[tuple[str, bool]]:
    intro = "A chat between a curious human and an artificial intelligence assistant. "
    intro += "The assistant gives helpful, detailed, and polite answers to the human's questions. "
    pieces = [(intro, False)]
    for role, text in turns:
        name = "USER:" if role == "user" else "ASSISTANT:"
        is_trained = role == "assistant"
        pieces += [(name, False), (f" {text}" + ("</s>" if is_trained else " "), is_trained)]
    return pieces


texts = st.lists(st.sampled_from(NASTY), max_size=4).map("".join)
turns_of_two = st.lists(st.tuples(texts, texts), min_size=1, max_size=3).map(
    lambda pairs: [turn for a, b in pairs for turn in (("user", a), ("assistant", b))]
)


@pytest.mark.parametrize("name", ["chatml", "vicuna"])
@given(turns=turns_of_two)
@settings(max_examples=60, deadline=None)
def test_the_data_can_spell_no_control(name: str, turns: list[tuple[str, str]]) -> None:
    clean = [
        (role, "".join("\ufffd" if "\ufdd0" <= c <= "\ufdef" else c for c in text))
        for role, text in turns
    ]
    pieces = (write_chatml if name == "chatml" else write_vicuna)(clean)
    rendered = template(source(name)).render(talk(*turns))
    assert plain(rendered) == "".join(text for text, _ in pieces)
    assert trained(rendered) == [text for text, is_trained in pieces if is_trained]
    ids, _ = tokenizer().encode_marked(rendered.text)
    per_turn = (
        ["<|im_start|>", "<|im_end|>"] * len(turns)
        if name == "chatml"
        else ["</s>"] * (len(turns) // 2)
    )
    control = [make.byte_level_bpe(SPECIAL).id_to_token(i) for i in ids if i < len(SPECIAL)]
    assert control == per_turn


@given(nasty=texts)
@settings(max_examples=60, deadline=None)
def test_neither_fields_nor_tools_nor_roles_spell_control(nasty: str) -> None:
    def controls(word: str) -> int:
        call = {"function": {"name": word, "arguments": {word: [word]}}}
        messages = (
            Message("user", (Text("q"),)),
            Message("assistant", (), (("tool_calls", [call]), ("reasoning_content", word))),
            Message("tool", (Text(word),), (("name", word),)),
            Message("assistant", (Text("a"),)),
        )
        tool = {"type": "function", "function": {"name": word, "description": word}}
        return (
            template(source("qwen3"))
            .render(Document((), "", messages, (tool,)))
            .text.count(CONTROL)
        )

    assert controls(nasty) == controls("x")


def test_parts_cannot_be_joined_to_control() -> None:
    halves = (Text("<|im_"), Text("end|>"))
    for name in ("chatml", "qwen2_5_vl"):
        joined = Document((), "", (Message("user", halves), Message("assistant", (Text("a"),))))
        single = talk(("user", "<|im_end|>"), ("assistant", "a"))
        chat = template(source(name))
        assert chat.render(joined) == chat.render(single)
        assert chat.render(single).text.count(CONTROL) == 2 * (6 if name == "qwen2_5_vl" else 4)


# Law 2: as many turns as messages.


@pytest.mark.parametrize(
    ("text", "turns", "reason"),
    [
        (BUILT_IN["vicuna"], [("tool", "x")], "template.*knows no role tool"),
        ("{{ messages[0].content }}{{ messages[0].content + 1 }}", [("user", "x")], "template"),
        (
            BUILT_IN["chatml"].replace("in messages", "in messages[-3:]"),
            [("user", "a"), ("assistant", "b")] * 2,
            "turn_mismatch.*wrote 2 turns from .*assistant",
        ),
        (
            BUILT_IN["chatml"].replace(
                "<|im_end|>", "{{ '<|im_end|>' if turn.content != 'b' else '' }}"
            ),
            [("user", "a"), ("assistant", "b"), ("user", "c")],
            "turn_mismatch.*wrote 0 turns",
        ),
    ],
)
def test_what_a_template_drops_or_merges_is_refused(
    text: str, turns: list[tuple[str, str]], reason: str
) -> None:
    if "turn_mismatch.*wrote 2" in reason:
        turns = [*turns[1:], ("assistant", "c")]
    with pytest.raises(SampleError, match=reason):
        template(text).render(talk(*turns))


def test_media_that_a_template_drops_are_refused() -> None:
    text = BUILT_IN["chatml"].replace("turn.content", "turn.content.split('|')[0]")
    image = Message("user", (Text("a|"), Image(FileBlob("/a", 0, 1))))
    with pytest.raises(SampleError, match=r"media_mismatch.*wrote 0 of 1 images"):
        template(text).render(Document((), "", (image,)))


# Where loss is.


def test_cnv_04_the_rule_for_empty_answers_and_first_turns() -> None:
    """CNV-04: an empty answer trains its closing; any turn may be the first."""
    empty = [("user", "a"), ("assistant", ""), ("user", "b"), ("assistant", "kept")]
    first = [("assistant", "starts alone"), ("user", "hm")]
    for name in ("chatml", "qwen2_5", "qwen3", "qwen3_vl"):
        chat = template(source(name))
        assert trained(chat.render(talk(*empty)))[0] == "<|im_end|>"
        assert trained(chat.render(talk(*empty)))[1].endswith("kept<|im_end|>")
        assert trained(chat.render(talk(*first))) == ["starts alone<|im_end|>"]
        assert trained(chat.render(talk(("system", "s"), ("user", "a")))) == []


def test_what_the_template_writes_inside_a_turn_is_trained() -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    turn = Message("assistant", (Text("b"),), (("tool_calls", [call]), ("reasoning_content", "hm")))
    found = template(source("qwen3")).render(
        Document((), "", (*talk(("user", "a")).messages, turn))
    )
    called = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert trained(found) == [f"<think>\nhm\n</think>\n\nb\n{called}<|im_end|>"]


def test_a_prompt_that_begins_the_answer_is_only_the_header_where_every_turn_has_it() -> None:
    chat = template(source("qwen3"), enable_thinking=False)
    found = chat.render(talk(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")))
    assert trained(found) == ["b<|im_end|>", "<think>\n\n</think>\n\nd<|im_end|>"]


@pytest.mark.parametrize(
    ("roles", "wanted"),
    [
        (("user",), ["a<|im_end|>", "c<|im_end|>"]),
        (("tool",), ["t<|im_end|>"]),
        (("user", "assistant"), ["a<|im_end|>", "b<|im_end|>", "c<|im_end|>", "d<|im_end|>"]),
    ],
)
def test_train_on_names_roles(roles: tuple[str, ...], wanted: list[str]) -> None:
    turns = talk(
        ("user", "a"), ("assistant", "b"), ("tool", "t"), ("user", "c"), ("assistant", "d")
    )
    assert trained(template(source("chatml"), roles).render(turns)) == wanted
    everything = template(source("chatml"), ("all",)).render(turns)
    assert trained(everything) == [plain(everything)]


def test_a_role_is_found_where_the_turn_in_front_of_it_changes_with_what_follows() -> None:
    """Qwen3 writes an empty thought into the last answer alone."""
    turns = talk(("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"))
    answered = talk(("user", "a"), ("assistant", "b"), ("tool", "t"), ("assistant", "c"))
    for roles, wanted in (
        (("user",), ["a<|im_end|>", "c<|im_end|>"]),
        (("system", "assistant"), ["s<|im_end|>", "b<|im_end|>"]),
    ):
        assert trained(template(source("qwen3"), roles).render(turns)) == wanted
    found = trained(template(source("qwen3"), ("tool",)).render(answered))
    assert found == ["t\n</tool_response><|im_end|>"]


@pytest.mark.parametrize(
    "roles", [(), ("asistant",), ("gpt",), ("user", "user"), ("all", "assistant"), ("model",)]
)
def test_roles_that_cannot_be_trained_are_named(roles: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"train_on=.* must be roles of \['assistant', "):
        template(source("chatml"), roles)


def test_tools_and_calls_are_never_left_out() -> None:
    call = {"function": {"name": "f", "arguments": {}}}
    called = Message("assistant", (), (("tool_calls", [call]),))
    question = talk(("user", "a")).messages
    for messages, tools, name in (
        ((*question, called), (), "tool_calls"),
        (talk(("user", "a"), ("assistant", "b")).messages, (call,), "tools"),
    ):
        document = Document((), "", messages, tools)
        assert len(template(source("qwen3")).render(document).trained) == 1
        with pytest.raises(SampleError, match=f"template.* writes no {name}, "):
            template(source("chatml")).render(document)


def test_generation_blocks_win_over_headers() -> None:
    turns = talk(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    with_blocks = template(source("llava_next_training")).render(turns)
    without = template(source("llava_next")).render(turns)
    assert trained(with_blocks) == [" b</s>", " d</s>"]
    assert trained(without) == [" b</s>", " d</s>"]
    assert plain(with_blocks) == plain(without)
    users = template(source("llava_next_training"), ("user",)).render(turns)
    assert trained(users) == [" a [/INST]", " c [/INST]"]
    assert trained(template(source("llava_next_training"), ("all",)).render(turns)) == [
        plain(users)
    ]


# Law 4, and settings.


def test_a_template_that_asks_for_the_date_needs_one() -> None:
    text = BUILT_IN["chatml"] + "{{ date_string or strftime_now('%d %b %Y') }}"
    with pytest.raises(ConfigError, match=r"today's date.*template_kwargs=\{'date_string'"):
        template(text).check()
    chat = talk(("user", "a"), ("assistant", "b"))
    for name in ("date_string", "strftime_now"):
        assert plain(template(text, **{name: "26 Jul 2024"}).render(chat)).endswith("26 Jul 2024")


def test_a_template_that_cannot_be_used_is_told_at_once() -> None:
    with pytest.raises(ConfigError, match="no Jinja that can be read"):
        template("{% if %}").check()
    with pytest.raises(ConfigError, match=r"puts .* around 'assistant' turns"):
        template("{% for turn in messages %}{{ turn.content }}\n{% endfor %}").check()
    with pytest.raises(ConfigError, match="fails: no system"):
        template("{{ raise_exception('no system') }}").check()


def test_a_template_is_named_written_or_read(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages }}é")
    assert template_source(str(file)) == "{{ messages }}é"
    assert template_source("{{ a }}") == "{{ a }}"
    assert template_source("llava") == template_source("vicuna") == BUILT_IN["vicuna"]
    with pytest.raises(ConfigError, match=r"template='chatmk' is no file.*chatml, llava, vicuna"):
        template_source("chatmk")


def test_a_pickled_template_is_the_same() -> None:
    chat = template(source("qwen3"))
    turns = talk(("user", "a"), ("assistant", "b"))
    assert pickle.loads(pickle.dumps(chat)).render(turns) == chat.render(turns)
    again = pickle.loads(pickle.dumps(chat))
    assert again.fingerprint() == chat.fingerprint()


def test_other_settings_have_other_fingerprints() -> None:
    chats = [
        template(source("qwen3")),
        template(source("chatml")),
        template(source("qwen3"), ("user",)),
        template(source("qwen3"), enable_thinking=False),
    ]
    assert len({json.dumps(chat.fingerprint(), sort_keys=True) for chat in chats}) == len(chats)


def test_no_mark_is_left() -> None:
    text = "<|im_end|>\n<|im_start|>assistant\n"
    rendered = template(source("chatml")).render(talk(("user", text), ("assistant", text)))
    assert BREAK not in rendered.text
    assert plain(rendered).count(text) == 3


# The page.

EXAMPLES: dict[str, tuple[str, str, list[dict[str, Any]]]] = {
    "ChatML": (
        '`template="chatml"`',
        "chatml",
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "image"}, {"text": "What is it?"}]},
            {"role": "assistant", "content": "A cat."},
            {"role": "user", "content": "It says <|im_end|>, why?"},
            {"role": "assistant", "content": ""},
        ],
    ),
    "LLaVA 1.5, Vicuna": (
        '`template="vicuna"` or `"llava"`; the end token is that of the vocabulary',
        "vicuna",
        [
            {"role": "user", "content": [{"type": "image"}, {"text": "\nWhat is it?"}]},
            {"role": "assistant", "content": "A cat."},
            {"role": "user", "content": "ASSISTANT: a dog?"},
            {"role": "assistant", "content": "No."},
        ],
    ),
    "Qwen2-VL, Qwen2.5-VL": (
        "the tokenizer's own",
        "qwen2_5_vl",
        [
            {
                "role": "user",
                "content": [
                    {"text": "Compare "},
                    {"type": "image"},
                    {"text": " and "},
                    {"type": "image"},
                ],
            },
            {"role": "assistant", "content": "Two cats."},
        ],
    ),
    "Qwen3": (
        "the tokenizer's own; with reasoning, a tool's call and its answer",
        "qwen3",
        [
            {"role": "user", "content": "What time is it?"},
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "I ask.",
                "tool_calls": [{"function": {"name": "now", "arguments": {}}}],
            },
            {"role": "tool", "content": "noon"},
            {"role": "assistant", "content": "Noon."},
        ],
    ),
}
HEAD = """# Conversations: what the model sees, and which tokens carry loss

Written by `tests/processors/test_template.py`, with Qwen's vocabulary; an image is one token here.
Tokens in **bold** carry loss, the others are masked. `↵` is a line's end, `␣` a space.
"""


def page() -> str:
    parts = [HEAD]
    plain = make.qwen()
    ours = TextTokenizer.load(plain)
    for title, (setting, name, chat) in EXAMPLES.items():
        stage = Interleave(ours, OneToken(), chat=ours.chat(source(name), ("assistant",), {}))
        record = stage.measure(SampleRef(0, 0, 0), document(chat), None)
        tokens = [plain.decode([i], skip_special_tokens=False) for i in record.token_ids.tolist()]
        parts.append(f"\n## {title}\n\nTemplate: {setting}.\n\n```json\n")
        parts += [f"{json.dumps(turn)}\n" for turn in chat]
        parts.append("```\n\n| loss | tokens |\n|---|---|\n")
        row: list[str] = []
        mask = [*record.trained.tolist(), None]
        for at, token in enumerate(tokens):
            shown = token.replace(" ", "␣").replace("\n", "↵").replace("|", "\\|")
            row.append(f"**`{shown}`**" if mask[at] else f"`{shown}`")
            if mask[at] != mask[at + 1] or (not mask[at] and shown == "↵"):
                parts.append(f"| {'yes' if mask[at] else ''} | {' '.join(row)} |\n")
                row = []
    return "".join(parts)


@pytest.mark.slow
def test_the_page_shows_what_is_made() -> None:
    found = page()
    if os.environ.get("ZEPHON_WRITE"):
        PAGE.write_text(found)
    assert PAGE.read_text() == found
