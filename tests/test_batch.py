"""Batches: exact arrays, digests, what a model is given; packing that a model does not notice."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask

from tests.fixtures.memory import PROCESSOR
from zephon_mm.batch import IGNORE, Batch, step_sha256
from zephon_mm.engine.assembly import Assembly
from zephon_mm.errors import ConfigError
from zephon_mm.media import MediaLayout
from zephon_mm.ops.pack import PackConfig, make_packer
from zephon_mm.packed import Piece
from zephon_mm.packed import Sequence as PackedSequence
from zephon_mm.records import FileBlob, ImageSlot, Record, SampleRef, record_of

CASES = Path(__file__).parent / "fixtures" / "cases"
PAD = 9
SHAPE = (3, 4, 4)


def record(row: int, ids: Sequence[int], trained: Sequence[int], images: Any = ()) -> Record:
    slots = tuple(ImageSlot(FileBlob("/x", row, 1), at, size, SHAPE) for at, size in images)
    uncut = tuple((at, at + size) for at, size in images)
    tokens = np.array(ids, dtype=np.int32)
    mask = np.array(trained, dtype=np.bool_)
    return record_of(SampleRef(0, 0, row), tokens, mask, slots, uncut)


def whole(*records: Record) -> PackedSequence:
    return PackedSequence(tuple(Piece(one, 0, one.num_tokens) for one in records))


def assemble(
    sequences: Sequence[PackedSequence], *, length: int, invalid: Sequence[int] = (), first: int = 0
) -> Batch:
    """Return the batch of these rows, made in memory that holds old bytes."""
    assembly = Assembly(sequences, max_length=length, images=MediaLayout(SHAPE))
    arrays = assembly.layout.views(np.full(assembly.layout.num_bytes, 0xA5, dtype=np.uint8))
    for number, image in enumerate(assembly.media["pixel_values"].slots):
        arrays["pixel_values"][number] = 10 + image.blob.offset  # what a worker would write
    assembly.fill_tokens(arrays, pad_id=PAD)
    keys = tuple(tuple(f"d/s/{p.record.ref.row}" for p in s.pieces) for s in sequences)
    batch = assembly.batch(
        arrays,
        numbers=range(first, first + len(sequences)),
        keys=keys,
        delivered=first + len(sequences),
        image_processor=PROCESSOR,
    )
    return assembly.invalidate(batch, arrays, [("pixel_values", number) for number in invalid])


@st.composite
def rows(draw: st.DrawFn) -> list[PackedSequence]:
    """Draw sequences of at most 24 tokens, of documents with images among their tokens."""
    sequences = []
    for _ in range(draw(st.integers(1, 4))):
        sizes = draw(st.lists(st.integers(1, 8), min_size=1, max_size=3))
        records = []
        for size in sizes:
            trained = draw(st.lists(st.booleans(), min_size=size, max_size=size))
            at = draw(st.integers(0, size))
            images = [(at, min(2, size - at))] if at < size else []
            for start, count in images:
                trained[start : start + count] = [False] * count
            ids = draw(st.lists(st.integers(1, 50), min_size=size, max_size=size))
            records.append(record(draw(st.integers(0, 99)), ids, trained, images))
        sequences.append(whole(*records))
    return sequences


def test_pck_03_four_documents_give_the_expected_arrays() -> None:
    case = json.loads((CASES / "PCK-03" / "docs.json").read_text())
    expected = json.loads((CASES / "PCK-03" / "expected.json").read_text())
    length, eos = case["seq_len"], case["eos"]
    packer = make_packer(PackConfig(length))
    packed: list[PackedSequence] = []
    for row, ids in enumerate(case["docs"]):
        packed += packer.push(record(row, [*ids, eos], [True] * (len(ids) + 1)))
    packed += packer.flush()

    batch = assemble(packed, length=length)
    used = len(expected["input"])

    assert len(packed) == 1
    assert batch.input_ids[0].tolist() == expected["input"] + [PAD] * (length - used)
    assert batch.position_ids[0, :used].tolist() == expected["positions"]
    assert (batch.segment_ids[0, :used] - 1).tolist() == expected["doc_ids"]
    assert batch.segment_ids[0, used:].tolist() == [0] * (length - used)
    shifted = batch.to_training(attention="sdpa", shift_labels=True)["labels"][0]
    assert shifted[:used].tolist() == expected["labels_shifted"]
    assert shifted[used:].tolist() == [IGNORE] * (length - used)
    assert batch.cu_seqlens.tolist() == [0, 4, 7, 12, 14, 16]
    assert batch.max_seqlen == 5
    assert batch.num_valid_tokens == sum(label != IGNORE for label in expected["labels_shifted"])


@settings(max_examples=40)
@given(rows())
def test_pck_06_a_label_is_its_own_token_and_shifting_happens_once(
    sequences: list[PackedSequence],
) -> None:
    batch = assemble(sequences, length=24)
    carried = batch.labels != IGNORE
    assert torch.equal(batch.labels[carried], batch.input_ids[carried])
    plain = batch.to_training(attention="sdpa")["labels"]
    assert torch.equal(plain, batch.labels)
    shifted = batch.to_training(attention="sdpa", shift_labels=True)["labels"]
    assert torch.equal(shifted[:, :-1], batch.labels[:, 1:])
    assert (shifted[:, -1] == IGNORE).all()
    flat = batch.to_training(shift_labels=True)["labels"]
    assert torch.equal(flat, shifted.reshape(1, -1))


@settings(max_examples=40)
@given(rows())
def test_arrays_are_what_going_through_the_tokens_one_by_one_gives(
    sequences: list[PackedSequence],
) -> None:
    batch = assemble(sequences, length=24)
    boundaries = [0]
    for row, sequence in enumerate(sequences):
        expected = []
        for segment, piece in enumerate(sequence.pieces, start=1):
            for position in range(piece.num_tokens):
                token = int(piece.record.token_ids[position])
                learn = bool(piece.record.trained[position]) and position > 0
                expected.append((token, token if learn else IGNORE, position, segment))
            boundaries.append(row * 24 + len(expected))
        padding = 24 - len(expected)
        expected += [(PAD, IGNORE, position, 0) for position in range(padding)]
        boundaries += [(row + 1) * 24] if padding else []
        fields = (batch.input_ids, batch.labels, batch.position_ids, batch.segment_ids)
        assert list(zip(*(field[row].tolist() for field in fields), strict=True)) == expected
    assert batch.cu_seqlens.tolist() == boundaries
    assert batch.max_seqlen == max(np.diff(boundaries))
    assert batch.num_valid_tokens == int((batch.labels != IGNORE).sum())
    assert batch.cu_seqlens.dtype == batch.segment_ids.dtype == torch.int32
    assert batch.input_ids.dtype == batch.labels.dtype == batch.position_ids.dtype == torch.int64


@settings(max_examples=40)
@given(rows())
def test_images_come_by_row_then_token_and_point_at_their_placeholders(
    sequences: list[PackedSequence],
) -> None:
    batch = assemble(sequences, length=24)
    expected = []
    for row, sequence in enumerate(sequences):
        at = 0
        for piece in sequence.pieces:
            for image in piece.record.images:
                expected.append((row, at + image.start, image.num_tokens, image.blob.offset))
            at += piece.num_tokens
    found = [
        (*index, int(pixels[0, 0, 0]) - 10)
        for index, pixels in zip(batch.image_index.tolist(), batch.pixel_values, strict=True)
    ]
    assert found == expected
    assert batch.pixel_values.shape == (len(expected), *SHAPE)
    assert batch.image_valid.all()


def test_a_cut_document_starts_anew_and_carries_no_label_over_the_cut() -> None:
    long = record(3, [1, 2, 3, 4, 5, 6, 6, 8], [True] * 5 + [False] * 2 + [True], [(5, 2)])
    parts = [PackedSequence((Piece(long, 0, 4),)), PackedSequence((Piece(long, 4, 8),))]
    batch = assemble(parts, length=5)
    assert batch.labels.tolist() == [[IGNORE, 2, 3, 4, IGNORE], [IGNORE, IGNORE, IGNORE, 8, IGNORE]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0]] * 2
    assert batch.image_index.tolist() == [[1, 1, 2]]


def test_an_invalid_image_is_zero_its_document_unlabelled_and_nothing_moves() -> None:
    first = record(1, [1, 2, 3, 4], [False, False, True, True], [(0, 2)])
    second = record(2, [5, 6, 7, 8], [False, False, True, True], [(0, 1), (1, 1)])
    third = record(3, [5, 6, 7], [False, True, True], [(0, 1)])
    sequences = [whole(first, second), whole(third)]
    good, bad = assemble(sequences, length=9), assemble(sequences, length=9, invalid=[2])

    assert bad.image_valid.tolist() == [True, True, False, True]
    assert not bad.pixel_values[2].any()
    assert torch.equal(bad.pixel_values[[0, 1, 3]], good.pixel_values[[0, 1, 3]])
    assert bad.labels[0].tolist() == [IGNORE, IGNORE, 3, 4] + [IGNORE] * 5
    assert torch.equal(bad.labels[1], good.labels[1])
    assert bad.num_valid_tokens == good.num_valid_tokens - 2
    for name in ("input_ids", "position_ids", "segment_ids", "cu_seqlens", "image_index"):
        assert torch.equal(getattr(bad, name), getattr(good, name))
    assert bad.row_sha256()[0] != good.row_sha256()[0]
    assert bad.row_sha256()[1] == good.row_sha256()[1]
    pixels = bad.to_training()["pixel_values"]
    assert not pixels[2].any()
    assert torch.equal(pixels[3], good.to_training()["pixel_values"][3])
    assert pixels[3].any()


def test_a_batch_of_text_has_empty_images_never_none_but_on_demand() -> None:
    batch = assemble([whole(record(0, [1, 2], [True, True]))], length=4)
    assert batch.pixel_values.shape == (0, *SHAPE)
    assert batch.image_index.shape == (0, 3)
    assert batch.image_valid.shape == (0,)
    assert batch.to_training()["pixel_values"].shape == (0, *SHAPE)
    assert not [name for name in batch.to_training(omit_empty=True) if "pixel" in name]
    for asked in ({"dummy_image": True}, {"pad_images_to": 1}):
        pixels = batch.to_training(**asked)["pixel_values"]  # type: ignore[arg-type]
        assert len(pixels) == 1
        assert not pixels.any()


@settings(max_examples=40)
@given(rows(), st.data())
def test_a_rows_digest_does_not_depend_on_its_batch(
    sequences: list[PackedSequence], data: st.DataObject
) -> None:
    together = assemble(sequences, length=24).row_sha256()
    alone = [assemble([s], length=24, first=i).row_sha256()[0] for i, s in enumerate(sequences)]
    assert list(together) == alone
    order = data.draw(st.permutations(range(len(sequences))))
    mixed = assemble([sequences[i] for i in order], length=24).row_sha256()
    assert mixed == tuple(alone[i] for i in order)


@settings(max_examples=40)
@given(rows())
def test_a_batchs_digest_is_that_of_its_rows_in_global_order(
    sequences: list[PackedSequence],
) -> None:
    batch = assemble(sequences, length=24, first=7)
    digests = dict(enumerate(batch.row_sha256(), start=7))
    assert batch.sha256() == step_sha256(digests)
    assert step_sha256(dict(reversed(digests.items()))) == step_sha256(digests)


def test_every_part_of_a_row_shows_in_its_digest() -> None:
    base = record(0, [1, 1, 3, 4], [False, False, True, True], [(0, 2)])
    others = [
        record(0, [1, 1, 3, 5], [False, False, True, True], [(0, 2)]),
        record(0, [1, 1, 3, 4], [False, False, True, False], [(0, 2)]),
        base._replace(ref=SampleRef(0, 0, 1)),
        base._replace(images=(base.images[0]._replace(start=1),)),
        base._replace(images=(base.images[0]._replace(blob=FileBlob("/x", 5, 1)),)),
    ]
    batches = [assemble([whole(one)], length=6) for one in (base, *others)]
    batches.append(assemble([whole(base)], length=6, invalid=[0]))
    assert len({batch.row_sha256() for batch in batches}) == len(batches)


@settings(max_examples=40)
@given(rows())
def test_attention_masks_are_causal_within_a_segment(sequences: list[PackedSequence]) -> None:
    batch = assemble(sequences, length=24)
    mask = batch.to_training(attention="sdpa")["attention_mask"]
    segments = batch.segment_ids.tolist()
    expected = [
        [[q >= k and row[q] == row[k] for k in range(24)] for q in range(24)] for row in segments
    ]
    assert mask.dtype == torch.bool
    assert torch.equal(mask[:, 0], torch.tensor(expected))


def test_the_block_mask_is_the_dense_mask() -> None:
    sequences = [
        whole(*(record(i, [i] * n, [True] * n) for i, n in enumerate(sizes)))
        for sizes in ([5, 100, 30], [128, 20], [150])
    ]
    batch = assemble(sequences, length=160)
    dense = batch.to_training(attention="sdpa")["attention_mask"]
    block = batch.to_training(attention="block")["attention_mask"]
    found = create_mask(block.mask_mod, 3, None, 160, 160, device="cpu")
    assert torch.equal(found, dense)
    assert block.kv_num_blocks.sum() < 3 * 2 * 2  # what lies above the diagonal is left out


def test_to_training_gives_what_a_model_takes_and_nothing_else() -> None:
    batch = assemble([whole(record(0, [1, 2, 3], [True] * 3, [(0, 1)]))] * 2, length=4)
    common = {"input_ids", "labels", "position_ids", "pixel_values"}
    varlen = batch.to_training()
    assert set(varlen) == common | {
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "use_cache")
    }
    assert varlen["input_ids"].shape == (1, 8)
    assert varlen["cu_seq_lens_q"].tolist() == [0, 3, 4, 7, 8]
    assert varlen["max_length_q"] == varlen["max_length_k"] == 3
    for attention in ("sdpa", "block"):
        assert set(batch.to_training(attention=attention)) == common | {"attention_mask"}
    pixels = batch.to_training(dtype=torch.bfloat16)["pixel_values"]
    assert pixels.dtype == torch.bfloat16
    assert torch.equal(pixels, PROCESSOR.normalize(batch.pixel_values, torch.bfloat16))


def test_renaming_and_wrong_names() -> None:
    batch = assemble([whole(record(0, [1, 2], [True] * 2))], length=4)
    rename = {"pixel_values": "images", "labels": "targets"}
    assert "targets" in batch.to_training(rename=rename, omit_empty=True)  # no pixels: no error
    renamed = batch.to_training(rename=rename, dummy_image=True)
    assert {"images", "targets"} <= set(renamed)
    assert not {"pixel_values", "labels"} & set(renamed)
    with pytest.raises(ConfigError, match=r"no such keys: \['mask'\]; there are \['cu_seq_lens_k'"):
        batch.to_training(rename={"mask": "m"})
    with pytest.raises(ConfigError, match="varlen, block, sdpa, full, got 'flash'"):
        batch.to_training(attention="flash")  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "varlen"])
def test_pck_04_a_packed_document_gets_the_logits_that_it_gets_alone(attention: Any) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM  # takes seconds, for this test alone

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            attn_implementation="sdpa",
        )
    ).eval()
    rng = np.random.Generator(np.random.Philox(key=1))
    documents = [
        record(i, rng.integers(10, 64, size), [True] * size)
        for i, size in enumerate((7, 1, 12, 5, 9))
    ]
    batch = assemble([whole(*documents[:3]), whole(*documents[3:])], length=24)
    inputs = batch.to_training(attention=attention)
    with torch.no_grad():
        packed = model(**{k: v for k, v in inputs.items() if k != "pixel_values"})
        logits = packed.logits.reshape(2, 24, -1)
        loss = torch.zeros(())
        for number, document in enumerate(documents):
            row, segment = (0, number + 1) if number < 3 else (1, number - 2)
            ids = torch.from_numpy(document.token_ids.astype(np.int64))[None]
            alone = model(input_ids=ids, labels=ids)
            found = logits[row, batch.segment_ids[row] == segment]
            torch.testing.assert_close(found, alone.logits[0], rtol=1e-5, atol=1e-5)
            if ids.shape[1] > 1:
                loss += alone.loss * (ids.shape[1] - 1)
    torch.testing.assert_close(packed.loss, loss / batch.num_valid_tokens, rtol=1e-5, atol=1e-5)
