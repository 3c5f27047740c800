"""The operators of a pipeline as values: how each is made for a window, named, fingerprinted.

Imports: ops, engine.tasks, errors, protocols, rng. Used by: pipeline.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from zephon_mm.engine.blocks import RawContext, detect_fields
from zephon_mm.engine.tasks import Context, detect_schema
from zephon_mm.errors import ConfigError
from zephon_mm.io import Dataset
from zephon_mm.ops.downscale import Downscale
from zephon_mm.ops.fair import make_fair_packer
from zephon_mm.ops.fit import NO_LIMIT, Report
from zephon_mm.ops.interleave import Interleave
from zephon_mm.ops.map import DocumentOp, MapSequences, call, name_of
from zephon_mm.ops.pack import PackConfig, make_packer
from zephon_mm.ops.shuffle import ShuffleBuffer
from zephon_mm.ops.tokenize import Tokenize
from zephon_mm.protocols import Accumulator
from zephon_mm.rng import Stream
from zephon_mm.tables import check_types

Factory = Callable[[Stream], Accumulator[Any, Any]]


class SequenceStage(Protocol):
    """An accumulator to be: newly made for every lane and window."""

    def make(self, place: int, lane: int, window: int, report: Report) -> Accumulator[Any, Any]:
        """Return the accumulator of one window; `place` is the operator's place in the chain."""
        ...

    def fingerprint(self) -> Any:
        """Return all that its output depends on, JSON-serialisable."""
        ...


@dataclass(frozen=True, slots=True)
class PackStage:
    """`.pack_flat`; `fair` after `.mix`."""

    config: PackConfig
    fair: bool = False

    def make(self, place: int, lane: int, window: int, report: Report) -> Accumulator[Any, Any]:
        """Return a packer."""
        return (make_fair_packer if self.fair else make_packer)(self.config, report)

    def fingerprint(self) -> Any:
        """Return the packer's settings."""
        return {"pack": asdict(self.config)}


@dataclass(frozen=True, slots=True)
class ShuffleStage:
    """`.shuffle`."""

    buffer_size: int
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(ShuffleStage, "shuffle", buffer_size=self.buffer_size, seed=self.seed)
        if self.buffer_size < 1:
            raise ConfigError(f"shuffle: buffer_size must be at least 1, got {self.buffer_size}")

    def make(self, place: int, lane: int, window: int, report: Report) -> Accumulator[Any, Any]:
        """Return a buffer keyed by its place, lane and window."""
        return ShuffleBuffer(self.buffer_size, Stream(self.seed, "shuffle", place, lane, window))

    def fingerprint(self) -> Any:
        """Return size and seed."""
        return {"shuffle": {"buffer_size": self.buffer_size, "seed": self.seed}}


@dataclass(frozen=True, slots=True)
class UserStage:
    """`.accumulate` and `.map_sequence`: a user's code, told apart by name and version."""

    operator: str
    factory: Factory
    name: str
    seed: int
    version: str

    def make(self, place: int, lane: int, window: int, report: Report) -> Accumulator[Any, Any]:
        """Return what the user's factory makes of a keyed random stream.

        Raises:
            ConfigError: It has no `push` and `flush`.
        """
        stream = Stream(self.seed, self.operator, place, lane, window)
        made = call(f".{self.operator}", self.factory, stream)
        if not isinstance(made, Accumulator):
            raise ConfigError(
                f".{self.operator}({self.name}) must return an object with push(item) and flush(), "
                f"got {made!r}"
            )
        return _Named(made, f".{self.operator}({self.name})")

    def fingerprint(self) -> Any:
        """Return the function's name and version."""
        return {self.operator: {"name": self.name, "seed": self.seed, "version": self.version}}


@dataclass(frozen=True, slots=True)
class _Named:
    """A user's accumulator, whose errors name it."""

    accumulator: Accumulator[Any, Any]
    name: str

    def push(self, item: Any) -> Iterable[Any]:
        return self._iterable("push", call(self.name, self.accumulator.push, item))

    def flush(self) -> Iterable[Any]:
        return self._iterable("flush", self.accumulator.flush())

    def _iterable(self, method: str, result: Any) -> Iterable[Any]:
        if not isinstance(result, Iterable):
            raise TypeError(f"{self.name}: {method} must return an iterable, got {result!r}")
        return result


def user_stage(operator: str, factory: Factory, fn: Any, seed: int, version: str) -> UserStage:
    """Return a stage for a user's function."""
    if not callable(fn):
        raise ConfigError(f".{operator} takes a function, got {fn!r}")
    return UserStage(operator, factory, name_of(fn), seed, version)


def map_stage(fn: Any, version: str) -> UserStage:
    """Return the stage of `.map_sequence(fn)`."""
    return user_stage("map_sequence", lambda _: MapSequences(fn), fn, 0, version)


@dataclass(frozen=True, slots=True)
class DocumentStage:
    """`.map` and `.filter`."""

    name: str
    operator: DocumentOp
    version: str


