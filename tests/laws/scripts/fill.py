"""A process that fills an index, saving often: it is killed in between."""

from zephon_mm import index
from zephon_mm.recipe import load_recipe


def main(recipe: str) -> None:
    index.SAVED_ROWS = 16
    load_recipe(recipe).pipeline(runner="thread", task_rows=4).build_index(progress=False)
