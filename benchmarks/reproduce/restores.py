"""(e) How large a checkpoint is over steps, and how long a restore takes over lanes per rank.

Sizes are those of 64 lanes x 8 data sets, as in `benchmarks.restore size`. A restore is timed from
building the pipeline to its first sequence of each lane, decoded, with an index, from a state deep
inside the lanes' second windows; "cold" is the same from the beginning.

Imports: benchmarks.restore, .plans, .rates, .tables. Used by: benchmarks.reproduce.
"""

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes

from benchmarks.plans import late_state
from benchmarks.reproduce.rates import photographs
from benchmarks.reproduce.tables import Result
from benchmarks.restore import build, first_round_s
from benchmarks.restore import sizes as print_sizes

STEPS, SHORT_STEPS = (10, 100, 1_000, 10_000), (10, 100)
LANES, SHORT_LANES = (1, 4, 16, 64), (1, 16, 64)


def sizes(steps: tuple[int, ...]) -> dict[int, int]:
    """Return the bytes of a checkpoint after some numbers of steps of 64 sequences."""
    with redirect_stdout(StringIO()) as text:
        print_sizes(steps)
    found = re.findall(r"after +([\d,]+) steps: +([\d,]+) bytes", text.getvalue())
    return {int(step.replace(",", "")): int(size.replace(",", "")) for step, size in found}


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
    found = sizes(SHORT_STEPS if short else STEPS)
    timed = {n: times(data, n, 1 if short else 5) for n in (SHORT_LANES if short else LANES)}
    rows: list[list[Any]] = [["size", step, size, "", ""] for step, size in found.items()]
    rows += [["restore", lanes, "", *both] for lanes, both in timed.items()]

    def draw(axes: Axes) -> None:
        for at, name in enumerate(("cold", "restored")):
            axes.plot(list(timed), [both[at] for both in timed.values()], marker="o", label=name)
        axes.set(xlabel="lanes of one rank", ylabel="seconds to the first sequence of each lane")

    columns = ["what", "steps, or lanes per rank", "bytes", "cold s", "restored s"]
    notes = ["sizes: 64 lanes x 8 data sets, bar 16,384 bytes; times: median, with an index"]
    return Result("Checkpoints and restores", columns, rows, notes, draw)
