import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon_mm.errors import ConfigError, DatasetError, SampleError
from zephon_mm.processors.documents import (
    IMAGE_FIELDS,
    TEXT_FIELDS,
    fields_of,
    schema_of,
    to_document,
)
from zephon_mm.processors.marks import count_marks
from zephon_mm.records import Document, FileBlob, Image, Message, RowBlob, Text, Video

PICTURE = FileBlob("/data/shard.tar", 512, 1000)
EMPTY = FileBlob("/data/shard.tar", 2048, 0)
ROW = RowBlob(0, 3, "image")

# The five samples of case TAR-06, as a reader gives them: sample -> reason (None: whole).
TAR_06 = {
    "0000": ({"jpg": PICTURE, "txt": "a cat"}, None),
    "0001": ({"jpg": PICTURE}, "no_text"),
    "0002": ({"txt": "a cat"}, "no_image"),
    "0003": ({"jpg": EMPTY, "txt": "a cat"}, "empty_image"),
    "0004": ({"jpg": PICTURE, "txt": ""}, "empty_text"),
}


def reason_of(sample, *options):
    with pytest.raises(SampleError) as caught:
        to_document(sample, *options)
    return caught.value.reason


# Law 1: every image and text, once, in order.


@pytest.mark.parametrize("image_field", IMAGE_FIELDS)
@pytest.mark.parametrize("text_field", TEXT_FIELDS)
def test_a_caption_is_its_image_then_its_text(image_field, text_field):
    if (image_field, text_field) == ("images", "texts"):
        return  # parallel lists
    sample = {"url": "x", text_field: "a cat", "__key__": "0001", image_field: ROW, "width": 3}
    assert to_document(sample) == Document((Image(ROW), Text("a cat")), "0001")


def test_lists_of_one_are_what_they_hold():
    sample = {"images": [PICTURE], "text": ["a cat"]}
    assert to_document(sample) == Document((Image(PICTURE), Text("a cat")))


def test_a_caption_may_stand_in_json():
    sample = {"jpg": PICTURE, "json": {"caption": "a cat", "width": 5}}
    assert to_document(sample) == Document((Image(PICTURE), Text("a cat")))
    both = {"jpg": PICTURE, "txt": "a dog", "json": {"caption": "a cat"}}
    assert to_document(both) == Document((Image(PICTURE), Text("a dog")))


def test_a_text_is_a_document():
    assert to_document({"text": " \n", "id": 4}) == Document((Text(" \n"),))


@given(slots=st.lists(st.one_of(st.just(ROW), st.just(PICTURE), st.text(min_size=1)), min_size=1))
def test_interleaved_lists_keep_their_order(slots):
    images = [None if isinstance(slot, str) else slot for slot in slots]
    texts = [slot if isinstance(slot, str) else None for slot in slots]
    wanted = tuple(Text(slot) if isinstance(slot, str) else Image(slot) for slot in slots)
    assert to_document({"images": images, "texts": texts}) == Document(wanted)
    assert to_document({"json": {"images": images, "texts": tuple(texts)}}) == Document(wanted)


@given(text=st.text(st.characters(exclude_categories=())))
def test_any_text_can_be_encoded_and_only_lone_surrogates_change(text):
    joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if not joined:
        return
    document = to_document({"text": text})
    assert document == Document((Text(joined),))
    assert document.segments[0].text.encode()


def test_text_that_spells_control_tokens_stays_text():
    text = "<image> <|im_end|>"
    assert to_document({"text": text}) == Document((Text(text),))


# Law 2: what is missing is a reason.


@pytest.mark.parametrize("key", TAR_06)
def test_missing_parts_are_skipped_with_their_reason(key):
    fields, reason = TAR_06[key]
    sample = {"__key__": key, **fields}
    if reason is None:
        assert to_document(sample, "caption", "skip") == Document(
            (Image(PICTURE), Text("a cat")), key
        )
    else:
        assert reason_of(sample, "caption", "skip") == reason


@pytest.mark.parametrize("key", TAR_06)
def test_missing_parts_stop_the_run_on_request(key):
    fields, reason = TAR_06[key]
    sample = {"__key__": key, **fields}
    if reason is None:
        assert to_document(sample, "caption", "error") is not None
    else:
        with pytest.raises(DatasetError, match=f"'{key}' has {reason.replace('_', ' ')}"):
            to_document(sample, "caption", "error")


