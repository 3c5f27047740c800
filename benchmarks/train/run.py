"""A training run: a recipe's pipeline, a sharded model, checkpoints, a line of JSON a step.

Laws (tests/benchmarks/test_train.py):
    1. A run that is resumed, on any number of ranks, gets the steps that follow.
    2. The loss of a step does not depend on the number of ranks but by rounding.

Imports: the package, benchmarks.train.model, .trainer. Used by: benchmarks.train, .cuda_check.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.train.model import VLM, make_language, make_vision, shard
from benchmarks.train.trainer import Micro, Trainer
from zephon_mm.batch import step_sha256
from zephon_mm.errors import ConfigError
from zephon_mm.integrations.cuda import on_device
from zephon_mm.ops.tokenizer import TextTokenizer
from zephon_mm.pipeline import Pipeline
from zephon_mm.recipe import Recipe

COUNTS = ("valid", "tokens", "samples")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a recipe is trained on. `python -m benchmarks.train --help` says what each means."""

    steps: int = 20
    shape: str = "tiny_vlm"
    vision: str | None = None
    language: str | None = None
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    attention: str = "sdpa"
    learning_rate: float = 3e-3
    digests: bool = False
    checkpoint: Path | None = None
    every: int = 0
    resume: Path | None = None
    options: dict[str, Any] = field(default_factory=dict)


def make_model(recipe: Recipe, settings: Settings, *, seed: int = 0) -> VLM:
    """Return the model for a recipe's tokenizer; equal seeds give equal random weights."""
    table = recipe.tables["interleave"]
    tokenizer = TextTokenizer.load(table["tokenizer"], image_token=table.get("image_token"))
    devices = [torch.cuda.current_device()] if settings.device == "cuda" else []
    with torch.random.fork_rng(devices), torch.device(settings.device):
        torch.manual_seed(seed)
        vision = make_vision(settings.shape, settings.vision)
        language = make_language(
            *(settings.shape, tokenizer.vocab_size, settings.attention, settings.language)
        )
        return VLM(vision, language, tokenizer.require_image_id()).to(settings.device)


def microbatches(pipeline: Pipeline, settings: Settings) -> Iterator[Micro]:
    """Yield a pipeline's batches as a trainer takes them."""
    how = {"dtype": settings.dtype, "attention": settings.attention, "dummy_image": True}
    for batch, inputs in on_device(pipeline, settings.device, **how):
        tokens, samples = int((batch.segment_ids > 0).sum()), sum(map(len, batch.keys))
        numbers = batch.sequence_ids.tolist()
        rows = dict(zip(numbers, batch.row_sha256(), strict=True)) if settings.digests else {}
        yield Micro(inputs, batch.num_valid_tokens, tokens, samples, rows)


