"""Conversations as datasets hold them: lists of turns, with media in them or beside them.

    messages         turns of `role` and `content`: a string, or a list of parts {"type": "text" |
                     "image" | "image_url" | "video", ...}, or of one key that says the type
                     (Qwen); other keys are kept for the template
    conversations    turns of `from` and `value` (LLaVA, Qwen, ShareGPT); the value of one of
                     "function_call" is the JSON of the assistant's call, or of a list of them
    texts            turns of `user` and `assistant` at once (FineVision)

Media are those of the parts; where a part has none, the next of the sample's own. In a content that
is a string, `<image>` and `<video>` are tags. By kind, images as videos:

    the conversation has parts of the kind    tags are text; parts without media take all of the
                                              sample's, and are as many
    it has none, the sample has media         as many tags as media: each takes the next;
                                              no tag at all: all come first in the first user turn
    the sample has none either                tags are text

Any other number is `media_mismatch`. A tool's turn counts like any other.

Laws (tests/processors/test_chat.py):
    1. Each image and video is in the messages once; those of the sample in order.
    2. Text is what was stored, less the tags that were replaced; lone surrogates become U+FFFD.
    3. What is not known, a role, a type, a count, is refused by name.

Imports: errors, records. Used by: processors.documents, processors.template.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zephon_mm.errors import SampleError
from zephon_mm.records import Blob, FileBlob, Image, Message, Segment, Text, Video

ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    **{"human": "user", "gpt": "assistant", "function": "tool", "observation": "tool"},
}
"""Role in the data -> role for the template."""

MediaKind = type[Image] | type[Video]
Faults = list[str]

_PARTS: dict[str, MediaKind] = {"image": Image, "image_url": Image, "video": Video}
_TURN_KEYS = ("role", "from", "content", "value")


def messages_of(
    turns: Any, media: Mapping[MediaKind, Sequence[Segment]], faults: Faults
) -> tuple[Message, ...]:
    """Return the turns of a conversation with all media in place.

    Args:
        turns: As stored, in one of the layouts.
        media: The sample's own images and videos, in order.
        faults: Gets the reason where a part's own media is empty.

    Raises:
        SampleError: `empty_document`, `bad_turn`, `bad_role`, `bad_part`, `media_mismatch`.
    """
    if not isinstance(turns or [], list | tuple):
        found = f"{type(turns).__name__} {repr(turns)[:80]}"
        raise SampleError("bad_turn", f"the conversation is the {found}, expected a list of turns")
    told = [one for turn in turns or () for one in _told(turn)]
    if not told:
        raise SampleError(
            "empty_document", "the conversation has no turns: its field is empty or missing"
        )
    roles = [role for role, _, _ in told]
    pieces = [
        (number, piece)
        for number, (_, content, _) in enumerate(told)
        for piece in _pieces(content, faults)
    ]
    for kind, given in media.items():
        pieces = _placed(kind, given, pieces, roles)
    segments: list[list[Any]] = [[] for _ in told]
    for number, piece in pieces:
        segment = Text(piece) if isinstance(piece, str) else piece
        segments[number] += [segment] if segment != Text("") else []
    return tuple(
        Message(role, tuple(found), fields)
        for (role, _, fields), found in zip(told, segments, strict=True)
    )


def tools_of(value: Any, name: str = "tools") -> tuple[Any, ...]:
    """Return a conversation's functions, or calls of them: a list, or the JSON text of one.

    Raises:
        SampleError: `bad_tools`.
    """
    try:
        found = json.loads(value) if isinstance(value, str) and value else value or []
    except ValueError as error:
        raise SampleError("bad_tools", f"`{name}` is no JSON: {error}") from None
    if isinstance(found, list):
        return tuple(found)
    raise SampleError("bad_tools", f"`{name}` is {type(found).__name__}, expected a list")


def add_media(value: Any, kind: MediaKind, found: list[Any], faults: Faults) -> None:
    """Append an image or video, or the reason why it is none.

    Raises:
        SampleError: `image_url`, `bad_field`.
    """
    if value is None:
        faults.append("no_image")
    elif isinstance(value, FileBlob) and value.size == 0:
        faults.append("empty_image")
    elif isinstance(value, Blob):
        found.append(kind(value))
    elif isinstance(value, str) and "://" in value[:16]:
        raise SampleError("image_url", f"the image {value[:200]!r} is a URL. Download the images.")
    else:
        name = kind.__name__.lower()
        raise SampleError(
            "bad_field",
            f"found {type(value).__name__} as an {name}, expected the bytes of an encoded {name}",
        )


def well_formed(text: str) -> str:
    """Return the text with lone surrogates, which no encoder takes, as U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _told(turn: Any) -> Iterator[tuple[str, Any, tuple[tuple[str, Any], ...]]]:
    """Yield (role, content, fields) of a turn; one of FineVision is two."""
    found = {k: v for k, v in turn.items() if v is not None} if isinstance(turn, Mapping) else {}
    role = found.get("role", found.get("from"))
    content = found.get("content", found.get("value", ""))
    if known := ROLES.get(str(role)):
        yield known, content, tuple(item for item in found.items() if item[0] not in _TURN_KEYS)
    elif role == "function_call":
        calls = tools_of(content if str(content).startswith("[") else f"[{content}]", role)
        yield "assistant", "", (("tool_calls", [{"function": call} for call in calls]),)
    elif role is not None:
        names = ", ".join((*ROLES, "function_call"))
        raise SampleError("bad_role", f"found a turn of {role!r}, expected one of {names}")
    elif "user" in found or "assistant" in found:
        yield from ((name, found[name], ()) for name in ("user", "assistant") if name in found)
    else:
        raise SampleError(
            "bad_turn",
            f"found a turn {repr(turn)[:80]}, expected role and content, from and value, or user "
            "and assistant",
        )


