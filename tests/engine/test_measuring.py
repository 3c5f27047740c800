"""The records of a chunk come in the order of its refs, whatever the index knows of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.memory import dataset, document_of, random_rows
from tests.fixtures.tokenizers import byte_level_bpe
from zephon_mm.engine.measuring import Measuring
from zephon_mm.engine.schedule import TaskQueue
from zephon_mm.engine.tasks import Context, measure
from zephon_mm.index import Index, Table
from zephon_mm.ops.interleave import Interleave
from zephon_mm.ops.tokenizer import TextTokenizer
from zephon_mm.packed import extents_of
from zephon_mm.records import SampleRef, Skip
from zephon_mm.runners.inline import InlineRunner

DATA = dataset("a", random_rows(1, 30, []))
CONTEXT = Context(
    (DATA,), (document_of,), (), Interleave(TextTokenizer.load(byte_level_bpe()), None)
)
REFS = np.array(
    [(0, shard, row) for shard, info in enumerate(DATA.shards) for row in range(info.num_rows)],
    dtype=np.int64,
)


def comparable(item: Any) -> Any:
    if isinstance(item, Skip):
        return item
    return SampleRef(*item.ref), item.num_tokens, extents_of(item)


EXPECTED = [comparable(item) for item in measure(CONTEXT, REFS)]


@settings(max_examples=40)
@given(
    known=st.sets(st.integers(0, 29)),
    chunk=st.lists(st.integers(0, 29), min_size=1, max_size=20),
    task_rows=st.integers(1, 25),
    fill=st.booleans(),
)
def test_records_come_in_the_order_of_their_refs(
    known: set[int],
    chunk: list[int],
    task_rows: int,
    fill: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("index")
    table = Table(folder, DATA.shards)
    for result in measure(CONTEXT, REFS[sorted(known)]):
        table.add(result)
    table.save()
    runner = InlineRunner(CONTEXT)
    measuring = Measuring(TaskQueue(runner), Index([table], fill=fill), task_rows)
    parts = list(measuring((0,), REFS[chunk]))
    tasks = runner.stats()["tasks_done"]
    found = [comparable(item) for part in parts for item in part.result()]
    assert found == [EXPECTED[row] for row in chunk]
    assert all(part.done() for part in parts)
    assert tasks <= -(-len(chunk) // task_rows)
    assert (tasks == 0) == (set(chunk) <= known)
    table.save()
    assert table.num_known == len(known | set(chunk) if fill else known)


def test_without_an_index_a_chunk_is_cut_into_tasks(tmp_path: Path) -> None:
    runner = InlineRunner(CONTEXT)
    parts = list(Measuring(TaskQueue(runner), None, 7)((0,), REFS))
    assert [len(part.result()) for part in parts] == [7, 7, 7, 7, 2]
    assert runner.stats()["tasks_done"] == 5
