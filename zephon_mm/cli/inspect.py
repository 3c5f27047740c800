"""`zephon-mm inspect PATH`: what a dataset is, three of its samples, likely problems.

    default      the shards and fields, and the first rows of some shards
    --check      every row of every shard: it is read, and its images are decoded
    of a recipe  its stages; with --step N, which samples each row of that global step is made of

Exit status 1 if something is wrong, so that a job can stop before it starts. Damage that leaves
shards readable, or stands in one shard of many, is reported with all else that is wrong.

Imports: checkpoint, errors, io, engine.tasks, processors, recipe, records, cli.dataset.
Used by: cli.main.
"""

import argparse
import json
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from zephon_mm.cli import dataset
from zephon_mm.engine.tasks import detect_schema
from zephon_mm.errors import ConfigError, DatasetError, SampleError, ZephonError
from zephon_mm.io import Dataset, read_blob
from zephon_mm.options import cpus
from zephon_mm.processors.documents import to_document
from zephon_mm.processors.image import decode, probe
from zephon_mm.recipe import load_recipe
from zephon_mm.records import FileBlob, Image, RowBlob

LOOKED_SHARDS, LOOKED_ROWS = 8, 32
TASK_ROWS, AT_ONCE = 64, 256
SHOWN_SAMPLES, SHOWN_PROBLEMS = 3, 10
SHOWN_CHARS = 60
SHOWN_ITEMS = 4
MOST_TOML = 1 << 20

Problem = tuple[str, str]
Place = tuple[int, range]
"""A reason that can be counted, and a message that names the sample."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    dataset.add_arguments(parser, "path", "a file, a folder, a pattern, a URL; or a recipe")
    parser.add_argument("--schema", help="how rows become documents, if the fields do not tell")
    parser.add_argument("--check", action="store_true", help="read every row, decode every image")
    add = parser.add_argument_group("of a recipe").add_argument
    add("--step", type=int, help="show what each row of this global step is made of")
    add("--state", type=_state, help="a file: begin planning with this checkpoint, as JSON")
    add("--json", action="store_true", help="with --step: print the rows as JSON")


def _state(path: str) -> Any:
    try:
        return json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{path} is no checkpoint as JSON: {error}") from error


def run(arguments: argparse.Namespace) -> int:
    """Print what was found; return the exit status."""
    given = (arguments.step, arguments.state, arguments.json or None)
    if any(one is not None for one in given) or _is_recipe(Path(arguments.path)):
        return _inspect_recipe(arguments)
    data = dataset.opened("data", arguments, "path", schema=arguments.schema)
    if arguments.check:
        with suppress(ConfigError):  # few formats have hashes
            options = {"schema": arguments.schema, "check_hashes": True}
            data = dataset.opened("data", arguments, "path", **options)
    rows = [shard.num_rows for shard in data.shards]
    size = sum(shard.num_bytes for shard in data.shards)
    print(f"format   {data.fmt}")
    print(
        f"shards   {len(rows)}, of {min(rows)} to {max(rows)} rows, {size / 2**20:.1f} MiB in all"
    )
    print(f"rows     {len(data)}")
    for kind, count in getattr(data.reader, "skipped_members", {}).items():
        print(f"skipped  {count} members: {kind}")
    looked = list(_looked_at(data))
    _print_fields([sample for _, sample in looked])
    for hint in sorted({str(sample["__hint__"]) for _, sample in looked if "__hint__" in sample}):
        print(f"hint     {hint}")
    schema = _schema(data)
    for name, sample in looked[:SHOWN_SAMPLES]:
        print(f"\n{name}")
        for field, value in sorted(sample.items()):
            print(f"  {field:12} {_shown(data, value)}")
    places = _all(data) if arguments.check else _some(data)
    is_good = _report(data, schema, places, sum(rows) if arguments.check else None)
    return 0 if is_good and schema is not None else 1


def _schema(data: Dataset) -> Any:
    """Print the schema and return it; None if there is none."""
    try:
        schema = detect_schema(data)
    except (ZephonError, OSError) as error:
        print(f"schema   unknown: {error}")
        return None
    print(f"schema   {schema if isinstance(schema, str) else 'a function'}")
    return schema


def _is_recipe(path: Path) -> bool:
    """Return whether a file is TOML with datasets; those of data are no such text."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(MOST_TOML)
    try:
        return "datasets" in tomllib.loads(head.decode())
    except ValueError:
        return False


