"""Shares: how much of each dataset was given, and who gives next; weights, and what they may be.

Laws (tests/test_work_tokens.py):
    1. Of datasets that follow `Account.next`, each is with its share at any time, to within one
       document of each, over any number of windows.

Imports: errors, rng. Used by: work.mixture.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zephon_mm.errors import ConfigError
from zephon_mm.rng import Stream

Rows = NDArray[np.int64]
Program = Sequence[tuple[int, Mapping[str, float]]]
"""(first window, weights by name), ascending; the first one begins at window 0."""

_PARTS = 100
"""Of a token, as states count them: whole ones, rounded in each window, would take a dataset of
few tokens a window for good below or above its share."""


class Account:
    """How far each dataset is with its share; that which is furthest behind gives next.

    Args:
        shares: Of each dataset, at least 0; those with 0 never give.
        ahead: What each has given beyond its share, as `ahead()` tells.
    """

    def __init__(self, shares: Sequence[float], ahead: Sequence[int]) -> None:
        self._shares = shares
        self._progress = [
            given / _PARTS / share if share else math.inf
            for given, share in zip(ahead, shares, strict=True)
        ]

    def next(self) -> int | None:
        """Return the dataset that gives next; None if none can."""
        least = min(self._progress)
        return None if least == math.inf else self._progress.index(least)

    def give(self, dataset: int, tokens: float) -> None:
        """Count tokens of a dataset."""
        self._progress[dataset] += tokens / self._shares[dataset]

    def end(self, dataset: int) -> None:
        """Never name a dataset again: it is used up."""
        self._progress[dataset] = math.inf

    def ahead(self) -> list[int]:
        """Return what each has given beyond its share, if that furthest behind is right.

        Hundredths of a token, since a state holds integers.
        """
        least = min(self._progress)
        return [
            0 if progress == math.inf else round((progress - least) * share * _PARTS)
            for progress, share in zip(self._progress, self._shares, strict=True)
        ]


def draw(stream: Stream, shares: NDArray[np.float64], count: int) -> Rows:
    """Return `count` dataset numbers in random order, each share exact to within one."""
    ends = np.cumsum(shares)
    ends /= ends[-1]  # not shares.sum(), whose rounding may depend on the CPU
    points = (np.arange(count) + stream.uniform(1)[0]) / count
    last = int(np.flatnonzero(shares)[-1])
    choice = np.minimum(np.searchsorted(ends, points, side="right"), last)
    return np.asarray(choice[stream.permutation(count)], dtype=np.int64)


def affordable(choice: Rows, left: Rows) -> int:
    """Return how many of the leading choices can be given with `left` rows of each dataset."""
    stop = len(choice)
    for index, rows in enumerate(left.tolist()):
        if rows < len(choice) and rows < (choice == index).sum():
            stop = min(stop, int(np.flatnonzero(choice == index)[rows]))
    return stop


def normalized(weights: Sequence[float]) -> list[float]:
    """Return weights that add up to 1, rounded alike on every CPU."""
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def check_mixture(datasets: Sequence[Any], mixture: Mapping[str, float]) -> dict[str, float]:
    """Return the weights by name.

    Raises:
        ConfigError: Names or weights cannot be a mixture of these datasets.
    """
    names = [dataset.name for dataset in datasets]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"datasets {twice} appear twice. Give each dataset its own name.")
    if sorted(mixture) != sorted(names):
        raise ConfigError(
            f"mixture names {sorted(mixture)}, datasets are {sorted(names)}. Give every dataset "
            "a weight under its name; 0 leaves it out."
        )
    for name, weight in mixture.items():
        if not isinstance(weight, int | float):
            raise ConfigError(f"mixture[{name!r}] must be a number, got {weight!r}")
    weights = {name: float(weight) for name, weight in mixture.items()}
    for name, weight in weights.items():
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(f"mixture[{name!r}] is {weight}: weights are finite and >= 0")
    if not any(weights.values()):
        raise ConfigError(f"all weights of mixture {weights} are 0: give one dataset a share")
    for dataset in datasets:
        if weights[dataset.name] and not sum(shard.num_rows for shard in dataset.shards):
            raise ConfigError(
                f"dataset {dataset.name!r} has no rows. Check its path, or give it weight 0."
            )
    return weights


def turns(
    datasets: Sequence[Any],
    mixture: Mapping[str, float],
    curriculum: Sequence[tuple[int, Mapping[str, float]]],
    windows_per_step: float | Sequence[float] | None,
) -> Program:
    """Return the weights of a run by window, from those of its steps.

    Raises:
        ConfigError: Weights are no mixture, steps do not ascend, or share a window.
    """
    given = windows_per_step or 0.0
    rates = list(given) if isinstance(given, Sequence) else [given] * len(curriculum)
    program = [(0, check_mixture(datasets, mixture))]
    at, last = 0.0, 0
    for (step, weights), rate in zip(curriculum, rates, strict=False):
        at, last = at + (step - last) * (rate if math.isfinite(rate) else 0.0), step
        program.append((round(at), check_mixture(datasets, weights)))
    windows = [window for window, _ in program]
    if len(rates) != len(curriculum) or windows != sorted(set(windows)):
        raise ConfigError(
            f"the curriculum's turns begin in windows {windows[1:]}. Give ascending steps, at "
            "least a window apart, and windows_per_step, which metrics() tells: one for all, or "
            f"one for the steps before each turn, got {windows_per_step}."
        )
    return program
