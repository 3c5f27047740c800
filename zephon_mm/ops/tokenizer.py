"""Text to token ids, where a user's text is text: it can spell no control token.

Laws:
    1. `encode` never returns a special token, whatever the text spells and whatever kind of model
       the tokenizer has. A token that we use for control counts as special even if its file forgot.
    2. Two tokenizers with equal contents have equal fingerprints, wherever they are stored.
    3. Nothing is cut, padded or added: truncation, padding and start tokens in a file are off.
    4. A conversation is tokenised once, as a whole; of each token it is known where it begins.

Cost: that of the Rust `tokenizers` library, plus one set test per text. Workers get the tokenizer
as its JSON text and never import transformers, which costs up to a second; only a hub id does.

Imports: errors, processors.template. Used by: ops.interleave, ops.tokenize, builder.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from tokenizers import AddedToken, Tokenizer
from tokenizers.normalizers import Lowercase, Sequence

from zephon_mm.errors import ConfigError
from zephon_mm.processors.template import CONTROL, MEDIA, ChatTemplate

_EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
_PAD_NAMES = ("<|pad|>", "<pad>", "[PAD]")
_IMAGE_NAMES = (
    "<|image_pad|>",
    "<image>",
    "<|image|>",
    "<image_soft_token>",
    "<IMG_CONTEXT>",
    "[IMG]",
)
_VIDEO_NAMES = ("<|video_pad|>", "<video>", "<|video|>")
_IMAGE_BOUNDS = (
    ("<|vision_start|>", "<|vision_end|>"),
    ("<|begin_of_image|>", "<|end_of_image|>"),
    ("<|image_start|>", "<|image_end|>"),
    ("<start_of_image>", "<end_of_image>"),
    ("<img>", "</img>"),
)
# Characters that vocabularies lack: what they become is the "unknown" token, which text may give.
_UNKNOWN_PROBES = ("\U00010380", "\ua66e", "\u2d6f\u16a0")


class TextTokenizer:
    """A tokenizer with its control tokens resolved. Make one with `load`; it is picklable.

    Attributes:
        bos_ids: What goes in front of a document once; empty for most tokenizers.
        eos_id: The end-of-document token, or None.
        pad_id: The padding token, else the end token, else 0.
        image_id: The image placeholder, or None; `start_id` and `end_id` stand around a run of
            placeholders where the vocabulary has such tokens.
        video_id: The placeholder of videos; that of images where the vocabulary has no other.
        vocab_size: Ids are in [0, vocab_size).
        chat_template: The Jinja text that is stored with it, or None.
    """

    bos_ids: tuple[int, ...]
    eos_id: int | None
    pad_id: int
    image_id: int | None
    video_id: int | None
    start_id: int | None
    end_id: int | None
    vocab_size: int
    chat_template: str | None

    def __init__(
        self,
        tokenizer: Tokenizer,
        names: Mapping[str, Any],
        *,
        image_token: str | None = None,
        image_start: str | None = None,
        image_end: str | None = None,
        video_token: str | None = None,
        eos: bool | str = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._json: str | None = None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.eos_id = self._resolve_eos(names, eos)
        self.image_id = self._named(image_token, "image_token", self._first(_IMAGE_NAMES))
        video_id = self._first(_VIDEO_NAMES)
        self.video_id = self._named(video_token, "video_token", video_id)
        start_id, end_id = self._default_bounds()
        self.start_id = self._named(image_start, "image_start", start_id)
        self.end_id = self._named(image_end, "image_end", end_id)
        self.bos_ids = self._resolve_bos(names)
        tokenizer.post_processor = None  # not used from here on, and transformers adds empty ones
        pad = self._first((_content(names.get("pad_token")), *_PAD_NAMES))
        self.pad_id = next(i for i in (pad, self.eos_id, 0) if i is not None)
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        control = (self.eos_id, self.image_id, self.video_id, self.start_id, self.end_id)
        self._protect([*control, *self.bos_ids])
        if self.video_id is None:
            self.video_id = self.image_id
        self.chat_template = _default_template(names.get("chat_template"))
        self._texts = {
            "bos_token": self._text(self.bos_ids),
            "eos_token": self._text([self.eos_id]),
        }
        for name, token in names.items():
            if name.endswith("_token") and isinstance(token, str | Mapping):
                self._texts[name] = str(_content(token))
        self._marked: tuple[Tokenizer, dict[int, int]] | None = None

    @classmethod
    def load(
        cls,
        spec: Any,
        *,
        image_token: str | None = None,
        image_start: str | None = None,
        image_end: str | None = None,
        video_token: str | None = None,
        eos: bool | str = True,
        lowercase: bool = False,
    ) -> Self:
        """Return the tokenizer that `spec` names.

        Args:
            spec: A folder with tokenizer.json, such a file, a hub id, a fast tokenizer of
                transformers, or a `tokenizers.Tokenizer`. It is copied, never changed.
            image_token: The placeholder's name; None looks for the usual ones.
            image_start: The token before a run of placeholders; None looks for the usual ones.
            image_end: The token after it.
            video_token: The placeholder's name; None looks for the usual ones.
            eos: Whether an end token is needed, or its name.
            lowercase: Make texts lower case before all else.

        Raises:
            ConfigError: There is no such tokenizer, it has no fast backend, or it lacks a token.
        """
        tokenizer, names = _open(spec)
        if lowercase:
            others = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
            tokenizer.normalizer = Sequence([Lowercase(), *others])
        return cls(
            tokenizer,
            names,
            image_token=image_token,
            image_start=image_start,
            image_end=image_end,
            video_token=video_token,
            eos=eos,
        )

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without control tokens; lone surrogates become U+FFFD."""
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        except TypeError:  # how tokenizers reports a string that is not valid Unicode
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        if self._special.isdisjoint(ids):
            return ids
        return self._respell(text, ids, encoding.offsets)

    def control(self, text: str) -> list[int]:
        """Return the ids of a text that the program wrote: `<...>` is one token if there is one."""
        ids: list[int] = []
        for piece in filter(None, re.split(r"(<[^<>]*>)", text)):
            known = self._tokenizer.token_to_id(piece)
            ids += self.encode(piece) if known is None else [known]
        return ids

    def encode_marked(self, text: str) -> tuple[list[int], list[int]]:
        """Return the ids of a conversation, -1 for each image or video, and where each begins.

        Args:
            text: As in `processors.template.Rendered`.
        """
        self._marked = self._marked or self._with_marks()
        tokenizer, known = self._marked
        encoding = tokenizer.encode(text, add_special_tokens=False)
        ids, offsets = encoding.ids, encoding.offsets
        starts = [start for start, _ in offsets]
        odd = [at for at, token in enumerate(ids) if token in known or token in self._special]
        for at in reversed(odd):
            token, (start, stop) = ids[at], offsets[at]
            if token in known:
                found = [known[token]]
            else:  # text that spells a special token, in a model that looks whole words up
                found = self._respell(text[start:stop], [token], [(0, stop - start)])
            ids[at : at + 1] = found
            starts[at : at + 1] = [start] * len(found)
        return ids, starts

    def chat(
        self, source: str, train_on: tuple[str, ...], variables: Mapping[str, Any]
    ) -> ChatTemplate:
        """Return a template that knows this tokenizer's control tokens; arguments as there."""
        start, image, video, end = (
            re.escape(self._text([token]))
            for token in (self.start_id, self.image_id, self.video_id, self.end_id)
        )
        placeholder = f"(?:{start})?(?:{image}|{video})(?:{end})?" if image else "(?!)"
        control = tuple(self._text([token]) for token in sorted(self._special))
        return ChatTemplate(source, control, placeholder, {**self._texts, **variables}, train_on)

    def require_image_id(self) -> int:
        """Return the image placeholder.

        Raises:
            ConfigError: The tokenizer has none.
        """
        if self.image_id is None:
            raise ConfigError(
                f"the tokenizer has no image token: none of {', '.join(_IMAGE_NAMES)} is in its "
                "vocabulary. Name one of its tokens with image_token=, for example an unused "
                "reserved token, or add one to the tokenizer."
            )
        return self.image_id

    def fingerprint(self) -> str:
        """Return 32 hex digits of the contents and the control tokens, never of the path."""
        ids = (self.bos_ids, self.eos_id, self.pad_id, self.image_id, self.start_id, self.end_id)
        text = f"{ids}\n{self._to_json()}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tokenizer": None, "_marked": None, "_json": self._to_json()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tokenizer = Tokenizer.from_str(state["_json"])
        self._tokenizer.encode_special_tokens = True  # not part of the JSON

    def _to_json(self) -> str:
        if self._json is None:
            self._json = self._tokenizer.to_str()
        return self._json

    def _text(self, ids: Iterable[int | None]) -> str:
        return "".join(str(self._tokenizer.id_to_token(one)) for one in ids if one is not None)

    def _with_marks(self) -> tuple[Tokenizer, dict[int, int]]:
        """Return a tokenizer that takes special tokens between marks only, and its id -> ours.

        It shares the model, which is nearly all of it.
        """
        marked = Tokenizer(self._tokenizer.model)
        marked.normalizer = self._tokenizer.normalizer
        marked.pre_tokenizer = self._tokenizer.pre_tokenizer
        known = {MEDIA: -1}
        tokens = [AddedToken(MEDIA, normalized=False)]
        for token, added in self._tokenizer.get_added_tokens_decoder().items():
            name = f"{CONTROL}{added.content}{CONTROL}" if added.special else added.content
            known[name] = token
            flags = {flag: getattr(added, flag) for flag in ("lstrip", "rstrip", "normalized")}
            tokens.append(AddedToken(name, single_word=added.single_word, **flags))
        marked.add_tokens(tokens)
        return marked, {int(marked.token_to_id(name)): at for name, at in known.items()}  # type: ignore[arg-type]  # each was added

    def _first(self, names: Iterable[str | None]) -> int | None:
        found = (self._tokenizer.token_to_id(name) for name in names if name)
        return next((i for i in found if i is not None), None)

    def _named(self, name: str | None, option: str, default: int | None) -> int | None:
        if name is None:
            return default
        found: int | None = self._tokenizer.token_to_id(name)
        if found is None:
            raise ConfigError(
                f"{option}={name!r} is not in the tokenizer's vocabulary. Name a token that it "
                "has, or add this one to the tokenizer and resize the model's embeddings."
            )
        return found

    def _default_bounds(self) -> tuple[int | None, int | None]:
        for pair in _IMAGE_BOUNDS:
            start, end = (self._tokenizer.token_to_id(name) for name in pair)
            if start is not None and end is not None and self.image_id not in (start, end):
                return start, end
        return None, None

    def _resolve_eos(self, names: Mapping[str, Any], eos: bool | str) -> int | None:
        if isinstance(eos, str):
            return self._named(eos, "eos", None)
        known = names.get("eos_token_id")
        found = self._first((_content(names.get("eos_token")),))
        if found is None:
            found = known if isinstance(known, int) else self._first(_EOS_NAMES)
        if found is None and eos:
            raise ConfigError(
                "the tokenizer has no end-of-document token: no eos_token in its configuration and "
                f"none of {', '.join(_EOS_NAMES)}. Name one with eos='...', or set eos=False."
            )
        return found

    def _resolve_bos(self, names: Mapping[str, Any]) -> tuple[int, ...]:
        """Return what the tokenizer itself would put in front of a text."""
        for probe in ("a", "0", "."):
            plain = self._tokenizer.encode(probe, add_special_tokens=False).ids
            full = self._tokenizer.encode(probe, add_special_tokens=True).ids
            starts = range(len(full) - len(plain) + 1)
            at = next((i for i in starts if full[i : i + len(plain)] == plain), 0)
            if plain and at:
                return tuple(full[:at])
        bos = self._first((_content(names.get("bos_token")),))
        return (bos,) if names.get("add_bos_token") is True and bos is not None else ()

    def _protect(self, used: Iterable[int | None]) -> None:
        """Make every control token special, and note which ids a text may never give."""
        control = {i for i in used if i is not None}
        contents = [str(self._tokenizer.id_to_token(i)) for i in sorted(control)]
        self._tokenizer.add_special_tokens(
            [AddedToken(content, special=True, normalized=False) for content in contents]
        )
        self._tokenizer.encode_special_tokens = True
        added = self._tokenizer.get_added_tokens_decoder().items()
        unknown = {
            i
            for probe in _UNKNOWN_PROBES
            for i in self._tokenizer.encode(probe, add_special_tokens=False).ids
        }
        flagged = {i for i, token in added if token.special}
        self._special = frozenset((flagged - unknown) | control)

    def _respell(self, text: str, ids: list[int], offsets: list[tuple[int, int]]) -> list[int]:
        """Replace control tokens by those of the halves of their text.

        Needed for models that look whole words up (Unigram, WordPiece, WordLevel): there
        `encode_special_tokens` hands the literal to the model, which finds the token again.
        """
        result: list[int] = []
        for token, (start, stop) in zip(ids, offsets, strict=True):
            if token not in self._special:
                result.append(token)
            elif stop - start > 1:
                middle = (start + stop) // 2
                result += self.encode(text[start:middle]) + self.encode(text[middle:stop])
        return result


