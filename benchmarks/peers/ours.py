"""This package, on WebDataset shards.

Settings: 8 lanes, two worker processes, no index; raw rows as mappings, which the others have too
and is slower than columns; the full row packed best fit, with a shuffle buffer of 64. Its windows
hold 2,048 samples of all lanes, not 16,384: one is measured ahead at its start and lived on at its
end, so a measurement must last for several.

Imports: the package, benchmarks.contenders, .work. Used by: .measure.
"""

from typing import Any

import torch

from benchmarks.contenders import raw
from benchmarks.peers.work import IMAGE_PX, LENGTH, PAD, Delivered, Loader, Task
from zephon_mm.processors import SigLIPProcessor


def zephon_mm(task: Task) -> Loader:
    """Return the pipeline."""
    pipeline = raw(str(task.folder)).options(dp_degree=task.ranks, dp_rank=task.rank)
    if not task.full:
        return Loader(batch.samples for batch in pipeline.batch(microbatch_size=task.samples))
    processor = SigLIPProcessor(size=IMAGE_PX, patch_size=14)
    pipeline.interleave(tokenizer=task.tokenizer, image_processor=processor)
    pipeline.pack_flat(max_length=LENGTH, algorithm="best_fit", max_images=32)
    pipeline.shuffle(buffer_size=64, seed=0).batch(microbatch_size=task.packs)
    pipeline.options(chunk_size=64, flush_every_k_chunks=4, index="off")
    if task.state is not None:
        pipeline.restore(task.state)
    return Loader(map(_delivered, pipeline), pipeline.checkpoint)


def _delivered(batch: Any) -> Delivered:
    ids = torch.where(batch.segment_ids > 0, batch.input_ids, PAD)
    return Delivered(ids, batch.pixel_values)
