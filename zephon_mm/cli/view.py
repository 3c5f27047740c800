"""`zephon-mm view RECIPE`: the first batches as PNG files.

Imports: errors, recipe. Used by: cli.main.
"""

import argparse
from itertools import islice
from pathlib import Path

from zephon_mm.errors import ConfigError
from zephon_mm.recipe import load_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add = parser.add_argument
    add("recipe", help="a TOML file, such as configs/demo.toml")
    add("-n", type=int, default=1, metavar="COUNT", help="batches (%(default)s)")
    add("--out", type=Path, default=Path("view_out"), help="folder of the files (%(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Write the files; return the exit status."""
    if arguments.n < 1:
        raise ConfigError(f"-n must be at least 1, got {arguments.n}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    with load_recipe(arguments.recipe).pipeline(runner="inline") as pipeline:
        for number, batch in enumerate(islice(pipeline, arguments.n)):
            file = arguments.out / f"batch-{number:03}.png"
            batch.show().savefig(file)
            print(file)
    return 0
