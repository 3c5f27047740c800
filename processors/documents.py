"""Schemas: how the fields of a stored sample become a document, an ordered list of segments.

    caption      one image and one text:  `jpg jpeg png webp ... image images`, and
                 `txt text caption texts`; the image comes first. Of several fields the first in
                 the order of `IMAGE_FIELDS` or `TEXT_FIELDS` is taken. A caption may also stand
                 inside a parsed `json` member.
    interleaved  parallel lists `images` and `texts`: each slot holds an image or a text, the other
                 list holds null there (as in OBELICS). They may stand inside `json` as well.
    text         one text, no image.
    chat         a conversation: `messages`, `conversations`, or `texts` of user and assistant, with
                 the sample's own images and videos; `tools` are its functions, a text `system` is
                 its first turn. processors.chat says what turns may be and where media go. It is
                 never kept without one of its images: they are in one field, its videos in one,
                 and one with others, such as `0.jpg` and `1.jpg`, is refused (`bad_field`).

Beside them `loss_weight` may be a number, the document's, or a list, one for each of its images and
videos (see `records.Image`).

OBELICS is `interleaved`: a reader finds the local copies of its URLs (`image_map=`), and a sample
with a URL that has none is skipped and counted (`image_url`).

`boxes` and `points` mark things in the images, as `records.Image` says, also inside `json`: a list
for each image in the order of the document, null where it has none; for one image its list may
stand alone, `[[left, top, right, bottom], ...]`.

Any other layout takes a function: `schema=lambda sample: Document((Text(sample["alt"]),))`; it may
return None to drop a sample. Other fields are ignored.

Laws (tests/processors/test_documents.py):
    1. Every image and every non-empty text of the schema's fields is in the document, once, in
       order; text is what was stored, with lone surrogates as U+FFFD.
    2. What is missing is a countable reason, never a shorter document in silence: `no_image`,
       `no_text`, `empty_image` (0 bytes), `empty_text` (""). White space is text.
    3. Each image has its own boxes and points; what cannot be dealt to the images is `bad_field`.

Cost: 2 us a sample. Imports: errors, records, protocols, processors.chat. Used by: the engine's
tasks, io.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from zephon_mm.errors import ConfigError, DatasetError, SampleError
from zephon_mm.processors.chat import Faults, add_media, messages_of, tools_of, well_formed
from zephon_mm.protocols import Sample
from zephon_mm.records import Document, FileBlob, Image, RowBlob, Segment, Text, Video

SchemaName = Literal["caption", "interleaved", "text", "chat"]
Schema = SchemaName | Callable[[Sample], Document | None]
Missing = Literal["skip", "error", "keep"]

IMAGE_FIELDS = (
    *("jpg", "jpeg", "png", "webp", "avif", "gif", "bmp", "tif", "tiff", "jp2"),
    *("image", "images"),
)
VIDEO_FIELDS = ("mp4", "webm", "mkv", "mov", "avi", "video", "videos")
TEXT_FIELDS = ("txt", "text", "caption", "texts")
CHAT_FIELDS = ("messages", "conversations", "texts")


def schema_of(fields: Iterable[str]) -> SchemaName:
    """Return the schema that field names tell.

    Give it the fields of the whole dataset: a sample that lacks its image has a caption's fields
    less one, which alone would look like a text.

    Raises:
        SampleError: `unknown_schema`, with the fields that were found.
    """
    names = set(fields)
    if not names.isdisjoint(("messages", "conversations", "texts/assistant")):
        return "chat"
    if "images" in names and "texts" in names:
        return "interleaved"
    if not names.isdisjoint((*IMAGE_FIELDS, *VIDEO_FIELDS)):
        return "caption"
    if not names.isdisjoint(TEXT_FIELDS):
        return "text"
    raise SampleError(
        "unknown_schema",
        f"found the fields {_listed(names)}, expected an image ({' '.join(IMAGE_FIELDS)}), a video "
        f"({' '.join(VIDEO_FIELDS)}) or a text ({' '.join(TEXT_FIELDS)}): rename a field, or give "
        f"the dataset a function, schema=my_function(sample) -> Document",
    )


def to_document(
    sample: Sample, schema: str | Schema | None = None, missing: str | Missing = "skip"
) -> Document | None:
    """Return the document that a sample holds; None when a schema function drops it.

    Args:
        sample: Field name -> value; images are blobs.
        schema: "caption", "interleaved", "text", "chat", or a function of the sample. None takes
            the schema that this sample's own fields tell (see `schema_of`).
        missing: What an absent or empty image or text does. "skip": the sample is skipped and
            counted by reason. "error": the run stops. "keep": the document has what is there.

    Raises:
        SampleError: `no_image`, `no_text`, `empty_image`, `empty_text` with "skip";
            `empty_document`, `bad_interleaving`, `bad_field`, `bad_weight`, `unknown_schema`, and
            what processors.chat refuses, always.
        DatasetError: Something is missing, with "error".
        ConfigError: No such schema or policy, or a schema function returned something else.
    """
    if callable(schema):
        return _from_function(schema, sample)
    name = schema if schema is not None else schema_of(fields_of(sample))
    if name not in get_args(SchemaName):
        raise ConfigError(
            f"schema={name!r} is unknown, expected one of {get_args(SchemaName)} or a function"
        )
    if missing not in get_args(Missing):
        raise ConfigError(f"missing={missing!r} is unknown, expected one of {get_args(Missing)}")
    segments: list[Segment] = []
    faults: Faults = []
    key = str(sample.get("__key__", ""))
    if name == "chat":
        document = _chat(sample, key, faults)
        if faults:
            _refuse(sample, faults[0], key, missing)
        return _with_fields(document, sample)
    _BUILDERS[name](sample, segments, faults)
    if faults and missing != "keep":
        _refuse(sample, faults[0], key, missing)
    if not segments:
        raise SampleError(
            "empty_document", f"sample {key!r} has no image and no text ({_listed(sample)})"
        )
    return _with_fields(Document(tuple(segments), key), sample)


def _with_fields(document: Document, sample: Sample) -> Document:
    """Return the document with the weights, boxes and points that its sample has."""
    if _find(sample, ("loss_weight", "boxes", "points")) is None:
        return document
    document = _weighted(document, sample)
    for name in ("boxes", "points"):
        if (found := _find(sample, (name,))) is not None:
            document = _marked(document, name, found)
    return document


def _weighted(document: Document, sample: Sample) -> Document:
    """Return the document with the weights that its sample says."""
    found = _find(sample, ("loss_weight",))
    if found is None:
        return document
    if isinstance(found, int | float):
        return replace(document, weight=float(found))
    num_media = len(document.media)
    numbers = isinstance(found, list | tuple) and all(isinstance(n, int | float) for n in found)
    if not numbers or len(found) != num_media:
        raise SampleError(
            "bad_weight",
            f"loss_weight is {found!r}, expected a number, or a list of {num_media}, one for each "
            "image and video of the document",
        )
    return _changed(document, [{"weight": float(weight)} for weight in found])


def _marked(document: Document, name: str, value: Any) -> Document:
    """Return the document with a field's boxes or points on its images."""

    def is_list(one: Any) -> bool:
        return isinstance(one, list | tuple)

    media = document.media
    count = sum(isinstance(one, Image) for one in media)
    if not count:
        return document
    each = list(value) if is_list(value) else [value]
    nested = all(one is None or (is_list(one) and all(map(is_list, one))) for one in each)
    if count == 1 and not (nested and len(each) == 1):
        each, nested = [each], True
    if not (nested and len(each) == count):
        raise SampleError(
            "bad_field",
            f"found {repr(value)[:200]} as `{name}` of {count} images, expected {count} lists, one "
            "for each image",
        )
    marks = iter([tuple(tuple(m) if is_list(m) else m for m in one or ()) for one in each])
    changes = [{name: next(marks)} if isinstance(one, Image) else {} for one in media]
    return _changed(document, changes)


