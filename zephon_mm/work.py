"""The standard curriculum: a fixed mixture of datasets, each read pass after pass.

Laws:
    1. Pure and history-free: a chunk is a function of (state, chunk_size, configuration).
    2. Each pass gives every row exactly once over all lanes, for any rows, shards and lanes. Lane l
       of L owns one of L contiguous ranges of the pass's row space, whose sizes differ by one at
       most; a range moves on by one lane each pass, so that every lane meets rows at last.
    3. A dataset's share of each chunk is exact to within one sample (systematic sampling).

State: (lane, num_lanes, chunk_number, pass_0, position_0, pass_1, position_1, ...).

Cost: below a microsecond a reference; nothing is built that is as large as a dataset.

Imports: errors, records, rng. Used by: engine, pipeline.
"""

import copy
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from zephon_mm.errors import ConfigError
from zephon_mm.records import Chunk, ShardInfo, State
from zephon_mm.rng import Stream
from zephon_mm.tables import check_types

Rows = NDArray[np.int64]
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
        self._datasets = [dataset for dataset in datasets if weights[dataset.name] > 0]
        self._weights = _normalized([weights[dataset.name] for dataset in self._datasets])
        self._shares = self._weights
        self._seed = seed
        self._estimation = token_estimation
        self._max_passes = stop_after_passes
        self._stop = stop
        self._constants: Mapping[str, Any] | None = None
        self._orders = [
            RowOrder(d.name, d.shards, seed, shuffle=shuffle, block_rows=shuffle_block_rows)
            for d in self._datasets
        ]

    @property
    def datasets(self) -> Sequence[Any]:
        """The datasets that references point into: those with a weight above 0."""
        return self._datasets

    @property
    def constants(self) -> Mapping[str, Any] | None:
        """What `estimate` measured, or None."""
        return self._constants

    @property
    def needs_constants(self) -> bool:
        """Whether `with_constants` must be called before `next`."""
        return self._estimation is not None and self._constants is None

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
        choice = self._choose(lane, num_lanes, number, cursors, chunk_size)
        if not len(choice):
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
        order = self._orders[0]
        return {
            "seed": self._seed,
            "datasets": [[dataset.name, dataset.digest()] for dataset in self._datasets],
            "weights": self._weights.tolist(),
            "token_estimation": self._estimation and self._estimation.sample_rows,
            "constants": self._constants,
            "stop_after_passes": self._max_passes,
            "stop": self._stop,
            "shuffle": order.shuffle,
            "shuffle_block_rows": order.block_rows,
        }

    def estimate(self, measure: MeasureRows) -> Mapping[str, Any]:
        """Measure a fixed, seed-keyed set of rows of each dataset.

        Returns:
            Constants for `with_constants`, JSON-serialisable.

        Raises:
            ConfigError: No sampled row of a dataset gives tokens.
        """
        sample_rows = (self._estimation or TokenEstimation()).sample_rows
        per_row: dict[str, float] = {}
        per_byte: dict[str, float] = {}
        for index, (dataset, order) in enumerate(zip(self._datasets, self._orders, strict=True)):
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

        Raises:
            ConfigError: The constants are of other datasets.
        """
        per_row = constants["tokens_per_row"]
        names = [dataset.name for dataset in self._datasets]
        if sorted(per_row) != sorted(names):
            raise ConfigError(
                f"constants are of datasets {sorted(per_row)}, this source has {sorted(names)}. "
                "Measure again with estimate()."
            )
        source = copy.copy(self)
        pairs = zip(self._weights.tolist(), names, strict=True)
        source._shares = _normalized([weight / per_row[name] for weight, name in pairs])
        source._constants = constants
        return source

    def _choose(
        self,
        lane: int,
        num_lanes: int,
        number: int,
        cursors: list[tuple[int, int]],
        chunk_size: int,
    ) -> Rows:
        """Return which dataset each reference of a chunk comes from; fewer at the lane's end."""
        stream = Stream(self._seed, "mix", lane, num_lanes, number)
        if self._max_passes is None:
            return _draw(stream, self._shares, chunk_size)
        left = np.array(
            [
                order.left(lane, num_lanes, *cursor, self._max_passes)
                for order, cursor in zip(self._orders, cursors, strict=True)
            ]
        )
        if self._stop == "first_exhausted" and not left.all():
            return np.empty(0, dtype=np.int64)
        parts: list[Rows] = []
        wanted = chunk_size
        while wanted and left.any():
            part = _draw(stream, np.where(left > 0, self._shares, 0.0), wanted)
            part = part[: _affordable(part, left)]
            parts.append(part)
            wanted -= len(part)
            left = left - np.bincount(part, minlength=len(left))
            if self._stop == "first_exhausted":
                break
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


