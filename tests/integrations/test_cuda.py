"""What arrives on a device is what `to_training` gives; the CUDA part needs a CUDA machine."""

from typing import Any

import pytest
import torch

from tests.fixtures.memory import Recipe
from zephon_mm.integrations.cuda import on_device, pinned, tensors_of
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


def test_every_tensor_that_a_model_is_given_is_kept_also_what_a_mask_closes_over(
    recipe: Recipe,
) -> None:
    with recipe.build() as pipeline:
        inputs = next(iter(pipeline)).to_training(attention="block")
    mask = inputs["attention_mask"]
    (documents,) = (cell.cell_contents for cell in mask.mask_mod.__closure__)
    found = {id(one) for one in tensors_of(inputs.values())}
    assert {id(documents), id(mask.kv_indices), id(inputs["input_ids"])} <= found


def test_the_memory_of_batches_is_there_while_a_pipeline_runs(recipe: Recipe) -> None:
    with recipe.build() as pipeline:
        with pytest.raises(RuntimeError, match="from its first `iter`"):
            _ = pipeline.arena
        batch = next(iter(pipeline))
        memory = pipeline.arena.view(0, pipeline.arena.capacity_bytes)
        at = batch.input_ids.data_ptr() - memory.ctypes.data
        assert 0 <= at < memory.nbytes


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
