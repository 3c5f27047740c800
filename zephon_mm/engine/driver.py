"""The driver: plans, leases memory, submits decoding, and hands over batches in order.

One background thread does steps 1, 3 and 4 and the bookkeeping; the consumer's `next()` only waits.
The thread sleeps on one queue of events, and everything that may concern it puts one there: a
finished measuring, a batch that the consumer took, a slab that came back, a request for a
checkpoint, closing. `SimpleQueue.put` takes no lock that a finalizer could find held.

Waking a thread is dear: the first 0.4 ms after a sleep run ten times slower (seen: building a batch
takes 50 us hot, 450 us after 20 ms of sleep). So the thread plans in bursts, from half of
`prefetch_batches` up to all of them, and does in its bursts what could be done when tasks end.

Invariants:
    1. Batches are delivered in the order in which they were planned; an error takes its place
       behind the batches before it.
    2. A batch leases its slab before its first task is submitted, and a slab is leased for the
       oldest undelivered batch first, so waiting for memory cannot deadlock: if nothing is in
       flight, the consumer holds every slab, and the batch comes in ordinary memory.
    3. Every image region is written by its task, or zeroed before delivery.

Imports: engine.{assembly, planner, schedule, tasks}, batch, shm, runners. Used by: pipeline.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zephon_mm.batch import Batch
from zephon_mm.engine.assembly import Assembly
from zephon_mm.engine.blocks import RawContext
from zephon_mm.engine.lanes import Cursor, LanePlan
from zephon_mm.engine.measuring import Measured, Measuring
from zephon_mm.engine.order import Topology
from zephon_mm.engine.pending import Decoding, Pending, jobs_of, sequence_keys, tally
from zephon_mm.engine.planner import Group, Planner, Position, Start
from zephon_mm.engine.schedule import TaskQueue
from zephon_mm.engine.tasks import Context, measure
from zephon_mm.errors import DataQualityError, RunnerError
from zephon_mm.index import Index
from zephon_mm.media import MediaLayout
from zephon_mm.metrics import Metrics
from zephon_mm.runners import make_runner
from zephon_mm.shm.arena import Arena

logger = logging.getLogger("zephon_mm")

JUDGED_IMAGES = 1_000
"""Images that a rank sees before `max_error_rate` is applied to them."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All that a driver needs.

    `prefetch_batches` batches may be planned and not delivered; `task_images` images are decoded by
    one task, `task_rows` samples measured; `measure_parallelism` bounds how many workers measure at
    once; `index` is what is known of the samples, if anything.
    """

    plan: LanePlan
    context: Context | RawContext
    num_lanes: int
    topology: Topology
    finite: bool
    max_length: int
    pad_id: int
    runner: str
    workers: int
    prefetch_batches: int
    memory_budget_bytes: int
    task_images: int
    task_rows: int
    task_timeout_s: float
    measure_parallelism: int | None
    images: MediaLayout
    videos: MediaLayout
    index: Index | None


class _Bell:
    """Wakes the driver when a slab comes back, if it waits for one.

    Finalizers of leases are held for ever, and hold this: so it must not hold the driver.
    """

    def __init__(self, events: "SimpleQueue[Any]") -> None:
        self._events = events
        self.armed = False

    def __call__(self) -> None:
        if self.armed:
            self._events.put(None)


class _ClosedError(Exception):
    """The driver was asked to stop."""


class _Close:
    """The event that asks for it."""


@dataclass(slots=True)
class _Request:
    ask: Callable[[Planner], Any]
    answer: "Future[Any]"


class Driver:
    """Runs one rank's pipeline from a start position. Made by `Pipeline`, closed by `close`."""

    _planner_type = Planner
    _judged = "images"  # what `max_error_rate` is a share of

    def __init__(self, config: EngineConfig, start: Start, metrics: Metrics) -> None:
        self._config = config
        self._metrics = metrics
        self._events: SimpleQueue[Any] = SimpleQueue()
        # In order of delivery; an item leaves only when it is returned, so that Ctrl-C loses none.
        self._ready: deque[Pending | BaseException | None] = deque()
        self._more: SimpleQueue[None] = SimpleQueue()  # one for each item, to wait for
        self._planned = self._taken = 0
        self._images_seen = self._images_bad = 0
        self._closed = self._warned = False
        self._failed = ""  # what stopped the run, once the consumer was told
        self._pid = os.getpid()
        self._bell = _Bell(self._events)
        self.arena = Arena(config.memory_budget_bytes, on_release=self._bell)
        self._runner = make_runner(
            config.runner,
            replace(config.context, arena=self.arena),
            workers=config.workers,
            fds=(self.arena.fd,),
            task_timeout_s=config.task_timeout_s,
        )
        self._queue = TaskQueue(self._runner)
        self._decoding = Decoding(self._queue, config.task_images)
        if config.measure_parallelism is not None:
            self._queue.limit(measure, config.measure_parallelism)
        self._ahead = config.prefetch_batches
        self._planner: Any = self._planner_type(
            config.plan,
            num_lanes=config.num_lanes,
            topology=config.topology,
            start=start,
            finite=config.finite,
            measuring=Measuring(self._queue, config.index, config.task_rows),
            wait=self._wait_for,
            metrics=metrics,
        )
        self._thread = threading.Thread(target=self._run, name="zephon_mm driver", daemon=True)
        self._thread.start()

    def next(self) -> tuple[Batch, Position] | None:
        """Wait for the next batch; None when a finite run has ended.

        Raises:
            DataQualityError: More images are defective than `max_error_rate` allows.
            Exception: What stopped the driver or a worker, with its traceback.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(
                "this pipeline belongs to the process that iterated it first, and this is a fork "
                "of that process; build the pipeline after forking"
            )
        if self._failed:
            raise RunnerError(f"the pipeline stopped earlier: {self._failed}")
        try:
            return self._next()
        except Exception as error:
            self._failed = f"{type(error).__name__}: {error}"
            raise

    def _next(self) -> tuple[Batch, Position] | None:
        began = time.perf_counter()
        while not self._ready:
            self._more.get()
        item = self._ready[0]
        if item is None:
            return None
        if isinstance(item, BaseException):
            raise item
        item.ready.wait()
        self._metrics.add("wait_s", time.perf_counter() - began)
        if item.error is not None:
            raise item.error
        self._count(item)
        batch = item.delivered()
        self._ready.popleft()
        with suppress(Empty):
            self._more.get_nowait()
        self._taken += 1
        if self._bell.armed or self._is_low():
            self._wake()
        return batch, item.after

    def cursors(self, at: Position) -> dict[int, Cursor]:
        """Return the cursors of the lanes that this rank plans, at a delivered position."""
        found: dict[int, Cursor] = self.ask(lambda planner: planner.cursors(at))
        return found

    def ask(self, question: Callable[[Planner], Any]) -> Any:
        """Return what a question to the planner gives; it is asked in the driver's thread."""
        request = _Request(question, Future())
        self._events.put(request)
        if not self._thread.is_alive():
            self._refuse_requests()
        return request.answer.result()

    @property
    def plans_all_lanes(self) -> bool:
        """Whether the cursors of this rank are those of all lanes."""
        return self._config.finite or self._config.plan.whole_steps

    @property
    def newest_window(self) -> int:
        """The newest window that a lane of this rank reads ahead."""
        newest: int = self._planner.newest_window
        return newest

    def stats(self) -> dict[str, float]:
        """Return queue depths, memory and the runner's counters, as of now."""
        return {
            "batches_ahead": self._planned - self._taken,
            "tasks_queued": self._queue.depth,
            **self._runner.stats(),
        }

    def close(self) -> None:
        """Stop the thread and the workers. Batches that were delivered stay valid."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._events.put(_Close())
        self._queue.close()
        self._runner.shutdown(wait=True, cancel_futures=True)
        self._thread.join()
        if self._config.index is not None:
            self._config.index.save()
        self._refuse_requests()
        self._ready.clear()
        self._deliver(RunnerError("the pipeline was closed"))
        self.arena.close()

    def collected(self) -> None:
        """Close; for the finalizer of a pipeline, which may run in any thread, even in ours."""
        if threading.current_thread() is threading.main_thread():
            self.close()
        else:
            threading.Thread(target=self.close, name="zephon_mm closing", daemon=True).start()

    # The driver's thread.

    def _run(self) -> None:
        try:
            for group in self._planner.groups():
                self._deliver(self._submit(group))
                self._planned += 1
                self._wait_until(lambda: True, "requests")
                if self._planned - self._taken >= self._ahead:
                    self._wait_until(self._is_low, "consumer")
            self._decoding.flush()
            self._deliver(None)
        except (_ClosedError, CancelledError):
            return
        except BaseException as error:  # noqa: BLE001  delivered to the consumer, who raises it
            self._deliver(error)
        self._serve()

    def _deliver(self, item: Pending | BaseException | None) -> None:
        self._ready.append(item)
        self._more.put(None)

    def _serve(self) -> None:
        """Answer requests after the last batch was planned, until closed."""
        try:
            self._wait_until(lambda: False, "consumer")
        except (_ClosedError, CancelledError):
            return

    def _is_low(self) -> bool:
        return self._planned - self._taken <= self._ahead // 2

    def _wake(self) -> None:
        self._events.put(None)

    def _wait_for(self, measured: Measured) -> None:
        measured.add_done_callback(lambda _: self._wake())
        self._wait_until(measured.done, "measure")

    def _wait_until(self, condition: Callable[[], bool], why: str) -> None:
        while not self._events.empty():  # requests do not wait for a condition to turn false
            self._handle(self._events.get())
        while not condition():
            self._decoding.flush()
            self._wait(why)

    def _wait(self, why: str) -> None:
        """Handle the next event."""
        with self._metrics.timed(f"driver_wait_{why}_s"):
            event = self._events.get()
        self._handle(event)

    def _handle(self, event: object) -> None:
        if self._closed or isinstance(event, _Close):
            raise _ClosedError
        if isinstance(event, _Request):
            try:
                event.answer.set_result(event.ask(self._planner))
            except (_ClosedError, CancelledError):
                event.answer.set_exception(RunnerError("the pipeline was closed"))
                raise
            except Exception as error:  # noqa: BLE001  raised where it was asked
                event.answer.set_exception(error)

    def _refuse_requests(self) -> None:
        """Answer what came too late for the thread."""
        while not self._events.empty():
            event = self._events.get()
            if isinstance(event, _Request):
                event.answer.set_exception(RunnerError("the pipeline was closed"))

    def _submit(self, group: Group) -> Pending:
        """Lease a slab, write the tokens, submit the decoding."""
        config = self._config
        assert isinstance(config.context, Context)
        if config.plan.ahead:
            config.plan.ahead.delivered(group.sequences)
        assembly = Assembly(
            group.sequences,
            max_length=config.max_length,
            images=config.images,
            videos=config.videos,
            weighted=config.context.weighted,
        )
        slab, base = self._slab(assembly.layout.num_bytes)
        arrays = assembly.layout.views(slab)
        assembly.fill_tokens(arrays, pad_id=config.pad_id)
        tallied = tally(group.sequences)
        jobs = jobs_of(assembly, group.sequences, base, group.numbers)
        datasets = config.context.datasets
        batch = assembly.batch(
            arrays,
            numbers=group.numbers,
            keys=tuple(sequence_keys(datasets, sequence) for sequence in group.sequences),
            delivered=group.after.delivered,
            num_valid_tokens=tallied["trained_tokens"],
            step_valid_tokens=group.step_valid_tokens,
            image_processor=config.context.image_processor,
            video_processor=config.context.video_processor,
        )
        pending = Pending(group, assembly, arrays, batch, len(jobs), tallied)
        self._decoding.add(pending, jobs, self._planned, self._planned - self._taken)
        return pending

    def _slab(self, num_bytes: int) -> tuple[NDArray[np.uint8], int]:
        """Lease shared memory, waiting for some; or take ordinary memory (base -1)."""
        slab = self.arena.lease(num_bytes)
        if slab is None:
            self._bell.armed = True
            self._decoding.flush()
            while (slab := self.arena.lease(num_bytes)) is None and self._planned > self._taken:
                # While each worker has a task, more memory would not make it faster.
                self._wait("consumer" if self._queue.depth >= self._config.workers else "memory")
            self._bell.armed = False
        if slab is not None:
            return slab, self.arena.offset_of(slab)
        self._metrics.add("batches_in_ordinary_memory")
        if not self._warned:
            self._warned = True
            logger.warning(
                "every slab of shared memory is in batches that the training loop still holds; "
                "further batches come in ordinary memory, which is slower. Drop batches after "
                "use, or raise options(memory_budget_bytes=%d).",
                self._config.memory_budget_bytes,
            )
        return np.zeros(num_bytes, dtype=np.uint8), -1

    # The consumer's thread.

    def _count(self, item: Pending) -> None:
        """Count what is delivered; stop when too many of its images were defective."""
        self._metrics.add_all(item.counts)
        for failure in item.failures.values():
            self._metrics.skip(failure.reason, failure.message)
        self._judge(item)

    def _judge(self, item: Pending) -> None:
        """Stop when too many images were defective, counted in the order of delivery."""
        self._images_seen += item.counts[self._judged] + item.counts.get("frames", 0)
        self._images_bad += len(item.failures)
        rate = self._config.plan.max_error_rate
        judged = rate == 0 or self._images_seen >= JUDGED_IMAGES
        if item.failures and judged and self._images_bad > rate * self._images_seen:
            last = item.failures[max(item.failures)]
            raise DataQualityError(
                f"{self._images_bad} of the first {self._images_seen} {self._judged} are "
                f"defective, max_error_rate is {rate}. The last one: {last.message} "
                f"[{last.reason}]. Repair the data, or raise max_error_rate."
            )
