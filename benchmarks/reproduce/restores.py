"""(e) How large a checkpoint is over steps, and how long a restore takes over lanes per rank.

Over steps it is planned only: 64 lanes x 8 data sets of lengths, as in `benchmarks.restore size`.
Over lanes it is decoded, with an index, from a state deep inside the lanes' second windows. Timed
is from building the pipeline to its first sequence of each lane; "cold" is without a state.

Imports: benchmarks.restore, .plans, .rates, .tables. Used by: benchmarks.reproduce.
"""

import json
import time
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes

from benchmarks.plans import late_state
from benchmarks.reproduce.rates import photographs
from benchmarks.reproduce.tables import Result
from benchmarks.restore import build, first_round_s, many_lanes, states

STEPS, SHORT_STEPS = (10, 100, 1_000, 10_000), (10, 100)
LANES, SHORT_LANES = (1, 4, 16, 64), (1, 16, 64)


def planned_s(state: str | None) -> float:
    """Return seconds to the plan of the first sequences of 64 lanes, from a state."""
    began = time.perf_counter()
    pipeline = many_lanes()
    if state is not None:
        pipeline.restore(json.loads(state))
    assert len(list(pipeline.plan(64))) == 64
    return time.perf_counter() - began


def times(data: Path, lanes: int, tries: int) -> tuple[float, float]:
    """Return seconds to the first sequences of all lanes: cold, and after a restore."""
    options: dict[str, Any] = {"runner": "thread", "workers": 2}
    with build(data, lanes, "fill", **options) as made:
        made.build_index(progress=False)
    state = late_state(build(data, lanes, "read", **options))
    cold, restored = (
        median(first_round_s(data, lanes, "read", start, **options) for _ in range(tries))
        for start in (None, state)
    )
    return cold, restored


def run(folder: Path, *, short: bool) -> Result:
    """Return the table, a row for each number of steps and of lanes."""
    data = photographs(folder, short=short)
    tries, cold = range(1 if short else 5), planned_s(None)
    rows: list[list[Any]] = [
        ["64 lanes", step, len(state), cold, median(planned_s(state) for _ in tries)]
        for step, state in states(SHORT_STEPS if short else STEPS)
    ]
    timed = {n: times(data, n, len(tries)) for n in (SHORT_LANES if short else LANES)}
    rows += [["decoded", lanes, "", *both] for lanes, both in timed.items()]

    def draw(axes: Axes) -> None:
        for at, name in enumerate(("cold", "restored")):
            axes.plot(list(timed), [both[at] for both in timed.values()], marker="o", label=name)
        axes.set(xlabel="lanes of one rank", ylabel="seconds to the first sequence of each lane")

    columns = ["what", "steps, or lanes per rank", "bytes", "cold s", "restored s"]
    notes = ["over steps: 8 data sets, planned only, bar 16,384 bytes; over lanes: with an index"]
    return Result("Checkpoints and restores", columns, rows, notes, draw)
