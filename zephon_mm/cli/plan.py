"""`zephon-mm plan RECIPE`: the next sequences of the global order, as a table.

Imports: errors, recipe. Used by: cli.main.
"""

import argparse

from zephon_mm.errors import ConfigError
from zephon_mm.recipe import load_recipe

MOST_KEYS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("recipe", help="a TOML file, such as configs/demo.toml")
    parser.add_argument("-n", type=int, default=8, metavar="COUNT", help="sequences (%(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Print the table; return the exit status."""
    if arguments.n < 1:
        raise ConfigError(f"-n must be at least 1, got {arguments.n}")
    pipeline = load_recipe(arguments.recipe).pipeline()
    print(f"{'number':>6}  {'tokens':>6}  {'images':>6}  samples")
    for planned in pipeline.plan(arguments.n):
        more = len(planned.keys) - MOST_KEYS
        keys = ", ".join(planned.keys[:MOST_KEYS]) + (f" and {more} more" if more > 0 else "")
        print(f"{planned.number:>6}  {planned.num_tokens:>6}  {planned.num_images:>6}  {keys}")
    return 0
