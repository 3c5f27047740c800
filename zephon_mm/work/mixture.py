"""The standard curriculum: a mixture of datasets, each read pass after pass.

Laws (tests/test_work.py, tests/test_work_tokens.py):
    1. Pure and history-free: a chunk is a function of (state, chunk_size, configuration).
    2. Each pass gives every row exactly once over all lanes (`roworder`).
    3. A dataset's share of each chunk is exact to within one sample (systematic sampling).
    4. A source with a history gives the chunks of each earlier mixture until the window that it
       held to, and from there on those that a source of the next one gives from the same positions.
       A lane in which an earlier mixture has nothing left waits for the next one in empty chunks,
       so that a chunk's number says in which window it is.
    5. By tokens, a chunk is a guess from mean lengths. `settled` is told what a window took of its
       chunks; the next one begins behind that.

State: (lane, num_lanes, chunk_number, pass_0, position_0, pass_1, position_1, ...). By tokens each
dataset has two more: hundredths of a token given beyond its share, and mean tokens of its rows, 0
if unknown.

Cost: below a microsecond a reference.

Imports: errors, records, rng, roworder, tables, work.shares. Used by: engine, pipeline.
"""

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from zephon_mm.errors import ConfigError, DatasetError
from zephon_mm.records import Chunk, State
from zephon_mm.rng import Stream
from zephon_mm.roworder import RowOrder
from zephon_mm.tables import check_types, unknown
from zephon_mm.work.shares import Account, Rows, affordable, check_mixture, draw, normalized, turns

MeasureRows = Callable[[int, list[tuple[int, int]]], list[int | None]]
"""`measure(dataset, [(shard, row), ...])` gives each row's tokens, None where it is defective."""

MEAN_TOKENS, MEAN_ROWS = 256, 64
"""Tokens of a row before any is known; as how many rows the mean of earlier windows counts."""
Turns = Sequence[tuple[int, Mapping[str, float]]]
"""(a step or window, weights by dataset), ascending."""

