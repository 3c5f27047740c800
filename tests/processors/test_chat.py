"""Conversations of all layouts: media in their places, text as stored, the unknown refused."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures import tokenizers as make
from zephon_mm import Pipeline
from zephon_mm.errors import ConfigError, SampleError
from zephon_mm.io import Dataset
from zephon_mm.processors import SigLIPProcessor
from zephon_mm.processors.chat import ROLES, messages_of, tools_of
from zephon_mm.processors.documents import to_document
from zephon_mm.records import Document, FileBlob, Image, Message, RowBlob, Text, Video
from zephon_mm.work import StaticMixtureWorkSource

CASES = Path(__file__).parents[1] / "fixtures" / "cases"
A, B, C = (FileBlob("/pictures", at, 9) for at in range(3))
EMPTY = FileBlob("/pictures", 0, 0)
SPECIAL = [*make.VISION, "<|im_start|>", "<|im_end|>"]


def user(*segments: Any) -> Message:
    return Message("user", segments)


def assistant(*segments: Any) -> Message:
    return Message("assistant", segments)


def messages(sample: dict[str, Any]) -> tuple[Message, ...]:
    document = to_document(sample)
    assert document is not None
    assert document.segments == ()
    return document.messages


def reason_of(sample: dict[str, Any]) -> str:
    with pytest.raises(SampleError) as caught:
        to_document(sample)
    return f"{caught.value.reason}: {caught.value.message}"


# Law 1: each image once, in its place.


def test_the_layouts_say_the_same() -> None:
    wanted = (user(Image(A), Text("\nWhat?")), assistant(Text("a cat")))
    chat = [
        {"role": "user", "content": "<image>\nWhat?"},
        {"role": "assistant", "content": "a cat"},
    ]
    llava = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "a cat"}]
    fine = [{"user": "<image>\nWhat?", "assistant": "a cat"}]
    parts = [{"type": "image", "image": A}, {"type": "text", "text": "\nWhat?"}]
    short = [{"image": A}, {"text": "\nWhat?", "image": None}]
    for sample in (
        {"messages": chat, "images": [A]},
        {"messages": chat, "image": A},
        {"conversations": llava, "image": A},
        {"conversations": chat, "image": [A]},
        {"texts": fine, "images": [A]},
        {"jpg": A, "json": {"conversations": llava}},
        *(
            {
                "messages": [
                    {"role": "user", "content": content},
                    {"role": "assistant", "content": ["a cat"]},
                ]
            }
            for content in (parts, short)
        ),
    ):
        assert messages(sample) == wanted


def test_parts_bring_their_media_or_take_the_next_of_the_sample() -> None:
    image_url = {"type": "image_url", "image_url": {"url": A}}
    video = {"type": "video", "video": B, "text": None}
    own = [{"role": "user", "content": [image_url, "and", video]}]
    assert messages({"messages": own}) == (user(Image(A), Text("and"), Video(B)),)
    slots = [{"type": "image"}, {"type": "video", "video": None}, {"type": "image", "image": None}]
    turn = [{"role": "user", "content": slots}]
    found = messages({"messages": turn, "images": [A, C], "videos": [B]})
    assert found == (user(Image(A), Video(B), Image(C)),)


def test_media_may_stand_in_any_turn() -> None:
    roles = ("system", "user", "assistant", "tool")
    turns = [{"role": role, "content": f"<image>{role}"} for role in roles]
    found = messages({"messages": turns, "images": [A, B, C, A]})
    assert [one.segments[0] for one in found] == [Image(A), Image(B), Image(C), Image(A)]


bodies = st.lists(st.sampled_from(["a", " ", "<image>", "<video>", "\n"]), max_size=5)


@given(
    turns=st.lists(bodies, min_size=1, max_size=4),
    images=st.integers(0, 3),
    videos=st.integers(0, 2),
)
def test_tags_and_media_are_matched_by_count_and_kind(
    turns: list[list[str]], images: int, videos: int
) -> None:
    given = {Image: [Image(A)] * images, Video: [Video(B)] * videos}
    stored = [{"role": "user", "content": "".join(body)} for body in turns]
    tags = {
        Image: sum(b.count("<image>") for b in turns),
        Video: sum(b.count("<video>") for b in turns),
    }
    if any(given[kind] and tags[kind] not in (0, len(given[kind])) for kind in given):
        with pytest.raises(SampleError, match="media_mismatch"):
            messages_of(stored, given, [])
        return
    found = messages_of(stored, given, [])
    written = ""
    for message in found:
        for one in message.segments:
            written += one.text if isinstance(one, Text) else f"<{type(one).__name__.lower()}>"
    first = "".join(
        f"<{kind}>" * n
        for kind, n, tag in (("video", videos, tags[Video]), ("image", images, tags[Image]))
        if not tag
    )
    assert written == first + "".join(map("".join, turns))
    media = [one for message in found for one in message.segments if not isinstance(one, Text)]
    assert len(media) == images + videos


@pytest.mark.parametrize(
    ("content", "fields", "words"),
    [
        ("<image> <image>", {"images": [A]}, "found 2 tags <image> and 1 images"),
        ("<image>", {"images": [A, B]}, "found 1 tags <image> and 2 images"),
        ("<video><video>", {"video": A}, "found 2 tags <video> and 1 videos"),
        ([{"type": "image"}], {}, "found 1 image parts without one of their own and 0 images"),
        ([{"type": "image"}], {"images": [A, B]}, "found 1 image parts .* and 2 images"),
        ([{"type": "image", "image": A}], {"images": [B]}, "found 0 image parts .* and 1 images"),
    ],
)
def test_each_mismatch_names_both_counts(content: Any, fields: dict[str, Any], words: str) -> None:
    sample = {"messages": [{"role": "user", "content": content}], **fields}
    assert re.search(f"media_mismatch: {words}", reason_of(sample))


def test_media_without_tag_and_user_turn_have_no_place() -> None:
    sample = {"messages": [{"role": "assistant", "content": "hi"}], "images": [A]}
    assert "media_mismatch: found 0 tags <image> and 1 images" in reason_of(sample)


def test_a_conversation_is_never_kept_without_one_of_its_images() -> None:
    turns = [{"role": "user", "content": "<image>"}]
    parts = [{"role": "user", "content": [{"type": "image", "image": EMPTY}]}]
    for sample, reason in (
        ({"messages": turns, "images": [EMPTY]}, "empty_image"),
        ({"messages": turns, "images": [None]}, "no_image"),
        ({"messages": parts}, "empty_image"),
    ):
        for missing in ("skip", "keep"):
            with pytest.raises(SampleError, match=reason):
                to_document(sample, None, missing)


@pytest.mark.parametrize("others", [{"png": A}, {"images": [A]}, {"0.jpg": A}, {"left.mp4": A}])
def test_a_conversation_has_one_field_of_images_and_one_of_videos(others: dict[str, Any]) -> None:
    turns = [{"role": "user", "content": "<image>"}]
    sample = {"messages": turns, "jpg": A, "json": {"image": "a.jpg"}, "image": None, "images": []}
    assert messages(sample) == (user(Image(A)),)
    found = reason_of(sample | others)
    assert found.startswith("bad_field")
    assert str(next(iter(others))) in found


# Law 2: text is what was stored.


@given(text=st.text(st.characters(exclude_categories=())))
def test_text_without_media_stays_as_it_is(text: str) -> None:
    text += "<image>"
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert messages({"messages": [{"role": "user", "content": text}]}) == (user(Text(whole)),)
    parts = [{"type": "image", "image": A}, {"type": "text", "text": text}]
    assert messages({"messages": [{"role": "user", "content": parts}]}) == (
        user(Image(A), Text(whole)),
    )


def test_other_keys_are_fields_and_tools_are_a_list() -> None:
    call = [{"function": {"name": "f", "arguments": {"a": None}}}]
    turn = {"role": "assistant", "content": None, "tool_calls": call, "name": None}
    tools = [{"type": "function", "function": {"name": "f"}}]
    for stored in (tools, json.dumps(tools)):
        document = to_document({"messages": [turn], "tools": stored})
        assert document == Document(
            (), "", (Message("assistant", (), (("tool_calls", call),)),), (*tools,)
        )
    assert tools_of(None) == tools_of("") == tools_of([]) == ()
    for bad in ("{", '{"a": 1}', {"a": 1}, 3):
        with pytest.raises(SampleError, match="bad_tools"):
            tools_of(bad)


def test_a_call_of_sharegpt_is_a_turn_with_tool_calls_and_system_comes_first() -> None:
    call = {"name": "f", "arguments": {"a": 1}}
    for value, calls in ((json.dumps(call), [call]), (json.dumps([call, call]), [call, call])):
        turns = [{"from": "human", "value": "q"}, {"from": "function_call", "value": value}]
        turns.append({"from": "observation", "value": "3"})
        fields = (("tool_calls", [{"function": one} for one in calls]),)
        assert messages({"conversations": turns, "system": "be kind"}) == (
            Message("system", (Text("be kind"),)),
            user(Text("q")),
            Message("assistant", (), fields),
            Message("tool", (Text("3"),)),
        )
    turns = [{"from": "function_call", "value": "f(1)"}]
    assert reason_of({"conversations": turns}).startswith("bad_tools: `function_call` ")


# Law 3: the unknown is refused.


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([], "empty_document"),
        (None, "empty_document"),
        ('[{"role": "user"}]', "bad_turn: the conversation is the str '[{"),
        (5, "bad_turn: the conversation is the int 5, expected a list"),
        ({"role": ["user"], "content": ["hi"]}, "bad_turn: the conversation is the dict"),
        ([3], "bad_turn"),
        ([{"text": "hi"}], "bad_turn: found a turn {'text': 'hi'}"),
        (
            [{"role": "narrator", "content": ""}],
            "bad_role: found a turn of 'narrator', expected one of",
        ),
        ([{"role": ["user"], "content": ""}], "bad_role"),
        ([{"role": "user", "content": 3}], "bad_part"),
        (
            [{"role": "user", "content": [{"type": "audio"}]}],
            "bad_part: found content with {'type': 'audio'}",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "bad_part"),
        ([{"role": "user", "content": [{"text": "a", "image": A}]}], "bad_part"),
        ([{"role": "user", "content": [{}]}], "bad_part"),
        ([{"role": "user", "content": [{"type": [], "text": "a"}]}], "bad_part"),
        ([{"role": "user", "content": [{"type": "image", "image": 3}]}], "bad_field"),
        ([{"role": "user", "content": [{"type": "image", "image": "https://a.b/c"}]}], "image_url"),
    ],
)
def test_what_is_not_known_is_named(turns: Any, reason: str) -> None:
    assert reason in reason_of({"messages": turns})


def test_every_role_of_the_data_has_one_for_the_template() -> None:
    assert set(ROLES.values()) == {"system", "developer", "user", "assistant", "tool"}
    for stored, role in ROLES.items():
        assert messages({"conversations": [{"from": stored, "value": "x"}]}) == (
            Message(role, (Text("x"),)),
        )


# From files.


def case(name: str) -> list[tuple[Message, ...] | str]:
    """The messages of each row of a case, or why there are none."""
    dataset = Dataset.from_path(name, CASES / name / "data.jsonl", progress=False)
    found: list[tuple[Message, ...] | str] = []
    for row in dataset.reader.read(0, range(len(dataset))):
        try:
            found.append(messages(row))
        except SampleError as error:
            found.append(error.reason)
    return found


def kinds(found: tuple[Message, ...] | str) -> list[list[str]]:
    return [[type(one).__name__ for one in message.segments] for message in found]


def test_cnv_01_an_image_without_a_tag_comes_first_in_the_first_user_turn() -> None:
    """CNV-01."""
    assert [kinds(one) for one in case("CNV-01")] == [[["Image", "Text"], ["Text"]]]


def test_cnv_03_tags_without_images_and_in_parts_are_text() -> None:
    """CNV-03."""
    first, second, third = case("CNV-03")
    assert [kinds(one) for one in (first, third)] == [[["Text"]] * 2, [["Text"]] * 3]
    assert kinds(second) == [["Image", "Text"], ["Text"]]
    assert second[0].segments[1] == Text("Explain the tag <image> and <|image_pad|>")


def test_cnv_04_turns_may_be_empty_but_not_a_conversation() -> None:
    """CNV-04."""
    found = case("CNV-04")
    assert [at for at, one in enumerate(found) if isinstance(one, str)] == [4]
    assert found[4] == "empty_document"
    assert kinds(found[0]) == [["Text"], []] == kinds(found[6])


def test_cnv_07_the_image_of_a_tool_turn_counts() -> None:
    """CNV-07."""
    (found,) = case("CNV-07")
    assert [(one.role, *kind) for one, kind in zip(found, kinds(found), strict=True)] == [
        ("system", "Text"),
        ("user", "Image", "Text"),
        ("assistant", "Text"),
        ("tool", "Image"),
        ("assistant", "Text"),
    ]


def batches(dataset: Dataset, index: str = "off", max_length: int = 64) -> list[Any]:
    source = StaticMixtureWorkSource([dataset], {dataset.name: 1.0}, seed=0, stop_after_passes=1)
    pipeline = (
        Pipeline(source)
        .options(canonical_replicas=1, runner="inline", index=index)
        .interleave(
            tokenizer=make.byte_level_bpe(SPECIAL),
            image_processor=SigLIPProcessor(size=32, patch_size=16),
            template="chatml",
        )
        .pack_flat(max_length=max_length)
        .batch(microbatch_size=1, tail="pad")
    )
    with pipeline:
        return list(pipeline)


def test_cnv_06_batches_with_and_without_images_have_the_same_keys() -> None:
    """CNV-06."""
    dataset = Dataset.from_path("c", CASES / "CNV-06" / "data.jsonl", progress=False)
    found = batches(dataset)
    counts = sorted(len(batch.pixel_values) for batch in found)
    assert (counts[0], sum(counts)) == (0, 1)
    assert len({tuple(batch.to_training()) for batch in found}) == 1
    assert {batch.pixel_values.shape[1:] for batch in found} == {(3, 32, 32)}


def test_every_way_to_store_an_image_gives_the_same_pixels(tmp_path: Path) -> None:
    picture = (CASES / "CNV-07" / "img" / "0.jpg").read_bytes()
    (tmp_path / "0.jpg").write_bytes(picture)
    uri = "data:image/jpeg;base64," + base64.b64encode(picture).decode()
    answer = {"role": "assistant", "content": "a square"}

    def turns(**part: Any) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}, answer]

    lines = [
        {"messages": turns(type="image"), "images": ["0.jpg"]},
        {"messages": turns(type="image", image="0.jpg")},
        {"messages": turns(type="image_url", image_url={"url": "0.jpg"})},
        {"messages": turns(type="image_url", image_url={"url": uri})},
        {"messages": [{"role": "user", "content": "<image>?"}, answer], "image": uri},
        {
            "conversations": [
                {"from": "human", "value": "?"},
                {"from": "gpt", "value": "a square"},
            ],
            "image": "0.jpg",
        },
    ]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)))
    stored = {"bytes": picture, "path": None}
    table = {
        "images": [[stored], []],
        "messages": [
            [
                {
                    "role": "user",
                    "content": [{"type": "image", "text": None}, {"type": "text", "text": "?"}],
                }
            ],
            [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "?"}, {"type": "text", "text": "!"}],
                }
            ],
        ],
    }
    for row in table["messages"]:
        row.append({"role": "assistant", "content": [{"type": "text", "text": "a square"}]})
    pq.write_table(pa.table(table), tmp_path / "chat.parquet")
    fine = {"images": [[stored]], "texts": [[{"user": "?", "assistant": "a square"}]]}
    pq.write_table(pa.table(fine), tmp_path / "fine.parquet")
    found = []
    for name in ("chat.jsonl", "chat.parquet", "fine.parquet"):
        found += batches(Dataset.from_path(name, tmp_path / name, progress=False))
    rows = [text for batch in found for text in _documents(batch)]
    with_image = [row for row in rows if row[1] is not None]
    assert len(with_image) == len(lines) + 2
    assert len(rows) == len(with_image) + 1
    assert len(set(with_image)) == 1


def _documents(batch: Any) -> list[tuple[Any, bytes | None]]:
    """(tokens, pixels) of each document of a batch of one row."""
    found = []
    images = iter(zip(batch.image_index.tolist(), batch.pixel_values, strict=True))
    for segment in range(1, int(batch.segment_ids.max()) + 1):
        ids = batch.input_ids[batch.segment_ids == segment]
        has_image = bool((ids == make.byte_level_bpe(SPECIAL).token_to_id("<|image_pad|>")).any())
        pixels = next(images)[1].numpy().tobytes() if has_image else None
        labels = batch.labels[batch.segment_ids == segment]
        found.append(((*ids.tolist(), *labels.tolist()), pixels))
    return found


def test_videos_may_be_parts_or_fields_of_json_lines(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(b"film")
    film = Video(FileBlob(str(tmp_path / "a.mp4"), 0, 4))
    part = {"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}
    tag = {"role": "user", "content": "<video>"}
    lines = [{"messages": [part]}, {"messages": [tag], "videos": ["a.mp4"]}]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)))
    dataset = Dataset.from_path("c", tmp_path / "chat.jsonl", progress=False)
    rows = dataset.reader.read(0, range(2))
    assert [messages(row)[0].segments for row in rows] == [(film,), (film,)]


def test_with_an_index_tokens_are_made_again_and_the_same(tmp_path: Path) -> None:
    for name in ("CNV-03", "CNV-07"):
        path = CASES / name / "data.jsonl"
        dataset = Dataset.from_path(name, path, progress=False, cache_dir=tmp_path / name)
        runs = [batches(dataset, index, 256) for index in ("off", "fill", "read")]
        digests = [[batch.sha256() for batch in run] for run in runs]
        assert digests[0] == digests[1] == digests[2]


def test_a_tokenizer_without_a_template_is_told_before_anything_is_read() -> None:
    dataset = Dataset.from_path("c", CASES / "CNV-01" / "data.jsonl", progress=False)
    source = StaticMixtureWorkSource([dataset], {"c": 1.0}, seed=0)
    pipeline = Pipeline(source).interleave(tokenizer=make.byte_level_bpe(SPECIAL))
    pipeline.pack_flat(max_length=64).batch(microbatch_size=1)
    with pytest.raises(ConfigError, match=r"no chat template.*template='chatml'"), pipeline:
        next(iter(pipeline))


def test_a_row_blob_is_an_image_too() -> None:
    turn = [{"role": "user", "content": [{"type": "image", "image": RowBlob(0, 1, "a")}]}]
    assert messages({"messages": turn}) == (user(Image(RowBlob(0, 1, "a"))),)
