"""`zephon-mm verify RECIPE`: the same sequences on every topology and runner, or which differs.

The reference is one rank, inline, one sequence a batch. Every combination is run with all its
ranks, one after another in this process; the sha256 of each row, and so of each step, must be the
reference's. With `--resume` a combination delivers the first half of the steps, and the next one
goes on from its checkpoint.

Cost: each combination loads, decodes and hashes all sequences once.

Imports: batch, checkpoint, errors, options, pipeline, recipe. Used by: cli.main, cli.demo_training.
"""

import argparse
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from typing import Any, NamedTuple

from tqdm import tqdm

from zephon_mm.batch import Batch, step_sha256
from zephon_mm.checkpoint import merge_checkpoints
from zephon_mm.errors import ConfigError
from zephon_mm.options import RUNNERS
from zephon_mm.pipeline import Pipeline
from zephon_mm.recipe import Recipe, load_recipe

State = dict[str, Any]
Advance = Callable[[int], object]


class Combination(NamedTuple):
    """How a run is spread: ranks, sequences a batch, runner."""

    dp_degree: int
    microbatch_size: int
    runner: str


REFERENCE = Combination(1, 1, "inline")


@dataclass(slots=True)
class Delivered:
    """What a run delivered: the digest and the samples of each row, by sequence number.

    `repeated` lists the numbers that came more than once: one rank alone may deliver each.
    """

    digests: dict[int, str] = field(default_factory=dict)
    keys: dict[int, tuple[str, ...]] = field(default_factory=dict)
    repeated: list[int] = field(default_factory=list)

    def add(self, batch: Batch) -> None:
        """Take the rows of a batch."""
        numbers = batch.sequence_ids.tolist()
        self.repeated += [number for number in numbers if number in self.digests]
        self.digests.update(zip(numbers, batch.row_sha256(), strict=True))
        self.keys.update(zip(numbers, batch.keys, strict=True))

    def step(self, number: int, step_size: int) -> str:
        """Return the digest of a step of `step_size` rows; of those that there are."""
        wanted = range(number * step_size, (number + 1) * step_size)
        return step_sha256({n: self.digests[n] for n in wanted if n in self.digests})


