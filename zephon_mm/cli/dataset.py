"""The dataset that a command is given: where it is, its format, and options of its reader.

Imports: errors, io. Used by: cli.convert, cli.inspect.
"""

import argparse
import json
from typing import Any

from zephon_mm.errors import ConfigError
from zephon_mm.io import Dataset


def add_arguments(
    parser: argparse.ArgumentParser, place: str, what: str = "a file, a folder, a pattern, a URL"
) -> None:
    """Declare a dataset, `place` by name."""
    parser.add_argument(place, help=what)
    parser.add_argument("--fmt", help="its format, if it is not recognised")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="for its reader, such as split=train; again for more",
    )


def opened(name: str, arguments: argparse.Namespace, place: str, **options: Any) -> Dataset:
    """Return the dataset.

    Args:
        name: Of the dataset.
        arguments: Of the command.
        place: Name of the argument that says where it is.
        **options: More than those that were given.

    Raises:
        ConfigError: An option is not `NAME=VALUE`, or as for `Dataset.from_path`.
        DatasetError: As for `Dataset.from_path`.
    """
    for word in arguments.option:
        option, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"--option {word}: expected NAME=VALUE, such as split=train")
        options[option] = _value(value)
    return Dataset.from_path(name, vars(arguments)[place], arguments.fmt, **options)


def _value(text: str) -> Any:
    """Return what JSON says, or the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