def _pieces(content: Any, faults: Faults) -> list[Any]:
    """Return what a turn's content holds: `str` may have tags; a kind waits for its media."""
    if isinstance(content, str):
        return [well_formed(content)]
    pieces: list[Any] = []
    for part in content if isinstance(content, list) else [content]:
        told = part if isinstance(part, Mapping) else {"text": part}
        told = {name: value for name, value in told.items() if value is not None}
        kind = str(told.get("type", next(iter(told)) if len(told) == 1 else None))
        value = told.get(kind)
        if kind == "text" and isinstance(value, str):
            pieces.append(Text(well_formed(value)))
        elif kind in _PARTS:
            value = value.get("url") if isinstance(value, Mapping) else value
            if value is None:
                pieces.append(_PARTS[kind])
            else:
                add_media(value, _PARTS[kind], pieces, faults)
        else:
            raise SampleError(
                "bad_part",
                f"found content with {repr(part)[:80]}, expected texts, or parts with a type of "
                f"text, {', '.join(_PARTS)}",
            )
    return pieces


def _placed(
    kind: MediaKind, given: Sequence[Segment], pieces: list[tuple[int, Any]], roles: Sequence[str]
) -> list[tuple[int, Any]]:
    """Return (turn, piece) with the sample's media of a kind where they belong."""
    name = kind.__name__.lower()
    what, tag = f"{name} parts without one of their own", f"<{name}>"
    if given and not any(one is kind or isinstance(one, kind) for _, one in pieces):
        what = f"tags {tag}"
        pieces = [
            (turn, kind if one == tag else one)
            for turn, piece in pieces
            for one in (re.split(f"({tag})", piece) if isinstance(piece, str) else [piece])
        ]
        if not any(one is kind for _, one in pieces) and "user" in roles:
            pieces = [(roles.index("user"), kind)] * len(given) + pieces
    slots = sum(one is kind for _, one in pieces)
    if slots != len(given):
        raise SampleError(
            "media_mismatch",
            f"found {slots} {what} and {len(given)} {name}s in the sample's fields, expected as "
            f"many: mend the sample. Without a tag, {name}s come first in the first user turn.",
        )
    rest = iter(given)
    return [(turn, next(rest) if one is kind else one) for turn, one in pieces]
