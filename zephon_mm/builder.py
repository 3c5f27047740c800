"""The fluent builder: a source, operators, a batch; checked at construction.

    source -> [schema, map, filter, interleave | tokenize]   in the workers, stateless
           -> [pack, shuffle, accumulate, map_sequence]      in the planner, per lane and window
           -> [decode, resize]                               in the workers, into shared memory
           -> Batch, or without the first two rows raw samples, as a SampleBatch

Imports: engine.order, meshes, ops, options, stages, compiled. Used by: pipeline.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Self

from zephon_mm.compiled import topology_of
from zephon_mm.engine.order import check_topology
from zephon_mm.errors import ConfigError
from zephon_mm.meshes import without_mesh
from zephon_mm.ops.interleave import Interleave, LossWeights
from zephon_mm.ops.map import Filter, Map
from zephon_mm.ops.pack import LOOKAHEAD, Algorithm, Order, PackConfig
from zephon_mm.ops.pair import Pair
from zephon_mm.ops.tokenize import Tokenize
from zephon_mm.ops.tokenizer import TextTokenizer
from zephon_mm.options import Options, check_names
from zephon_mm.packed import Sequence as PackedSequence
from zephon_mm.processors.augment import Augment
from zephon_mm.processors.template import template_source
from zephon_mm.protocols import ImageProcessor, VideoProcessor, WorkSource
from zephon_mm.records import Document, Policy
from zephon_mm.stages import (
    DocumentStage,
    Factory,
    PackStage,
    ShuffleStage,
    Stages,
    map_stage,
    user_stage,
)
from zephon_mm.tables import check_types


class Builder:
    """Collects what a pipeline is made of; each method checks what it is given and returns itself.

    Args:
        source: Which samples come next.
    """

    def __init__(self, source: Any) -> None:
        if not isinstance(source, WorkSource):
            raise ConfigError(
                f"Pipeline takes a WorkSource, got {type(source).__name__}. For datasets: "
                "StaticMixtureWorkSource([dataset], {dataset.name: 1.0}, seed=0)."
            )
        self._source: Any = source
        self._options = Options()
        self._stages = Stages()
        self._batching: tuple[int, int | None] | None = None
        self._pad_tail = self._started = False

    def options(self, **changes: Any) -> Self:
        """Set how the pipeline runs; the settings are those of `zephon_mm.options.Options`.

        Raises:
            ConfigError: An unknown setting or an impossible value.
        """
        changes = without_mesh(changes)
        check_names(changes, Options, "options")
        return self._build(options=replace(self._options, **changes))

    def map(
        self,
        fn: Callable[[Document], Document],
        *,
        version: str = "",
        parallelism: int | None = None,
    ) -> Self:
        """Replace every document by `fn(document)`, in the workers; `fn` must be pure.

        Args:
            fn: The function. A `SampleError` that it raises skips the sample.
            version: Change it when the function's meaning changes: part of the fingerprint.
            parallelism: Workers that may be in it at once.
        """
        stage = DocumentStage(".map", Map(fn), version)
        return self._build(stages=self._stages.with_document(stage, parallelism))

    def filter(
        self, fn: Callable[[Document], bool], *, version: str = "", parallelism: int | None = None
    ) -> Self:
        """Keep the documents for which `fn(document)` is true; arguments as for `map`."""
        stage = DocumentStage(".filter", Filter(fn), version)
        return self._build(stages=self._stages.with_document(stage, parallelism))

    def interleave(  # noqa: PLR0913 - one call says all about tokens
        self,
        *,
        tokenizer: Any,
        image_processor: ImageProcessor | None = None,
        video_processor: VideoProcessor | None = None,
        eos: bool = True,
        image_token: str | None = None,
        video_token: str | None = None,
        template: str | None = None,
        train_on: Sequence[str] | Literal["all"] = ("assistant",),
        template_kwargs: Mapping[str, Any] | None = None,
        augment: Augment | None = None,
        loss_weights: LossWeights | None = None,
        parallelism: int | None = None,
    ) -> Self:
        """Turn documents of text, images and videos into tokens and placeholders.

        Args:
            tokenizer: What `TextTokenizer.load` takes: a folder, a file, a hub id, or a tokenizer.
            image_processor: What images become; None for documents without.
            video_processor: What videos become; None for documents without.
            eos: End every document with the end token, which is trained; not conversations.
            image_token: Name of the placeholder token; None looks for the usual ones.
            video_token: That of videos; None looks for the usual ones, then takes the image token.
            template: The chat template of conversations: Jinja text, a file of it, or "chatml",
                "vicuna", "llava"; None takes the tokenizer's own.
            train_on: The roles whose turns carry loss, or "all".
            template_kwargs: What else the template may use, such as `enable_thinking`.
            augment: What happens to decoded images at random, keyed by the sample and the sequence
                that it is in: another thing in each pass, the same on any topology.
            loss_weights: Give batches `loss_weights`. "token": as the documents and images say (see
                `records.Document`, and the schemas' field `loss_weight`), 1 where they say nothing;
                "document": that divided by the document's trained tokens, so that each counts as
                much as another; "sqrt": divided by the root of their number, as InternVL does.
            parallelism: Workers that may measure at once.

        Raises:
            ConfigError: The tokenizer lacks a token that is needed, or no such template.
        """
        for one, kind in ((image_processor, ImageProcessor), (video_processor, VideoProcessor)):
            if one is not None:
                _check_processor("interleave", one, kind)
        check_types(Builder.interleave, "interleave", loss_weights=loss_weights)
        loaded = TextTokenizer.load(
            tokenizer, image_token=image_token, video_token=video_token, eos=eos
        )
        source = loaded.chat_template if template is None else template_source(template)
        roles = (train_on,) if isinstance(train_on, str) else tuple(train_on)
        chat = None if source is None else loaded.chat(source, roles, template_kwargs or {})
        stage = Interleave(
            loaded,
            image_processor,
            eos=eos,
            video_processor=video_processor,
            chat=chat,
            augment=augment,
            loss_weights=loss_weights,
        )
        return self._build(stages=self._stages.with_interleave(stage, parallelism))

    def tokenize(
        self,
        *,
        tokenizer_id: Any,
        field: str = "text",
        eos: bool = True,
        parallelism: int | None = None,
    ) -> Self:
        """Turn one text field of every sample into tokens; arguments as for `interleave`."""
        stage = Tokenize(TextTokenizer.load(tokenizer_id, eos=eos), field, eos=eos)
        return self._build(stages=self._stages.with_interleave(stage, parallelism))

    def pair(
        self,
        *,
        tokenizer: Any,
        image_processor: ImageProcessor,
        max_length: int = 64,
        lowercase: bool = True,
        augment: Augment | None = None,
        parallelism: int | None = None,
    ) -> Self:
        """Make each image and its caption one sequence, for the two towers of SigLIP.

        A sequence is the caption, the end token, and padding; in place of `.interleave` and
        `.pack_flat`. `batch.to_training(attention="full")` gives what `SiglipModel` takes: text i
        is that of picture i, which is zero where `batch.image_valid[i]` is False: leave it out of
        the loss.

        Args:
            tokenizer: As for `interleave`; needs no image token.
            image_processor: What images become.
            max_length: Tokens of a sequence: those that the text tower was trained with. A longer
                caption is cut, ends with the end token, and is counted as truncated.
            lowercase: Make captions lower case, as all SigLIP models were trained. What else a
                model's tokenizer does (SigLIP 1 removes punctuation) is in its own file.
            augment: As for `interleave`.
            parallelism: As for `interleave`.

        Raises:
            ConfigError: The tokenizer has no end token.
        """
        check_types(Builder.pair, "pair", max_length=max_length, lowercase=lowercase)
        _check_processor("pair", image_processor, ImageProcessor)
        if max_length < 2:
            raise ConfigError(f"pair: max_length must be at least 2, got {max_length}")
        pack = PackConfig(max_length, max_images=1, overlong="truncate", order="keep")
        loaded = TextTokenizer.load(tokenizer, lowercase=lowercase)
        stage = Pair(loaded, image_processor, augment=augment, length=max_length)
        stages = self._stages.with_interleave(stage, parallelism)
        return self._build(stages=stages.with_sequence(PackStage(pack)))

    def mix(self, *, by: Literal["tokens"] = "tokens") -> Self:
        """Make the mixture's weights exact shares of the tokens that are packed.

        Rows are drawn by what was measured, and packed so that no dataset is held back: see
        `zephon_mm.engine.mixing` and `zephon_mm.ops.fair`. No token_estimation is needed. With it
        `max_patches` is a limit of each sequence: which documents leave is decided by the shares,
        not by what would use tokens and patches evenly, so a scarce one may leave more padding.

        Raises:
            ConfigError: It does not stand between tokenising and packing, or the source cannot.
        """
        check_types(Builder.mix, "mix", by=by)
        if self._stages.raw or self._stages.packing:
            raise ConfigError(".mix comes after .interleave or .tokenize, and before .pack_flat")
        if not hasattr(self._source, "by_tokens"):
            raise ConfigError(f".mix(by='tokens'): {type(self._source).__name__} has no by_tokens")
        self._build(stages=replace(self._stages, mixes=True))
        self._source = self._source.by_tokens()
        return self

    def pack_flat(
        self,
        *,
        max_length: int,
        algorithm: Algorithm = "best_fit",
        max_images: int | None = None,
        max_patches: int | None = None,
        overlong: Policy = "drop",
        order: Order = "any",
        lookahead: int = LOOKAHEAD,
    ) -> Self:
        """Pack documents into sequences; the settings are those of `zephon_mm.ops.pack`."""
        config = PackConfig(
            max_length, algorithm, max_images, overlong, lookahead, max_patches, order
        )
        stage = PackStage(config, fair=self._stages.mixes)
        return self._build(stages=self._stages.with_sequence(stage))

    def shuffle(self, *, buffer_size: int, seed: int = 0) -> Self:
        """Shuffle sequences, or raw samples, within each lane, through a buffer of so many."""
        return self._build(stages=self._stages.with_sequence(ShuffleStage(buffer_size, seed)))

    def map_sequence(
        self, fn: Callable[[PackedSequence], PackedSequence], *, version: str = ""
    ) -> Self:
        """Replace every packed sequence by `fn(sequence)`; metadata only."""
        return self._build(stages=self._stages.with_sequence(map_stage(fn, version)))

    def accumulate(self, factory: Factory, *, seed: int = 0, version: str = "") -> Self:
        """Add an accumulator: `factory(rng)` is called for every window of every lane.

        Before `.pack_flat` it takes records, after it sequences: `push(item)` and `flush()` return
        iterables of them.
        """
        stage = user_stage("accumulate", factory, factory, seed, version)
        return self._build(stages=self._stages.with_sequence(stage))

    def batch(
        self,
        *,
        microbatch_size: int,
        global_batch_size: int | None = None,
        tail: Literal["drop", "pad"] = "drop",
        fields: Sequence[str] | None = None,
    ) -> Self:
        """Set B, the sequences of a batch, and N, those of a step over all ranks.

        With N set it is part of the fingerprint; without, N = dp_degree * B. In a pipeline without
        .interleave, .tokenize and .pack_flat a sequence is one sample as it is stored, and batches
        are `zephon_mm.samples.SampleBatch`.

        Args:
            microbatch_size: B.
            global_batch_size: N; every rank delivers N / (dp_degree * B) batches a step.
            tail: What a finite run does with the sequences that do not fill a step: `drop` them
                (at most N - 1, counted), or `pad` the step with rows of padding alone, whose `keys`
                are empty, so that an evaluation sees every document once.
            fields: Of raw samples, those that are read; None for all.

        Raises:
            ConfigError: `dp_degree * B` does not divide N.
        """
        check_types(
            Builder.batch,
            "batch",
            microbatch_size=microbatch_size,
            global_batch_size=global_batch_size,
            tail=tail,
            fields=list(fields) if isinstance(fields, tuple) else fields,
        )
        stages = replace(self._stages, fields=tuple(fields) if fields is not None else None)
        self._build(batching=(microbatch_size, global_batch_size), stages=stages)
        self._pad_tail = tail == "pad"
        return self

    def _build(
        self,
        *,
        options: Options | None = None,
        stages: Stages | None = None,
        batching: tuple[int, int | None] | None = None,
    ) -> Self:
        if self._started:
            raise ConfigError("the pipeline has started: change a new Pipeline instead")
        options, batching = options or self._options, batching or self._batching
        if batching is not None:
            check_topology(topology_of(options, batching))
        self._options = options
        self._stages = stages or self._stages
        self._batching = batching
        return self


def _check_processor(operator: str, processor: Any, kind: type) -> None:
    if not isinstance(processor, kind):
        name = kind.__name__.removesuffix("Processor").lower()
        example = "SigLIPProcessor" if name == "image" else "SigLIPVideoProcessor"
        raise ConfigError(
            f"{operator}: {name}_processor takes a processor such as {example}(), got {processor!r}"
        )
