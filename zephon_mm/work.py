"""The standard curriculum: a mixture of datasets, each read pass after pass.

Laws:
    1. Pure and history-free: a chunk is a function of (state, chunk_size, configuration).
    2. Each pass gives every row exactly once over all lanes (`roworder`).
    3. A dataset's share of each chunk is exact to within one sample (systematic sampling).
    4. A source with a history gives the chunks of each earlier mixture until the number that it
       held to, and from there on those that a source of the next one gives from the same positions.
       A lane in which an earlier mixture has nothing left waits for the next one in empty chunks,
       so that a chunk's number says in which window it is.

State: (lane, num_lanes, chunk_number, pass_0, position_0, pass_1, position_1, ...).

Cost: below a microsecond a reference.

Imports: errors, records, rng, roworder, tables. Used by: engine, pipeline.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from zephon_mm.errors import ConfigError
from zephon_mm.records import Chunk, State
from zephon_mm.rng import Stream
from zephon_mm.roworder import RowOrder, Rows
from zephon_mm.tables import check_types

MeasureRows = Callable[[int, list[tuple[int, int]]], list[int | None]]
"""`measure(dataset, [(shard, row), ...])` gives each row's tokens, None where it is defective."""


@dataclass(frozen=True, slots=True)
class TokenEstimation:
    """Makes the mixture's weights shares of tokens, by measuring a few rows of each dataset.

    Tokens per row is what is kept. Tokens per stored byte would say the same, since a dataset's
    bytes per row are known only on average, and is worse where rows differ: an image's bytes say
    nothing of its tokens. It is kept beside it for display.

    Args:
        sample_rows: Rows measured of each dataset, chosen by the seed.
    """

    sample_rows: int = 64

    def __post_init__(self) -> None:
        check_types(TokenEstimation, "TokenEstimation", sample_rows=self.sample_rows)
        if self.sample_rows < 1:
            raise ConfigError(
                f"TokenEstimation: sample_rows must be at least 1, got {self.sample_rows}"
            )


