"""The table: rates in interleaved rounds, and whether batches stay the same on other ranks.

Imports: benchmarks.{data, reproduce.tables}, .runs. Used by: `__main__`, benchmarks.reproduce.
"""

import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import chain, product
from operator import eq
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.data import make_data, write_benchmark_tokenizer
from benchmarks.peers.runs import PEERS, python_of, start
from benchmarks.reproduce.tables import Result

COUNTS = {"text": 200_000, "image": 16_000, "full": 4_000}
COLUMNS = (
    *("row", "loader", "version", "format", "samples/s", "lowest", "highest"),
    *("usable tokens/s", "us CPU a sample", "batches in a window"),
    *("same on 2 ranks", "resumed", "resumed on 2 ranks"),
)


@dataclass(frozen=True)
class Plan:
    """What is run.

    Attributes:
        rows: Of "text", "image", "full".
        names: The contenders.
        rounds: How often each is run, in turn with the others.
        seconds: The window of each run; the full row's is four times as long.
        warm_up: Batches before it.
        steps: Global batches that are compared with those of two ranks and of resumed runs,
            behind as many that are not; 0 compares none.
        counts: Samples of each row's data.
        limit_s: A run that takes longer is ended.
    """

    rows: Collection[str] = tuple(COUNTS)
    names: Collection[str] = tuple(PEERS)
    rounds: int = 3
    seconds: float = 6.0
    warm_up: int = 32
    steps: int = 10
    counts: Mapping[str, int] = field(default_factory=lambda: COUNTS)
    limit_s: float = 180.0


@dataclass(frozen=True)
class Bench:
    """Runs contenders of a plan on data in a folder, where it is written if it is not there."""

    data: Path
    plan: Plan

    def run(self, name: str, row: str, ranks: int = 1, **options: Any) -> list[Any]:
        """Return what a contender finds on each rank, or a text that says what went wrong."""
        peer, count = PEERS[name], self.plan.counts[row]
        folder = self.data / f"{peer.format}-{row}-{count}"
        if not folder.exists():
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            words = ["benchmarks.contenders", "write", peer.format, row, str(partial)]
            words += ["--count", str(count)]
            if (found := start(peer, words, limit_s=1_200.0)) != [True]:
                return found
            partial.rename(folder)
        wanted = {"file": peer.file, "name": name, "folder": str(folder), "full": row == "full"}
        wanted |= {"ranks": ranks, "steps": 0, "more": 0, "state": "", "save": "", **options}
        with TemporaryDirectory() as place:
            wanted["meet"] = f"{place}/meet"
            each = [json.dumps({**wanted, "rank": rank}) for rank in range(ranks)]
            commands = (["benchmarks.peers.measure", one] for one in each)
            return start(peer, *commands, limit_s=self.plan.limit_s)

    def rates(self) -> dict[tuple[str, str], list[Any]]:
        """Return what each run of a row and contender found, or why it did not."""
        found: dict[tuple[str, str], list[Any]] = {}
        for row, _, name in product(self.plan.rows, range(self.plan.rounds), self.plan.names):
            results = found.setdefault((row, name), [])
            if not any(isinstance(one, str) for one in results):
                seconds = self.plan.seconds * (4 if row == "full" else 1)
                results += self.run(name, row, seconds=seconds, warm_up=self.plan.warm_up)
                print(row, name, results[-1], flush=True)
        return found

    def elastic(self, name: str) -> list[str]:
        """Say if 2 ranks, a resumed run, and one resumed on 2 ranks have one rank's batches."""
        steps = self.plan.steps
        with TemporaryDirectory() as place:
            state = f"{place}/state"
            (whole,) = self.run(name, "full", steps=steps, save=state, more=steps)
            answers = [_equal(whole, self.run(name, "full", 2, steps=2 * steps))]
            for ranks in (1, 2):
                found = ["not offered"]
                if Path(state).exists():
                    found = self.run(name, "full", ranks, steps=steps, state=state)
                answers.append(_equal(whole[steps:], found))
        return answers


def _equal(whole: Any, parts: list[Any]) -> str:
    """Count the steps that hold the same sequences, or say why there are none."""
    for one in (*parts, whole):
        if isinstance(one, str):
            return one
    merged = [sorted(chain(*step)) for step in zip(*parts, strict=True)]
    return f"{sum(map(eq, map(sorted, whole), merged))} of {len(whole)}"


def compare(data: Path, plan: Plan) -> Result:
    """Return the table, a line for each row and contender."""
    make_data(data / "photos", num_samples=plan.counts["full"])
    write_benchmark_tokenizer(data / "tokenizer")
    bench = Bench(data, plan)
    lines = [_line(row, name, found) for (row, name), found in bench.rates().items()]
    for line in lines:
        able = line[0] == "full" and line[4] and plan.steps
        line += bench.elastic(line[1]) if able else [""] * 3
    names, rates = zip(*((f"{line[0]}: {line[1]}", line[4] or 1) for line in lines), strict=True)
    notes = [
        "two workers; interleaved rounds, each run a process group of its own; settings: see the "
        "headers in benchmarks/peers",
        f"{2 * plan.steps} global batches are compared, {plan.steps} after a state was saved",
    ]
    title = "Other loaders on the same samples: samples/s"
    return Result(title, COLUMNS, lines, notes, lambda axes: axes.barh(names, rates, log=True))


def run(folder: Path, *, short: bool) -> Result:
    """Return the table; the short form runs everything once, briefly, to see that it works."""
    brief = Plan(rounds=1, seconds=1.0, steps=0)
    return compare(folder / "peers", brief if short else Plan())


def _line(row: str, name: str, found: list[Any]) -> list[Any]:
    good, fmt = [one for one in found if isinstance(one, dict)], PEERS[name].format
    if not good:
        return [row, name, found[0], fmt, *[""] * 6]
    values = {key: [one[key] for one in good] for key in good[0]}
    rates, tokens = values["samples_per_s"], median(values["tokens_per_s"]) or ""
    ends = [min(rates), max(rates), tokens, median(values["cpu_us"]), min(values["batches"])]
    return [row, name, python_of(PEERS[name])[1], fmt, median(rates), *ends]
