"""Is shared memory faster than pickling? `python -m benchmarks.transport` (case SHM-08).

A worker makes arrays of 4 MB, which is copying a template, and the trainer reads a byte of every
page. Ours writes into a lease of the arena, and an integer comes back; the other way is a
ProcessPoolExecutor, whose arrays come pickled through a pipe. Both have the same number of
workers and of arrays in flight, and take turns.

Imports: runners.processes, shm.arena. Writes nothing.
"""

import argparse
import multiprocessing
import statistics
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zephon_mm.runners.processes import ProcessRunner
from zephon_mm.shm.arena import Arena

BATCH_BYTES = 4_000_000
IN_FLIGHT = 6

Bytes = NDArray[np.uint8]
_template = np.arange(BATCH_BYTES, dtype=np.uint8)


class Context(NamedTuple):
    """What our workers hold. A function of `__main__` would carry its globals with every task."""

    arena: Arena
    template: Bytes


def write(context: Context, offset: int, number: int) -> int:
    """Make an array in the arena; runs in a worker of ours."""
    out = context.arena.view(offset, context.template.size)
    out[:] = context.template
    out[0] = number % 256
    return number


def make(number: int) -> Bytes:
    """Make an array that is returned; runs in a worker of the standard executor."""
    out = _template.copy()
    out[0] = number % 256
    return out


def through_memory(runner: ProcessRunner, arena: Arena, count: int) -> float:
    """Return arrays a second that come through shared memory."""

    def submit(number: int) -> tuple[Bytes, "Future[Any]"]:
        lease = arena.lease(BATCH_BYTES)
        assert lease is not None
        return lease, runner.submit(write, arena.offset_of(lease), number)

    def receive(item: tuple[Bytes, "Future[Any]"]) -> Bytes:
        item[1].result()
        return item[0]

    return _rate(submit, receive, count)


def through_pipes(pool: Executor, count: int) -> float:
    """Return arrays a second that come pickled."""
    return _rate(lambda number: pool.submit(make, number), lambda item: item.result(), count)


def _rate(submit: Callable[[int], Any], receive: Callable[[Any], Bytes], count: int) -> float:
    began = time.perf_counter()
    waiting: deque[Any] = deque()
    for number in range(count + IN_FLIGHT):
        if number >= IN_FLIGHT:
            array = receive(waiting.popleft())
            assert array[0] == (number - IN_FLIGHT) % 256
            array[::4096].sum()
            del array
        if number < count:
            waiting.append(submit(number))
    return count / (time.perf_counter() - began)


def main() -> None:
    """Print the rates of both ways and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=1_000, help="of each way, in all")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    arena = Arena(2 * IN_FLIGHT * BATCH_BYTES)
    spawn = multiprocessing.get_context("spawn")
    with (
        ProcessRunner(
            Context(arena, _template), workers=args.workers, fds=(arena.fd,), preload=()
        ) as runner,
        ProcessPoolExecutor(args.workers, mp_context=spawn) as pool,
    ):
        through_memory(runner, arena, 2 * IN_FLIGHT)  # both warm
        through_pipes(pool, 2 * IN_FLIGHT)
        count = args.batches // args.turns
        pairs = [
            (through_memory(runner, arena, count), through_pipes(pool, count))
            for _ in range(args.turns)
        ]
    for ours, pickled in pairs:
        print(f"shared memory {ours:7.0f}/s  pickled {pickled:7.0f}/s  ratio {ours / pickled:.2f}")
    ratio = statistics.median(ours / pickled for ours, pickled in pairs)
    print(f"median ratio of {len(pairs)} pairs: {ratio:.2f}")


if __name__ == "__main__":
    main()
