"""The tiny model's law: packing changes nothing, and it learns."""

import pytest
import torch
from torch import Tensor

from zephon_mm.cli.tiny_model import IMAGE_SIZE, TOKENS_PER_IMAGE, TinyVLM

VOCAB, IMAGE_TOKEN = 300, 4
Batch = dict[str, Tensor]


@pytest.fixture(scope="module")
def model() -> TinyVLM:
    return TinyVLM(vocab_size=VOCAB, image_token_id=IMAGE_TOKEN).eval()


def document(seed: int, num_words: int, num_images: int) -> Batch:
    """Return one document: words around runs of placeholders, as a batch of one row."""
    random = torch.Generator().manual_seed(seed)
    words = torch.randint(10, VOCAB, (num_words,), generator=random)
    image = torch.full((TOKENS_PER_IMAGE,), IMAGE_TOKEN)
    tokens = torch.cat([words[:2], *[image] * num_images, words[2:]])[None]
    length = tokens.shape[1]
    return {
        "input_ids": tokens,
        "labels": tokens.masked_fill(tokens == IMAGE_TOKEN, -100),
        "position_ids": torch.arange(length)[None],
        "pixel_values": torch.rand((num_images, 3, IMAGE_SIZE, IMAGE_SIZE), generator=random) - 0.5,
        "attention_mask": torch.ones(1, 1, length, length).tril().bool(),
    }


def pack(documents: list[Batch]) -> Batch:
    """Return one row that holds the documents one after another."""
    row = {
        name: torch.cat([doc[name] for doc in documents], dim=1)
        for name in ("input_ids", "labels", "position_ids")
    }
    masks = [doc["attention_mask"][0, 0] for doc in documents]
    row["attention_mask"] = torch.block_diag(*masks).bool()[None, None]
    row["pixel_values"] = torch.cat([doc["pixel_values"] for doc in documents])
    return row


@pytest.mark.parametrize("masked", [True, False], ids=["mask", "positions"])
def test_packed_documents_give_the_result_of_each_alone(model: TinyVLM, masked: bool) -> None:
    documents = [document(1, 20, 2), document(2, 9, 0), document(3, 14, 1)]
    batches = [*documents, pack(documents)]
    if not masked:
        for batch in batches:
            del batch["attention_mask"]
    with torch.no_grad():
        *alone, packed = [model(**batch) for batch in batches]

    torch.testing.assert_close(packed.logits, torch.cat([o.logits for o in alone], dim=1))
    total = sum(out.loss * out.num_valid for out in alone)
    torch.testing.assert_close(packed.loss * packed.num_valid, total, rtol=1e-5, atol=1e-5)
    assert packed.num_valid == sum(out.num_valid for out in alone)


def test_the_loss_is_the_mean_of_the_next_tokens_surprise(model: TinyVLM) -> None:
    doc = document(5, 12, 1)
    with torch.no_grad():
        out = model(**doc)
    surprise = -out.logits[0].log_softmax(-1)
    labels = doc["labels"][0].tolist()
    each = [surprise[i - 1, label] for i, label in enumerate(labels) if i and label != -100]
    torch.testing.assert_close(out.loss, torch.stack(each).mean())


def test_images_reach_their_own_placeholders_in_order(model: TinyVLM) -> None:
    doc = document(6, 8, 2)
    swapped = doc | {"pixel_values": doc["pixel_values"].flip(0)}
    second = slice(2 + TOKENS_PER_IMAGE, 2 + 2 * TOKENS_PER_IMAGE)
    with torch.no_grad():
        one = model._embed(doc["input_ids"], doc["pixel_values"])
        two = model._embed(swapped["input_ids"], swapped["pixel_values"])
    torch.testing.assert_close(one[0, second], two[0, 2 : 2 + TOKENS_PER_IMAGE])
    assert not torch.equal(one[0, second], two[0, second])


def test_a_wrong_number_of_placeholders_names_both_numbers(model: TinyVLM) -> None:
    doc = document(7, 8, 2)
    doc["pixel_values"] = doc["pixel_values"][:1]
    with pytest.raises(ValueError, match=r"32 image placeholders .* 1 images have 16 patches"):
        model(**doc)


def test_equal_seeds_give_equal_weights_and_leave_the_global_state_alone() -> None:
    before = torch.random.get_rng_state()
    one, two, other = (TinyVLM(vocab_size=VOCAB, image_token_id=4, seed=s) for s in (1, 1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(one.language.lm_head.weight, other.language.lm_head.weight)


@pytest.mark.slow
def test_it_learns_one_batch_by_heart() -> None:
    model = TinyVLM(vocab_size=VOCAB, image_token_id=IMAGE_TOKEN)
    batch = pack([document(1, 20, 1), document(2, 20, 1)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
