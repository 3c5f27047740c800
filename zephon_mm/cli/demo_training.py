"""The demo's training, elasticity and pictures, on the data and the recipe that `cli.demo` made.

    1. Trains a tiny SigLIP + Qwen3 (`cli.tiny_model`); its loss must fall.
    2. Runs the same recipe on 1, 2, 3 and 4 ranks, each going on from the checkpoint before, and
       compares every step's digest with an uninterrupted run on one rank.
    3. Draws the packed rows of the first batches, and the loss.

Imports: the package, cli.tiny_model, cli.verify. Used by: cli.demo.
"""

import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
from matplotlib.figure import Figure
from tokenizers import Tokenizer
from tqdm import tqdm

from zephon_mm.batch import Batch
from zephon_mm.cli.tiny_model import TinyVLM
from zephon_mm.cli.verify import Combination, Delivered, Run, first_difference
from zephon_mm.errors import ConfigError
from zephon_mm.ops.tokenizer import TextTokenizer
from zephon_mm.recipe import Recipe, load_recipe

STAGES = (
    Combination(1, 4, "process"),
    Combination(2, 3, "thread"),
    Combination(3, 2, "inline"),
    Combination(4, 1, "thread"),
)
STEPS_PER_STAGE = 2
LEARNING_RATE = 3e-3
WARM_UP_STEPS = 10
DRAWN_ROWS = 8


def show(file: Path, *, seconds: float, steps: int | None) -> int:
    """Train, resume and draw; return 0 if the loss fell and all digests are equal, else 1.

    Args:
        file: The recipe; its data, and what is drawn, are in its folder.
        seconds: How long to train.
        steps: Train for so many steps instead, at least 2.
    """
    out, recipe = file.parent, load_recipe(file)
    print("\n2. Training a tiny SigLIP + Qwen3 from random weights")
    if steps is not None and steps < 2:
        raise ConfigError(f"--steps must be at least 2, got {steps}")
    losses = train(recipe, out, seconds=seconds, steps=steps)
    draw_losses(losses, out / "loss.png")
    fell = has_fallen(losses)
    print("\n3. The same recipe on 1 -> 2 -> 3 -> 4 ranks, against one uninterrupted rank")
    equal = resume_on_more_ranks(recipe)
    print("\n4. Pictures")
    draw_rows(recipe, out)
    print(
        f"   {out / 'packing.png'}: packed sequences, with images in place and padding\n"
        f"   {out / 'loss.png'}: the loss\n"
        f"   {file}: the recipe; try `zephon-mm plan {file}` or `zephon-mm verify {file}`\n"
        f"\nDone: the loss {'fell' if fell else 'DID NOT FALL'}"
        f", all digests {'are equal' if equal else 'ARE NOT EQUAL'}."
    )
    return 0 if fell and equal else 1


def train(recipe: Recipe, out: Path, *, seconds: float, steps: int | None) -> list[float]:
    """Train for some time or some steps; return the loss of every step."""
    tokenizer = TextTokenizer.load(out / "data" / "tokenizer", image_token="<|image_pad|>")
    model = TinyVLM(
        vocab_size=tokenizer.vocab_size,
        image_token_id=tokenizer.require_image_id(),
        video_token_id=tokenizer.video_id,
        seed=0,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98))
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=WARM_UP_STEPS)
    losses: list[float] = []
    layout = "   training {percentage:3.0f}% |{bar}| {n:.0f}/{total:.0f}{unit}{postfix}"
    bar = tqdm(total=steps or seconds, unit="" if steps else " s", bar_format=layout)
    torch.set_num_threads(1)  # they wait by spinning, and the workers need the other cores
    with recipe.pipeline() as pipeline, bar:
        began = time.monotonic()
        for step in islice(global_steps(pipeline, recipe), steps):
            losses.append(train_step(model, step))
            optimizer.step()
            warm_up.step()
            optimizer.zero_grad()
            elapsed_s = time.monotonic() - began
            bar.set_postfix_str(f"step {len(losses)}, loss {losses[-1]:.3f}", refresh=False)
            bar.update(1 if steps else min(elapsed_s, seconds) - bar.n)
            if not steps and elapsed_s >= seconds:
                break
        counts = pipeline.metrics()
    print(
        f"   {len(losses)} steps, {counts['tokens']:,} tokens, {counts['images']:,} images, "
        f"{counts['padding']:.1%} padding; loss {losses[0]:.3f} -> {losses[-1]:.3f}"
    )
    return losses


