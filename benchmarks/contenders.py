"""What `benchmarks.readers` runs in processes of its own: the formats' libraries, and zephon_mm.

Each contender reads in shuffled order with two worker processes, and its consumer touches each byte
once: it counts the zero bytes. One is run in any Python that has its library, so nothing is
imported before it is needed.

    python benchmarks/contenders.py write mds text FOLDER
    python benchmarks/contenders.py read mosaic text FOLDER

Imports: nothing of the package but in `raw`. Used by: benchmarks.{readers, peers}.
"""

import argparse
import glob
import json
import os
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import psutil

BATCH = 256
WORKERS = 2
TEXT_ROWS, IMAGE_ROWS = 200_000, 16_000
SHARD_ROWS = {"text": 20_000, "image": 2_000}
WARM_UP_BATCHES, SECONDS = 8, 4.0

Row = dict[str, Any]
Batch = list[Row]


def rows(kind: str, count: int | None = None) -> Iterator[Row]:
    """Yield the samples: a text of 200 to 1,000 letters, and with `image` 20 to 30 KB beside it."""
    numbers = random.Random(0)
    words = ["".join(numbers.choices("abcdefghij", k=n)) for n in (2, 3, 4, 5, 6, 7, 8) * 30]
    text = " ".join(numbers.choices(words, k=20_000))
    noise = numbers.randbytes(1 << 20)
    for number in range(count or (TEXT_ROWS if kind == "text" else IMAGE_ROWS)):
        at = numbers.randrange(len(text) - 1_000)
        row: Row = {"txt": f"{number} " + text[at : at + numbers.randint(200, 1_000)]}
        if kind == "image":
            at = numbers.randrange(len(noise) - 30_000)
            row["jpg"] = b"\xff\xd8\xff" + noise[at : at + numbers.randint(20_000, 30_000)]
        yield row


def photographs(target: str) -> Iterator[Row]:
    """Yield what `benchmarks.data` wrote into `photos` beside the target folder."""
    from benchmarks.formats import shards

    for part in shards(Path(target).with_name("photos")):
        yield from part


# Writers, each the format's own.


def write_webdataset(samples: Iterable[Row], folder: str, shard_rows: int) -> None:
    """Write tar shards."""
    import webdataset

    with webdataset.ShardWriter(f"{folder}/s-%04d.tar", maxcount=shard_rows, verbose=0) as out:
        for number, row in enumerate(samples):
            out.write({"__key__": f"{number:08}", **row})


def write_mds(samples: Iterable[Row], folder: str, shard_rows: int) -> None:
    """Write MDS shards, of as many rows as fit into its 64 MiB."""
    from streaming import MDSWriter

    first = next(rest := iter(samples))
    columns = {name: "str" if name == "txt" else "bytes" for name in first}
    with MDSWriter(out=folder, columns=columns, exist_ok=True) as out:
        for row in chain([first], rest):
            out.write(row)


def write_litdata(samples: Iterable[Row], folder: str, shard_rows: int) -> None:
    """Write LitData chunks of 64 MB."""
    from litdata.streaming import Cache

    cache = Cache(folder, chunk_bytes="64MB")
    for number, row in enumerate(samples):
        cache[number] = row
    cache.done()
    cache.merge()


def write_lance(samples: Iterable[Row], folder: str, shard_rows: int) -> None:
    """Write a Lance dataset, a fragment for each part."""
    import lance
    import pyarrow

    for part in _parts(samples, shard_rows):
        lance.write_dataset(pyarrow.Table.from_pylist(part), folder, mode="append")


def write_parquet(samples: Iterable[Row], folder: str, shard_rows: int) -> None:
    """Write Parquet files with row groups of 1,000 rows."""
    import pyarrow
    import pyarrow.parquet

    for number, part in enumerate(_parts(samples, shard_rows)):
        name = f"{folder}/{number:08}.parquet"
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(part), name, row_group_size=1_000, compression="none"
        )


def write_records(samples: Iterable[Row], folder: str, shard_rows: int) -> None:
    """Write pickled rows into one file, and where each begins into another."""
    import numpy as np

    with open(f"{folder}/rows.bin", "wb") as file:
        sizes = [0, *(file.write(pickle.dumps(row)) for row in samples)]
    np.save(f"{folder}/ends.npy", np.cumsum(sizes))


