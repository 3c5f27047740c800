"""The program of a worker process: take a task, run it, reply, until the trainer hangs up.

Laws:
    1. The board says which task runs: its number from before it is unpickled until its result is
       freed, 0 otherwise. So a death can be blamed on exactly one task, or on none.
    2. A reply is sent once, whole (see wire).

Imports: errors. Used by: zygote.
"""

import contextlib
import pickle
import socket
import sys
from typing import Any

from zephon_mm.errors import RunnerError
from zephon_mm.runners import pickles, wire


def serve(sock: socket.socket, context: Any, board: "memoryview[int]", slot: int) -> None:
    """Run tasks until the other end of the socket is closed.

    Args:
        sock: This worker's end, blocking.
        context: The first argument of every task.
        board: (workers,) uint64, shared with the trainer.
        slot: This worker's place on the board.
    """
    while True:
        header, payload = wire.collect(sock, wire.REQUEST.size)
        if not header:
            return
        (number,) = wire.REQUEST.unpack(header)
        board[slot] = number
        ok, reply = _run(context, payload)
        flush_output()
        try:
            wire.post(sock, wire.REPLY.pack(number, ok), reply)
        except ConnectionError:
            return
        except OSError as error:  # no memory for a large reply
            wire.post(sock, wire.REPLY.pack(number, False), pickles.dumps_error(error))
        del payload, reply
        board[slot] = 0


def _run(context: Any, payload: bytes) -> tuple[bool, bytes]:
    """Return (True, pickled result) or (False, pickled exception)."""
    try:
        fn, args = _load(payload)
        return True, _dump(fn(context, *args))
    except BaseException as error:  # noqa: BLE001  # the worker boundary
        return False, pickles.dumps_error(error)


def _load(payload: bytes) -> Any:
    try:
        return pickle.loads(payload)
    except Exception as error:
        raise RunnerError(
            f"a task could not be unpickled in a worker ({type(error).__name__}: {error}). Workers "
            "have the sys.path that the trainer had when the runner was made: extend it before."
        ) from error


def _dump(result: Any) -> bytes:
    try:
        return pickles.dumps(result)
    except Exception as error:
        raise RunnerError(
            f"the result of a task, a {type(result).__name__}, cannot be pickled "
            f"({type(error).__name__}: {error}). Return plain data."
        ) from error


def flush_output() -> None:
    """Write out what was printed: a worker may be killed at any time, a zygote ends at once."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
