"""Batches on a CUDA device: from pinned memory, copied beside the computing.

The arena that all batches lie in is pinned once, so that a copy is one transfer at the bus's rate
and needs no staging. Copies and normalising run on a stream of their own: ask for the next batch
before you read the last one's loss, and they overlap with its computing. uint8 crosses the bus and
becomes float there.

Laws (tests/integrations/test_cuda.py, tests/test_cuda.py on a CUDA machine):
    1. What arrives equals `batch.to_training(...)`, on any device.
    2. `to_training` returns after its copies: a batch's memory may be used again at once.

Cost: pinning takes all of `memory_budget_bytes` from the machine at once.

Imports: batch, pipeline, shm.arena. Used by: users, benchmarks.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from zephon_mm.batch import Batch
from zephon_mm.pipeline import Pipeline
from zephon_mm.shm.arena import Arena

logger = logging.getLogger("zephon_mm")


def on_device(
    pipeline: Pipeline, device: torch.device | str, **training: Any
) -> Iterator[tuple[Batch, dict[str, Any]]]:
    """Yield each batch with its `to_training(device, **training)`.

    On CUDA the current stream may use the tensors; on other devices this is a plain loop.

    Args:
        pipeline: Is iterated; its arena stays pinned until the iterator ends or is closed.
        device: Where the tensors go.
        **training: Of `Batch.to_training`.
    """
    batches = iter(pipeline)
    if torch.device(device).type != "cuda":
        for batch in batches:
            yield batch, batch.to_training(device, **training)
        return
    side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with pinned(pipeline.arena):
        for batch in batches:
            with torch.cuda.stream(side):
                inputs = batch.to_training(device, **training)
            torch.cuda.current_stream(device).wait_stream(side)
            for tensor in tensors_of(inputs.values()):  # their memory is kept until it is used
                tensor.record_stream(torch.cuda.current_stream(device))
            yield batch, inputs


def tensors_of(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors, also those of a flex attention mask and of the rule inside it."""
    for value in values:
        rule = getattr(getattr(value, "mask_mod", None), "__closure__", None) or ()
        inside = getattr(value, "__dict__", {}).values()
        for one in (value, *inside, *(cell.cell_contents for cell in rule)):
            if isinstance(one, torch.Tensor):
                yield one


@contextmanager
def pinned(arena: Arena) -> Iterator[None]:
    """Keep an arena page-locked; a refusal is logged, and copies are only slower."""
    memory = arena.view(0, arena.capacity_bytes)
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(cuda.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
    if error:
        with suppress(RuntimeError):  # CUDA would report it again, to the next kernel
            torch.ones(1, device="cuda")
        logger.warning(
            "cudaHostRegister refused %d bytes (error %d): copies are slower. Lower "
            "options(memory_budget_bytes=...), or allow the process more memory.",
            *(memory.nbytes, error),
        )
    try:
        yield
    finally:
        if not error:
            torch.cuda.synchronize()
            cuda.cudaHostUnregister(memory.ctypes.data)