def write_arrayrecord(samples: Iterable[Row], folder: str, shard_rows: int) -> None:
    """Write pickled rows as ArrayRecord shards, a row a group, as Grain wants for random access."""
    from array_record.python.array_record_module import ArrayRecordWriter

    for number, part in enumerate(_parts(samples, shard_rows)):
        writer = ArrayRecordWriter(f"{folder}/{number:05}.arrayrecord", "group_size:1,uncompressed")
        for row in part:
            writer.write(pickle.dumps(row))
        writer.close()


def write_energon(samples: Iterable[Row], folder: str, shard_rows: int) -> None:
    """Write tar shards, and what `energon prepare` adds to them."""
    write_webdataset(samples, folder, shard_rows)
    command = [f"{os.path.dirname(sys.executable)}/energon", "prepare", "--non-interactive"]
    split = ["--split-parts", "train:s-.*[.]tar", "--sample-type", "CrudeWebdataset"]
    subprocess.run([*command, *split, "--num-workers", "2", folder], check=True)


def write_arrow(samples: Iterable[Row], folder: str, shard_rows: int) -> None:
    """Write a data set of Hugging Face's `datasets`."""
    import datasets

    datasets.Dataset.from_list(list(samples)).save_to_disk(folder)


def _parts(samples: Iterable[Row], size: int) -> Iterator[Batch]:
    source = iter(samples)
    while part := list(islice(source, size)):
        yield part


# Contenders: each yields batches for ever or for one pass.


def webdataset_loader(folder: str) -> Iterable[Batch]:
    """WebDataset in a DataLoader, as its documentation shows."""
    import torch
    import webdataset

    shards = sorted(glob.glob(f"{folder}/*.tar"))
    data = webdataset.WebDataset(shards, shardshuffle=100, empty_check=False).shuffle(1_000)
    return torch.utils.data.DataLoader(
        data, batch_size=BATCH, num_workers=WORKERS, collate_fn=_same
    )


def mosaic(folder: str) -> Iterable[Batch]:
    """StreamingDataset in a DataLoader."""
    import torch
    from streaming import StreamingDataset

    data = StreamingDataset(local=folder, shuffle=True, batch_size=BATCH)
    return torch.utils.data.DataLoader(
        data, batch_size=BATCH, num_workers=WORKERS, collate_fn=_same
    )


def litdata(folder: str) -> Iterable[Batch]:
    """LitData's dataset in its own loader."""
    from litdata import StreamingDataLoader, StreamingDataset

    data = StreamingDataset(folder, shuffle=True)
    return StreamingDataLoader(data, batch_size=BATCH, num_workers=WORKERS, collate_fn=_same)


def lance(folder: str) -> Iterable[Batch]:
    """A map-style dataset over batched `take` in a DataLoader."""
    import torch

    return torch.utils.data.DataLoader(
        _LanceRows(folder),
        batch_size=BATCH,
        shuffle=True,
        num_workers=WORKERS,
        collate_fn=_same,
        multiprocessing_context="forkserver",
    )


