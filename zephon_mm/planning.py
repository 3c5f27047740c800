"""Looking ahead: the next sequences of the global order, and what they are made of, undecoded.

Imports: engine, errors, io, runners, metrics, records. Used by: pipeline.
"""

import itertools
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from zephon_mm.engine.blocks import RawContext
from zephon_mm.engine.driver import EngineConfig
from zephon_mm.engine.measuring import Measuring
from zephon_mm.engine.order import Topology
from zephon_mm.engine.pending import sequence_keys
from zephon_mm.engine.planner import Planner, Start
from zephon_mm.engine.rawplan import RawPlanner
from zephon_mm.engine.schedule import TaskQueue
from zephon_mm.errors import ConfigError
from zephon_mm.io import Dataset
from zephon_mm.metrics import Metrics
from zephon_mm.packed import Piece, Sequence
from zephon_mm.records import SampleRef
from zephon_mm.runners import make_runner


@dataclass(frozen=True, slots=True)
class PlannedSequence:
    """One sequence of the global order, known without decoding.

    `number` is its global number; `keys` names its samples; `num_tokens` excludes padding.
    """

    number: int
    keys: tuple[str, ...]
    num_tokens: int
    num_images: int
    sequence: Sequence


class Plan:
    """The next sequences, one after another; made as they are asked for.

    Args:
        sequences: What to yield.
        max_length: Tokens that a sequence has room for; 0 for raw samples.
    """

    def __init__(self, sequences: Iterator[PlannedSequence], max_length: int) -> None:
        self._sequences = sequences
        self._max_length = max_length

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PlannedSequence:
        return next(self._sequences)

    def show(self) -> Any:
        """Return a matplotlib figure of the sequences that are left, and take them.

        Raises:
            ConfigError: There is none, or no matplotlib.
        """
        from zephon_mm.show import draw_plan  # loads matplotlib, which planning has no use for

        return draw_plan(self, self._max_length)


def planner_of(config: EngineConfig, start: Start) -> Any:
    """Return a planner that measures in this thread."""
    queue = TaskQueue(make_runner("inline", config.context, workers=1))
    return (RawPlanner if isinstance(config.context, RawContext) else Planner)(
        config.plan,
        num_lanes=config.num_lanes,
        topology=config.topology,
        start=start,
        finite=config.finite,
        measuring=Measuring(queue, config.index, config.task_rows),
        wait=lambda future: None,
        metrics=Metrics(),
    )


def planned_sequences(
    config: EngineConfig, start: Start, count: int, first: int = 0
) -> Iterator[PlannedSequence]:
    """Yield the next sequences after `start`, measuring in this thread and decoding nothing.

    Inside a step that was dealt by weight, they are those from the beginning of the step.

    Args:
        config: Of the pipeline.
        start: Where to begin planning.
        count: How many to yield.
        first: Yield only sequences from this global number on.
    """
    raw = isinstance(config.context, RawContext)
    start = replace(start, delivered=_begun(start), dealt=())
    planner = planner_of(replace(config, topology=Topology(1, 0, 1, 1)), start)
    wanted = (group for group in planner.groups() if group.numbers[0] >= first)
    for group in itertools.islice(wanted, count):
        if raw:
            datasets, ref = config.context.datasets, SampleRef(*group.refs[0].tolist())
            keys = (datasets[ref.dataset].key(ref.shard, ref.row),)
            yield PlannedSequence(int(group.numbers[0]), keys, 0, 0, Sequence(()))
            continue
        sequence = group.sequences[0]
        yield PlannedSequence(
            group.numbers[0],
            sequence_keys(config.context.datasets, sequence),
            sequence.num_tokens,
            sequence.num_images,
            sequence,
        )


def provenance(config: EngineConfig, start: Start, step: int) -> list[dict[str, Any]]:
    """Return what each row of a global step is made of, as plain JSON values.

    Args:
        config: Of the pipeline.
        start: Where to begin planning, at or before the step.
        step: Its number.

    Returns:
        A mapping a row: `row` in the step, `sequence` (the global number), `tokens`, `images`, and
        `samples`: of each its `key` in `batch.keys`, `dataset`, `shard`, `row` in the shard, `name`
        (its key in the data; "" if it has none or is in a store), and the `tokens` and `images` of
        it that are in the sequence, 0 for raw samples. Rows of padding are left out. Empty if the
        step is skipped or the data ends before it.

    Raises:
        ConfigError: The step began before the start.
    """
    size = config.topology.global_batch_size
    first = operator.index(step) * size
    if first < _begun(start):
        raise ConfigError(
            f"step {step} begins with sequence {first}, planning with {_begun(start)}: restore a "
            "state of before that step"
        )
    if config.plan.omissions.skips(first):
        return []
    datasets = {dataset.name: dataset for dataset in config.context.datasets}
    rows = [
        {
            "row": one.number - first,
            "sequence": one.number,
            "tokens": one.num_tokens,
            "images": one.num_images,
            "samples": [
                _sample(datasets, key, part)
                for key, part in itertools.zip_longest(one.keys, one.sequence.pieces)
            ],
        }
        for one in planned_sequences(config, start, size, first)
    ]
    return rows if len(rows) == size or config.plan.pad_tail else []  # what is left over is dropped


def _sample(datasets: Mapping[str, Dataset], key: str, piece: Piece | None) -> dict[str, Any]:
    dataset = datasets[key.rpartition("/")[0]]
    shard, row = dataset.locate(key)
    stored = {} if dataset.mirrors else dataset.reader.read(shard, [row], ())[0]
    return {
        "key": key,
        "dataset": dataset.name,
        "shard": dataset.shards[shard].name,
        "row": row,
        "name": str(stored.get("__key__", "")) if isinstance(stored, Mapping) else "",
        "tokens": piece.num_tokens if piece else 0,
        "images": piece.num_images if piece else 0,
    }


def _begun(start: Start) -> int:
    """Return the global number with which planning begins."""
    return start.delivered - sum(hand.size for hand in start.dealt)