class Run(NamedTuple):
    """A recipe in one combination, for a number of steps of `step_size` sequences."""

    recipe: Recipe
    combination: Combination
    step_size: int
    workers: int | None

    def deliver(
        self, steps: int, into: Delivered, *, start: State | None = None, advance: Advance
    ) -> State:
        """Run all ranks for `steps` steps; return the merged checkpoint, through JSON.

        Args:
            steps: How many; a finite recipe may end earlier.
            into: Receives the rows.
            start: A checkpoint to go on from.
            advance: Called with the number of rows after each batch.
        """
        dp, size, _ = self.combination
        parts = []
        for rank in range(dp):
            with self._pipeline(rank) as pipeline:
                if start is not None:
                    pipeline.restore(start)
                for batch in islice(_start(pipeline), steps * self.step_size // (dp * size)):
                    into.add(batch)
                    advance(len(batch.keys))
                parts.append(pipeline.checkpoint())
        merged: State = json.loads(json.dumps(merge_checkpoints(parts)))
        return merged

    def _pipeline(self, rank: int) -> Pipeline:
        more: dict[str, Any] = {} if self.workers is None else {"workers": self.workers}
        return self.recipe.pipeline(
            microbatch_size=self.combination.microbatch_size,
            global_batch_size=self.step_size,
            dp_degree=self.combination.dp_degree,
            dp_rank=rank,
            runner=self.combination.runner,
            prefetch_batches=2,  # what is prefetched at the end is work for nothing
            **more,
        )


def _start(pipeline: Pipeline) -> Iterator[Batch]:
    with warnings.catch_warnings():  # that a topology is awkward is the point here
        warnings.filterwarnings("ignore", message=".*measure each sample")
        return iter(pipeline)


def first_difference(expected: Delivered, found: Delivered, step_size: int) -> str | None:
    """Return where two runs differ first, in the global order; None if they are equal."""
    for number in sorted(expected.digests.keys() | found.digests.keys()):
        where = f"step {number // step_size}, row {number % step_size} (sequence {number})"
        if number in found.repeated:
            return f"{where}: delivered more than once, last {_named(found, number)}"
        if expected.digests.get(number) != found.digests.get(number):
            return f"{where}: expected {_named(expected, number)}, got {_named(found, number)}"
    return None


def _named(run: Delivered, number: int) -> str:
    if number not in run.digests:
        return "nothing"
    return f"{run.digests[number][:16]} of {', '.join(run.keys[number])}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("recipe", help="a TOML file, such as configs/demo.toml")
    add = parser.add_argument
    add("--dp", type=_numbers, default="1,2,3,4", help="data-parallel degrees (%(default)s)")
    add("--microbatch", type=_numbers, default="1,2", help="sequences a batch (%(default)s)")
    add("--runner", type=_runners, default=",".join(RUNNERS), help="runners (%(default)s)")
    add("--steps", type=_positive, default=8, help="steps to compare (%(default)s)")
    add("--workers", type=_positive, help="threads or processes of a runner (the recipe's)")
    add(
        "--resume",
        action="store_true",
        help="hand over to the next combination, by a checkpoint, half way through",
    )


def run(arguments: argparse.Namespace) -> int:
    """Compare all combinations; return 0 if all are equal, else 1."""
    recipe = load_recipe(arguments.recipe)
    wanted = [
        Combination(*one) for one in product(arguments.dp, arguments.microbatch, arguments.runner)
    ]
    step_size = _step_size(recipe, wanted)
    possible = [one for one in wanted if step_size % (one.dp_degree * one.microbatch_size) == 0]
    if not possible:
        raise ConfigError(
            f"no dp * microbatch divides global_batch_size = {step_size}: choose others, or change "
            f"[batch] of {arguments.recipe}"
        )
    steps, run = arguments.steps, Run(recipe, REFERENCE, step_size, arguments.workers)
    rows = step_size * steps * (len(possible) + 1)
    with tqdm(total=rows, unit="rows", desc="verify", leave=False, mininterval=0.5) as bar:
        expected = Delivered()
        run.deliver(steps, expected, advance=bar.update)
        half = steps // 2 if arguments.resume else 0
        found = _deliver(run, possible, steps, half, bar.update)
    return report(wanted, found, expected, step_size)


def _step_size(recipe: Recipe, combinations: Sequence[Combination]) -> int:
    """Return the recipe's N; without one, the least that every combination divides."""
    least = math.lcm(*(one.dp_degree * one.microbatch_size for one in combinations))
    size: int = recipe.tables["batch"].get("global_batch_size", least)
    return size


def _deliver(
    reference: Run, combinations: Sequence[Combination], steps: int, half: int, advance: Advance
) -> dict[Combination, Delivered]:
    """Let each combination deliver all, or the first half and the next one of the ring the rest."""
    found = {}
    for one, successor in zip(combinations, [*combinations[1:], combinations[0]], strict=True):
        found[one], state, run = Delivered(), None, reference._replace(combination=one)
        if half:
            state = run.deliver(half, found[one], advance=advance)
            run = run._replace(combination=successor)
        run.deliver(steps - half, found[one], start=state, advance=advance)
    return found


def report(
    wanted: Sequence[Combination],
    found: Mapping[Combination, Delivered],
    expected: Delivered,
    step_size: int,
) -> int:
    """Print the table and the verdict; return the exit status."""
    print(f"{'ranks':>5}  {'microbatch':>10}  {'runner':8}  {'rows':>5}  result")
    different = 0
    for one in wanted:
        head = f"{one.dp_degree:>5}  {one.microbatch_size:>10}  {one.runner:8}"
        if one not in found:
            print(
                f"{head}  {'-':>5}  skipped: {one.dp_degree} * {one.microbatch_size} does not "
                f"divide {step_size}"
            )
            continue
        difference = first_difference(expected, found[one], step_size)
        print(f"{head}  {len(found[one].digests):>5}  {difference or 'equal'}")
        different += difference is not None
    skipped = len(wanted) - len(found)
    tail = f", {skipped} skipped" if skipped else ""
    if different:
        print(f"NOT EQUAL: {different} of {len(found)} combinations differ{tail}")
        return 1
    total = len(expected.digests)
    steps = -(-total // step_size)
    print(f"all equal: {len(found)} combinations, {steps} steps, {total} rows{tail}")
    return 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _numbers(text: str) -> list[int]:
    try:
        return [_positive(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers") from None


def _runners(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in RUNNERS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(RUNNERS)}")
    return names