class State:
    """Model, optimizer and pipeline, as `torch.distributed.checkpoint` keeps them.

    The pipeline's is complete and the same on every rank, under one key, so that any other number
    of ranks can go on from it. Saving and loading are collective.
    """

    def __init__(self, trainer: Trainer, pipeline: Pipeline) -> None:
        self._model, self._optimizer, self._pipeline = trainer.model, trainer.optimizer, pipeline

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors, and the pipeline's state as text."""
        model, optimizer = get_state_dict(self._model, self._optimizer)
        state = json.dumps(self._pipeline.checkpoint(group=dist.group.WORLD))
        return {"model": model, "optimizer": optimizer, "pipeline": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what was saved."""
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(
            *(self._model, self._optimizer), model_state_dict=model, optim_state_dict=optimizer
        )
        self._pipeline.restore(json.loads(state["pipeline"]))


def save(state: dict[str, Any], folder: Path) -> None:
    """Write a checkpoint, over another if need be: never one that is of both, and loads."""
    if dist.get_rank() == 0:  # the others write when it has planned what
        (folder / ".metadata").unlink(missing_ok=True)
    dcp.save(state, checkpoint_id=folder)


@contextmanager
def process_group(device: str) -> Iterator[None]:
    """Join the ranks that torchrun started; without it, be the only one."""
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", **alone)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Step:
    """What the microbatches of one step add up to on this rank; it lasts until the next is made.

    Args:
        number: From 0.
        device: Where losses are.
        waited_s: How long the loader was waited for until now.
    """

    def __init__(self, number: int, device: str, waited_s: Callable[[], float]) -> None:
        self.number, self.micros, self.rows = number, 0, dict[int, str]()
        self.loss = torch.zeros((), device=device)
        self.counts = torch.zeros(len(COUNTS), dtype=torch.float64)
        self._waited_s = waited_s
        self._began, self._waited = time.perf_counter(), waited_s()

    def add(self, loss: Tensor, micro: Micro) -> None:
        """Take a microbatch."""
        self.micros += 1
        self.loss += loss
        self.counts += torch.tensor([getattr(micro, name) for name in COUNTS])
        self.rows |= micro.rows

    @property
    def valid(self) -> float:
        """Labels that carry loss."""
        return float(self.counts[0])

    def line(self) -> dict[str, Any]:
        """Return what `train` yields. Collective; waits for the device."""
        loss, longest = self.loss.double().cpu(), torch.tensor(self._waited_s() - self._waited)
        dist.all_reduce(loss)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        counts = dict(zip(COUNTS, map(int, self.counts.tolist()), strict=True))  # of all ranks
        found = {"step": self.number, "loss": float(loss) / self.valid, **counts}
        found |= {"step_s": time.perf_counter() - self._began, "wait_s": float(longest)}
        if self.rows:
            parts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(parts, self.rows)
            rows = {number: row for part in parts for number, row in part.items()}
            found["sha256"] = step_sha256(rows)
        return found


def step_sizes(recipe: Recipe, world: int) -> tuple[int, int]:
    """Return the sequences of a step, and the microbatches of one rank of so many.

    Raises:
        ConfigError: It is no recipe for the model, or says no size of a step.
    """
    if not recipe.tables.keys() >= {"interleave", "image_processor"}:
        raise ConfigError(f"{recipe.file}: training needs [interleave] and [image_processor]")
    sizes = recipe.tables["batch"]
    if "global_batch_size" not in sizes:
        raise ConfigError(f"{recipe.file}: training needs global_batch_size in [batch]")
    size: int = sizes["global_batch_size"]
    return size, size // (world * sizes["microbatch_size"])


def train(recipe: Recipe, settings: Settings) -> Iterator[dict[str, Any]]:
    """Train up to step `settings.steps`, in a process group; yield what each step was.

    Yields:
        `step` from 0; over all ranks its `loss`, `valid` labels, `tokens` (no padding) and
        `samples`; `step_s`; `wait_s`, what the rank that waited longest for data did; its `sha256`
        where digests are on.

    Raises:
        ConfigError: As `step_sizes`, or the recipe cannot work.
    """
    world = dist.get_world_size()
    size, per_step = step_sizes(recipe, world)
    with recipe.pipeline(dp_degree=world, dp_rank=dist.get_rank(), **settings.options) as pipeline:
        model = make_model(recipe, settings)  # after what the recipe lacks was told
        shard(model, init_device_mesh(settings.device, (world,)), settings.dtype)
        trainer = Trainer(model, settings.dtype, settings.learning_rate)
        state = {"train": State(trainer, pipeline)}
        if settings.resume:
            dcp.load(state, checkpoint_id=settings.resume)
        first = pipeline.checkpoint()["delivered"] // size
        if first >= settings.steps:
            return

        def step_of(number: int) -> Step:
            return Step(number, settings.device, lambda: pipeline.metrics().get("wait_s", 0.0))

        step = step_of(first)
        for micro in microbatches(pipeline, settings):
            if step.micros == per_step:  # the next one's data came while this one was computed
                yield step.line()
                step = step_of(step.number + 1)
            step.add(trainer.add(micro.inputs), micro)
            if step.micros < per_step:
                continue
            dist.all_reduce(step.counts)
            trainer.update(step.number, world / step.valid)
            done = step.number + 1
            if settings.every and done % settings.every == 0:
                save(state, settings.checkpoint / f"step-{done}")
            if done == settings.steps:
                break
        yield step.line()


def totals(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the rates over some steps: `tokens_per_s`, `samples_per_s`, and `wait_share`."""
    names = ("tokens", "samples", "wait_s", "step_s")
    tokens, samples, wait_s, step_s = (sum(line[name] for line in lines) for name in names)
    rates = {"tokens_per_s": tokens / step_s, "samples_per_s": samples / step_s}
    return {**rates, "wait_share": wait_s / step_s}
