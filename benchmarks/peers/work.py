"""What all contenders share: the task, its sizes, and the work on a sample.

The work of the full pipeline is the same function for everyone: decode a JPEG with simplejpeg, as
zephon_mm does, resize with the operator of PyTorch that zephon_mm calls, tokenise with the same
file. `picture` and `token_ids` give what zephon_mm delivers, byte for byte, id for id
(tests/benchmarks/test_peers.py).

A batch of the full pipeline is `Delivered`, raw rows are a list of mappings. Free places in `ids`
hold `PAD`, and each document ends with `END`: documents and usable tokens are counted from them.

Imports: torch and what it is run with; nothing of the package. Used by: benchmarks.peers.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, default_collate

WORKERS = 2
IMAGE_PX, IMAGE_TOKENS, LENGTH = 384, 27**2, 4096
PACK_IMAGES = LENGTH // IMAGE_TOKENS  # that one sequence can hold
VISION, IMAGE, VISION_END, END, PAD = 3, 4, 5, 0, -1
SAMPLES, DOCUMENTS, PACKS = 256, 8, 2
"""What a global batch has: raw rows, padded documents, or packed sequences of about as many."""


@dataclass(frozen=True)
class Task:
    """What to deliver, on which rank, from which state on; `shared` is a folder of all ranks."""

    folder: Path
    full: bool
    ranks: int = 1
    rank: int = 0
    state: Any = None
    shared: Path = Path()

    @property
    def samples(self) -> int:
        """Rows or padded documents in a batch of this rank."""
        return (DOCUMENTS if self.full else SAMPLES) // self.ranks

    @property
    def packs(self) -> int:
        """Packed sequences in a batch of this rank."""
        return PACKS // self.ranks

    @property
    def tokenizer(self) -> Path:
        """The folder of the tokenizer."""
        return self.folder.parent / "tokenizer"


class Loader(NamedTuple):
    """Endless batches, and how to save a state, if there is a way."""

    batches: Iterable[Any]
    state: Callable[[], Any] | None = None


class Delivered(NamedTuple):
    """A batch: ids (rows, tokens) int64, pixels (images, 3, 384, 384) uint8."""

    ids: Any
    pixels: Any


@functools.cache
def _tokenizer(folder: Path) -> Any:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def token_ids(folder: Path, text: str | bytes) -> NDArray[np.int64]:
    """Return the ids of a captioned picture: the image's places, the text, an end."""
    ids = _tokenizer(folder).encode(text if isinstance(text, str) else text.decode()).ids
    return np.array([VISION, *[IMAGE] * IMAGE_TOKENS, VISION_END, *ids, END], dtype=np.int64)


def picture(jpg: bytes) -> torch.Tensor:
    """Return a JPEG as (3, 384, 384) uint8, contiguous."""
    pixels = torch.from_numpy(simplejpeg.decode_jpeg(jpg, "RGB")).permute(2, 0, 1)[None]
    out = torch.empty((1, 3, IMAGE_PX, IMAGE_PX), dtype=torch.uint8)
    torch.ops.aten._upsample_bicubic2d_aa.out(pixels, out.shape[2:], False, None, None, out=out)
    return out[0]


def padded(folder: Path, rows: Sequence[Any]) -> Delivered:
    """Return captioned pictures as a batch, each a row, as long as the longest."""
    ids = [torch.from_numpy(token_ids(folder, row["txt"])) for row in rows]
    together = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=PAD)
    return Delivered(together, default_collate([picture(row["jpg"]) for row in rows]))


def packed(packs: Sequence[Sequence[NDArray[np.int64]]], pixels: list[torch.Tensor]) -> Delivered:
    """Return a batch of sequences of `LENGTH`, each of whole documents."""
    ids = np.full((len(packs), LENGTH), PAD, dtype=np.int64)
    for row, pack in zip(ids, packs, strict=True):
        row[: sum(map(len, pack))] = np.concatenate(pack)
    return Delivered(torch.from_numpy(ids), default_collate(pixels))


def in_loader(data: Any, task: Task, loader: Any = DataLoader, **options: Any) -> Loader:
    """Return a dataset in torch's `DataLoader`, or one derived from it, epoch after epoch."""
    collate = functools.partial(padded, task.tokenizer) if task.full else list
    options |= {"num_workers": WORKERS, "persistent_workers": True, "collate_fn": collate}
    made = loader(data, batch_size=task.samples, **options)
    if task.state is not None:
        made.load_state_dict(task.state)
    batches = itertools.chain.from_iterable(itertools.repeat(made))
    return Loader(batches, getattr(made, "state_dict", None))
