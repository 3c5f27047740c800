"""Chat templates: a conversation becomes one text whose control tokens, media and loss are known.

    rendering    By Jinja as `transformers` does it: sandboxed, trim_blocks, lstrip_blocks, `break`,
                 `tojson`, `raise_exception`, `{% generation %}`. `content` of text alone is a
                 string where the template takes one, else a list of typed parts; neighbouring
                 texts are joined.
    media        In lists the template's own placeholders, with the tokens around them, become
                 marks; where it knows no such parts in a role, a mark stands for each in a string.
                 It is as many as the conversation has.
    loss         A turn of a role in `train_on` is trained from behind its header to the end of its
                 closing control token, that too, and with all that the template writes in between:
                 tool calls, reasoning. Header and closing are found by rendering; the header of
                 "assistant" is what `add_generation_prompt` adds. So an empty answer trains its
                 closing alone, and a first turn of any role is as good as a later one if the
                 template takes it. `{% generation %}` blocks win over the header of "assistant".

Laws (tests/processors/test_template.py; law 3, test_jinja.py):
    1. Text that spells a special token, a header or a closing is broken by a mark before rendering
       and mended after: it stays text, in content, fields and tools alike.
    2. As many turns of a trained role are found as there are messages of it, or it is refused.
    3. Without such text, the result is what `apply_chat_template` gives.
    4. Nothing depends on the day: a template that asks for the date is refused.
    5. No tools, and no calls of them, are left out: a template that does not write them is refused.

Marks are noncharacters, U+FDD0 and up, which Unicode keeps for such use inside a program; those in
the data become U+FFFD.

Cost: about 20 us a message. Imports: errors, records, processors.chat, processors.jinja. Used by:
ops.tokenizer, ops.interleave, builder.
"""

import hashlib
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from zephon_mm.errors import ConfigError, SampleError
from zephon_mm.processors.chat import ROLES, well_formed
from zephon_mm.records import Document, Message, Text

BREAK, OPEN, CLOSE, CONTROL, MEDIA = "\ufdd0\ufdd1\ufdd2\ufdd3\ufdd4"
"""Where text may not join; where a trained stretch begins, ends; around a control token; media."""

_NONCHARACTERS = re.compile("[\ufdd0-\ufdef]")
_VICUNA = """\
{{ bos_token }}{% if messages[0].role == 'system' %}{{ messages[0].content }}\
{% set turns = messages[1:] %}{% else %}A chat between a curious human and an artificial \
intelligence assistant. The assistant gives helpful, detailed, and polite answers to the human's \
questions.{% set turns = messages %}{% endif %} {% for turn in turns %}\
{% if turn.role == 'user' %}USER: {{ turn.content }} {% elif turn.role == 'assistant' %}\
ASSISTANT: {{ turn.content }}{{ eos_token }}{% else %}\
{{ raise_exception('this template knows no role ' + turn.role) }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}ASSISTANT:{% endif %}"""
BUILT_IN = {
    "chatml": "{{ bos_token }}{% for turn in messages %}<|im_start|>{{ turn.role }}\n"
    "{{ turn.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "llava": _VICUNA,
    "vicuna": _VICUNA,
}
"""Templates by name; LLaVA 1.5's is Vicuna's."""


class Rendered(NamedTuple):
    """A conversation as one text.

    In `text` each control token stands between two `CONTROL`, and a `MEDIA` for each image and
    video. `trained` are half-open ranges of its characters.
    """

    text: str
    trained: tuple[tuple[int, int], ...]


class _Turn(NamedTuple):
    """How turns of a role begin and end; `opener` is the header's first control token, or ""."""

    role: str
    header: str
    closing: str
    opener: str

    def marked(self, raw: str, roles: Sequence[str]) -> str:
        """Return the text with marks around what is trained of this role."""
        _, header, closing, opener = map(re.escape, self)
        inside = f"(?:(?!{opener}).)*?" if opener else ".*?"  # no other turn closes this one
        pattern = re.compile(f"({header})({inside}{closing})", re.DOTALL)
        raw, found = pattern.subn(f"\\1{OPEN}\\2{CLOSE}", raw)
        if found == roles.count(self.role):
            return raw
        what = f"{found} turns from {self.header!r} to {self.closing!r}, the sample has the turns"
        message = f"the chat template wrote {what} {roles}. Give a template= that takes them."
        raise SampleError("turn_mismatch", message)


def template_source(template: str) -> str:
    """Return the Jinja text that a setting stands for: a built-in's name, a file, or itself.

    Raises:
        ConfigError: It is none of these.
    """
    if template in BUILT_IN or "{" in template:
        return BUILT_IN.get(template, template)
    if not os.path.isfile(template):
        known = ", ".join(BUILT_IN)
        raise ConfigError(f"template={template!r} is no file, no Jinja text, and none of {known}")
    with open(template, encoding="utf-8") as file:
        return file.read()


