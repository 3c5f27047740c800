"""The contenders that run in torch's `DataLoader` or one derived from it, with a collator.

Settings: two workers that stay from epoch to epoch, two batches ahead in each, and else the
defaults of a library but for what a function names. None has a packer, so that the full row is
padded. Each is run in a Python that has its library, so nothing is imported before.

Imports: .work. Used by: .measure.
"""

import pickle
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
from torch.utils.data import DistributedSampler

from benchmarks.peers.work import Loader, Task, in_loader


class _Rows:
    """Pickled rows in one file, by number, through a memory map."""

    def __init__(self, task: Task) -> None:
        self._data = np.memmap(task.folder / "rows.bin")
        self._ends = np.load(task.folder / "ends.npy")

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: int) -> Any:
        return pickle.loads(self._data[self._ends[number] : self._ends[number + 1]])


def _endless(data: Any, task: Task) -> Iterator[int]:
    """Yield the rank's rows in a new order each epoch, without an end."""
    sampler = DistributedSampler(data, task.ranks, task.rank)
    for epoch in count():
        sampler.set_epoch(epoch)
        yield from sampler


def torch(task: Task) -> Loader:
    """Rows by number: what a training script does by hand."""
    data = _Rows(task)
    return in_loader(data, task, sampler=_endless(data, task))


def hf_datasets(task: Task) -> Loader:
    """Torchtitan's way: `datasets`, memory-mapped Arrow, whose rows are taken a batch at a time."""
    import datasets

    data = datasets.load_from_disk(str(task.folder))
    return in_loader(data, task, sampler=_endless(data, task))


def webdataset(task: Task) -> Loader:
    """Shards in random order, dealt to ranks and workers, rows shuffled in a buffer."""
    import webdataset

    shards = sorted(map(str, task.folder.glob("*.tar")))
    node = webdataset.split_by_node
    data = webdataset.WebDataset(shards, shardshuffle=100, nodesplitter=node, seed=0).repeat()
    return in_loader(data.shuffle(128 if task.full else 1_000), task)


def mosaic(task: Task) -> Loader:
    """Its shuffle, over one canonical node, so that any number of ranks has the same order."""
    import streaming

    options = {"local": str(task.folder), "shuffle": True, "num_canonical_nodes": 1}
    data = streaming.StreamingDataset(batch_size=task.samples, **options)
    return in_loader(data, task, streaming.StreamingDataLoader)


def litdata(task: Task) -> Loader:
    """Its shuffle."""
    import litdata

    data = litdata.StreamingDataset(str(task.folder), shuffle=True)
    return in_loader(data, task, litdata.StreamingDataLoader)
