"""`zephon-mm inspect PATH`: what a dataset is, three of its samples, likely problems.

    default    the shards and fields, and the first rows of some shards
    --check    every row of every shard: it is read, and its images are decoded

Exit status 1 if something is wrong, so that a job can stop before it starts.

Imports: errors, io, engine.tasks, processors, records. Used by: cli.main.
"""

import argparse
import itertools
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tqdm import tqdm

from zephon_mm.engine.tasks import detect_schema
from zephon_mm.errors import ConfigError, DatasetError, SampleError
from zephon_mm.io import Dataset, read_blob
from zephon_mm.options import cpus
from zephon_mm.processors.documents import to_document
from zephon_mm.processors.image import decode, probe
from zephon_mm.records import FileBlob, Image, RowBlob

LOOKED_SHARDS, LOOKED_ROWS = 8, 32
TASK_ROWS = 64
SHOWN_PROBLEMS = 10
SHOWN_CHARS = 60
SHOWN_ITEMS = 4

Problem = tuple[str, str]
"""A reason that can be counted, and a message that names the sample."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("path", help="a file, a folder, a pattern, a URL")
    parser.add_argument("--fmt", help="the format, if it is not recognised")
    parser.add_argument("--schema", help="how rows become documents, if the fields do not tell")
    parser.add_argument("--check", action="store_true", help="read every row, decode every image")


def run(arguments: argparse.Namespace) -> int:
    """Print what was found; return the exit status."""
    dataset = Dataset.from_path("data", arguments.path, arguments.fmt, arguments.schema)
    rows = [shard.num_rows for shard in dataset.shards]
    size = sum(shard.num_bytes for shard in dataset.shards)
    print(f"format   {dataset.fmt}")
    print(
        f"shards   {len(rows)}, of {min(rows)} to {max(rows)} rows, {size / 2**20:.1f} MiB in all"
    )
    print(f"rows     {len(dataset)}")
    looked = list(_looked_at(dataset))
    _print_fields([sample for _, sample in looked])
    try:
        schema: Any = detect_schema(dataset)
        print(f"schema   {schema if isinstance(schema, str) else 'a function'}")
    except ConfigError as error:
        print(f"schema   unknown: {error}")
        return 1
    for name, sample in itertools.islice(looked, 3):
        print(f"\n{name}")
        _print_sample(dataset, sample)
    places = _all(dataset) if arguments.check else _some(dataset)
    total = sum(rows) if arguments.check else None
    return _report(dataset, schema, places, total)


def _some(dataset: Dataset) -> Iterator[tuple[int, range]]:
    """Yield the first rows of some shards, the first and the last of them among those."""
    step = max(1, (len(dataset.shards) - 1) // max(LOOKED_SHARDS - 1, 1))
    for number in range(0, len(dataset.shards), step):
        yield number, range(min(dataset.shards[number].num_rows, LOOKED_ROWS))


def _all(dataset: Dataset) -> Iterator[tuple[int, range]]:
    for number, shard in enumerate(dataset.shards):
        for at in range(0, shard.num_rows, TASK_ROWS):
            yield number, range(at, min(at + TASK_ROWS, shard.num_rows))


def _looked_at(dataset: Dataset) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for shard, rows in _some(dataset):
        for row, sample in zip(rows, dataset.reader.read(shard, rows), strict=True):
            if not isinstance(sample, SampleError):
                yield dataset.row_name(shard, row), sample


def _print_fields(samples: list[Mapping[str, Any]]) -> None:
    kinds: dict[str, Counter[str]] = {}
    for sample in samples:
        for name, value in sample.items():
            kinds.setdefault(name, Counter())[_kind(value)] += 1
    for name, found in sorted(kinds.items()):
        absent = len(samples) - found.total()
        more = [f"absent in {absent} of {len(samples)} rows"] if absent else []
        print(f"field    {name}: {', '.join([*map(str, found), *more])}")


def _kind(value: Any) -> str:
    if isinstance(value, FileBlob | RowBlob):
        return "bytes"
    if isinstance(value, list):
        return f"list of {' or '.join(sorted({_kind(one) for one in value})) or 'nothing'}"
    return type(value).__name__


def _print_sample(dataset: Dataset, sample: Mapping[str, Any]) -> None:
    for name, value in sorted(sample.items()):
        print(f"  {name:12} {_shown(dataset, value)}")


def _shown(dataset: Dataset, value: Any) -> str:
    if isinstance(value, FileBlob | RowBlob):
        data = read_blob(dataset, value)
        try:
            header = probe(lambda size: data if size < 0 else data[:size])
        except SampleError:
            return f"{len(data)} bytes"
        return f"{header.format}, {header.width_px} x {header.height_px} px, {len(data)} bytes"
    if isinstance(value, list):
        more = [f"and {len(value) - SHOWN_ITEMS} more"] if len(value) > SHOWN_ITEMS else []
        shown = [_shown(dataset, one) for one in value[:SHOWN_ITEMS]]
        return f"[{'; '.join(shown + more)}]"
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}... ({len(text)})"


def _report(
    dataset: Dataset, schema: Any, places: Iterator[tuple[int, range]], total: int | None
) -> int:
    """Look at rows, decoding their images; print the problems by reason."""
    counts: Counter[str] = Counter()
    first: dict[str, str] = {}
    looked = 0
    bar = tqdm(total=total, unit="row", disable=None if total else True)
    with bar, ThreadPoolExecutor(cpus()) as pool:
        running: deque[Future[tuple[int, list[Problem]]]] = deque()
        more = True
        while more or running:
            place = next(places, None) if more else None
            more = place is not None
            if place is not None:
                running.append(pool.submit(_problems, dataset, schema, *place))
            if more and len(running) < 4 * cpus():
                continue
            rows, problems = running.popleft().result() if running else (0, [])
            looked += rows
            bar.update(rows)
            for reason, message in problems:
                counts[reason] += 1
                first.setdefault(reason, message)
    print(f"\nlooked at {looked} of {len(dataset)} rows: {counts.total()} problems")
    for reason, count in counts.most_common(SHOWN_PROBLEMS):
        print(f"  {count} x {reason}, first: {first[reason]}")
    if not total:
        print("--check looks at every row")
    return 1 if counts else 0


def _problems(dataset: Dataset, schema: Any, shard: int, rows: range) -> tuple[int, list[Problem]]:
    """Return how many rows were looked at, and what is wrong with them."""
    try:
        samples = dataset.reader.read(shard, rows)
    except (DatasetError, OSError) as error:
        return 0, [("damaged_shard", f"{dataset.shards[shard].name}: {error}")]
    found = []
    for row, sample in zip(rows, samples, strict=True):
        try:
            _decode(dataset, schema, sample)
        except SampleError as error:
            found.append((error.reason, f"{dataset.row_name(shard, row)}: {error.message}"))
        except (DatasetError, OSError) as error:
            found.append(("damaged_shard", f"{dataset.row_name(shard, row)}: {error}"))
    return len(rows), found


def _decode(dataset: Dataset, schema: Any, sample: Any) -> None:
    """Do with a row what training would, from its fields to its pixels."""
    if isinstance(sample, SampleError):
        raise sample
    document = to_document(sample, schema, dataset.missing)
    for segment in document.segments if document else ():
        if isinstance(segment, Image):
            decode(read_blob(dataset, segment.blob))
