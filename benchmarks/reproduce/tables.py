"""A benchmark's result, as Markdown, CSV and a plot.

Imports: matplotlib. Used by: benchmarks.reproduce.
"""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Result:
    """What a benchmark found.

    Attributes:
        title: What it shows, in a line.
        columns: Names, with units.
        rows: A value for each column; floats are shown with four digits.
        notes: What must be known to read them.
        draw: Puts the rows on axes.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    notes: Sequence[str]
    draw: Callable[[Axes], object]

    def markdown(self, name: str) -> str:
        """Return a section of a page, with the plot that lies beside it."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        table = "\n".join(f"| {' | '.join(map(_shown, line))} |" for line in lines)
        notes = "".join(f"- {note}\n" for note in self.notes)
        return f"## {self.title}\n\n{table}\n\n{notes}\n![{name}]({name}.png)\n"

    def write(self, name: str, folder: Path) -> None:
        """Write `name`.md, .csv and .png into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.md").write_text(self.markdown(name))
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([self.columns, *self.rows])
        figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
        axes = figure.add_subplot(title=self.title)
        axes.grid(alpha=0.3)
        self.draw(axes)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
        FigureCanvasAgg(figure).print_png(folder / f"{name}.png")


def _shown(value: Any) -> str:
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.4g}"
