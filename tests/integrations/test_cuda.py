"""What arrives on a device is what `to_training` gives; the CUDA part needs a CUDA machine."""

from typing import Any

import pytest
import torch

from tests.fixtures.memory import Recipe
from zephon_mm.integrations.cuda import on_device, pinned
from zephon_mm.shm.arena import Arena

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("attention", ["varlen", "sdpa"])
def test_each_batch_comes_with_what_to_training_gives(
    recipe: Recipe, device: str, attention: Any
) -> None:
    how = {"dtype": torch.bfloat16, "attention": attention, "dummy_image": True}
    with recipe.build() as pipeline:
        batches = on_device(pipeline, device, **how)
        for _, (batch, inputs) in zip(range(6), batches, strict=False):
            expected = batch.to_training(**how)
            assert inputs.keys() == expected.keys()
            tensors = [name for name, one in expected.items() if isinstance(one, torch.Tensor)]
            assert all(inputs[name].device.type == device for name in tensors)
            assert all(torch.equal(inputs[name].cpu(), expected[name]) for name in tensors)


@pytest.mark.parametrize("device", DEVICES)
def test_dropping_the_iterator_lets_another_go_on(recipe: Recipe, device: str) -> None:
    with recipe.build() as pipeline:
        first = next(batch for batch, _ in on_device(pipeline, device)).delivered
        assert next(batch for batch, _ in on_device(pipeline, device)).delivered > first


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_pinned_arena_is_page_locked_until_the_end() -> None:
    arena = Arena(1 << 20)
    memory = torch.from_numpy(arena.view(0, 1 << 20))
    with pinned(arena):
        assert memory.is_pinned()
    assert not memory.is_pinned()
