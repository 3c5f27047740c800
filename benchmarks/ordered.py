"""What delivering in order costs with a heavy tail: `python -m benchmarks.ordered`.

One image in a hundred costs about 50 times what the others do: it is a JPEG of 8 x 8 photographs.
The `Unordered` driver exists here alone: it hands batches over as they complete, so that none waits
for a slow one before it. All else is the package's own and the same: planning, task functions, task
sizes, prefetch. The ratio of samples per second, median of interleaved pairs, is what order costs.

Each run is a process of its own, and is timed over a whole window of all lanes.

Imports: the package, benchmarks.pipeline. Writes the images into the data folder, once.
"""

import argparse
import io
import json
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from PIL import Image

import zephon_mm.engine.driver as driver_module
from benchmarks.data import samples, write_benchmark_tokenizer
from benchmarks.photos import SIGLIP, alone
from benchmarks.pipeline import build
from zephon_mm.batch import Batch
from zephon_mm.cli.demo_data import encode, write_shard
from zephon_mm.engine.driver import Driver
from zephon_mm.engine.pending import Pending
from zephon_mm.engine.planner import Position, Start
from zephon_mm.metrics import Metrics

EVERY = 100  # one heavy image in so many
TILES = 8  # a heavy image is 8 x 8 copies of a picture of the others' mean size
WARM_UP_S = 2.0


class _Bell(threading.Event):
    """The `ready` event of a batch; it puts the batch into a queue when it is set."""

    def __init__(self, done: "SimpleQueue[Any]", batch: Any) -> None:
        super().__init__()
        self._done, self._batch = done, batch

    def set(self) -> None:
        super().set()
        self._done.put(self._batch)


class Completed(Pending):
    """A batch that says when its last image has ended."""

    done: "SimpleQueue[Any]" = SimpleQueue()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        empty = self.ready.is_set()
        self.ready = _Bell(self.done, self)  # no task of it has been submitted yet
        if empty:
            self.ready.set()


class Unordered(Driver):
    """Delivers batches as they complete."""

    def _deliver(self, item: Any) -> None:
        if not isinstance(item, Completed):  # an error, or the end
            Completed.done.put(item)

    def _next(self) -> tuple[Batch, Position] | None:
        item = Completed.done.get()
        if not isinstance(item, Completed):
            if item is None:
                return None
            raise item
        if item.error is not None:
            raise item.error
        self._count(item)
        batch = item.delivered()
        item.ready = None  # type: ignore[assignment]  # it holds the item: a cycle that holds a slab
        self._taken += 1
        if self._bell.armed or self._is_low():
            self._wake()
        return batch, item.after


def make_heavy_data(data: Path, count: int) -> Path:
    """Write one shard of photographs with captions unless there is one; return its folder."""
    folder = data.with_name(f"photos-heavy-{count}")
    if not folder.exists():
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write_shard(partial / "heavy-000000.tar", _with_heavy(count))
        partial.rename(folder)
    return folder


def _with_heavy(count: int) -> Iterator[dict[str, Any]]:
    for number, sample in enumerate(samples(0, count)):
        if number % EVERY == EVERY // 2:
            small = np.asarray(Image.open(io.BytesIO(sample["jpg"])).resize((690, 690)))
            sample["jpg"] = encode(Image.fromarray(np.tile(small, (TILES, TILES, 1))), "jpg")
        yield sample


def cost_ratio() -> float:
    """Return what a heavy image costs one core, in times of the others' mean; best of three."""
    out = np.empty((3, 384, 384), dtype=np.uint8)

    def cost_s(sample: dict[str, Any]) -> float:
        began = time.perf_counter()
        SIGLIP.write(sample["jpg"], out)
        return time.perf_counter() - began

    costs_s = [min(cost_s(sample) for _ in range(3)) for sample in _with_heavy(EVERY)]
    heavy_s = costs_s.pop(EVERY // 2)
    return heavy_s / statistics.fmean(costs_s)


def run(kind: str, data: Path, workers: int, count: int) -> float:
    """Return samples per second after a warm-up."""
    if kind == "unordered":
        driver_module.Pending = Completed  # type: ignore[misc]
    metrics = Metrics()
    config = build(data, "process", workers).options(index="off")._compiled(metrics)
    driver = (Unordered if kind == "unordered" else Driver)(config, Start(), metrics)
    seen, start, began = 0, 0.0, time.perf_counter()
    try:
        while seen < count:
            item = driver.next()
            assert item is not None
            if start:
                seen += sum(len(row) for row in item[0].keys)
            elif time.perf_counter() - began > WARM_UP_S:
                start = time.perf_counter()
        return seen / (time.perf_counter() - start)
    finally:
        del item
        driver.close()


def main() -> None:
    """Parse the command line, print the ratio of each pair and the median."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("benchmarks/data_cache/photos"))
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--count", type=int, default=8 * 2048, help="samples of a run")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--one", choices=["ordered", "unordered"])
    args = parser.parse_args()
    folder = make_heavy_data(args.data, args.samples)
    write_benchmark_tokenizer(args.data.with_name("tokenizer"))
    if args.one:
        print(json.dumps(run(args.one, folder, args.workers, args.count)))
        return
    print(f"1 image in {EVERY} costs {cost_ratio():.0f} times what the others do")
    ratios = []
    for number in range(args.pairs):
        rates = {kind: alone("benchmarks.ordered", args, kind) for kind in ("unordered", "ordered")}
        ratios.append(rates["ordered"] / rates["unordered"])
        shown = "  ".join(f"{kind} {rate:6.1f} samples/s" for kind, rate in rates.items())
        print(f"pair {number + 1}: {shown}  ({ratios[-1]:.3f})", flush=True)
    print(f"ordered / unordered, median of {args.pairs}: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
