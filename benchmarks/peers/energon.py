"""Megatron-Energon on its own prepared WebDataset.

Settings: endless, a buffer of 1,000 rows (128 of the full row) shuffles, 100 rows in sequence, two
workers. The full row goes through its packing buffer of 64 documents, first fit, by token counts;
pictures are decoded when the pack is made (`postencode_sample`).

Imports: .work. Used by: .measure.
"""

from typing import Any

from megatron import energon as library

from benchmarks.peers.work import LENGTH, WORKERS, Loader, Task, packed, picture, token_ids

Row = dict[str, Any]


@library.stateless
def cook(row: Row) -> Row:
    """Keep a row as it is."""
    return row


class Raw(library.TaskEncoder[Any, Any, Any, Any]):
    """Batches are lists of rows."""

    cookers = (library.Cooker(cook),)
    decoder = None

    @library.stateless
    def batch(self, samples: list[Row]) -> Any:
        """Keep the list."""
        return samples


class Packed(Raw):
    """Batches are packed sequences."""

    def __init__(self, task: Task) -> None:
        self._task = task

    @library.stateless
    def preencode_sample(self, sample: Row) -> Row:
        """Tokenise."""
        return {**sample, "ids": token_ids(self._task.tokenizer, sample["txt"])}

    def select_samples_to_pack(self, samples: list[Row]) -> list[list[Row]]:
        """Put each document into the first sequence that has room for it."""
        packs: list[list[Row]] = []
        for sample in samples:
            for pack in packs:
                if sum(len(one["ids"]) for one in (*pack, sample)) <= LENGTH:
                    pack.append(sample)
                    break
            else:
                packs.append([sample])
        return packs

    @library.stateless
    def postencode_sample(self, sample: Row) -> Row:
        """Decode."""
        return {**sample, "jpg": picture(sample["jpg"])}

    @library.stateless
    def pack_selected_samples(self, samples: list[Row]) -> Row:
        """Keep the documents of a sequence together."""
        return {**samples[0], "pack": samples}

    @library.stateless
    def batch(self, samples: list[Row]) -> Any:
        """Lay sequences out."""
        packs = [sample["pack"] for sample in samples]
        pixels = [row["jpg"] for pack in packs for row in pack]
        return packed([[row["ids"] for row in pack] for pack in packs], pixels)


def energon(task: Task) -> Loader:
    """Return the loader."""
    workers = {"rank": task.rank, "world_size": task.ranks, "num_workers": WORKERS}
    data = library.get_train_dataset(
        task.folder,
        worker_config=library.WorkerConfig(**workers),
        batch_size=task.packs if task.full else task.samples,
        packing_buffer_size=64 if task.full else None,
        shuffle_buffer_size=128 if task.full else 1_000,
        max_samples_per_sequence=100,
        task_encoder=Packed(task) if task.full else Raw(),
    )
    loader = library.get_savable_loader(data)
    if task.state is not None:
        loader.restore_state_rank(task.state)
    return Loader(loader, loader.save_state_rank)