_ENDLESS = 1 << 62  # rows
Shares = NDArray[np.float64]


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
    """Draws samples from datasets in fixed shares, or in those of a schedule.

    Args:
        datasets: Each with a `name`, `shards`, `digest()` and a length.
        mixture: Weight of every dataset by name, at least 0; 0 leaves a dataset out.
        seed: Key of every random choice.
        token_estimation: Makes weights shares of tokens instead of samples, about; `Pipeline.mix`
            makes them exact without.
        stop_after_passes: Passes over each dataset; None for endless.
        stop: Whether a lane ends with its first exhausted dataset or with its last, when those
            left take the shares of those exhausted; or an exhausted dataset is an error.
        shuffle: False keeps the stored order.
        shuffle_block_rows: Rows that are permuted among each other; read locality against mixing.
        max_passes: Passes over some datasets, by name, in place of `stop_after_passes`.
        curriculum: (step, weights) from which steps on other weights hold, ascending.
        windows_per_step: How many windows of a lane a step takes, about: a fact of the recipe,
            which turns the curriculum's steps into windows. `metrics()` tells it. It depends on the
            weights where documents are of unequal length: then one for the steps before each turn.
    """

    def __init__(  # noqa: PLR0913 - one call says all about the order
        self,
        datasets: Sequence[Any],
        mixture: Mapping[str, float],
        seed: int,
        token_estimation: TokenEstimation | None = None,
        *,
        stop_after_passes: int | None = None,
        stop: Literal["first_exhausted", "all_exhausted", "error"] = "first_exhausted",
        shuffle: bool = True,
        shuffle_block_rows: int = 4096,
        max_passes: Mapping[str, int] | None = None,
        curriculum: Turns = (),
        windows_per_step: float | Sequence[float] | None = None,
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
            max_passes=max_passes,
            curriculum=[list(entry) for entry in curriculum],
            windows_per_step=windows_per_step,
        )
        self._scheduled = turns(datasets, mixture, curriculum, windows_per_step)
        self._program = self._scheduled
        self._given = {dataset.name: dataset for dataset in datasets}
        self._limits = {**dict.fromkeys(self._given, stop_after_passes), **(max_passes or {})}
        if strange := sorted(self._limits.keys() - self._given):
            raise ConfigError(f"max_passes: {unknown(strange[0], self._given, 'dataset')}")
        for name, passes in {"stop_after_passes": stop_after_passes, **self._limits}.items():
            if passes is not None and not (isinstance(passes, int) and passes >= 1):
                raise ConfigError(f"passes must be None or at least 1, got {passes!r} for {name}")
        if shuffle_block_rows < 1:
            raise ConfigError(f"shuffle_block_rows must be at least 1, got {shuffle_block_rows}")
        self._seed = seed
        self._estimation = token_estimation
        self._max_passes = stop_after_passes, dict(max_passes or {})
        self._stop = stop
        self._shuffle = shuffle
        self._block_rows = shuffle_block_rows
        self._constants: Mapping[str, Any] | None = None
        self._by_tokens = False
        self._window_chunks = 1
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
    def unit(self) -> str:
        """What weights are shares of."""
        return "tokens" if self._by_tokens or self._estimation else "rows"

    @property
    def needs_constants(self) -> bool:
        """Whether `with_constants` must be called before `next`."""
        known = (self._constants or {}).get("tokens_per_row", {})
        return self._estimation is not None and any(d.name not in known for d in self._datasets)

    @property
    def finite(self) -> bool:
        """Whether lanes end: with the last mixture, a dataset is exhausted, or all of them are."""
        limited = [self._limits[name] is not None for name in self.weights_at(math.inf)]
        return any(limited) if self._stop == "first_exhausted" else all(limited)

    def start(self, lane: int, num_lanes: int) -> State:
        """Return the state in which a lane begins.

        Raises:
            ConfigError: `lane` is not in [0, num_lanes).
        """
        if not 0 <= lane < num_lanes:
            raise ConfigError(f"lane must be in [0, {num_lanes}), got {lane}")
        return self.carried((lane, num_lanes, 0), 0)

    def next(self, state: State, chunk_size: int) -> tuple[Chunk | None, State]:
        """Return the next chunk and the state after it, or (None, state) at the lane's end.

        Raises:
            ConfigError: The source needs constants first, or `chunk_size` is below 1.
            DatasetError: A dataset is used up, and `stop` is "error".
        """
        if self.needs_constants:
            raise ConfigError(
                "this source has a token_estimation that was not measured yet. Call "
                "source.with_constants(source.estimate(measure)) first; a pipeline does it itself."
            )
        if chunk_size < 1:
            raise ConfigError(f"chunk_size must be at least 1, got {chunk_size}")
        lane, num_lanes, number = map(int, state[:3])
        at, shares, left = self._at(state)
        choose = self._guess if self._by_tokens else self._draw
        choice = choose(state, at, shares, left, chunk_size)
        waits = any(number // self._window_chunks < until for until, _ in self._eras[:-1])
        if not len(choice) and not waits:
            return None, state
        refs = np.empty((len(choice), 3), dtype=np.int64)
        refs[:, 0] = choice
        for index, count in enumerate(np.bincount(choice, minlength=len(at)).tolist()):
            if count:
                epoch, position, *_ = at[index]
                order = self._orders[index]
                rows, at[index][:2] = order.take(lane, num_lanes, epoch, position, count)
                refs[choice == index, 1:] = rows
        return Chunk(refs), (lane, num_lanes, number + 1, *itertools.chain(*at))

    def fingerprint(self) -> Mapping[str, Any]:
        """Return everything that the chunks depend on, JSON-serialisable."""
        (_, weights), *later = [
            [since, normalized([weights[d.name] for d in self._datasets])]
            for since, weights in self._program
        ]
        stop_after_passes, max_passes = self._max_passes
        by = "tokens" if self._by_tokens else None
        more = {"curriculum": later, "max_passes": max_passes, "by": by}
        return {
            "seed": self._seed,
            "datasets": [[dataset.name, dataset.digest()] for dataset in self._datasets],
            "weights": weights,
            "token_estimation": self._estimation and self._estimation.sample_rows,
            "constants": self._constants,
            "stop_after_passes": stop_after_passes,
            "stop": self._stop,
            "shuffle": self._shuffle,
            "shuffle_block_rows": self._block_rows,
            **{name: value for name, value in more.items() if value},
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

    # Copies: what a pipeline makes of the source that it was given.

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

    def with_windows(self, window_chunks: int) -> Self:
        """Return a copy that knows how many chunks a window has."""
        source = copy.copy(self)
        source._window_chunks = window_chunks
        return source

    def by_tokens(self) -> Self:
        """Return a copy whose weights are exact shares of tokens, if `settled` tells of windows."""
        source = copy.copy(self)
        source._by_tokens, source._estimation, source._constants = True, None, None
        source._share_out()
        return source

    def with_history(self, names: Sequence[str], history: Turns) -> Self:
        """Return a copy that goes on in lanes that earlier mixtures began, without `with_turn`'s.

        Args:
            names: The datasets of the lanes' states, in order; those that join come after them.
            history: (window that it held to, exclusive, weights by name) of each earlier mixture,
                ascending. The weights add up to 1.

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
        source._program = self._scheduled
        source._arrange(names, history)
        return source if source._constants is None else source.with_constants(source._constants)

    def with_turn(self, window: int, weights: Mapping[str, float]) -> Self:
        """Return a copy with other weights of its datasets from a window on, for good."""
        idle = self._given.keys() - {dataset.name for dataset in self._datasets}
        weights = {name: weight for name, weight in weights.items() if weight or name not in idle}
        turn = {**dict.fromkeys(self._given, 0.0), **check_mixture(self._datasets, weights)}
        source = copy.copy(self)
        source._program = [*(one for one in self._program if one[0] < window), (window, turn)]
        source._share_out()
        return source

    def weights_at(self, window: float) -> dict[str, float]:
        """Return the weights above 0, by name, that hold in a window; they add up to 1."""
        weights = next(weights for until, weights in self._mixtures if window <= until - 1)
        names = [dataset.name for dataset in self._datasets]
        return {name: weight for name, weight in zip(names, weights, strict=True) if weight}

    def carried(self, state: State, number: int) -> State:
        """Return a state of before datasets joined as one of this source, at a chunk number."""
        lane, num_lanes, _, *cursors = state
        joined = self._width * len(self._datasets) - len(cursors)
        return (lane, num_lanes, number, *cursors, *(0,) * joined)

    # By tokens.

    def account(self, state: State) -> Account:
        """Return how far each dataset is with its share; those used up give nothing."""
        at, shares, left = self._at(state)
        account = Account(shares.tolist(), [part[2] for part in at])
        for index in np.flatnonzero(left == 0).tolist():
            account.end(index)
        return account

    def settled(
        self, state: State, number: int, rows: Mapping[int, int], tokens: Mapping[int, int]
    ) -> State:
        """Return the state in which a window begins, from what that before it took.

        Args:
            state: In which that one began.
            number: Of the first chunk.
            rows: By dataset, how many it took, from the first one on.
            tokens: By dataset, how many these had.
        """
        lane, num_lanes = map(int, state[:2])
        account, at = self.account(state), self._at(state)[0]
        for index, count in rows.items():
            account.give(index, tokens[index])
            epoch, position, _, mean = at[index]
            _, at[index][:2] = self._orders[index].take(lane, num_lanes, epoch, position, count)
            known = (mean or MEAN_TOKENS) * MEAN_ROWS + tokens[index]
            at[index][3] = max(known // (MEAN_ROWS + count), 1)
        for part, ahead in zip(at, account.ahead(), strict=True):
            part[2] = ahead
        return (lane, num_lanes, number, *itertools.chain(*at))

    # Parts of the above.

    @property
    def _width(self) -> int:
        """Integers of a dataset in a state."""
        return 4 if self._by_tokens else 2

    def _at(self, state: State) -> tuple[list[list[int]], Shares, Rows]:
        """Return of each dataset its part of a state, its share, and how many rows are left.

        Raises:
            DatasetError: There are none, and that is an error.
        """
        lane, num_lanes, number, *flat = map(int, state)
        at = [flat[index : index + self._width] for index in range(0, len(flat), self._width)]
        window = number // self._window_chunks
        shares = next(shares for until, shares in self._eras if window < until)
        left = np.full(len(at), _ENDLESS)
        left[shares == 0] = 0
        for index in np.flatnonzero(left).tolist():
            name, order = self._datasets[index].name, self._orders[index]
            epoch, position, *_ = at[index]
            if (passes := self._limits[name]) is not None:
                left[index] = order.left(lane, num_lanes, epoch, position, passes)
            if not left[index] and self._stop == "error":
                raise DatasetError(
                    f"dataset {name!r} is used up in lane {lane} after {passes} passes. Allow more "
                    "of them, give it less weight, or set stop='all_exhausted', so that it leaves."
                )
        return at, shares, left

    def _arrange(self, names: Sequence[str], history: Turns) -> None:
        """Line up datasets: first what states so far know, then what joins."""
        used = {name for _, weights in self._program for name, weight in weights.items() if weight}
        joined = [name for name in self._given if name in used and name not in names]
        self._datasets = [self._given[name] for name in (*names, *joined)]
        self._orders = [
            RowOrder(
                d.name, d.shards, self._seed, shuffle=self._shuffle, block_rows=self._block_rows
            )
            for d in self._datasets
        ]
        self._history = history
        self._share_out()

    def _share_out(self) -> None:
        """Line up mixtures: those of the history, then the turns that come. Make shares of them."""
        self._mixtures: list[tuple[float, list[float]]] = [
            (until, [weights.get(d.name, 0.0) for d in self._datasets])
            for until, weights in self._history
        ]
        ends = [*(since for since, _ in self._program[1:]), math.inf]
        self._mixtures += [
            (end, normalized([weights[d.name] for d in self._datasets]))
            for end, (_, weights) in zip(ends, self._program, strict=True)
            if not self._history or end > self._history[-1][0]
        ]
        self._eras = [(until, np.array(self._shares_of(one))) for until, one in self._mixtures]

    def _shares_of(self, weights: list[float]) -> list[float]:
        if self._constants is None or self.needs_constants:
            return weights
        per_row = self._constants["tokens_per_row"]
        pairs = zip(weights, self._datasets, strict=True)
        return normalized([weight / per_row[dataset.name] for weight, dataset in pairs])

    def _ends(self, shares: Shares, left: Rows) -> bool:
        return self._stop == "first_exhausted" and not left[shares > 0].all()

    def _draw(
        self, state: State, at: Sequence[Any], shares: Shares, left: Rows, chunk_size: int
    ) -> Rows:
        """Return which dataset each reference of a chunk comes from; fewer at the lane's end."""
        stream = Stream(self._seed, "mix", *map(int, state[:3]))
        parts = [np.empty(0, dtype=np.int64)]
        wanted = chunk_size
        while wanted and left.any() and not self._ends(shares, left):
            part = draw(stream, np.where(left > 0, shares, 0.0), wanted)
            part = part[: affordable(part, left)]
            parts.append(part)
            wanted -= len(part)
            left = left - np.bincount(part, minlength=len(left))
        return np.concatenate(parts)

    def _guess(
        self, state: State, at: Sequence[Any], shares: Shares, left: Rows, chunk_size: int
    ) -> Rows:
        """Return as much as `_draw`, in the order in which rows of mean length would be taken.

        What the datasets are ahead then is written into `at`.
        """
        account = self.account(state)
        choice: list[int] = []
        ended = self._ends(shares, left)
        while len(choice) < chunk_size and not ended and (index := account.next()) is not None:
            choice.append(index)
            account.give(index, at[index][3] or MEAN_TOKENS)
            left[index] -= 1
            if not left[index]:
                account.end(index)
                ended = self._ends(shares, left)
        for part, ahead in zip(at, account.ahead(), strict=True):
            part[2] = ahead
        return np.array(choice, dtype=np.int64)
