"""`zephon-mm index RECIPE`: measure every sample once, so that planning reads none.

May be interrupted and started again; several processes may do it at once, and share the work.

Imports: recipe. Used by: cli.main.
"""

import argparse
import time

from zephon_mm.recipe import load_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("recipe", help="a TOML file, such as configs/demo.toml")
    parser.add_argument("--rebuild", action="store_true", help="forget what is known first")
    parser.add_argument("--workers", type=int, help="worker processes (one for each CPU)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(arguments: argparse.Namespace) -> int:
    """Fill the index and print what is in it; return the exit status."""
    workers = {} if arguments.workers is None else {"workers": arguments.workers}
    pipeline = load_recipe(arguments.recipe).pipeline(**workers)
    began = time.perf_counter()
    for name, found in pipeline.build_index(
        rebuild=arguments.rebuild, progress=not arguments.quiet
    ).items():
        skipped = ", ".join(f"{count} {reason}" for reason, count in found["skipped"].items())
        print(
            f"{name}: {found['rows']} rows, {found['records']} records of {found['tokens']} tokens "
            f"and {found['images']} images; skipped: {skipped or 'none'}"
        )
    print(f"indexed in {time.perf_counter() - began:.1f} s; planning reads no sample now")
    return 0
