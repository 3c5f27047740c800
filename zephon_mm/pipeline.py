"""A pipeline that runs: iterated, looked at, saved and restored.

Imports: everything below. Used by: users, recipe, cli.
"""

import json
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from zephon_mm.batch import Batch
from zephon_mm.builder import Builder
from zephon_mm.checkpoint import gather, gather_checkpoint
from zephon_mm.compiled import (
    KEPT_BATCHES,
    compile_engine,
    fingerprint,
    topology_of,
    validate,
    with_constants,
)
from zephon_mm.engine.driver import Driver, EngineConfig
from zephon_mm.engine.lanes import Cursor
from zephon_mm.engine.omissions import Omissions
from zephon_mm.engine.order import Topology
from zephon_mm.engine.planner import Position, Start
from zephon_mm.engine.raw import RawDriver
from zephon_mm.errors import CheckpointError, ConfigError
from zephon_mm.indexing import build_index, state_of_index
from zephon_mm.metrics import Metrics
from zephon_mm.planning import Plan, planned_sequences, provenance
from zephon_mm.report import describe, shares, summary
from zephon_mm.resume import STEERED, leave_out, resume, state_of
from zephon_mm.shm.arena import Arena

STATE_KEY = "zephon_mm"
"""The one key of `state_dict()`."""


