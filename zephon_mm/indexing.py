"""Which index belongs to a pipeline, and filling it whole.

Imports: compiled's parts below the pipeline: engine, index, io, options, ops, runners, stages.
Used by: compiled, pipeline, cli.
"""

import json
import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from zephon_mm.engine.schedule import TaskQueue
from zephon_mm.engine.tasks import Context, measure, poisoned_sample
from zephon_mm.errors import ConfigError
from zephon_mm.index import Index, Table
from zephon_mm.io import Dataset
from zephon_mm.ops.map import name_of
from zephon_mm.ops.tokenize import Tokenize
from zephon_mm.options import Options
from zephon_mm.rng import digest
from zephon_mm.runners import make_runner
from zephon_mm.stages import Stages

FORMAT = "measured 6"
"""Change it when measuring gives other results for the same settings."""


def why_off(stages: Stages, options: Options, datasets: Any) -> str:
    """Return why a pipeline has no index; empty if it may have one."""
    if stages.raw:
        return "raw samples are not measured"
    if options.index == "off":
        return "options(index='off')"
    for stage in stages.documents:
        if not stage.version:
            function = name_of(stage.operator.fn)  # type: ignore[attr-defined]
            return f"{stage.name}({function}) has no version='...'"
    for dataset in datasets:
        if callable(dataset.schema) and not dataset.version:
            return f"the schema function of dataset {dataset.name!r} has no version='...'"
    return ""


def open_index(stages: Stages, options: Options, context: Context) -> Index | None:
    """Return the index of a pipeline, or None if it has none.

    A dataset that was not opened with `Dataset.from_path` has no place for one.
    """
    if why_off(stages, options, context.datasets):
        return None
    fill = options.index == "fill"
    operators = stages.fingerprint()  # digests the tokenizer: once, for all datasets
    folders = [folder_of(operators, context, number) for number in range(len(context.datasets))]
    tables = [
        None if folder is None else Table(folder, dataset.shards, write=fill)
        for folder, dataset in zip(folders, context.datasets, strict=True)
    ]
    return Index(tables, fill=fill) if any(tables) else None


def folder_of(operators: Mapping[str, Any], context: Context, number: int) -> Path | None:
    """Return where the table of a dataset is: a digest of all that measuring depends on.

    Args:
        operators: The fingerprint of the stages.
        context: The workers'.
        number: Of the dataset.
    """
    dataset = context.datasets[number]
    if dataset.cache_dir is None:
        return None
    schema = context.schemas[number]
    if isinstance(context.interleave, Tokenize):
        schema = "text"  # the field is part of the operator's fingerprint
    key = {
        "format": FORMAT,
        "tokenizers": version("tokenizers"),
        "data": [os.path.abspath(dataset.path), dataset.fmt, _kind(dataset)],
        "schema": schema if isinstance(schema, str) else name_of(schema),
        "version": dataset.version,
        "missing": dataset.missing,
        "documents": operators["documents"],
        "tokens": operators["tokens"],
        "processors": [
            type(processor).__qualname__
            for processor in (context.image_processor, context.video_processor)
        ],
    }
    return dataset.cache_dir / "measured" / digest(json.dumps(key, sort_keys=True))


def _kind(dataset: Dataset) -> str:
    """Return what a reader's rows depend on besides its shards; else all shards at once."""
    return str(getattr(dataset.reader, "kind", None) or dataset.digest())


def state_of_index(source: Any, stages: Stages, options: Options) -> tuple[bool, str]:
    """Return whether every row is known, and what a person is told of the index."""
    if reason := why_off(stages, options, source.datasets):
        return False, f"off: {reason}"
    index = open_index(stages, replace(options, index="read"), stages.context(source.datasets))
    if index is None:
        return False, "none: no dataset was opened with Dataset.from_path"
    tables = [table for table in index.tables if table is not None]
    rows = sum(len(dataset) for dataset in source.datasets)
    known = sum(table.num_known for table in tables)
    folders = sorted({str(table.folder.parent) for table in tables})
    return index.complete, f"{known} of {rows} samples are known, in {' and '.join(folders)}"


@contextmanager
def started_queue(options: Options, context: Context) -> Iterator[TaskQueue]:
    """Return a queue of a new runner, as the options say, for measuring alone."""
    runner = make_runner(
        options.runner, context, workers=options.workers, task_timeout_s=options.task_timeout_s
    )
    queue = TaskQueue(runner)
    try:
        yield queue
    finally:
        queue.close()
        runner.shutdown(wait=True, cancel_futures=True)


def build_index(
    source: Any, stages: Stages, options: Options, *, rebuild: bool, progress: bool
) -> dict[str, dict[str, Any]]:
    """Measure every row that the index does not know; see `Pipeline.build_index`."""
    if stages.interleave is None:
        raise ConfigError("an index needs .interleave or .tokenize")
    options = replace(options, index="fill")
    context = stages.context(source.datasets)
    reason = why_off(stages, options, context.datasets)
    index = None if reason else open_index(stages, options, context)
    if index is None or None in index.tables:
        raise ConfigError(
            f"this pipeline has no index: {reason or 'open its datasets with Dataset.from_path'}"
        )
    found = {}
    with ExitStack() as stack:
        queue = stack.enter_context(started_queue(options, context))
        stack.callback(index.save)  # also what was measured before an interrupt
        for number, (dataset, table) in enumerate(zip(context.datasets, index.tables, strict=True)):
            assert table is not None
            if rebuild:
                table.clear()
            bar = tqdm(
                total=table.num_rows,
                initial=table.num_known,
                desc=f"index {dataset.name}",
                unit="row",
                disable=None if progress else True,
            )
            with bar:
                _fill(table, _tasks(table, number, options.task_rows), queue, index, bar)
            found[dataset.name] = {"rows": table.num_rows, **table.summary()}
    return found


def _tasks(table: Table, number: int, task_rows: int) -> Iterator[NDArray[np.int64]]:
    """Yield refs of unknown rows, a few of one shard at a time.

    Each process begins at a shard of its own, and looks before each shard what others have
    written: so several of them share the work.
    """
    first = os.getpid() % table.num_shards
    for shard in np.roll(np.arange(table.num_shards), -first).tolist():
        table.refresh()
        rows = table.unknown(shard)
        refs = np.stack((np.full_like(rows, number), np.full_like(rows, shard), rows), axis=1)
        yield from (refs[at : at + task_rows] for at in range(0, len(refs), task_rows))


def _fill(
    table: Table, tasks: Iterator[NDArray[np.int64]], queue: TaskQueue, index: Index, bar: Any
) -> None:
    running: deque[Future[Any]] = deque()
    for refs in tasks:
        running.append(queue.submit((0,), measure, refs, poisoned_sample))
        if len(running) > 2 * queue.slots:
            _take(running, index, bar)
    while running:
        _take(running, index, bar)
    table.save()


def _take(running: "deque[Future[Any]]", index: Index, bar: Any) -> None:
    results = running.popleft().result()
    index.add(results)
    bar.update(len(results))