class _LanceRows:
    """Rows by number; made in each worker."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.data: Any = None

    def __len__(self) -> int:
        import lance

        return int(lance.dataset(self.folder).count_rows())

    def __getitems__(self, numbers: list[int]) -> Batch:
        if self.data is None:
            import lance

            self.data = lance.dataset(self.folder)
        return list(self.data.take(numbers).to_pylist())


def parquet(folder: str) -> Iterable[Batch]:
    """A pass over row groups in shuffled order in a DataLoader, rows shuffled within each."""
    import torch

    class Groups(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Row]:
            return _parquet_rows(folder, torch.utils.data.get_worker_info().id)

    return torch.utils.data.DataLoader(
        Groups(), batch_size=BATCH, num_workers=WORKERS, collate_fn=_same
    )


def _parquet_rows(folder: str, worker: int) -> Iterator[Row]:
    import pyarrow.parquet

    files = [pyarrow.parquet.ParquetFile(path) for path in sorted(glob.glob(f"{folder}/*.parquet"))]
    groups = [(file, group) for file in files for group in range(file.num_row_groups)]
    order = random.Random(0)
    order.shuffle(groups)
    for file, group in groups[worker::WORKERS]:
        found = file.read_row_group(group).to_pylist()
        order.shuffle(found)
        yield from found


def _same(batch: Any) -> Any:
    return batch


def touch(batch: Batch) -> int:
    """Count the zero bytes of a batch."""
    zeros = 0
    for row in batch:
        for name, value in row.items():
            if not name.startswith("__"):
                zeros += value.count("\0" if isinstance(value, str) else 0)
    return zeros


def zephon(folder: str) -> tuple[Iterable[Any], Callable[[Any], int]]:
    """Raw samples, through columns."""
    import numpy as np

    return raw(folder).batch(microbatch_size=BATCH), lambda batch: sum(
        column.data.size - np.count_nonzero(column.data) for column in batch.columns.values()
    )


def zephon_samples(folder: str) -> tuple[Iterable[Any], Callable[[Any], int]]:
    """Raw samples, through one mapping a sample."""
    return raw(folder).batch(microbatch_size=BATCH), lambda batch: touch(batch.samples)


def raw(folder: str) -> Any:
    """Return a pipeline of samples, not yet in batches."""
    from zephon_mm import Dataset, Pipeline
    from zephon_mm.work import StaticMixtureWorkSource

    data = Dataset.from_path("data", folder, cache_dir=f"{folder}.cache", progress=False)
    source = StaticMixtureWorkSource([data], {"data": 1.0}, seed=0)
    return Pipeline(source).options(runner="process", workers=WORKERS)


WRITERS = {
    "webdataset": write_webdataset,
    "mds": write_mds,
    "litdata": write_litdata,
    "lance": write_lance,
    "parquet": write_parquet,
    "records": write_records,
    "arrayrecord": write_arrayrecord,
    "energon": write_energon,
    "arrow": write_arrow,
}
OWN: dict[str, Callable[[str], Iterable[Batch]]] = {
    "webdataset": webdataset_loader,
    "mds": mosaic,
    "litdata": litdata,
    "lance": lance,
    "parquet": parquet,
}
"""Format -> its own library, or where that has no loader the usual DataLoader around it."""


def measure(
    batches: Iterable[Any], touched: Callable[[Any], int], size: Callable[[Any], int]
) -> Row:
    """Return samples per second delivered to a consumer that touches each byte once."""
    zeros = count = 0
    start = cpu = 0.0
    for number, batch in enumerate(batches):
        if number == WARM_UP_BATCHES:
            start, cpu, count = time.perf_counter(), cpu_s(), 0
        zeros += touched(batch)
        count += size(batch)
        if number > WARM_UP_BATCHES and time.perf_counter() - start > SECONDS:
            break
    elapsed, cpu = time.perf_counter() - start, cpu_s() - cpu
    return {"samples_per_s": count / elapsed, "cpu_us": 1e6 * cpu / count, "zeros": int(zeros)}


def cpu_s() -> float:
    """Return the CPU time of this process and those that it started, also of those that ended."""
    me = psutil.Process()
    times = (process.cpu_times() for process in (me, *me.children(recursive=True)))
    return float(sum(sum(one[:4]) for one in times))  # the last two are of ended children


def main() -> None:
    """Write data or run one contender; print its figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["write", "own", "zephon", "zephon_samples"])
    parser.add_argument("format", choices=sorted(WRITERS))
    parser.add_argument("kind", choices=["text", "image", "full"])
    parser.add_argument("folder")
    parser.add_argument("--count", type=int, help="of samples, in 16 shards")
    args = parser.parse_args()
    if args.action == "write":
        os.makedirs(args.folder, exist_ok=True)
        full = args.kind == "full"
        samples = photographs(args.folder) if full else rows(args.kind, args.count)
        shard_rows = args.count // 16 if args.count else SHARD_ROWS[args.kind]
        WRITERS[args.format](samples, args.folder, shard_rows)
        print("[true]")
    elif args.action == "own":
        print(json.dumps(measure(OWN[args.format](args.folder), touch, len)))
    else:
        make = zephon if args.action == "zephon" else zephon_samples
        pipeline, touched = make(args.folder)
        found = measure(pipeline, touched, lambda batch: len(batch.sequence_ids))
        print(json.dumps(found))
        pipeline.close()  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
