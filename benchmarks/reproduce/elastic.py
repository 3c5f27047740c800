"""(b) A run on 16 ranks, saved, that goes on with 8, 12, 16, 24, 32 and 64: sha256 of each step.

The reference is the same run on one rank (ours), or on 16 (the plain loader), that was never saved.
Ranks are simulated, one after another; every byte that they deliver is hashed. Resuming with 16
stands there for what the plain loader loses even then: what lay in open packs.

Imports: the package, .plain, .tables. Used by: benchmarks.reproduce.
"""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from matplotlib.axes import Axes

from benchmarks.reproduce.plain import digests, documents
from benchmarks.reproduce.tables import Result
from zephon_mm.cli.verify import Combination, Delivered, Run
from zephon_mm.recipe import Recipe, load_recipe

Steps = list[str]
"""The sha256 of each step after the checkpoint."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Saved after `saved_at` steps of `size` sequences, compared over `more`."""

    saved_at: int
    more: int
    saved_on: int = 16
    resumed_on: tuple[int, ...] = (8, 12, 16, 24, 32, 64)
    size: int = 192


FULL, SHORT = Plan(150, 10), Plan(3, 1, resumed_on=(8, 12, 64))


def ours(recipe: Recipe, plan: Plan) -> dict[int, Steps]:
    """Return what our loader delivers, by number of ranks; 0 is the run that was never saved."""

    def part(ranks: int) -> Run:
        return Run(recipe, Combination(ranks, 1, "inline"), plan.size, None)

    whole = Delivered()
    part(1).deliver(plan.saved_at + plan.more, whole, advance=int)
    state = part(plan.saved_on).deliver(plan.saved_at, Delivered(), advance=int)
    runs = {0: whole}
    for ranks in plan.resumed_on:
        runs[ranks] = Delivered()
        part(ranks).deliver(plan.more, runs[ranks], start=state, advance=int)
    numbers = range(plan.saved_at, plan.saved_at + plan.more)
    return {ranks: [one.step(n, plan.size) for n in numbers] for ranks, one in runs.items()}


def plain(recipe: Recipe, plan: Plan) -> dict[int, Steps]:
    """Return the same of the plain loader."""
    data, length = documents(recipe), recipe.tables["pack"]["max_length"]
    whole = digests(data, length, plan.saved_on, plan.size)
    *_, (_, read) = islice(whole, plan.saved_at)
    found = {0: [sha for sha, _ in islice(whole, plan.more)]}
    for ranks in plan.resumed_on:
        after = digests(data, length, ranks, plan.size, read)
        found[ranks] = [sha for sha, _ in islice(after, plan.more)]
    return found


def run(config: Path, *, short: bool) -> Result:
    """Return the table, a row for each loader and number of ranks."""
    recipe = load_recipe(config)
    plan = SHORT if short else FULL
    saved_at, more = plan.saved_at, plan.more
    rows, equal = [], {}
    for loader, deliver in {"zephon_mm": ours, "DataLoader": plain}.items():
        found = deliver(recipe, plan)
        for ranks in plan.resumed_on:
            same = [a == b for a, b in zip(found[0], found[ranks], strict=True)]
            equal[loader, ranks] = sum(same)
            change, first, last = f"{plan.saved_on} -> {ranks}", found[ranks][0], found[ranks][-1]
            rows.append([loader, change, f"{sum(same)} of {more}", first[:12], last[:12]])
        rows.append([loader, "never saved", "", found[0][0][:12], found[0][-1][:12]])

    def draw(axes: Axes) -> None:
        names = [str(ranks) for ranks in plan.resumed_on]
        for loader, marker in (("zephon_mm", "o"), ("DataLoader", "x")):
            axes.plot(names, [equal[loader, n] for n in plan.resumed_on], marker, label=loader)
        axes.set(xlabel="ranks after the checkpoint", ylabel=f"equal steps of {more}")

    columns = ["loader", "ranks", "equal steps", f"sha256 of step {saved_at}"]
    columns.append(f"of step {saved_at + more - 1}")
    notes = [f"{plan.size} sequences a step; saved after {saved_at} steps"]
    return Result("A run on 16 ranks goes on with others", columns, rows, notes, draw)
