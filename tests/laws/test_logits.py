"""A packed batch gives each document the logits that it gets alone: fp32, every attention.

Real encoders and a real language model of transformers, tiny and with random weights: SigLIP,
SigLIP 2 NaFlex, Qwen3.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.fixtures.memory import Recipe, dataset, random_rows, take, write_images
from zephon_mm.batch import Attention, Batch
from zephon_mm.media import Media
from zephon_mm.processors import NaFlexProcessor, SigLIPProcessor
from zephon_mm.records import Document, Message, Text

DIM = 32
LENGTH = 96
SIZES = {"hidden_size": DIM, "intermediate_size": 48, "num_hidden_layers": 2}
IMPLEMENTATION = {"varlen": "sdpa", "sdpa": "sdpa", "block": "flex_attention"}
PROCESSORS = {
    "siglip": SigLIPProcessor(size=32, patch_size=16),
    "naflex": NaFlexProcessor(max_num_patches=9),
}

pytestmark = pytest.mark.slow


class VLM(nn.Module):
    """Encoder, language model; patches take the places of the placeholders."""

    def __init__(self, kind: str, attention: str, vocab_size: int) -> None:
        super().__init__()
        sizes = {**SIZES, "num_attention_heads": 4, "patch_size": 16}
        if kind == "siglip":
            config: Any = transformers.SiglipVisionConfig(
                **sizes, image_size=32, vision_use_head=False
            )
            self.vision: Any = transformers.SiglipVisionModel(config)
        else:
            config = transformers.Siglip2VisionConfig(
                **sizes, num_patches=16, vision_use_head=False
            )
            self.vision = transformers.Siglip2VisionModel(config)
        self.language: Any = transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(
                vocab_size=vocab_size,
                **SIZES,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                attn_implementation=IMPLEMENTATION[attention],
            )
        )

    def forward(
        self, input_ids: torch.Tensor, places: torch.Tensor, pixels: Any, **others: Any
    ) -> torch.Tensor:
        """Return the logits; `places` marks the placeholders in `input_ids`."""
        hidden = self.language.model.embed_tokens(input_ids)
        if len(pixels["pixel_values"]):
            found = self.vision(**pixels).last_hidden_state
            mask = pixels.get("pixel_attention_mask")
            found = found.flatten(0, 1) if mask is None else found[mask.bool()]
            hidden = hidden.masked_scatter(places[..., None], found)
        logits: torch.Tensor = self.language(inputs_embeds=hidden, **others).logits
        return logits


def places_of(batch: Batch) -> torch.Tensor:
    marked = torch.zeros_like(batch.input_ids, dtype=torch.bool)
    for row, first, count in batch.image_index.tolist():
        marked[row, first : first + count] = True
    return marked


def vision_of(found: dict[str, Any]) -> dict[str, Any]:
    names = ("pixel_values", "pixel_attention_mask", "spatial_shapes")
    return {name: found.pop(name) for name in names if name in found}


def only(media: Media, numbers: list[int]) -> dict[str, Any]:
    """Return some images of a batch, as they would come in a batch of their own."""
    found = vision_of(media.training(None, torch.float32))
    return {name: value[numbers] for name, value in found.items()}


def as_conversation(document: Document) -> Document:
    """Ask all that a document holds, in two turns, and answer each."""
    halves = document.segments[:2], document.segments[2:]
    turns: list[Message] = []
    for half in filter(None, halves):
        answer = Text(f"a fox {len(turns)}")
        turns += [Message("user", half), Message("assistant", (answer,))]
    return replace(document, segments=(), messages=tuple(turns))


CHATS: dict[str, Any] = {"fn": as_conversation, "template": "chatml"}


@pytest.mark.parametrize("attention", ["varlen", "sdpa", "block"])
@pytest.mark.parametrize(("kind", "chats"), [("siglip", {}), ("naflex", {}), ("siglip", CHATS)])
def test_a_packed_document_gets_the_logits_that_it_gets_alone(
    kind: str, chats: dict[str, Any], attention: Attention, tmp_path: Path
) -> None:
    rows = random_rows(3, 24, write_images(tmp_path))
    length = 2 * LENGTH if chats else LENGTH
    recipe = Recipe(datasets=(dataset("d", rows),), max_length=length, global_batch_size=2)
    with recipe.build(processor=PROCESSORS[kind], microbatch=2, **chats) as pipeline:
        batch = max(take(pipeline, 3), key=lambda batch: len(batch.image_index))
    assert len(batch.image_index) > 2
    assert int(batch.segment_ids.max()) > 1
    torch.manual_seed(0)
    vocab_size = int(batch.input_ids.max()) + 1
    model = VLM(kind, attention, vocab_size).eval()
    plain = VLM(kind, "sdpa", vocab_size).eval()
    plain.load_state_dict(model.state_dict())
    places = places_of(batch)
    inputs = batch.to_training(attention=attention)
    del inputs["labels"]
    vision, shape = vision_of(inputs), inputs["input_ids"].shape
    with torch.no_grad():
        logits = model(places=places.view(shape), pixels=vision, **inputs)
        logits = logits.view(*batch.input_ids.shape, -1)
        for row in range(2):
            for segment in range(1, int(batch.segment_ids[row].max()) + 1):
                (mine,) = torch.where(batch.segment_ids[row] == segment)
                numbers = [
                    number
                    for number, (at, first, _) in enumerate(batch.image_index.tolist())
                    if at == row and mine[0] <= first <= mine[-1]
                ]
                alone = plain(
                    batch.input_ids[row, mine][None],
                    places[row, mine][None],
                    only(batch.images, numbers),
                    use_cache=False,
                )
                found = logits[row, mine]
                torch.testing.assert_close(found, alone[0], rtol=1e-5, atol=1e-5)