def _changed(document: Document, changes: Iterable[Mapping[str, Any]]) -> Document:
    """Return the document with other fields of its images and videos, in order."""
    each = iter(changes)

    def changed(segments: Iterable[Segment]) -> tuple[Segment, ...]:
        return tuple(
            one if isinstance(one, Text) else replace(one, **next(each)) for one in segments
        )

    turns = tuple(replace(turn, segments=changed(turn.segments)) for turn in document.messages)
    return replace(document, segments=changed(document.segments), messages=turns)


def _from_function(
    function: Callable[[Sample], Document | None], sample: Sample
) -> Document | None:
    document = function(sample)
    if document is None or isinstance(document, Document):
        return document
    raise ConfigError(
        f"the schema function returned a {type(document).__name__}, expected a "
        f"zephon_mm.records.Document, or None to drop the sample"
    )


def _refuse(sample: Sample, reason: str, key: str, missing: str) -> None:
    message = f"sample {key!r} has {reason.replace('_', ' ')}; its fields are {_listed(sample)}"
    if missing == "error":
        raise DatasetError(f"{message}: mend the data, or set missing='skip' or missing='keep'")
    raise SampleError(reason, message)


def _chat(sample: Sample, key: str, faults: Faults) -> Document:
    images, videos = (
        _media(_find(sample, _named(sample, fields)), kind, faults)
        for kind, fields in ((Image, IMAGE_FIELDS), (Video, VIDEO_FIELDS))
    )
    if faults:
        return Document((), key)
    turns, system = _find(sample, CHAT_FIELDS), _find(sample, ("system",))
    if turns and system and isinstance(turns, list) and isinstance(system, str):
        turns = [{"role": "system", "content": system}, *turns]
    messages = messages_of(turns, {Image: images, Video: videos}, faults)
    return Document((), key, messages, tools_of(_find(sample, ("tools",))))


