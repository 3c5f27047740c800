"""Zephon 0.2.

Settings: `LANES` lanes, two workers for all operators together ("global"), threads, which is its
default on one machine (the `process` runner gives each operator processes of its own, 13 here);
chunks of 1,024 (one must be smaller than the data), shards and the rows in them shuffled, epoch
after epoch. The full row is tokenised, packed best fit in 32 bins by `pack_sequences`, and pictures
are decoded behind that (`map_transform`): it has no image step. Its promise is for steps of a
multiple of `LANES` batches: a batch is one sequence, whatever the ranks.

Imports: .work. Used by: .measure.
"""

from collections.abc import Iterable
from typing import Any

from zephon import Dataset, MixtureSpec, Pipeline, StaticMixtureWorkSource

from benchmarks.peers.work import LENGTH, WORKERS, Loader, Task, packed, picture, token_ids

LANES = 2


def zephon(task: Task) -> Loader:
    """Return the pipeline."""
    data, mixture = Dataset.from_path("data", str(task.folder)), MixtureSpec({"data": 1.0})
    endless = {"exhausted_policy": "repeat"}  # its default is one pass
    source = StaticMixtureWorkSource(
        [data], mixture, chunk_size=1_024, seed=0, shuffle_within_shard=True, **endless
    )
    pipeline = Pipeline(source).options(world_size=task.ranks, global_rank=task.rank)
    if task.ranks > 1:
        pipeline.options(aggregate_dir=str(task.shared))
    pipeline.options(worker_allocation="global", max_workers=WORKERS, canonical_replicas=LANES)
    if task.full:
        folder = task.tokenizer
        pipeline.map_transform(lambda row: {**row, "ids": token_ids(folder, row["txt"])})
        pipeline.pack_sequences(LENGTH, num_bins=32, algorithm="best_fit", tokens_field="ids")
        pipeline.map_transform(_decoded)
    pipeline.batch(1 if task.full else task.samples)
    if task.state is not None:
        pipeline.restore(task.state)
    batches = iter(pipeline)
    if not task.full:
        return Loader(map(_rows, batches), pipeline.checkpoint)
    return Loader(map(_packed, zip(*[batches] * task.packs, strict=False)), pipeline.checkpoint)


def _decoded(pack: dict[str, Any]) -> dict[str, Any]:
    rows = pack["packed_samples"]
    pixels = [picture(row["jpg"]) for row in rows]
    return {"ids": [row["ids"] for row in rows], "pixels": pixels}


def _rows(batch: Any) -> list[Any]:
    return [record.payload for record in batch.records]


def _packed(batches: Iterable[Any]) -> Any:
    packs = [pack for batch in batches for pack in _rows(batch)]
    pixels = [one for pack in packs for one in pack["pixels"]]
    return packed([pack["ids"] for pack in packs], pixels)