@dataclass(frozen=True)
class ChatTemplate:
    """Renders conversations; picklable.

    Args:
        source: Jinja text.
        control: The special tokens, as text.
        placeholder: Pattern of what stands for an image or video, with the tokens around it.
        variables: What the template may use besides messages and tools: `bos_token` and the like,
            and the user's; a text `strftime_now` is what it gets when it asks for the date.
        train_on: Roles that carry loss; ("all",) for everything but media.
    """

    source: str
    control: tuple[str, ...]
    placeholder: str
    variables: Mapping[str, Any]
    train_on: tuple[str, ...] = ("assistant",)

    def __post_init__(self) -> None:
        roles = sorted(set(ROLES.values()))
        named = sorted(self.train_on)
        if named != ["all"] and (not named or named != sorted({*named} & {*roles})):
            raise ConfigError(
                f"train_on={self.train_on} must be roles of {roles}, each once, or 'all'"
            )

    def check(self) -> None:
        """Raise a ConfigError if no conversation could be rendered."""
        try:
            _ = self._turns
        except SampleError as error:
            raise ConfigError(f"{error.message}. Set another template=.") from error

    def render(self, document: Document) -> Rendered:
        """Return a conversation as text.

        Raises:
            SampleError: The template refuses it, or knows no tools and there are some (`template`),
                or it writes another number of media (`media_mismatch`) or of trained turns
                (`turn_mismatch`).
            ConfigError: The template cannot be used at all.
        """
        fields = [name for message in document.messages for name, value in message.fields if value]
        for name in ("tools", "tool_calls"):
            given = document.tools if name == "tools" else name in fields
            if given and name not in self.source:
                message = f"the chat template writes no {name}, and the sample has some. Give "
                raise SampleError("template", f"{message}a template= that does, or drop them.")
        messages = [self._message(message) for message in document.messages]
        raw = self._write(messages, self._broken(document.tools) or None)
        if raw.count(MEDIA) != len(document.media):
            what = f"{raw.count(MEDIA)} of {len(document.media)} images and videos"
            message = f"the chat template wrote {what}. Give a template= that knows them there."
            raise SampleError("media_mismatch", message)
        if "assistant" not in self.train_on:
            raw = _without_edges(raw)
        for turn in self._turns:
            raw = turn.marked(raw, [message.role for message in document.messages])
        raw = self._special.sub(f"{CONTROL}\\g<0>{CONTROL}", raw).replace(BREAK, "")
        *edges, size = itertools.accumulate(map(len, re.split(f"[{OPEN}{CLOSE}]", raw)))
        if self.train_on == ("all",):
            edges = [0, size]
        return Rendered(_without_edges(raw), tuple(zip(edges[::2], edges[1::2], strict=True)))

    def fingerprint(self) -> Mapping[str, Any]:
        """Return all that the text depends on besides the special tokens, JSON-serialisable."""
        source = hashlib.blake2b(self.source.encode(), digest_size=16).hexdigest()
        return {"template": source, "variables": self.variables, "train_on": self.train_on}

    @cached_property
    def _special(self) -> re.Pattern[str]:
        """Matches any special token of two characters or more, the longest."""
        names = sorted((name for name in self.control if len(name) > 1), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names)) or "(?!)")

    @cached_property
    def _breakable(self) -> re.Pattern[str]:
        """Matches all that the data may not spell."""
        words = [word.strip() for turn in self._turns for word in (turn.header, turn.closing)]
        plain = [re.escape(word) for word in words if not self._special.search(word)]
        return re.compile("|".join([*plain, self._special.pattern]))

    def _split(self, text: str) -> str:
        return self._breakable.sub(lambda found: f"{found[0][0]}{BREAK}{found[0][1:]}", text)

    def _broken(self, value: Any) -> Any:
        """Return a JSON value whose texts and names spell nothing that is control."""
        if isinstance(value, str):
            return self._split(_clean(value))
        if isinstance(value, Mapping):
            return {self._broken(name): self._broken(one) for name, one in value.items()}
        return list(map(self._broken, value)) if isinstance(value, list | tuple) else value

    def _message(self, message: Message) -> dict[str, Any]:
        """Return a message as the template takes it."""
        segments = message.segments
        text = "".join(_clean(one.text) if isinstance(one, Text) else MEDIA for one in segments)
        kinds = [type(one).__name__.lower() for one in segments if not isinstance(one, Text)]
        fields = {name: self._broken(value) for name, value in message.fields}
        content = self._content(self._split(text), [(message.role, kind) for kind in kinds])
        return {"role": self._broken(message.role), "content": content, **fields}

    def _content(self, text: str, media: Sequence[tuple[str, str]] = ()) -> Any:
        """Return a text, or typed parts where the template takes no text, or such media in parts.

        Args:
            text: With a mark for each of the media.
            media: The role and the kind of each.
        """
        if self._takes_text and not (media and self._takes_parts.issuperset(media)):
            return text
        kinds = iter([kind for _, kind in media])
        parts = [
            {"type": next(kinds)} if part == MEDIA else {"type": "text", "text": part}
            for part in re.split(f"({MEDIA})", text)
            if part
        ]
        return parts or [{"type": "text", "text": ""}]

    @cached_property
    def _takes_text(self) -> bool:
        """Whether content may be a string."""
        return self._takes(_word(0), _word(0))

    @cached_property
    def _takes_parts(self) -> set[tuple[str, str]]:
        """Roles, and kinds of media that the template writes where they are parts of such a turn.

        It may count them (`add_vision_id`) or cut the text around them, which it cannot with marks.
        """
        text = {"type": "text", "text": _word(0)}
        return {
            (role, kind)
            for role, kind in itertools.product(ROLES.values(), ("image", "video"))
            if self._takes([{"type": kind}, text], MEDIA, _word(0), role=role)
        }

    def _takes(self, content: Any, *wanted: str, role: str = "user") -> bool:
        """Whether all that is wanted is written for a content."""
        before = [] if role == "user" else [{"role": "user", "content": self._content(_word(1))}]
        try:
            written = self._write([*before, {"role": role, "content": content}])
        except SampleError:
            return False
        return all(one in written for one in wanted)

    def _write(self, messages: Sequence[Any], tools: Any = None, *, prompt: bool = False) -> str:
        from zephon_mm.processors.jinja import rendered  # loads Jinja, which captions do not need

        names = {**self.variables, "strftime_now": self._now, "messages": messages, "tools": tools}
        names["add_generation_prompt"] = prompt
        return re.sub(self.placeholder, MEDIA, rendered(self.source, (OPEN, CLOSE), names))

    def _now(self, _format: str) -> str:
        if "strftime_now" in self.variables:
            return str(self.variables["strftime_now"])
        raise ConfigError(
            "the chat template asks for today's date, on which the data would depend. Give it one: "
            "template_kwargs={'date_string': '26 Jul 2024'}, or 'strftime_now' for 'date_string'."
        )

    @cached_property
    def _turns(self) -> list[_Turn]:
        """How the turns of each trained role that has no `{% generation %}` begin and end."""
        blocks = {"assistant"} if OPEN in self._probe("user", "assistant") else set()
        return [self._turn(role) for role in self.train_on if role not in {"all", *blocks}]

    def _turn(self, role: str) -> _Turn:
        before = ["user"] if role == "assistant" else ["user", "assistant"]
        last, word = _word(len(before) - 1), _word(len(before))
        after = "user" if role == "assistant" else "assistant"
        base, full = self._probe(*before), self._probe(*before, role)
        more, prompt = self._probe(*before, role, after), self._probe(*before, prompt=True)
        start = full.index(last) + len(last)  # in front of it, what follows may make a difference
        start += len(_shared(base.partition(last)[2], full[start:]))
        inside = (one for one in self._special.finditer(full) if one.start() < start < one.end())
        start = next((one.start() for one in inside), start)
        begins = [full.partition(word)[0][start:], more.partition(word)[0][start:]]
        if role == "assistant":
            begins.append(prompt[start:])
            if prompt == base:  # it has no prompt: the header is what parts question and answer
                begins = [full.partition(_word(0))[2].partition(word)[0]]
        header = _shared(*begins).rstrip(" ")  # a space belongs to the word behind it
        closing = _shared(full.partition(word)[2], more.partition(word)[2])
        if end := re.search(f"(?:{self._special.pattern})+", closing):
            closing = closing[: end.end()]
        if min(len(header.strip()), len(closing.strip())) < 2:
            raise ConfigError(
                f"the chat template puts {header!r} and {closing!r} around {role!r} turns, which "
                "text could spell. Set a template= with {% generation %}, or train_on='all'."
            )
        opener = self._special.search(header)
        return _Turn(role, header, closing, opener[0] if opener else "")

    def _probe(self, *roles: str, prompt: bool = False) -> str:
        """Return what the template writes for turns of one word each."""
        words = (self._content(_word(number)) for number in range(len(roles)))
        turns = [{"role": r, "content": word} for r, word in zip(roles, words, strict=True)]
        return self._write(turns, prompt=prompt)


def _shared(*texts: str) -> str:
    """Return what texts begin with alike."""
    alike = itertools.takewhile(lambda one: len(set(one)) == 1, zip(*texts, strict=False))
    return "".join(one[0] for one in alike)


def _word(number: int) -> str:
    return f"zq{number}qz"


def _clean(text: str) -> str:
    return _NONCHARACTERS.sub("\ufffd", well_formed(text))


def _without_edges(raw: str) -> str:
    return re.sub(f"[{OPEN}{CLOSE}]", "", raw)