class StaticMixtureWorkSource:
    """Draws samples from datasets in fixed shares.

    Args:
        datasets: Each with a `name`, `shards`, `digest()` and a length.
        mixture: Weight of every dataset by name, at least 0; 0 leaves a dataset out.
        seed: Key of every random choice.
        token_estimation: Makes weights shares of tokens instead of samples.
        stop_after_passes: Passes over each dataset; None for endless.
        stop: Whether a lane ends with its first exhausted dataset or with its last; then those
            left take the shares of those exhausted.
        shuffle: False keeps the stored order.
        shuffle_block_rows: Rows that are permuted among each other; read locality against mixing.
    """

    def __init__(
        self,
        datasets: Sequence[Any],
        mixture: Mapping[str, float],
        seed: int,
        token_estimation: TokenEstimation | None = None,
        *,
        stop_after_passes: int | None = None,
        stop: Literal["first_exhausted", "all_exhausted"] = "first_exhausted",
        shuffle: bool = True,
        shuffle_block_rows: int = 4096,
    ) -> None:
        check_types(
            StaticMixtureWorkSource,
            "source",
            seed=seed,
            token_estimation=token_estimation,
            stop_after_passes=stop_after_passes,
            stop=stop,
            shuffle=shuffle,
            shuffle_block_rows=shuffle_block_rows,
        )
        weights = _check_mixture(datasets, mixture)
        if stop_after_passes is not None and stop_after_passes < 1:
            raise ConfigError(f"stop_after_passes must be None or >= 1, got {stop_after_passes}")
        if shuffle_block_rows < 1:
            raise ConfigError(f"shuffle_block_rows must be at least 1, got {shuffle_block_rows}")
        self._given = {dataset.name: dataset for dataset in datasets}
        self._mixture = weights
        self._seed = seed
        self._estimation = token_estimation
        self._max_passes = stop_after_passes
        self._stop = stop
        self._shuffle = shuffle
        self._block_rows = shuffle_block_rows
        self._constants: Mapping[str, Any] | None = None
        self._arrange((), ())

    @property
    def datasets(self) -> Sequence[Any]:
        """The datasets that references point into: those that have or had a weight above 0."""
        return self._datasets

    @property
    def constants(self) -> Mapping[str, Any] | None:
        """What `estimate` measured, or None."""
        return self._constants

    @property
    def needs_constants(self) -> bool:
        """Whether `with_constants` must be called before `next`."""
        known = (self._constants or {}).get("tokens_per_row", {})
        return self._estimation is not None and any(d.name not in known for d in self._datasets)

    @property
    def finite(self) -> bool:
        """Whether lanes end: `stop_after_passes` is given."""
        return self._max_passes is not None

    def start(self, lane: int, num_lanes: int) -> State:
        """Return the state in which a lane begins.

        Raises:
            ConfigError: `lane` is not in [0, num_lanes).
        """
        if not 0 <= lane < num_lanes:
            raise ConfigError(f"lane must be in [0, {num_lanes}), got {lane}")
        return (lane, num_lanes, 0) + (0, 0) * len(self._datasets)

    def next(self, state: State, chunk_size: int) -> tuple[Chunk | None, State]:
        """Return the next chunk and the state after it, or (None, state) at the lane's end.

        Raises:
            ConfigError: The source needs constants first, or `chunk_size` is below 1.
        """
        if self.needs_constants:
            raise ConfigError(
                "this source has a token_estimation that was not measured yet. Call "
                "source.with_constants(source.estimate(measure)) first; a pipeline does it itself."
            )
        if chunk_size < 1:
            raise ConfigError(f"chunk_size must be at least 1, got {chunk_size}")
        lane, num_lanes, number, *flat = (int(part) for part in state)
        cursors = list(zip(flat[::2], flat[1::2], strict=True))
        until, shares = next(era for era in self._eras if number < era[0])
        choice = self._choose(lane, num_lanes, number, cursors, chunk_size, shares)
        if not len(choice) and until == math.inf:
            return None, state
        refs = np.empty((len(choice), 3), dtype=np.int64)
        refs[:, 0] = choice
        for index, count in enumerate(np.bincount(choice, minlength=len(cursors)).tolist()):
            if count:
                order = self._orders[index]
                rows, cursors[index] = order.take(lane, num_lanes, *cursors[index], count)
                refs[choice == index, 1:] = rows
        return Chunk(refs), (lane, num_lanes, number + 1, *(n for pair in cursors for n in pair))

    def fingerprint(self) -> Mapping[str, Any]:
        """Return everything that the chunks depend on, JSON-serialisable."""
        return {
            "seed": self._seed,
            "datasets": [[dataset.name, dataset.digest()] for dataset in self._datasets],
            "weights": self._mixtures[-1][1],
            "token_estimation": self._estimation and self._estimation.sample_rows,
            "constants": self._constants,
            "stop_after_passes": self._max_passes,
            "stop": self._stop,
            "shuffle": self._shuffle,
            "shuffle_block_rows": self._block_rows,
        }

    def estimate(self, measure: MeasureRows) -> Mapping[str, Any]:
        """Measure a fixed, seed-keyed set of rows of each dataset whose constants are not known.

        Returns:
            Constants for `with_constants`, JSON-serialisable.

        Raises:
            ConfigError: No sampled row of a dataset gives tokens.
        """
        sample_rows = (self._estimation or TokenEstimation()).sample_rows
        known = self._constants or {}
        per_row: dict[str, float] = dict(known.get("tokens_per_row", {}))
        per_byte: dict[str, float] = dict(known.get("tokens_per_byte", {}))
        for index, (dataset, order) in enumerate(zip(self._datasets, self._orders, strict=True)):
            if dataset.name in per_row:
                continue
            rows = order.sample(sample_rows)
            # A defective row is a reference that gives nothing, so it counts as 0 tokens.
            tokens = sum(count or 0 for count in measure(index, rows))
            if not tokens:
                raise ConfigError(
                    f"none of {len(rows)} sampled rows of dataset {dataset.name!r} gives tokens. "
                    "Check its schema, .map and .filter, or give it weight 0."
                )
            num_bytes = sum(shard.num_bytes for shard in dataset.shards)
            per_row[dataset.name] = tokens / len(rows)
            per_byte[dataset.name] = per_row[dataset.name] * order.num_rows / max(num_bytes, 1)
        return {"tokens_per_row": per_row, "tokens_per_byte": per_byte}

    def with_constants(self, constants: Mapping[str, Any]) -> Self:
        """Return a copy whose weights are shares of tokens by these constants.

        Those of other datasets are left out; where one of this source's lacks, it still
        `needs_constants`, and `estimate` measures the rest.
        """
        names = {dataset.name for dataset in self._datasets}
        source = copy.copy(self)
        source._constants = {
            kind: {name: value for name, value in values.items() if name in names}
            for kind, values in constants.items()
        }
        source._share_out()
        return source

    def with_history(
        self, names: Sequence[str], history: Sequence[tuple[int, Mapping[str, float]]]
    ) -> Self:
        """Return a copy that goes on in lanes that earlier mixtures began.

        Args:
            names: The datasets of the lanes' states, in order; those that join come after them.
            history: (chunk number that it held to, exclusive, weights by name) of each earlier
                mixture, ascending. The weights add up to 1.

        Raises:
            ConfigError: A dataset of the states is not among those given.
        """
        missing = [name for name in names if name not in self._given]
        if missing:
            raise ConfigError(
                f"the state needs datasets {missing}, this source has {sorted(self._given)}. A "
                "dataset leaves by weight 0: keep it among the datasets, since what was planned "
                "with it is planned again on restore."
            )
        source = copy.copy(self)
        source._arrange(names, history)
        return source if source._constants is None else source.with_constants(source._constants)

    def carried(self, state: State, number: int) -> State:
        """Return a state of before datasets joined as one of this source, at a chunk number."""
        lane, num_lanes, _, *cursors = state
        joined = 2 * len(self._datasets) - len(cursors)
        return (lane, num_lanes, number, *cursors, *(0,) * joined)

    def _arrange(
        self, names: Sequence[str], history: Sequence[tuple[int, Mapping[str, float]]]
    ) -> None:
        """Line up datasets and mixtures: first what states so far know, then what joins."""
        joined = [name for name in self._given if self._mixture[name] and name not in names]
        self._datasets = [self._given[name] for name in (*names, *joined)]
        self._orders = [
            RowOrder(
                d.name, d.shards, self._seed, shuffle=self._shuffle, block_rows=self._block_rows
            )
            for d in self._datasets
        ]
        self._mixtures: list[tuple[float, list[float]]] = [
            (until, [weights.get(d.name, 0.0) for d in self._datasets])
            for until, weights in history
        ]
        now = _normalized([self._mixture[d.name] for d in self._datasets])
        self._mixtures.append((math.inf, now))
        self._share_out()

    def _share_out(self) -> None:
        """Turn the weights of all mixtures into shares of samples."""
        self._eras = [
            (until, np.array(self._shares_of(weights))) for until, weights in self._mixtures
        ]

    def _shares_of(self, weights: list[float]) -> list[float]:
        if self._constants is None or self.needs_constants:
            return weights
        per_row = self._constants["tokens_per_row"]
        pairs = zip(weights, self._datasets, strict=True)
        return _normalized([weight / per_row[dataset.name] for weight, dataset in pairs])

    def _choose(
        self,
        lane: int,
        num_lanes: int,
        number: int,
        cursors: list[tuple[int, int]],
        chunk_size: int,
        shares: NDArray[np.float64],
    ) -> Rows:
        """Return which dataset each reference of a chunk comes from; fewer at the lane's end."""
        stream = Stream(self._seed, "mix", lane, num_lanes, number)
        if self._max_passes is None:
            return _draw(stream, shares, chunk_size)
        left = np.array(
            [
                order.left(lane, num_lanes, *cursor, self._max_passes) if share else 0
                for order, cursor, share in zip(self._orders, cursors, shares, strict=True)
            ]
        )
        if self._stop == "first_exhausted" and not left[shares > 0].all():
            return np.empty(0, dtype=np.int64)
        parts: list[Rows] = []
        wanted = chunk_size
        while wanted and left.any():
            part = _draw(stream, np.where(left > 0, shares, 0.0), wanted)
            part = part[: _affordable(part, left)]
            parts.append(part)
            wanted -= len(part)
            left = left - np.bincount(part, minlength=len(left))
            if self._stop == "first_exhausted":
                break
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def _draw(stream: Stream, shares: NDArray[np.float64], count: int) -> Rows:
    """Return `count` dataset numbers in random order, each share exact to within one."""
    ends = np.cumsum(shares)
    ends /= ends[-1]  # not shares.sum(), whose rounding may depend on the CPU
    points = (np.arange(count) + stream.uniform(1)[0]) / count
    last = int(np.flatnonzero(shares)[-1])
    choice = np.minimum(np.searchsorted(ends, points, side="right"), last)
    return np.asarray(choice[stream.permutation(count)], dtype=np.int64)


def _normalized(weights: list[float]) -> list[float]:
    """Return weights that add up to 1, rounded alike on every CPU."""
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def _affordable(choice: Rows, left: Rows) -> int:
    """Return how many of the leading choices can be given with `left` rows of each dataset."""
    stop = len(choice)
    for index, rows in enumerate(left.tolist()):
        at = np.flatnonzero(choice == index)
        if len(at) > rows:
            stop = min(stop, int(at[rows]))
    return stop


def _check_mixture(datasets: Sequence[Any], mixture: Mapping[str, float]) -> dict[str, float]:
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