@pytest.mark.parametrize("key", TAR_06)
def test_missing_parts_may_be_left_out(key):
    fields, _ = TAR_06[key]
    wanted = [Image(PICTURE)] if fields.get("jpg") is PICTURE else []
    wanted += [Text(fields["txt"])] if fields.get("txt") else []
    assert to_document(fields, "caption", "keep") == Document(tuple(wanted))


def test_a_sample_with_nothing_in_it_is_never_kept():
    sample = {"jpg": EMPTY, "txt": ""}
    assert reason_of(sample, "caption", "keep") == "empty_document"
    assert reason_of(sample, "caption", "skip") == "empty_image"
    assert reason_of({"images": [], "texts": []}) == "empty_document"
    assert reason_of({"text": None}, "text") == "no_text"


@pytest.mark.parametrize(
    ("images", "texts", "words"),
    [
        ([ROW], ["a", None], "1 images and 2 texts"),
        ([ROW, None], [None, None], "slot 1 holds neither"),
        ([None, ROW], ["a", "b"], "slot 1 holds an image and a text"),
        (ROW, "a", "RowBlob images and str texts"),
        ([ROW], None, "list images and NoneType texts"),
    ],
)
def test_bad_interleaving_names_the_slot(images, texts, words):
    with pytest.raises(SampleError, match=rf"bad_interleaving.*{words}"):
        to_document({"images": images, "texts": texts})


def test_an_empty_paragraph_is_no_fault():
    sample = {"images": [None, ROW, ROW], "texts": ["", None, ""]}
    assert to_document(sample) == Document((Image(ROW), Image(ROW)))


@pytest.mark.parametrize(
    "sample",
    [
        {"image": "cat.jpg", "text": "a cat"},
        {"image": b"\xff\xd8", "text": "a cat"},
        {"image": [ROW, ROW], "text": "a cat"},
        {"image": ROW, "caption": ["a cat", "a dog"]},
        {"text": b"a cat"},
        {"images": [None], "texts": [3]},
    ],
)
def test_values_of_other_types_are_refused(sample):
    assert reason_of(sample) == "bad_field"


# Detection.


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        (["__key__", "jpg", "txt", "json"], "caption"),
        (["jpg", "json"], "caption"),
        (["image"], "caption"),
        (["images", "texts", "metadata"], "interleaved"),
        (["images", "text"], "caption"),
        (["id", "text", "url"], "text"),
        (["messages", "images", "text"], "chat"),
        (["conversations", "image"], "chat"),
        (["images", "texts", "texts/user", "texts/assistant"], "chat"),
    ],
)
def test_the_schema_is_told_by_field_names(fields, wanted):
    assert schema_of(fields) == wanted


def test_finevision_turns_are_chat_and_texts_are_not():
    turns = {"images": [ROW], "texts": [{"user": "what?", "assistant": "a cat"}]}
    assert fields_of(turns) == {"images", "texts", "texts/user", "texts/assistant"}
    for sample in (turns, {"png": ROW, "json": turns}):
        assert schema_of(fields_of(sample)) == "chat"
        assert [message.role for message in to_document(sample).messages] == ["user", "assistant"]
    assert fields_of({"images": [ROW, None], "texts": [None, "a"]}) == {"images", "texts"}


def test_media_of_a_document_are_in_order_whatever_it_is():
    film = Video(PICTURE)
    assert Document((Image(ROW), Text("a"), film)).media == [Image(ROW), film]
    turns = (Message("user", (film, Text("a"))), Message("tool", (Image(ROW),)))
    assert Document((), "", turns).media == [film, Image(ROW)]


def test_a_url_is_counted_as_one():
    url = "https://a.org/1.jpg"
    assert reason_of({"image": url, "text": "a"}) == "image_url"
    assert reason_of({"images": [url], "texts": [None]}) == "image_url"


def test_unknown_fields_are_listed():
    with pytest.raises(SampleError, match=r"unknown_schema.*alt, picture"):
        to_document({"picture": ROW, "alt": "a cat"})


# A user's function.


def test_loss_weight_weighs_the_document_or_each_of_its_images():
    sample = {"images": [PICTURE, None, ROW], "texts": [None, "x", None]}
    assert to_document(sample | {"loss_weight": 2}).weight == 2.0
    found = to_document(sample | {"json": {"loss_weight": [0.5, 0]}})
    assert [one.weight for one in found.media] == [0.5, 0.0]
    assert found.weight == 1.0
    turns = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "!"}]
    chat = to_document({"messages": turns, "images": [ROW], "loss_weight": [0.25]})
    assert [one.weight for one in chat.media] == [0.25]


