"""(a) The loss of one recipe on 1, 2, 4 and 8 data-parallel ranks, for two loaders.

The same model, weights, optimizer and documents each time; ranks are simulated in this process,
each with its own loader, its gradients summed with the others' in float32. For ours, real gloo
processes (`benchmarks.train` under torchrun) run beside them. What differs is what the loader
delivers: nothing for ours, so that only rounding is left.

The figure is the mean over steps and pairs of degrees of |loss - loss|.

Imports: the package, benchmarks.train, .plain, .tables. Used by: benchmarks.reproduce.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from itertools import combinations, islice
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

import torch
from matplotlib.axes import Axes

from benchmarks.reproduce.plain import PlainLoader, documents
from benchmarks.reproduce.tables import Result
from benchmarks.train.run import Settings, Step, make_model, microbatches
from benchmarks.train.trainer import Micro, Trainer
from zephon_mm.batch import step_sha256
from zephon_mm.recipe import Recipe, load_recipe

DEGREES, PROCESSES = (1, 2, 4, 8), (1, 2, 4)
STEPS, SHORT_STEPS = 300, 10
INLINE = {"microbatch_size": 1, "runner": "inline", "prefetch_batches": 2}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


Curve = list[tuple[float, str]]
"""Loss and sha256 of each step."""


def simulate(recipe: Recipe, ranks: Sequence[Iterator[Micro]], settings: Settings) -> Curve:
    """Train with simulated ranks, each of which yields its microbatches of one row."""
    trainer = Trainer(make_model(recipe, settings), settings.dtype, settings.learning_rate)
    share, curve = recipe.tables["batch"]["global_batch_size"] // len(ranks), []
    for number in range(settings.steps):
        step = Step(number, settings.device, float)
        for source in ranks:
            for micro in islice(source, share):
                step.add(trainer.add(micro.inputs), micro)
            trainer.next_rank()
        trainer.update(number, 1 / step.valid)
        curve.append((float(step.loss) / step.valid, step_sha256(step.rows)))
    return curve


def ours(recipe: Recipe, degree: int, settings: Settings) -> Curve:
    """Train on what our pipelines of so many ranks deliver."""
    with ExitStack() as stack:
        sources = [
            microbatches(stack.enter_context(one), settings)
            for rank in range(degree)
            for one in [recipe.pipeline(dp_degree=degree, dp_rank=rank, **INLINE)]
        ]
        return simulate(recipe, sources, settings)


def plain(recipe: Recipe, degree: int, settings: Settings) -> Curve:
    """Train on what the plain loaders of so many ranks deliver."""
    data, length = documents(recipe), recipe.tables["pack"]["max_length"]
    loaders = [PlainLoader(data, length, degree, rank) for rank in range(degree)]
    return simulate(recipe, [loader.micros() for loader in loaders], settings)


def processes(recipe: Recipe, degree: int, settings: Settings) -> Curve:
    """Train in fp32 with `benchmarks.train` in so many real processes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "steps.jsonl"
        command = "-m torch.distributed.run --standalone -m --nproc-per-node"
        options = f"--shape tiny_vlm --device cpu --digests --steps {settings.steps}"
        command = [sys.executable, *command.split(), str(degree), "benchmarks.train"]
        command += [*options.split(), "--config", str(recipe.file), "--out", str(out)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=env, check=True, capture_output=True)
        lines = [json.loads(line) for line in out.read_text().splitlines()]
    return [(line["loss"], line["sha256"]) for line in lines]


OURS, PLAIN, GLOO = "zephon_mm", "DataLoader", "zephon_mm, gloo processes"
LOADERS = {OURS: ours, PLAIN: plain, GLOO: processes}
RUNS = {(loader, dtype): DEGREES for dtype in DTYPES for loader in (OURS, PLAIN)}
RUNS[GLOO, "fp32"] = PROCESSES


def curve(config: Path, loader: str, dtype: str, degree: int, steps: int) -> Curve:
    """Train once, on one CPU in a process of its own."""
    torch.set_num_threads(1)
    settings = Settings(steps=steps, dtype=DTYPES[dtype], digests=True)
    found = LOADERS[loader](load_recipe(config), degree, settings)
    print(f"losses: {loader}, {dtype}, {degree} ranks done", file=sys.stderr, flush=True)
    return found


def difference(curves: Sequence[Curve]) -> float:
    """Return the mean over steps and pairs of curves of the absolute difference of losses."""
    return fmean(
        abs(one - other)
        for a, b in combinations(curves, 2)
        for (one, _), (other, _) in zip(a, b, strict=True)
    )


def equal_steps(curves: Sequence[Curve]) -> int:
    """Return the steps whose sha256 is the same in all curves."""
    return sum(len({sha for _, sha in found}) == 1 for found in zip(*curves, strict=True))


def measure(config: Path, steps: int) -> dict[tuple[str, str], list[Curve]]:
    """Return the curves of all degrees, by loader and precision; as many at once as CPUs."""
    cpus = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cpus, mp_context=get_context("spawn")) as pool:
        started = {
            key: [pool.submit(curve, config, *key, degree, steps) for degree in degrees]
            for key, degrees in RUNS.items()
        }
        return {key: [one.result() for one in curves] for key, curves in started.items()}


def run(config: Path, *, short: bool) -> Result:
    """Return the table, a row for each loader, precision and kind of ranks."""
    steps = SHORT_STEPS if short else STEPS
    found = measure(config, steps)
    rows = [
        [*key, len(found[key]), f"{equal_steps(found[key])} of {steps}", difference(found[key])]
        for key in found
    ]
    by_key = {(row[0], row[1]): row[4] for row in rows}
    notes = [
        f"{name}: the plain loader's curves differ {ratio:,.4g} times as much as ours (the paper's "
        "ratio to its baseline, for other models and data: 5.84)"
        for name in DTYPES
        for ratio in [by_key[PLAIN, name] / by_key[OURS, name]]
    ]
    both = equal_steps([found[OURS, "fp32"][0], *found[GLOO, "fp32"]])
    notes += ["ranks: 1, 2, 4, 8 simulated; 1, 2, 4 gloo processes"]
    notes += [f"steps whose sha256 is the same simulated and in processes: {both} of {steps}"]

    def draw(axes: Axes) -> None:
        for key, curves in found.items():
            spread = [max(at)[0] - min(at)[0] for at in zip(*curves, strict=True)]
            axes.semilogy([max(value, 1e-9) for value in spread], label=", ".join(key))
        axes.set(xlabel="step", ylabel="largest difference of the loss over degrees")

    columns = ["loader", "precision", "degrees", "equal sha256", "mean abs. difference of losses"]
    return Result("Loss over data-parallel degrees", columns, rows, notes, draw)