@dataclass(frozen=True, slots=True)
class Stages:
    """All operators of a pipeline, in order. Immutable: `with_...` returns a new value.

    `fields` are those that a pipeline of raw samples delivers, None for all; `mixes` says that the
    mixture has exact shares of tokens.
    """

    documents: tuple[DocumentStage, ...] = ()
    interleave: Interleave | Tokenize | None = None
    sequences: tuple[SequenceStage, ...] = ()
    parallelism: int | None = None
    fields: tuple[str, ...] | None = None
    mixes: bool = False

    def with_document(self, stage: DocumentStage, parallelism: int | None) -> "Stages":
        """Add `.map` or `.filter`.

        Raises:
            ConfigError: The documents are tokenised already.
        """
        if not callable(stage.operator.fn):  # type: ignore[attr-defined]
            raise ConfigError(f"{stage.name} takes a function")
        if self.interleave is not None:
            raise ConfigError(
                f"{stage.name} takes documents: put it before .interleave or .tokenize; for packed "
                "sequences there is .map_sequence"
            )
        return replace(self, documents=(*self.documents, stage)).limited(parallelism)

    def with_interleave(self, stage: Interleave | Tokenize, parallelism: int | None) -> "Stages":
        """Set `.interleave`, `.tokenize` or `.pair`.

        Raises:
            ConfigError: There is one already.
        """
        if self.interleave is not None:
            raise ConfigError("a pipeline has one .interleave, .tokenize or .pair")
        if self.sequences:
            raise ConfigError(".interleave, .tokenize and .pair come before .shuffle")
        return replace(self, interleave=stage).limited(parallelism)

    def with_sequence(self, stage: SequenceStage) -> "Stages":
        """Add an operator of the planner.

        Raises:
            ConfigError: It stands before tokenising or packing, packing comes twice, or its images
                cannot be downscaled.
        """
        packs = isinstance(stage, PackStage)
        name = "pack_flat" if packs else next(iter(stage.fingerprint()))
        if self.interleave is None and name != "shuffle":
            raise ConfigError(f".{name} comes after .interleave or .tokenize")
        if packs and self.packing is not None:
            raise ConfigError("a pipeline has one .pack_flat")
        if not (packs or self.packing or name == "accumulate" or self.interleave is None):
            raise ConfigError(f".{name} counts packed sequences: put it after .pack_flat")
        interleave = self.interleave
        if isinstance(stage, PackStage) and stage.config.overlong == "downscale":
            interleave = Downscale.of(interleave, stage.config.room._replace(images=NO_LIMIT))
        return replace(self, interleave=interleave, sequences=(*self.sequences, stage))

    def limited(self, parallelism: int | None) -> "Stages":
        """Lower the number of workers that may measure at once.

        Raises:
            ConfigError: `parallelism` is below 1.
        """
        if parallelism is None:
            return self
        check_types(Stages, "operators", parallelism=parallelism)
        if parallelism < 1:
            raise ConfigError(f"parallelism must be at least 1, got {parallelism}")
        return replace(self, parallelism=min(parallelism, self.parallelism or parallelism))

    @property
    def raw(self) -> bool:
        """Whether batches hold raw samples: nothing makes tokens of them."""
        return self.interleave is None

    @property
    def packing(self) -> PackConfig | None:
        """The packer's settings, or None before `.pack_flat`."""
        return next((s.config for s in self.sequences if isinstance(s, PackStage)), None)

    def context(self, datasets: Sequence[Dataset]) -> Context:
        """Return what the workers need, without memory."""
        stage = self.interleave
        assert stage is not None
        schemas: tuple[Any, ...] = tuple(
            stage.document if isinstance(stage, Tokenize) else detect_schema(d) for d in datasets
        )
        if "chat" in schemas and isinstance(stage, Interleave):
            stage.check_chat()
        return Context(
            datasets=tuple(datasets),
            schemas=schemas,
            operators=tuple(document.operator for document in self.documents),
            interleave=stage,
            image_processor=getattr(stage, "image_processor", None),
            video_processor=getattr(stage, "video_processor", None),
            augment=getattr(stage, "augment", None),
        )

    def raw_context(self, datasets: Sequence[Dataset]) -> RawContext:
        """Return what the workers of a pipeline of raw samples need, without memory."""
        kinds, row_bytes = detect_fields(datasets, self.fields)
        return RawContext(tuple(datasets), kinds, row_bytes)

    def accumulators(
        self, lane: int, window: int, report: Report
    ) -> Sequence[Accumulator[Any, Any]]:
        """Return the accumulators of one window of a lane."""
        return [
            stage.make(place, lane, window, report) for place, stage in enumerate(self.sequences)
        ]

    def fingerprint(self) -> dict[str, Any]:
        """Return all that the batches depend on besides the source, JSON-serialisable."""
        if self.interleave is None:
            return {"fields": self.fields, "sequences": [s.fingerprint() for s in self.sequences]}
        functions = [
            {stage.name: {"name": name_of(stage.operator.fn), "version": stage.version}}  # type: ignore[attr-defined]
            for stage in self.documents
        ]
        return {
            "documents": functions,
            "tokens": self.interleave.fingerprint(),
            "sequences": [stage.fingerprint() for stage in self.sequences],
        }