def _named(sample: Sample, fields: Sequence[str]) -> Sequence[str]:
    """Return the fields of a kind of media; a sample that has others, such as `0.jpg`, is refused.

    Raises:
        SampleError: `bad_field`.
    """
    suffixed = [name for name in sample if name.rpartition(".")[2] in fields and sample[name]]
    if len(suffixed) > 1 or not {*suffixed} <= {*fields}:
        raise SampleError(
            "bad_field",
            f"found media in the fields {suffixed}, expected one field of {fields[-1]}, which may "
            "hold a list. Rename them, or give the dataset a function, schema=my_function",
        )
    return fields


def _media(value: Any, kind: type[Image | Video], faults: Faults) -> list[Segment]:
    """Return the images or videos of a field, which holds one, a list, or nothing."""
    is_list = isinstance(value, list | tuple) and not isinstance(value, FileBlob | RowBlob)
    found: list[Segment] = []
    for one in value if is_list else [] if value is None else [value]:
        add_media(one, kind, found, faults)
    return found


def _caption(sample: Sample, segments: list[Segment], faults: Faults) -> None:
    video = _only(_find(sample, VIDEO_FIELDS))
    image = _only(_find(sample, IMAGE_FIELDS))
    if image is not None or video is None:
        add_media(image, Image, segments, faults)
    if video is not None:
        add_media(video, Video, segments, faults)
    _add_text(_only(_find(sample, TEXT_FIELDS)), segments, faults)


def _text(sample: Sample, segments: list[Segment], faults: Faults) -> None:
    _add_text(_only(_find(sample, TEXT_FIELDS)), segments, faults)


def _interleaved(sample: Sample, segments: list[Segment], faults: Faults) -> None:
    images, texts = _find(sample, ("images",)), _find(sample, ("texts",))
    if not (isinstance(images, list | tuple) and isinstance(texts, list | tuple)):
        raise SampleError(
            "bad_interleaving",
            f"found {type(images).__name__} images and {type(texts).__name__} texts, "
            f"expected two lists of the same length",
        )
    if len(images) != len(texts):
        raise SampleError(
            "bad_interleaving",
            f"found {len(images)} images and {len(texts)} texts, expected two lists of the same "
            f"length, with null in one where the other has a value",
        )
    for slot, (image, text) in enumerate(zip(images, texts, strict=True)):
        if image is not None and not text:
            add_media(image, Image, segments, faults)
        elif image is None and text is not None:
            if text != "":  # an empty paragraph says nothing; it is no fault of the document
                _add_text(text, segments, faults)
        else:
            found = "neither an image nor a text" if image is None else "an image and a text"
            raise SampleError(
                "bad_interleaving", f"slot {slot} holds {found}, expected exactly one of them"
            )


_BUILDERS: dict[str, Callable[[Sample, list[Segment], Faults], None]] = {
    "caption": _caption,
    "interleaved": _interleaved,
    "text": _text,
}


def _add_text(value: Any, segments: list[Segment], faults: Faults) -> None:
    if value is None:
        faults.append("no_text")
    elif not isinstance(value, str):
        raise SampleError("bad_field", f"found {type(value).__name__} as a text, expected a string")
    elif not value:
        faults.append("empty_text")
    else:
        segments.append(Text(well_formed(value)))


def _only(value: Any) -> Any:
    """Unpack a list of one; an empty list holds nothing."""
    if not isinstance(value, list | tuple) or isinstance(value, FileBlob | RowBlob):
        return value
    if len(value) > 1:
        raise SampleError(
            "bad_field",
            f"found a list of {len(value)} values, expected one: store parallel lists `images` and "
            f"`texts`, or give the dataset a function, schema=my_function(sample) -> Document",
        )
    return value[0] if value else None


def _find(sample: Sample, names: Iterable[str]) -> Any:
    """Return the first value that is not null, of the sample's fields, then of its `json`."""
    for name in names:
        if (value := sample.get(name)) is not None:
            return value
    member = sample.get("json")
    return _find(member, names) if isinstance(member, Mapping) else None


def fields_of(sample: Sample) -> set[str]:
    """Return the field names, with those of a parsed `json` member where the sample has no text.

    Where `texts` holds turns, their keys are among them as `texts/user`, `texts/assistant`.
    """
    names = set(sample)
    texts = _find(sample, ("texts",))
    for turn in texts if isinstance(texts, list) else []:
        names.update(f"texts/{key}" for key in (turn if isinstance(turn, Mapping) else ()))
    member = sample.get("json")
    if isinstance(member, Mapping) and names.isdisjoint(TEXT_FIELDS):
        names.update(member)
    return names


def _listed(fields: Iterable[str]) -> str:
    return ", ".join(sorted(map(str, fields))) or "none"
