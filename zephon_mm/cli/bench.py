"""`zephon-mm bench RECIPE --need-tokens 16900`: does this machine feed such a GPU with this recipe?

One rank's batches are taken as fast as they come. The clock runs from the first batch to the last:
what is ready before it starts is as much as what is not taken when it stops. What a training loop
does with its CPU is not in it, nor the copy to the GPU: leave a margin. A slow store shows in the
stage that reads from it: measuring reads rows, decoding the images' bytes.

Exit status 1 if the rate is below the need.

Imports: errors, options, pipeline, recipe. Used by: cli.main.
"""

import argparse
import time
from collections.abc import Mapping

from zephon_mm.errors import ConfigError
from zephon_mm.options import Options, cpus
from zephon_mm.pipeline import Pipeline
from zephon_mm.recipe import load_recipe

WAITS = {
    "measuring": "driver_wait_measure_s",
    "decoding": "driver_wait_consumer_s",  # all that is planned is in work, or each worker busy
    "memory": "driver_wait_memory_s",
}
_INDEX = "`zephon-mm index RECIPE`"
ADVICE = {
    "measuring": f"{_INDEX} does it once for all runs; {{workers}}",
    "decoding": '{workers}; [image_processor] decode = "scaled" for large JPEGs',
    "memory": "raise [options] memory_budget_bytes",
    "planning": f"{_INDEX} makes it cheap; {{workers}}",
    "one thread": "it does all: {workers}",
}
"""What makes the stage that limits faster."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("recipe", help="a TOML file, such as configs/demo.toml")
    add = parser.add_argument
    add("--need-tokens", type=float, required=True, metavar="N", help="usable tokens/s, no padding")
    add("--seconds", type=float, default=20.0, help="how long to measure (%(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; return the exit status."""
    need = arguments.need_tokens
    if not (need > 0 and arguments.seconds > 0):  # nan is neither
        raise ConfigError("--need-tokens and --seconds must be above 0")
    with load_recipe(arguments.recipe).pipeline() as pipeline:
        options = pipeline._options
        found = measure(pipeline, arguments.seconds)
    seconds = found["elapsed_s"]
    rate, images = found["tokens"] / seconds, found["images"] / seconds
    print(f"rate    {rate:,.0f} usable tokens/s, {images:,.0f} images/s, over {seconds:.1f} s")
    print(f"need    {need:,.0f} usable tokens/s")
    print(f"answer  {'yes' if rate >= need else 'no'}: {rate / need:.2f} times the need")
    limit = "one thread" if options.runner == "inline" else limit_of(found)
    print(f"limit   {limit}: {advice(limit, options)}")
    return 0 if rate >= need else 1


def measure(pipeline: Pipeline, seconds: float) -> dict[str, float]:
    """Return what the counters of `metrics()` gained between the first batch and the last.

    Raises:
        ConfigError: There is but one batch.
    """
    batches = iter(pipeline)
    next(batches, None)
    before, began = pipeline.metrics(), time.perf_counter()
    while time.perf_counter() - began < seconds and next(batches, None) is not None:
        pass  # a batch is dropped at once, as by a training loop that is never late
    elapsed_s = time.perf_counter() - began
    after = pipeline.metrics()
    if after["batches"] == before["batches"]:
        raise ConfigError("the data ends with the first batch: bench needs more of it")
    names = ("tokens", "images", *WAITS.values())
    gained = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in names}
    return gained | {"elapsed_s": elapsed_s}


def limit_of(found: Mapping[str, float]) -> str:
    """Return the stage that the driver waited for most; what it did not wait, it planned."""
    waits = {stage: found[name] for stage, name in WAITS.items()}
    waits["planning"] = found["elapsed_s"] - sum(waits.values())
    return max(waits, key=lambda stage: waits[stage])


def advice(limit: str, options: Options) -> str:
    """Return what makes a stage faster, of what is not set already."""
    have = cpus()
    if options.runner != "process":
        workers = '[options] runner = "process"'
    elif options.workers < have and limit != "planning":  # which is one thread's
        workers = f"[options] workers = {have}"
    else:
        workers = f"more CPUs (here are {have})"
    return ADVICE[limit].format(workers=workers)