def _content(token: Any) -> str | None:
    """Return the text of a token as configurations write it: a string, a mapping, an object."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return None if token is None else str(token)


def _default_template(value: Any) -> str | None:
    """Return the template for all uses, of one or several with names."""
    if isinstance(value, list):
        value = {one["name"]: one["template"] for one in value}
    return value.get("default") if isinstance(value, Mapping) else value


def _open(spec: Any) -> tuple[Tokenizer, Mapping[str, Any]]:
    """Return an own copy of the tokenizer and what its configuration says of special tokens."""
    if isinstance(spec, Tokenizer):
        return Tokenizer.from_str(spec.to_str()), {}
    if isinstance(spec, str | Path):
        path = Path(spec).expanduser()
        file = path / "tokenizer.json" if path.is_dir() else path
        if file.is_file():
            return _read(file), _read_names(file.parent)
        local = isinstance(spec, Path) or ("/" in spec and path.parent.is_dir())
        if not path.exists() and (local or not re.fullmatch(r"([\w.-]+/)?[\w.-]+", str(spec))):
            raise ConfigError(
                f"tokenizer {str(spec)!r}: there is no folder with tokenizer.json, nor such a "
                "file, and a hub id has the form owner/name. Check the path."
            )
        return _open(_from_hub(str(spec)))
    backend = getattr(spec, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ConfigError(
            f"tokenizer {type(spec).__name__} has no fast backend. Use a folder with "
            "tokenizer.json, a hub id, a fast tokenizer of transformers, or a tokenizers.Tokenizer."
        )
    fields = ("eos_token", "bos_token", "pad_token", "unk_token", "add_bos_token", "chat_template")
    names = {field: getattr(spec, field, None) for field in fields}
    return Tokenizer.from_str(backend.to_str()), names


def _read(file: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing narrower for a bad file
        raise ConfigError(
            f"{file} is not a tokenizer that the tokenizers library can read: {error}. Name a "
            "folder with a tokenizer.json, or such a file."
        ) from error


def _read_names(folder: Path) -> dict[str, Any]:
    names: dict[str, Any] = {}
    configurations = ("config.json", "special_tokens_map.json", "tokenizer_config.json")
    for name in (*configurations, "chat_template.json"):
        file = folder / name
        if file.is_file():
            names.update(json.loads(file.read_text(encoding="utf-8")))
    if (file := folder / "chat_template.jinja").is_file():
        names["chat_template"] = file.read_text(encoding="utf-8")
    return names


def _from_hub(name: str) -> Any:
    # The one lazy import: transformers costs up to a second and is needed for hub ids only.
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"tokenizer {name!r} is neither a folder with tokenizer.json, nor such a file, "
            f"nor a hub id that can be loaded: {error}"
        ) from error
