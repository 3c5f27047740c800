"""The loader to compare with: torch's `DistributedSampler` and `DataLoader`, packing on each rank.

It is what training scripts do by hand: the documents are dealt to ranks by a shuffled index, and
each rank packs its own, one after another, until the next does not fit. To go on it skips as many
documents as all ranks had taken; what lay in open packs is lost, and ranks are another number then.

The documents, tokens and pixels are those of our pipeline; what differs is the order, the packing,
and how often a document comes: once an epoch, where ours has the recipe's shares.

Imports: the package, benchmarks.train.trainer. Used by: benchmarks.reproduce.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, islice
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.train.trainer import Micro
from zephon_mm.batch import step_sha256
from zephon_mm.recipe import Recipe

SEED = 42


class Document(NamedTuple):
    """Token ids (n,), their labels (n,), and normalised pixels (images, 3, H, W)."""

    ids: Tensor
    labels: Tensor
    pixels: Tensor


def documents(recipe: Recipe) -> list[Document]:
    """Return each document of a recipe's data once, sorted by name."""
    once = {
        "source": {**recipe.tables["source"], "stop_after_passes": 1, "stop": "all_exhausted"},
        "batch": {**recipe.tables["batch"], "tail": "pad"},
    }
    found = {}
    with replace(recipe, tables={**recipe.tables, **once}).pipeline(runner="inline") as pipeline:
        for batch in pipeline:
            pixels = batch.to_training(dummy_image=True)["pixel_values"]
            rows, starts, _ = batch.image_index.T
            places = ((row, n) for row, names in enumerate(batch.keys) for n in range(len(names)))
            for row, n in places:
                (at,) = torch.where(batch.segment_ids[row] == n + 1)
                mine = torch.where((rows == row) & (starts >= at[0]) & (starts <= at[-1]))[0]
                ids, labels = batch.input_ids[row, at], batch.labels[row, at]
                found[batch.keys[row][n]] = Document(ids, labels, pixels[mine])
    return [found[name] for name in sorted(found)]


class PlainLoader:
    """What one rank delivers, endless: packs of one row. `taken` counts the documents it read.

    Args:
        data: All documents.
        length: Tokens of a pack.
        ranks: How many share the documents.
        rank: Which this is.
        skip: Documents that all ranks together had read before.
    """

    def __init__(
        self, data: Sequence[Document], length: int, ranks: int, rank: int, skip: int = 0
    ) -> None:
        self._data, self._length, self._skip = data, length, skip
        self._ranks, self._rank = ranks, rank
        self.taken = 0

    def micros(self) -> Iterator[Micro]:
        """Yield packs, numbered as they lie in the global batches."""
        for number, pack in enumerate(self._packs()):
            yield micro(pack, self._length, number * self._ranks + self._rank)

    def _packs(self) -> Iterator[list[Document]]:
        pack: list[Document] = []
        for document in self._documents():
            self.taken += 1
            if sum(len(one.ids) for one in (*pack, document)) > self._length:
                yield pack
                pack = []
            pack.append(document)

    def _documents(self) -> Iterator[Document]:
        sampler = DistributedSampler(self._data, self._ranks, self._rank, seed=SEED)
        first, within = divmod(self._skip, len(self._data))
        start = within // self._ranks
        for epoch in count(first):
            sampler.set_epoch(epoch)
            yield from islice(DataLoader(self._data, batch_size=None, sampler=sampler), start, None)
            start = 0


def micro(pack: Sequence[Document], length: int, number: int) -> Micro:
    """Return a pack of at most `length` tokens as a microbatch of one row, sequence `number`."""
    sizes = [len(document.ids) for document in pack]
    sizes.append(length - sum(sizes))
    pad = (0, sizes[-1])
    ids = functional.pad(torch.cat([one.ids for one in pack]), pad)
    labels = functional.pad(torch.cat([one.labels for one in pack]), pad, value=-100)
    positions = torch.cat([torch.arange(size) for size in sizes])
    segments = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    pixels = torch.cat([one.pixels for one in pack])
    tensors = (ids, labels, positions, pixels)
    sha = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors))
    inputs = {
        "input_ids": ids[None],
        "labels": labels[None],
        "position_ids": positions[None],
        "pixel_values": pixels if len(pixels) else pixels.new_zeros(1, *pixels.shape[1:]),
        "attention_mask": (segments[:, None] == segments).tril()[None, None],
    }
    valid = int((labels != -100).sum())
    return Micro(inputs, valid, length - sizes[-1], len(pack), {number: sha.hexdigest()})


def digests(
    data: Sequence[Document], length: int, ranks: int, size: int, skip: int = 0
) -> Iterator[tuple[str, int]]:
    """Yield for each step of `size` packs its sha256, and how many documents were read by then."""
    loaders = [PlainLoader(data, length, ranks, rank, skip) for rank in range(ranks)]
    sources = [loader.micros() for loader in loaders]
    while True:
        rows: dict[int, str] = {}
        for source in sources:
            for one in islice(source, size // ranks):
                rows |= one.rows
        yield step_sha256(rows), skip + sum(loader.taken for loader in loaders)
