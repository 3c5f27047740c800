"""`zephon-mm`: finds the command, runs it, turns errors into messages.

Exit status: 0 success, 1 a check failed, 2 the user's settings or data cannot work.

Imports: errors; the module of the chosen command, and no other. Used by: the console script.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

from zephon_mm.errors import ZephonError

# Each is a module of this package with `add_arguments(parser)` and `run(arguments) -> int`. It is
# imported when it is chosen: `zephon-mm --help` need not wait for matplotlib or transformers.
COMMANDS = {
    "bench": "measure whether a recipe feeds a GPU on this machine, and what limits it",
    "convert": "write a dataset in another format, and prove that it is the same",
    "demo": "make a data set, train a tiny model on it, resume on 1, 2, 3, 4 ranks",
    "index": "measure every sample once, so that planning and restoring read none",
    "inspect": "show what a dataset is and what is wrong with it, or what a step is made of",
    "plan": "show the next sequences of a recipe without decoding an image",
    "verify": "prove that a recipe gives the same data on every topology and runner",
    "view": "draw the first batches of a recipe",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status.

    Args:
        argv: The arguments after the program's name; None takes those of the process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = _parser(words).parse_args(words)
    try:
        status: int = arguments.run(arguments)
    except ZephonError as error:
        if arguments.debug:
            raise
        print(f"zephon-mm {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return status


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zephon-mm",
        description="Elastic, deterministic data loading for vision-language models.",
        epilog="`zephon-mm COMMAND --help` explains a command. Start with `zephon-mm demo`.",
    )
    parser.add_argument("--version", action="version", version=version("zephon-mm"))
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = next((word for word in words if not word.startswith("-")), None)
    for name, summary in COMMANDS.items():
        about = f"{summary[0].upper()}{summary[1:]}."
        command = commands.add_parser(name, help=summary, description=about)
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        if name == chosen:
            module = import_module(f"zephon_mm.cli.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