@pytest.mark.parametrize("value", ["2", [1.0], [1, "2"], {}])
def test_a_loss_weight_that_fits_no_image_is_refused(value):
    sample = {"images": [PICTURE, None, ROW], "texts": [None, "x", None], "loss_weight": value}
    with pytest.raises(SampleError, match="expected a number, or a list of 2") as caught:
        to_document(sample)
    assert caught.value.reason == "bad_weight"


def test_a_function_makes_or_drops_the_document():
    def schema(sample):
        if sample["alt"] == "":
            return None
        return Document((Text(sample["alt"], train=False), Image(sample["picture"])), "mine")

    sample = {"picture": ROW, "alt": "a cat"}
    assert to_document(sample, schema) == schema(sample)
    assert to_document({"alt": ""}, schema) is None


def test_wrong_settings_are_refused():
    with pytest.raises(ConfigError, match="returned a str"):
        to_document({"text": "a"}, lambda sample: "a")
    with pytest.raises(ConfigError, match="'pairs' is unknown"):
        to_document({"text": "a"}, "pairs")
    with pytest.raises(ConfigError, match="'fill' is unknown"):
        to_document({"text": "a"}, "text", "fill")


# Law 3: boxes and points.

BOX, OTHER = (1, 2, 30.5, 40), (0, 0, 9, 9)


@pytest.mark.parametrize("value", [[list(BOX), OTHER], [[BOX, OTHER]], ((BOX, OTHER),)])
def test_the_marks_of_one_image_may_stand_alone(value):
    wanted = Document((Image(PICTURE, boxes=(BOX, OTHER), points=((3, 4),)), Text("a cat")))
    sample = {"jpg": PICTURE, "txt": "a cat"}
    assert to_document(sample | {"boxes": value, "points": [[3, 4]]}) == wanted
    assert to_document(sample | {"json": {"boxes": value, "points": [[[3, 4]]]}}) == wanted
    turns = [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "!"}]
    chat = to_document({"messages": turns, "images": [PICTURE], "boxes": value})
    assert chat.media == [Image(PICTURE, boxes=(BOX, OTHER))]


def test_each_of_several_images_has_its_own_marks():
    sample = {"images": [PICTURE, None, ROW, PICTURE], "texts": [None, "x", None, None]}
    found = to_document(sample | {"boxes": [[BOX], None, [OTHER, BOX]]})
    assert [one.boxes for one in found.media] == [(BOX,), (), (OTHER, BOX)]
    turns = [{"role": "user", "content": "<image><video><image>"}, {"role": "tool", "content": ""}]
    media = {"images": [PICTURE, ROW], "videos": [PICTURE]}
    chat = to_document({"messages": turns, "points": [[], [[5, 6]]]} | media)
    images = (Image(PICTURE), Video(PICTURE), Image(ROW, points=((5, 6),)))
    assert chat.messages[0].segments == images


@pytest.mark.parametrize("nothing", [None, [], [[]], [None]])
def test_no_marks_are_none(nothing):
    sample = {"jpg": PICTURE, "txt": "a cat"}
    assert to_document(sample | {"boxes": nothing, "points": nothing}) == to_document(sample)
    for value in ([BOX], 5):
        assert to_document({"txt": "a cat", "boxes": value}) == Document((Text("a cat"),))


@pytest.mark.parametrize("value", [[BOX], [[BOX]], [[BOX]] * 3, 5, "boxes", {}, [[BOX], 5], []])
def test_marks_that_fit_no_image_are_refused(value):
    sample = {"images": [PICTURE, None, ROW], "texts": [None, "x", None], "boxes": value}
    with pytest.raises(SampleError, match="as `boxes` of 2 images, expected 2 lists") as caught:
        to_document(sample)
    assert caught.value.reason == "bad_field"


@pytest.mark.parametrize("value", [5, "boxes", {}, [[[BOX]], [BOX]], [BOX, 7]])
def test_what_is_no_box_is_refused_when_it_is_counted(value):
    (image, _) = to_document({"jpg": PICTURE, "txt": "a cat", "boxes": value}).segments
    assert image.boxes
    with pytest.raises(SampleError, match="expected each as"):
        count_marks(image)
