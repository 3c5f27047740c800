"""`zephon-mm demo`: data, training, elasticity and a picture, offline, in about two minutes.

    1. Draws captioned pictures, picture stories, chats and films, trains a tokenizer
       (`cli.demo_data`), and writes the recipe.
    2. Trains a tiny model on them and runs the recipe on more and more ranks (`cli.demo_training`).

Imports: cli.demo_data, cli.demo_training. Used by: cli.main.
"""

import argparse
from pathlib import Path

from zephon_mm.cli.demo_data import make_demo_data

# configs/demo.toml is this text with the paths of a clone; a test compares them.
RECIPE = Path(__file__).with_name("demo.toml").read_text()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add = parser.add_argument
    add("--out", type=Path, default=Path("demo_out"), help="folder for all files (%(default)s)")
    add("--seconds", type=float, default=60.0, help="how long to train (%(default)s)")
    add("--steps", type=int, help="train for so many steps instead")
    add("--data-only", action="store_true", help="make the data and the recipe, and stop")


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; return 0 if the loss fell and all digests are equal, else 1."""
    out: Path = arguments.out
    print(f"1. Data: 600 captioned pictures, 150 stories, 150 chats and 60 films into {out}")
    make_demo_data(out / "data")
    file = out / "demo.toml"
    file.write_text(RECIPE)
    if arguments.data_only:
        return 0
    from zephon_mm.cli.demo_training import show  # loads transformers, which takes seconds

    return show(file, seconds=arguments.seconds, steps=arguments.steps)
