"""Run one contender, in a Python that has it: `python -m benchmarks.peers.measure JSON`.

Prints a rate, or what the first global batches hold: for each the digests of its sequences, whose
order within a batch does not count.

A rate is taken after `warm_up` batches, more than any contender holds ready, and a tenth of the
window. The consumer only touches each byte once (it counts zeros), and is faster than they are: so
their queues are about empty at both ends of the window.

Imports: benchmarks.contenders, .work, the contenders. Used by: .table, in processes of its own.
"""

import hashlib
import importlib
import json
import os
import pickle
import sys
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.contenders import cpu_s, touch
from benchmarks.peers.work import END, PAD, Delivered, Task


def taken(batch: Any) -> tuple[int, int, int]:
    """Return the zeros, the samples and the usable tokens of a batch; raw rows have no tokens."""
    if not isinstance(batch, Delivered):
        return touch(batch), len(batch), 0
    ids = np.asarray(batch.ids)
    zeros = sum(one.size - np.count_nonzero(one) for one in map(np.asarray, batch))
    return int(zeros), int((ids == END).sum()), int((ids != PAD).sum())


def rate(batches: Iterable[Any], seconds: float, warm_up: int) -> dict[str, float]:
    """Return samples and usable tokens a second, and CPU time over all processes."""
    found: list[tuple[int, int, int]] = []
    first = start = cpu = 0.0
    for number, batch in enumerate(batches):
        found.append(taken(batch))
        now = time.perf_counter()
        first = first or now
        if start and now - start > seconds:
            break
        if not start and number >= warm_up and now - first > seconds / 10:
            start, cpu = now, cpu_s()
            found.clear()
    else:
        raise ValueError("the data ended before the window did")
    _, samples, tokens = map(sum, zip(*found, strict=True))
    rates = {"samples_per_s": samples / (now - start), "tokens_per_s": tokens / (now - start)}
    return {**rates, "cpu_us": 1e6 * (cpu_s() - cpu) / samples, "batches": len(found)}


def digests(batches: Iterable[Any], steps: int) -> list[list[str]]:
    """Return the digests of the sequences of the next batches, without their padding."""
    rows = (np.asarray(batch.ids) for batch in islice(batches, steps))
    return [[hashlib.sha256(row[row != PAD].tobytes()).hexdigest() for row in ids] for ids in rows]


def main() -> None:
    """Do what the command line asks; print a line of JSON."""
    wanted = json.loads(sys.argv[1])
    ranks, rank, steps, state = (wanted[name] for name in ("ranks", "rank", "steps", "state"))
    if ranks > 1:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ |= {name: str(value) for name, value in names.items()}  # Mosaic reads them
        where = f"file://{wanted['meet']}"
        torch.distributed.init_process_group("gloo", where, world_size=ranks, rank=rank)
    contender = importlib.import_module(f"benchmarks.peers.{wanted['file']}")
    state = pickle.loads(Path(state).read_bytes()) if state else None
    shared = Path(wanted["meet"]).parent
    task = Task(Path(wanted["folder"]), wanted["full"], ranks, rank, state, shared)
    loader = getattr(contender, wanted["name"])(task)
    batches = iter(loader.batches)
    if not steps:
        result: Any = rate(batches, wanted["seconds"], wanted["warm_up"])
    else:
        result = digests(batches, steps)
        if wanted["save"] and loader.state:
            Path(wanted["save"]).write_bytes(pickle.dumps(loader.state()))
        result += digests(batches, wanted["more"])
    print(f"\n{json.dumps([result])}", flush=True)


if __name__ == "__main__":
    main()
