"""Grain's `MapDataset` over ArrayRecord files.

Settings: global shuffle, endless, two worker processes; four reading threads in each instead of 16,
as there are two cores. The full row is packed by its `FirstFitPackIterDataset`, ids and pixels
alike, in 8 bins.

Imports: .work. Used by: .measure.
"""

import pickle
from typing import Any

from grain import MapDataset, MultiprocessingOptions, ReadOptions, sources
from grain.experimental import FirstFitPackIterDataset

from benchmarks.peers import work
from benchmarks.peers.work import Delivered, Loader, Task

OPTIONS = MultiprocessingOptions(num_workers=work.WORKERS)
READ = ReadOptions(num_threads=4, prefetch_buffer_size=64)


def grain(task: Task) -> Loader:
    """Return the iterator."""
    shards = sorted(map(str, task.folder.glob("*.arrayrecord")))
    rows = MapDataset.source(sources.ArrayRecordDataSource(shards)).seed(0).shuffle()
    rows = rows.repeat()[task.rank :: task.ranks].map(pickle.loads)
    if task.full:
        data = FirstFitPackIterDataset(
            rows.map(lambda row: _document(task, row)).to_iter_dataset(READ),
            length_struct={"ids": work.LENGTH, "pixels": work.PACK_IMAGES},
            num_packing_bins=8,
            padding_struct={"ids": work.PAD, "pixels": 0},
        ).batch(task.packs)
    else:
        data = rows.to_iter_dataset(READ).batch(task.samples, batch_fn=list)
    found = iter(data.mp_prefetch(OPTIONS))
    if task.state is not None:
        found.set_state(task.state)
    return Loader(map(_delivered, found) if task.full else found, found.get_state)


def _document(task: Task, row: Any) -> dict[str, Any]:
    pixels = work.picture(row["jpg"]).numpy()
    return {"ids": work.token_ids(task.tokenizer, row["txt"]), "pixels": pixels[None]}


def _delivered(batch: Any) -> Delivered:
    return Delivered(batch["ids"], batch["pixels"])