class Pipeline(Builder):
    """A recipe that yields deterministic batches. Iterate it; `checkpoint` and `restore` it.

    Args:
        source: Which samples come next; a `WorkSource`, such as `StaticMixtureWorkSource`.
    """

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self._metrics = Metrics()
        self._start = Start()
        self._lineage: Sequence[Mapping[str, Any]] = ()
        self._position = Position(0, 0, None)
        self._recent: deque[Position] = deque(maxlen=KEPT_BATCHES)
        self._closed = False
        self._driver: Driver | None = None
        self._iterator: Callable[[], _Batches | None] = lambda: None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._began = 0.0

    # Looking.

    def validate(self) -> None:
        """Do all launch-time checks, without reading data.

        Raises:
            ConfigError: A stage is missing, or settings contradict each other.
        """
        validate(
            self._stages,
            self._options,
            self._topology(),
            finite=self._finite,
            indexed=lambda: self._index_state()[0],
        )

    def explain(self) -> None:
        """Print the compiled stages, the topology and what a restore costs."""
        self.validate()
        index = self._index_state()[1]
        text = describe(self._source, self._stages, self._options, self._topology(), index=index)
        sys.stdout.write(text + "\n")

    def plan(self, count: int) -> Plan:
        """Return the next `count` sequences of the global order, without decoding an image.

        They can be iterated, or looked at: `pipeline.plan(8).show()`.
        """
        start, config = self._here(), self._compiled(Metrics())
        return Plan(planned_sequences(config, start, count), config.max_length)

    def provenance(self, step: int) -> list[dict[str, Any]]:
        """Return which rows of which shards each row of a global step is made of, undecoded.

        Planning begins at the current position: restore the state nearest before a late step. See
        `zephon_mm.planning.provenance`.
        """
        start = self._here()
        return provenance(self._compiled(Metrics()), start, step)

    def build_index(
        self, *, rebuild: bool = False, progress: bool = True
    ) -> dict[str, dict[str, Any]]:
        """Measure every sample that the index does not know; planning then reads none.

        It may be interrupted and started again, and several processes may do it at once.

        Args:
            rebuild: Forget what is known first.
            progress: Show a bar on stderr.

        Returns:
            By dataset: `rows`, and of them `records`, their `tokens` and `images`, and `skipped`,
            reason -> count.

        Raises:
            ConfigError: The pipeline can have no index: a user's function has no `version=`, or a
                dataset was not opened with `Dataset.from_path`.
        """
        self._check_open()
        return build_index(
            self._source, self._stages, self._options, rebuild=rebuild, progress=progress
        )

    def metrics(self) -> dict[str, Any]:
        """Return counters, rates and what limits: see `zephon_mm.report.summary`.

        Besides, `datasets`: see `zephon_mm.report.shares`, and, once a window is over,
        `windows_per_step`, which a curriculum needs.
        """
        packing = self._stages.packing
        elapsed_s = time.perf_counter() - self._began if self._began else 0.0
        counters = self._metrics.snapshot()
        window = max(self._driver.newest_window, 0) if self._driver else 0
        more: dict[str, Any] = {"datasets": shares(counters, self._source, window)}
        if given := counters.get("window_sequences"):
            lane_step = self._topology().global_batch_size / self._options.canonical_replicas
            more["windows_per_step"] = counters["windows"] / given * lane_step
        return more | summary(
            counters | (self._driver.stats() if self._driver else {}),
            elapsed_s=elapsed_s,
            max_length=packing.max_length if packing else 0,
            max_patches=packing.max_patches if packing else None,
            defects=self._metrics.defects(),
        )

    # Running.

    def __iter__(self) -> "_Batches":
        """Return an iterator that goes on from the current position.

        Raises:
            RuntimeError: Another iterator of this pipeline is alive.
        """
        self._check_open()
        if self._iterator() is not None:
            raise RuntimeError(
                "this pipeline is being iterated already; drop that iterator first (a traceback "
                "that is kept, as in a notebook after an error, may hold it), or build another "
                "Pipeline"
            )
        self._driver = self._driver or self._start_driver()
        batches = _Batches(self)
        self._iterator = weakref.ref(batches)
        return batches

    def _start_driver(self) -> Driver:
        self._started = True
        driver_type = RawDriver if self._stages.raw else Driver
        driver = driver_type(self._compiled(self._metrics), self._start, self._metrics)
        self._finalizer = weakref.finalize(self, driver.collected)
        self._began = time.perf_counter()
        return driver

    def _next(self) -> Batch:
        self._check_open()
        assert self._driver is not None
        item = self._driver.next()
        if item is None:
            raise StopIteration
        batch, self._position = item
        self._recent.append(self._position)
        return batch

    @property
    def arena(self) -> Arena:
        """The shared memory that batches lie in, once it is iterated; `integrations.cuda` pins it.

        Raises:
            RuntimeError: It was not iterated, or was closed.
        """
        if self._driver is None:
            raise RuntimeError("the pipeline has shared memory from its first `iter` to `close`")
        return self._driver.arena

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the pipeline was closed; build another one")

    def close(self) -> None:
        """Stop threads and workers. Delivered batches stay valid; take checkpoints before."""
        self._closed = True
        if self._finalizer is not None:
            self._finalizer.detach()
        if self._driver is not None:
            self._driver.close()
        self._driver = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # Resuming.

    def checkpoint(self, *, after: Batch | None = None, group: Any = None) -> dict[str, Any]:
        """Return a small, JSON-serialisable state: what was delivered, never what is prefetched.

        Args:
            after: Count the batches up to this one; None counts all that `next()` returned.
            group: A CPU process group: collective, and the complete state on every rank. Without,
                the state is complete with one rank, else a part for `merge_checkpoints`.
        """
        self._check_open()
        at = self._position if after is None else self._position_of(after)
        self._measure_constants()
        state = state_of(
            at,
            self._cursors(at),
            num_lanes=self._options.canonical_replicas,
            topology=self._topology(),
            all_lanes=self._driver is None or self._driver.plans_all_lanes,
            constants=getattr(self._source, "constants", None),
            recipe=self.fingerprint(),
            lineage=self._lineage,
        )
        return state if group is None else gather_checkpoint(state, group)

    def restore(
        self,
        state: Mapping[str, Any],
        allow: Sequence[str] = (),
        *,
        skip_steps: Iterable[int] = (),
        exclude_keys: Iterable[str] = (),
    ) -> Self:
        """Go on from a state; GPU count, microbatch size, runner and workers may differ.

        What is allowed, skipped and excluded must be given on every rank alike; later states know
        it, so that it need not be given again, and may be.

        Args:
            state: What `checkpoint` returned: of one rank, or merged.
            allow: What else may differ from here on, see `zephon_mm.resume`.
            skip_steps: Global steps that are not delivered, such as `range(1200, 1210)`. Those that
                follow keep their numbers and content: `batch.sequence_ids // N` is the step, and
                the first state after them counts them as delivered.
            exclude_keys: Samples that are in no batch from here on, by their names in `batch.keys`.
                In windows that were begun they leave padding, in later ones they are not drawn;
                counted in `metrics()["skipped"]["excluded"]`.

        Raises:
            CheckpointError: The state is a part, of another recipe, or iteration has started; or it
                was taken inside a balanced step, and there are `exclude_keys`.
            ConfigError: It was taken inside a step that this topology cannot finish, `allow` has an
                unknown name, a dataset is missing, a step was begun, or a sample is unknown.
        """
        self._check_open()
        if self._driver is not None:
            raise CheckpointError("restore before iterating: this pipeline has started")
        resumed = resume(
            state,
            allow,
            *(self._source, self._stages, self._options, self._batching),
            all_lanes=self._plans_all_lanes,
        )
        if not self._stages.raw:
            size = self._batching[1] if self._batching else None
            resumed = leave_out(resumed, skip_steps, exclude_keys, size)
        elif [*skip_steps, *exclude_keys]:
            raise ConfigError(
                "skip_steps and exclude_keys are for packed sequences, not raw samples"
            )
        self._source, start, self._lineage = resumed
        self._start = start
        self._position = Position(start.delivered, start.next_lane, None, start.dealt)
        return self

    def steer(
        self, decide: Callable[[dict[str, Any]], Mapping[str, float] | None], *, group: Any = None
    ) -> None:
        """Let a callback choose the mixture's weights; call it on every rank at the end of a step.

        `decide(metrics())` is called on the first rank, and returns a weight for each dataset that
        the source draws from, or None for no change. Those that began with weight 0, and have none
        in a curriculum, cannot join. The weights hold from a window on that no lane of any rank has
        begun. States know them, so that a restore gives the same batches and asks nobody.

        Args:
            decide: The callback.
            group: A CPU process group: collective. None with one rank.

        Raises:
            ConfigError: The weights are no mixture of the datasets, or would end the run; the
                source cannot change; several ranks have no group.
            CheckpointError: A step is dealt and not over.
            RuntimeError: The callback raised on the first rank; there, its own exception.
        """
        self._check_open()
        if self._stages.raw or self._finite or not hasattr(self._source, "with_turn"):
            raise ConfigError(
                "steer is for packed sequences of a StaticMixtureWorkSource that has no end"
            )
        if self._position.dealt:
            raise CheckpointError("steer: the step is dealt by weight; call it at the step's end")
        if group is None and self._topology().dp_degree > 1:
            raise ConfigError("steer: several ranks need a group=..., of all of them, on CPU")
        choice = _chosen(decide, self.metrics, group)

        def agree(newest: int) -> Any:
            said = [(newest, choice)] if group is None else gather((newest, choice), group)
            weights = said[0][1]
            if weights is None:
                return None
            if isinstance(weights, Exception):
                raise weights
            window = 1 + max(number for number, _ in said)
            old = self._source.weights_at(window)
            source = self._source.with_turn(window, weights)
            if source.finite:
                raise ConfigError(
                    f"steer: {weights} would let this endless run end, by max_passes or "
                    "stop_after_passes. Weigh datasets without a limit, or set none."
                )
            self._source = source
            entry = {"name": STEERED, "delivered": self._position.delivered, "window": window}
            self._lineage = [*self._lineage, {**entry, "old": old, "new": dict(weights)}]
            return self._source

        if self._driver is None:
            agree(max([-1, *(cursor.window for cursor in (self._start.cursors or {}).values())]))
        else:
            self._driver.ask(lambda planner: planner.steer(agree))

    def fingerprint(self) -> dict[str, Any]:
        """Return all that decides the batches, JSON-serialisable; measures constants if needed."""
        self._measure_constants()
        global_batch_size = self._batching[1] if self._batching else None
        return fingerprint(self._source, self._stages, self._options, global_batch_size)

    def state_dict(self) -> dict[str, str]:
        """Return `checkpoint()` as JSON under one key, for trainers that look for this method.

        `torch.distributed.checkpoint` fills a template that it takes before the first batch: its
        structure must not change. With several ranks save `checkpoint(group=...)` instead, whose
        value is the same on every rank.
        """
        return {STATE_KEY: json.dumps(self.checkpoint())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if STATE_KEY not in state:
            raise CheckpointError(f"load_state_dict takes what state_dict gave, got {state!r:.200}")
        self.restore(json.loads(state[STATE_KEY]))

    # Parts of the above.

    def _index_state(self) -> tuple[bool, str]:
        return state_of_index(self._source, self._stages, self._options)

    @property
    def _plans_all_lanes(self) -> bool:
        return self._finite or self._options.balance or bool(self._options.step_tokens)

    @property
    def _finite(self) -> bool:
        return bool(getattr(self._source, "finite", True))

    def _topology(self) -> Topology:
        if self._batching is None:
            raise ConfigError("the pipeline has no .batch(microbatch_size=...)")
        return topology_of(self._options, self._batching)

    def _position_of(self, batch: Batch) -> Position:
        for position in reversed(self._recent):
            if position.delivered == batch.delivered:
                return position
        raise CheckpointError(
            f"checkpoint(after=batch): the batch that ends at sequence {batch.delivered} is not "
            f"among the last {KEPT_BATCHES} that this pipeline delivered"
        )

    def _here(self) -> Start:
        self._check_open()
        at = self._position
        return Start(at.delivered, self._cursors(at), at.next_lane, at.dealt)

    def _cursors(self, at: Position) -> Mapping[int, Cursor]:
        if self._driver is None or at.delivered == self._start.delivered:
            return self._start.cursors or {}
        return self._driver.cursors(at)

    def _measure_constants(self) -> None:
        self._source = with_constants(self._source, self._stages, self._options)

    def _compiled(self, metrics: Metrics) -> EngineConfig:
        self.validate()
        self._measure_constants()
        config = compile_engine(
            self._source,
            self._stages,
            self._options,
            self._topology(),
            finite=self._finite,
            pad_tail=self._pad_tail,
            metrics=metrics,
        )
        size, plan = config.topology.global_batch_size, config.plan
        omissions = Omissions.of(self._lineage, self._source.datasets, size)
        remembered = plan.remembered + size * len(omissions.steps)  # a state is of before a skip
        return replace(config, plan=replace(plan, omissions=omissions, remembered=remembered))


def _chosen(decide: Callable[[Any], Any], told: Callable[[], Any], group: Any) -> Any:
    """Return what a callback chooses on the first rank, None on others; these hear if it fails."""
    if group is not None and dist.get_rank(group):
        return None
    try:
        return decide(told())
    except Exception as error:
        if group is not None:  # in which the others wait for the choice
            failed = RuntimeError(f"steer: the callback failed on the first rank: {error!r}")
            gather((-1, failed), group)
        raise


class _Batches:
    """The iterator of a pipeline. Dropping it stops nothing: another one goes on from there."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        return self._pipeline._next()