def global_steps(pipeline: Iterable[Batch], recipe: Recipe) -> Iterator[list[Batch]]:
    """Yield the microbatches of each step."""
    sizes = recipe.tables["batch"]
    count = sizes["global_batch_size"] // sizes["microbatch_size"]
    batches = iter(pipeline)
    while step := list(islice(batches, count)):
        yield step


def train_step(model: TinyVLM, step: Sequence[Batch]) -> float:
    """Accumulate the gradients of one global batch; return its loss, the mean over its tokens."""
    total = sum(batch.num_valid_tokens for batch in step)
    summed = 0.0
    for batch in step:
        loss = model(**batch.to_training(attention="sdpa")).loss
        share = loss * (batch.num_valid_tokens / total)  # microbatches differ in tokens
        share.backward()
        summed += share.item()
    return summed


def has_fallen(losses: Sequence[float]) -> bool:
    """Say whether the last steps' loss is below the first ones'; of up to ten each."""
    count = max(1, min(10, len(losses) // 2))
    return statistics.mean(losses[-count:]) < statistics.mean(losses[:count])


def resume_on_more_ranks(recipe: Recipe) -> bool:
    """Print step | ranks | sha256 | equal; return whether all are equal."""
    size = recipe.tables["batch"]["global_batch_size"]
    steps = STEPS_PER_STAGE * len(STAGES)
    expected, found, state = Delivered(), Delivered(), None
    rows = 2 * steps * size
    with tqdm(total=rows, unit="rows", desc="   comparing", leave=False, mininterval=0.5) as bar:
        reference = Run(recipe, Combination(1, 1, "inline"), size, None)
        reference.deliver(steps, expected, advance=bar.update)
        for stage in STAGES:
            part = reference._replace(combination=stage)
            state = part.deliver(STEPS_PER_STAGE, found, start=state, advance=bar.update)
    print(f"   {'step':>4} | {'ranks x microbatch':18} | {'runner':7} | {'sha256':16} | equal")
    for number in range(steps):
        stage = STAGES[number // STEPS_PER_STAGE]
        digest = found.step(number, size)
        equal = digest == expected.step(number, size)
        topology = f"{stage.dp_degree} x {stage.microbatch_size}"
        print(
            f"   {number:>4} | {topology:18} | {stage.runner:7} | {digest[:16]} | "
            f"{'yes' if equal else 'NO'}"
        )
    difference = first_difference(expected, found, size)
    if difference:
        print(f"   first difference: {difference}")
    return difference is None


def draw_rows(recipe: Recipe, out: Path) -> None:
    """Draw the first packed sequences: documents by their text, images, padding."""
    tokenizer = Tokenizer.from_file(str(out / "data" / "tokenizer" / "tokenizer.json"))
    with recipe.pipeline(runner="inline", microbatch_size=DRAWN_ROWS) as pipeline:
        batch = next(iter(pipeline))
    batch.show(decode=tokenizer.decode).savefig(out / "packing.png")


def draw_losses(losses: Sequence[float], path: Path) -> None:
    """Write a PNG of the loss over the steps."""
    figure = Figure(figsize=(8, 4), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(range(1, len(losses) + 1), losses, color="#3366cc")
    axes.set(xlabel="step", ylabel="loss", title="Tiny SigLIP + Qwen3 on the demo's data")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.savefig(path)