def _inspect_recipe(arguments: argparse.Namespace) -> int:
    pipeline = load_recipe(arguments.path).pipeline()
    if arguments.state is not None:
        # Nothing is decoded: where the run was, its pixels may differ.
        pipeline.restore(arguments.state, allow=["pixels"])
    if arguments.step is None:
        pipeline.explain()
        return 0
    rows = pipeline.provenance(arguments.step)
    if arguments.json:
        print(json.dumps(rows))
        return 0
    why = "" if rows else ": it is skipped, or the data ends before it"
    print(f"step {arguments.step}, {len(rows)} rows{why}")
    for row in rows:
        print("row {row}, sequence {sequence}: {tokens} tokens, {images} images".format(**row))
        for one in row["samples"]:
            text = "  {key}: {shard} row {row} ({name}), {tokens} tokens, {images} images"
            print(text.format(**one))
    return 0


def _some(data: Dataset) -> Iterator[Place]:
    """Yield the first rows of some shards, the first and the last of them among those."""
    step = max(1, (len(data.shards) - 1) // max(LOOKED_SHARDS - 1, 1))
    for number in range(0, len(data.shards), step):
        yield number, range(min(data.shards[number].num_rows, LOOKED_ROWS))


def _all(data: Dataset) -> Iterator[Place]:
    for number, shard in enumerate(data.shards):
        for at in range(0, shard.num_rows, TASK_ROWS):
            yield number, range(at, min(at + TASK_ROWS, shard.num_rows))


def _looked_at(data: Dataset) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for shard, rows in _some(data):
        samples: list[Any] = []
        with suppress(DatasetError, OSError):  # the report says so
            samples = data.reader.read(shard, rows)
        for row, sample in enumerate(samples):
            if not isinstance(sample, SampleError):
                yield data.row_name(shard, row), sample


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


def _shown(data: Dataset, value: Any) -> str:
    if isinstance(value, FileBlob | RowBlob):
        try:
            found = read_blob(data, value)
        except (ZephonError, OSError) as error:
            return f"cannot be read: {error}"
        try:
            header = probe(lambda size: found if size < 0 else found[:size])
        except SampleError:
            return f"{len(found)} bytes"
        return f"{header.format}, {header.width_px} x {header.height_px} px, {len(found)} bytes"
    if isinstance(value, list):
        more = [f"and {len(value) - SHOWN_ITEMS} more"] if len(value) > SHOWN_ITEMS else []
        shown = [_shown(data, one) for one in value[:SHOWN_ITEMS]]
        return f"[{'; '.join(shown + more)}]"
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}... ({len(text)})"


def _report(data: Dataset, schema: Any, places: Iterator[Place], total: int | None) -> bool:
    """Look at rows, decoding images; print the problems by reason, return if there is none."""
    counts: Counter[str] = Counter()
    first: dict[str, str] = {}
    looked = 0
    bar = tqdm(total=total, unit="row", disable=None if total else True)
    with bar, ThreadPoolExecutor(cpus()) as pool:
        look = partial(_problems, data, schema)
        some = iter(lambda: list(islice(places, AT_ONCE)), [])
        for rows, problems in chain.from_iterable(pool.map(look, part) for part in some):
            looked += rows
            bar.update(rows)
            for reason, message in problems:
                counts[reason] += 1
                first.setdefault(reason, message)
    print(f"\nlooked at {looked} of {len(data)} rows: {counts.total()} problems")
    for reason, count in counts.most_common(SHOWN_PROBLEMS):
        print(f"  {count} x {reason}, first: {first[reason]}")
    if not total:
        print("--check looks at every row")
    return not counts


def _problems(data: Dataset, schema: Any, place: Place) -> tuple[int, list[Problem]]:
    """Return how many rows were looked at, and what is wrong with them."""
    shard, rows = place
    try:
        samples = data.reader.read(shard, rows)
    except (DatasetError, OSError) as error:
        return 0, [("damaged_shard", f"{data.shards[shard].name}: {error}")]
    found = []
    for row, sample in zip(rows, samples, strict=True):
        try:
            _decode(data, schema, sample)
        except SampleError as error:
            found.append((error.reason, f"{data.row_name(shard, row)}: {error.message}"))
        except (DatasetError, OSError) as error:
            found.append(("damaged_shard", f"{data.row_name(shard, row)}: {error}"))
    return len(rows), found


def _decode(data: Dataset, schema: Any, sample: Any) -> None:
    """Do with a row what training would, from its fields to its pixels."""
    if isinstance(sample, SampleError):
        raise sample
    document = None if schema is None else to_document(sample, schema, data.missing)
    for segment in document.media if document else ():
        if isinstance(segment, Image):
            decode(read_blob(data, segment.blob))
