"""A work source whose weights come from an HTTP server, window by window: an example of its kind.

The server is asked `GET URL?lane=3&window=17` and answers a JSON object, dataset name -> weight. It
is asked when a lane draws the end of a window, and the answer is in the lane's state from the next
window on. So a state has the answers for the windows that lanes are in, and a resume plans these
again by them, and delivers what they give without their last chunk, if the server is gone; it is
asked, anew, for the windows after them.

No rank talks to another. A lane is planned by several ranks where topology, `balance` or a finite
source asks for it, and after a restore by others, so **the server must answer equal questions
equally**: by a function of lane and window, or by keeping what it said. If it does not, parts of a
checkpoint disagree on that lane, and merging them is an error. A decision that depends on the run's
past is for `Pipeline.steer`: one rank asks, all get the answer, and states have it for good.

Laws (tests/integrations/test_curriculum.py):
    1. It keeps the contract of work sources; in a process the first answer to a question stands.
    2. A fault is tried again, then it is an error that names the URL.

Imports: errors, records, work. Used by: users.
"""

import copy
import http.client
import json
import time
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.error import HTTPError

from zephon_mm.errors import ConfigError
from zephon_mm.records import Chunk, State
from zephon_mm.work import StaticMixtureWorkSource
from zephon_mm.work.shares import check_mixture

RETRY_DELAYS_S = (0.1, 1.0, 5.0)
PARTS = 1000
"""Weights are kept in a state as thousandths of their sum."""
_FAULTS = (
    *(OSError, http.client.HTTPException),
    *(ValueError, TypeError, AttributeError, ConfigError),  # what is no mixture
    *(ArithmeticError, RecursionError),  # numbers and nesting without measure
)


class HttpCurriculum:
    """Draws samples in shares that a server says.

    Args:
        datasets: As of `StaticMixtureWorkSource`.
        seed: Key of every random choice.
        url: Of the server, without a query.
        timeout_s: How long the server may be silent, before an answer or within it.
    """

    finite = False

    def __init__(
        self, datasets: Sequence[Any], seed: int, url: str, *, timeout_s: float = 10.0
    ) -> None:
        self._names = [dataset.name for dataset in datasets]
        self._base = StaticMixtureWorkSource(datasets, dict.fromkeys(self._names, 1.0), seed)
        self._url = url
        self._timeout_s = timeout_s
        self._window_chunks = 1
        self._answers: dict[tuple[int, int], tuple[int, ...]] = {}

    @property
    def datasets(self) -> Sequence[Any]:
        """The datasets that references point into."""
        return self._base.datasets

    def with_windows(self, window_chunks: int) -> "HttpCurriculum":
        """Return a copy that knows how many chunks a window has; the answers are one for both."""
        source = copy.copy(self)
        source._window_chunks = window_chunks
        return source

    def start(self, lane: int, num_lanes: int) -> State:
        """Return the state in which a lane begins: the answer for its first window, a position."""
        return (*self._weights(lane, 0), *self._base.start(lane, num_lanes))

    def next(self, state: State, chunk_size: int) -> tuple[Chunk | None, State]:
        """Return the next chunk and the state after it.

        Raises:
            ConnectionError: The server does not answer, or not with a mixture of the datasets.
        """
        weights, position = state[: len(self._names)], state[len(self._names) :]
        mixture = dict(zip(self._names, map(float, weights), strict=True))
        chunk, after = self._base.with_turn(0, mixture).next(position, chunk_size)
        lane, _, number, *_ = map(int, after)
        if number % self._window_chunks == 0:
            weights = self._weights(lane, number // self._window_chunks)
        return chunk, (*weights, *after)

    def fingerprint(self) -> Mapping[str, Any]:
        """Return everything that the chunks depend on, but for the server's answers."""
        return {**self._base.fingerprint(), "weights": "of a server"}

    def _weights(self, lane: int, window: int) -> tuple[int, ...]:
        """Return the weights of a window in the order of the datasets."""
        if (lane, window) not in self._answers:
            self._answers[lane, window] = self._ask(f"{self._url}?lane={lane}&window={window}")
        return self._answers[lane, window]

    def _ask(self, url: str) -> tuple[int, ...]:
        for tries, delay_s in enumerate((*RETRY_DELAYS_S, 0.0), start=1):
            try:
                with urllib.request.urlopen(url, timeout=self._timeout_s) as answer:
                    weights = json.load(answer)
                weights = {n: w for n, w in weights.items() if w != 0 or n in self._names}
                found = check_mixture(self.datasets, weights)
                total = sum(found.values())
                return tuple(round(PARTS * found[name] / total) for name in self._names)
            except _FAULTS as error:
                if isinstance(error, HTTPError):
                    error.close()
                if tries > len(RETRY_DELAYS_S):
                    raise ConnectionError(
                        f"{url} gave no weights of {self._names} in {tries} tries, the last time "
                        f"{error!r}. Start the server, and restore the run from its checkpoint."
                    ) from error
                time.sleep(delay_s)
        raise AssertionError("the last try returns or raises")
