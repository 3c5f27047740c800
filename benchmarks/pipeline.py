"""The full pipeline against a bare run of the same work: `python -m benchmarks.pipeline`.

The bare run calls the same task functions with the same task sizes on rows that were dealt to as
many processes before, into one buffer that is used again and again: no packing, no transport, no
order. What the pipeline adds to that is what it costs. It is timed over one whole window of all
lanes, because a window measures ahead at its start and lives on that at its end. Pairs are
interleaved, each run is a process group of its own, and the median of the pairs' ratios counts: the
machines are shared and noisy. `--media naflex` and `--media video` do the same with patches in the
pictures' own proportions, and with clips of 2 to 5 s.

Imports: the package, benchmarks.data, .photos. Writes nothing.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.data import make_data, write_benchmark_tokenizer
from benchmarks.photos import SIGLIP, alone, packed
from zephon_mm import Dataset, Pipeline
from zephon_mm.engine.pending import together
from zephon_mm.engine.tasks import ImageJob, materialize, measure
from zephon_mm.processors import NaFlexProcessor, SigLIPVideoProcessor
from zephon_mm.records import Record, Skip
from zephon_mm.shm.arena import Arena
from zephon_mm.work import StaticMixtureWorkSource

WARM_UP_S = 2.0
WINDOW = 8 * 2048  # samples between two flush sentinels of all lanes
FILM_WINDOW = {"chunk_size": 16, "flush_every_k_chunks": 2}  # 256 samples of all lanes
PROCESSORS: dict[str, dict[str, Any]] = {
    "fixed": {"image_processor": SIGLIP},
    "naflex": {"image_processor": NaFlexProcessor(max_num_patches=576, packed=True)},
    "video": {"video_processor": SigLIPVideoProcessor(SIGLIP, fps=2.0, max_frames=8, pool=2)},
}


def build(
    data: Path,
    runner: str,
    workers: int,
    cache_dir: str | None = None,
    index: str = "off",
    media: str = "fixed",
) -> Pipeline:
    """Return the README's pipeline on the benchmark's photographs, or films."""
    photos = Dataset.from_path("photos", data, cache_dir=cache_dir)
    source = StaticMixtureWorkSource([photos], {"photos": 1.0}, seed=42)
    options = {"canonical_replicas": 8, "runner": runner, "workers": workers, "index": index}
    options |= FILM_WINDOW if media == "video" else {}
    return packed(source, data, processors=PROCESSORS[media], max_images=32, **options)


def run_pipeline(args: argparse.Namespace) -> dict[str, float]:
    """Return samples per second delivered to a consumer that only takes batches."""
    began, count = time.perf_counter(), args.count
    with build(args.data, args.one, args.workers, index=args.index, media=args.media) as pipeline:
        if args.index != "off":
            pipeline.build_index(progress=False)
        began = time.perf_counter()
        batches = iter(pipeline)
        next(batches)
        first_s = time.perf_counter() - began
        while time.perf_counter() - began < first_s + WARM_UP_S:
            next(batches)
        samples, start = 0, time.perf_counter()
        while samples < count:
            samples += sum(len(row) for row in next(batches).keys)
        elapsed = time.perf_counter() - start
    return {"samples_per_s": samples / elapsed, "first_batch_s": first_s}


def run_bare(args: argparse.Namespace) -> dict[str, float]:
    """Return samples per second of the task functions alone, summed over processes."""
    workers = args.workers
    spawn = multiprocessing.get_context("spawn")
    barrier = spawn.Barrier(workers)
    with spawn.Pool(workers, _start_bare, (barrier,)) as pool:
        arguments = [(args, number) for number in range(workers)]
        rates = pool.starmap(_bare_worker, arguments, chunksize=1)
    return {"samples_per_s": sum(rates)}


def _start_bare(barrier: Any) -> None:
    global _barrier
    _barrier = barrier
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _bare_worker(args: argparse.Namespace, number: int) -> float:
    torch.set_num_threads(1)
    workers, seconds = args.workers, args.seconds
    pipeline = build(args.data, "inline", workers, media=args.media)
    source, options = pipeline._source, pipeline._options
    context = pipeline._stages.context(source.datasets)
    arena = Arena(2 * options.task_images * 3 * SIGLIP.size**2)
    context = replace(context, arena=arena)
    state = source.start(number, workers)
    samples, start = 0, 0.0
    _barrier.wait()
    begin = time.perf_counter()
    while True:
        chunk, state = source.next(state, options.chunk_size)
        for at in range(0, len(chunk.refs), options.task_rows):
            records = measure(context, chunk.refs[at : at + options.task_rows])
            for jobs in _tasks(records, options.task_images):
                assert not any(materialize(context, jobs))
            if not start and time.perf_counter() - begin > WARM_UP_S:
                samples, start = 0, time.perf_counter()
                continue
            samples += len(records)
            if start and (elapsed := time.perf_counter() - start) > seconds:
                return samples / elapsed


def _tasks(records: list[Record | Skip], task_images: int) -> Iterator[list[ImageJob]]:
    """Yield the jobs of records, one after the other in memory, in tasks of so many images."""
    jobs: list[ImageJob] = []
    offset = images = 0
    for record in records:
        for parts in together(record.images) if isinstance(record, Record) else ():
            slot = parts[0]
            shape = slot.shape if slot.part < 0 else (len(parts), *slot.shape)
            first, size = max(slot.part, 0), int(np.prod(shape))
            job = ImageJob(record.ref, slot.blob, offset, shape, slot.media, first, size)
            jobs.append(job._replace(video=slot.video, grid=slot.grid))
            offset, images = offset + size, images + len(parts)
            if images >= task_images:
                yield jobs
                jobs, offset, images = [], 0, 0
    if jobs:
        yield jobs


def compare(args: argparse.Namespace) -> None:
    """Print the ratio of each runner to the bare run, median of interleaved pairs."""
    runners, pairs = args.runners.split(","), args.pairs
    ratios: dict[str, list[float]] = {runner: [] for runner in runners}
    for number in range(pairs):
        bare = alone("benchmarks.pipeline", args, "bare")["samples_per_s"]
        line = f"pair {number + 1}: bare {bare:6.1f} samples/s"
        for runner in runners:
            found = alone("benchmarks.pipeline", args, runner)
            ratios[runner].append(found["samples_per_s"] / bare)
            line += (
                f"   {runner} {found['samples_per_s']:6.1f} ({ratios[runner][-1]:.3f}), first "
                f"batch {found['first_batch_s']:.2f} s"
            )
        print(line, flush=True)
    for runner, found_ratios in ratios.items():
        print(f"{runner} / bare, median of {pairs}: {statistics.median(found_ratios):.3f}")


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="default: benchmarks/data_cache/photos or films")
    parser.add_argument("--media", choices=sorted(PROCESSORS), default="fixed")
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a bare run")
    parser.add_argument("--count", type=int, default=WINDOW, help="samples of a pipeline run")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--runners", default="process,thread")
    parser.add_argument("--index", choices=["off", "read", "fill"], default="off")
    parser.add_argument(
        "--short", action="store_true", help="500 samples, 2 pairs, a part of a window"
    )
    parser.add_argument("--one", choices=["bare", "process", "thread", "inline"])
    args = parser.parse_args()
    films = args.media == "video"
    args.data = args.data or Path("benchmarks/data_cache") / ("films" if films else "photos")
    if args.one == "bare":
        print(json.dumps(run_bare(args)))
    elif args.one:
        print(json.dumps(run_pipeline(args)))
    else:
        if args.short:
            args.samples, args.pairs, args.seconds, args.count = 500, 2, 5.0, 4000
            args.data = args.data.with_name(args.data.name + "-short")
        make_data(args.data, num_samples=args.samples, films=films)
        write_benchmark_tokenizer(args.data.with_name("tokenizer"))
        compare(args)


if __name__ == "__main__":
    main()