class RowOrder:
    """The order of one dataset's rows, pass by pass and lane by lane. Picklable, thread-safe."""

    def __init__(
        self, name: str, shards: Sequence[ShardInfo], seed: int, *, shuffle: bool, block_rows: int
    ) -> None:
        self.num_rows = sum(shard.num_rows for shard in shards)
        self.shuffle = shuffle
        self.block_rows = block_rows
        self._name = name
        self._seed = seed
        self._sizes = np.array([shard.num_rows for shard in shards], dtype=np.int64)
        self._base = Stream(seed, "offset", name).integer(1 << 32) if shuffle else 0
        self._shard_orders = _Cache(8)
        self._blocks = _Cache(512)

    def size(self, lane: int, num_lanes: int, epoch: int) -> int:
        """Return how many rows of a pass a lane owns."""
        low, high = self._range(lane, num_lanes, epoch)
        return high - low

    def left(self, lane: int, num_lanes: int, epoch: int, position: int, max_epochs: int) -> int:
        """Return how many rows a lane has before it ends."""
        rounds, rest = divmod(max_epochs - epoch, num_lanes)  # a lane gets all rows in L passes
        sizes = (self.size(lane, num_lanes, epoch + i) for i in range(rest))
        return rounds * self.num_rows + sum(sizes) - position

    def take(
        self, lane: int, num_lanes: int, epoch: int, position: int, count: int
    ) -> tuple[Rows, tuple[int, int]]:
        """Return the next `count` rows of a lane and its (pass, position) after them.

        Passes in which the lane owns nothing are gone through; there are at most
        `num_lanes - 1` of them in a row, since ranges move on by one lane each pass.

        Returns:
            (count, 2) int64 of (shard, row), and the position.
        """
        parts: list[Rows] = []
        while count:
            size = self.size(lane, num_lanes, epoch)
            if position == size:
                epoch, position = epoch + 1, 0
                continue
            block = position // self.block_rows
            rows = self._block(lane, num_lanes, epoch, block)
            start = position - block * self.block_rows
            part = rows[start : start + count]
            parts.append(part)
            position += len(part)
            count -= len(part)
        return np.concatenate(parts), (epoch, position)

    def sample(self, count: int) -> list[tuple[int, int]]:
        """Return up to `count` different (shard, row), keyed by the seed, ascending."""
        if count < self.num_rows:
            uniform = Stream(self._seed, "estimate", self._name).uniform(count)
            chosen = np.unique((uniform * self.num_rows).astype(np.int64))
        else:
            chosen = np.arange(self.num_rows)
        rows = _locate(chosen, np.arange(len(self._sizes)), np.cumsum(self._sizes))
        return [(int(shard), int(row)) for shard, row in rows]

    def _range(self, lane: int, num_lanes: int, epoch: int) -> tuple[int, int]:
        rank = (lane + self._base + epoch) % num_lanes
        return rank * self.num_rows // num_lanes, (rank + 1) * self.num_rows // num_lanes

    def _block(self, lane: int, num_lanes: int, epoch: int, block: int) -> Rows:
        """Return the rows of one block in order, (n, 2) int64."""
        low, high = self._range(lane, num_lanes, epoch)
        key = (low, high, epoch, block)
        return self._blocks.get(key, lambda: self._build_block(*key))

    def _build_block(self, low: int, high: int, epoch: int, block: int) -> Rows:
        start = low + block * self.block_rows
        stop = min(start + self.block_rows, high)
        rows = np.arange(start, stop, dtype=np.int64)
        if self.shuffle:
            key = (self._seed, "rows", self._name, epoch, low, high, block)
            rows = rows[Stream(*key).permutation(len(rows))]
        shards = self._shard_orders.get((epoch,), lambda: self._shard_order(epoch))
        return _locate(rows, shards, np.cumsum(self._sizes[shards]))

    def _shard_order(self, epoch: int) -> Rows:
        if not self.shuffle:
            return np.arange(len(self._sizes))
        return Stream(self._seed, "shards", self._name, epoch).permutation(len(self._sizes))


class _Cache:
    """The arrays used last. It is empty in a copy that was pickled."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._arrays: OrderedDict[tuple[int, ...], Rows] = OrderedDict()

    def __reduce__(self) -> tuple[type["_Cache"], tuple[int]]:
        return _Cache, (self._size,)

    def get(self, key: tuple[int, ...], build: Callable[[], Rows]) -> Rows:
        """Return the array of a key, building it where it is missing."""
        with self._lock:
            if key not in self._arrays:
                self._arrays[key] = build()
                if len(self._arrays) > self._size:
                    self._arrays.popitem(last=False)
            self._arrays.move_to_end(key)
            return self._arrays[key]


def _locate(rows: Rows, shards: Rows, ends: Rows) -> Rows:
    """Turn positions in a row space into (shard, row), (n, 2) int64.

    Args:
        rows: (n,) int64 positions in the shards' concatenation.
        shards: (s,) int64, the shards in their order there.
        ends: (s,) int64, where each of them ends there.
    """
    at = np.searchsorted(ends, rows, side="right")
    starts = np.concatenate(([0], ends[:-1]))
    return np.stack((shards[at], rows - starts[at]), axis=1)


def _draw(stream: Stream, shares: NDArray[np.float64], count: int) -> Rows:
    """Return `count` dataset numbers in random order, each share exact to within one."""
    ends = np.cumsum(shares)
    ends /= ends[-1]  # not shares.sum(), whose rounding may depend on the CPU
    points = (np.arange(count) + stream.uniform(1)[0]) / count
    last = int(np.flatnonzero(shares)[-1])
    choice = np.minimum(np.searchsorted(ends, points, side="right"), last)
    return np.asarray(choice[stream.permutation(count)], dtype=np.int64)


def _normalized(weights: list[float]) -> NDArray[np.float64]:
    """Return weights that add up to 1, rounded alike on every CPU."""
    total = math.fsum(weights)
    return np.array([weight / total for weight in weights])


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
