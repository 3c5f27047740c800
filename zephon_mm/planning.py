"""Looking ahead: the next sequences of the global order, from metadata alone.

Imports: engine, runners, metrics, records. Used by: pipeline.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from zephon_mm.engine.blocks import RawContext
from zephon_mm.engine.driver import EngineConfig
from zephon_mm.engine.measuring import Measuring
from zephon_mm.engine.order import Topology
from zephon_mm.engine.pending import sequence_keys
from zephon_mm.engine.planner import Planner, Start
from zephon_mm.engine.rawplan import RawPlanner
from zephon_mm.engine.schedule import TaskQueue
from zephon_mm.metrics import Metrics
from zephon_mm.records import SampleRef, Sequence
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


def planned_sequences(config: EngineConfig, start: Start, count: int) -> Iterator[PlannedSequence]:
    """Yield the next sequences after `start`, measuring in this thread and decoding nothing."""
    queue = TaskQueue(make_runner("inline", config.context, workers=1))
    raw = isinstance(config.context, RawContext)
    planner: Any = (RawPlanner if raw else Planner)(
        config.plan,
        num_lanes=config.num_lanes,
        topology=Topology(1, 0, 1, 1),
        start=start,
        finite=config.finite,
        measuring=Measuring(queue, config.index, config.task_rows),
        wait=lambda future: None,
        metrics=Metrics(),
    )
    for group in itertools.islice(planner.groups(), count):
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
