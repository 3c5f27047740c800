"""(c) Photographs with captions per second: fetched and batched, and through the whole pipeline.

(d) The price of the guarantees: the whole pipeline against the bare work.

"fetch" delivers the stored bytes, undecoded, 64 samples a batch; "full" reads, tokenises, packs to
4,096 tokens, decodes and resizes to 384 px. Each run is a process of its own, timed after
`WARM_UP_S`, in which the queues have filled; the windows are longer than what they hold.

`NEED_TOKENS` is what one GPU is taken to eat that trains the 2.1 billion weights of
`configs/siglip2_so400m_qwen3_1.7b.toml`; `benchmarks.cuda_check` measures yours.

(f) Texts fetched and batched, beside the formats' own libraries where they are.

What "bare" is, and why it is compared in pairs, says `benchmarks.pipeline`; what the contenders of
(f) are, and how to have more of them, `benchmarks.readers`.

Imports: the package, benchmarks.pipeline, .tables. Used by: benchmarks.reproduce.
"""

import multiprocessing
import time
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes

from benchmarks.data import make_data, write_benchmark_tokenizer
from benchmarks.photos import alone, source
from benchmarks.pipeline import build
from benchmarks.readers import FORMATS as LIBRARIES
from benchmarks.readers import measured
from benchmarks.reproduce.tables import Result
from zephon_mm import Pipeline

NEED_TOKENS = 16_900
WARM_UP_S = 2.0
WORKERS, SHORT_WORKERS = (1, 2, 4, 8), (1, 2)
SECONDS, SHORT_SECONDS = 30.0, 4.0
PAIRS, SHORT_PAIRS = 5, 2
SHORT_PAIR = {"seconds": 5, "count": 3000}
FORMATS, TEXT_ROUNDS = ("webdataset", "mds", "litdata"), 3
RUNNERS = ("thread", "process")


def photographs(folder: Path, *, short: bool) -> Path:
    """Make the benchmark's photographs and tokenizer; return where the photographs are."""
    data = folder / ("photos-short" if short else "photos")
    make_data(data, num_samples=500 if short else 4_000)
    write_benchmark_tokenizer(folder / "tokenizer")
    return data


def fetching(data: Path, runner: str, workers: int) -> Pipeline:
    """Return a pipeline that delivers undecoded samples."""
    pipeline = Pipeline(source(data))
    pipeline.options(canonical_replicas=8, runner=runner, workers=workers)
    return pipeline.batch(microbatch_size=64)


MAKE = {"full": build, "fetch": fetching}


def rate(data: Path, kind: str, runner: str, workers: int, seconds: float) -> tuple[float, float]:
    """Return samples and usable tokens per second; fetching counts no tokens."""
    with MAKE[kind](data, runner, workers) as pipeline:
        batches = iter(pipeline)
        began = time.perf_counter()
        while time.perf_counter() - began < WARM_UP_S:
            next(batches)
        samples = tokens = 0
        began = time.perf_counter()
        while (elapsed_s := time.perf_counter() - began) < seconds:
            batch: Any = next(batches)
            samples += sum(map(len, batch.keys))
            tokens += int((batch.segment_ids > 0).sum()) if kind == "full" else 0
    return samples / elapsed_s, tokens / elapsed_s


def run(folder: Path, *, short: bool) -> Result:
    """Return the table, a row for each kind, runner and number of workers."""
    data = photographs(folder, short=short)
    workers, seconds = (SHORT_WORKERS, SHORT_SECONDS) if short else (WORKERS, SECONDS)
    found: dict[tuple[str, str, int], tuple[float, float]] = {}
    for key in product(MAKE, RUNNERS, workers):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            found[key] = pool.submit(rate, data, *key, seconds).result()
    samples, tokens = map(sum, zip(*(v for k, v in found.items() if k[0] == "full"), strict=True))
    each = tokens / samples
    rows = [
        [*key, one[0], one[0] * each, "yes" if one[0] * each >= NEED_TOKENS else "no"]
        for key, one in found.items()
    ]

    def draw(axes: Axes) -> None:
        for name in ("full", "fetch"):
            for runner in RUNNERS:
                points = [(row[2], row[4]) for row in rows if row[:2] == [name, runner]]
                axes.loglog(*zip(*points, strict=True), marker="o", label=f"{name}, {runner}")
        axes.axhline(NEED_TOKENS, color="black", linestyle="--", label="need of one GPU")
        axes.set(xlabel="workers", ylabel="usable tokens/s")

    columns = ["kind", "runner", "workers", "samples/s", "usable tokens/s"]
    notes = [f"{each:,.0f} tokens a sample; need of one GPU: {NEED_TOKENS:,} usable tokens/s"]
    title = "Photographs with captions: fetched, and through the whole pipeline"
    return Result(title, [*columns, "enough"], rows, notes, draw)


def price(folder: Path, *, short: bool) -> Result:
    """Return the table of (d), a row for each pair and runner."""
    data = photographs(folder, short=short)
    args, rows = Namespace(data=data, **(SHORT_PAIR if short else {})), []
    for pair in range(SHORT_PAIRS if short else PAIRS):
        bare = alone("benchmarks.pipeline", args, "bare")["samples_per_s"]
        for runner in RUNNERS:
            found = alone("benchmarks.pipeline", args, runner)["samples_per_s"]
            rows.append([pair + 1, runner, bare, found, found / bare])
    ratios = {runner: [row[4] for row in rows if row[1] == runner] for runner in RUNNERS}

    def draw(axes: Axes) -> None:
        axes.boxplot(list(ratios.values()), tick_labels=list(ratios))
        axes.set(ylabel="samples/s of the pipeline / of the bare work")

    notes = [f"{name}: median {median(found):.3f} of bare" for name, found in ratios.items()]
    columns = ["pair", "runner", "bare samples/s", "pipeline samples/s", "ratio"]
    return Result("The price of the guarantees", columns, rows, notes, draw)


def texts(folder: Path, *, short: bool) -> Result:
    """Return the table of (f), a row for each format and loader."""
    rows, missing = [], []
    for fmt in FORMATS[: 1 if short else None]:
        found = measured(fmt, "text", folder / "readers", 1 if short else TEXT_ROUNDS)
        if found is None:
            missing.append(f"{fmt} left out: no Python has {LIBRARIES[fmt]}; set READERS_PYTHON")
            continue
        for name, tries in found.items():
            values = [[one[key] for one in tries] for key in ("samples_per_s", "cpu_us")]
            rows.append([fmt, LIBRARIES[fmt] if name == "own" else name, *map(median, values)])

    def draw(axes: Axes) -> None:
        axes.barh([f"{row[0]}: {row[1]}" for row in rows], [row[2] for row in rows])
        axes.set(xlabel="samples/s")

    columns = ["format", "loader", "samples/s", "us CPU a sample"]
    notes = ["two workers, batches of 256 in shuffled order, each byte touched once", *missing]
    return Result("Texts, fetched and batched", columns, rows, notes, draw)
