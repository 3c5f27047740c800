"""`zephon-mm demo`: data, training, elasticity and a picture, offline, in about two minutes.

    1. Draws captioned pictures, picture stories, chats and films, trains a tokenizer
       (`cli.demo_data`), and writes the recipe.
    2. Trains a tiny SigLIP + Qwen3 on them (`cli.tiny_model`); its loss must fall.
    3. Runs the same recipe on 1, 2, 3 and 4 ranks, each going on from the checkpoint before, and
       compares every step's digest with an uninterrupted run on one rank.
    4. Draws the packed rows of the first batches, and the loss.

Imports: the package, cli.demo_data, cli.tiny_model, cli.verify. Used by: cli.main.
"""

import argparse
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from tokenizers import Tokenizer
from tqdm import tqdm

from zephon_mm.batch import Batch
from zephon_mm.cli.demo_data import make_demo_data
from zephon_mm.cli.tiny_model import TinyVLM
from zephon_mm.cli.verify import Combination, Delivered, Run, first_difference
from zephon_mm.errors import ConfigError
from zephon_mm.ops.tokenizer import TextTokenizer
from zephon_mm.recipe import Recipe, load_recipe

# configs/demo.toml is this text with the paths of a clone; a test compares them.
RECIPE = Path(__file__).with_name("demo.toml").read_text()

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add = parser.add_argument
    add("--out", type=Path, default=Path("demo_out"), help="folder for all files (%(default)s)")
    add("--seconds", type=float, default=60.0, help="how long to train (%(default)s)")
    add("--steps", type=int, help="train for so many steps instead")
    add("--data-only", action="store_true", help="make the data and the recipe, and stop")


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; return 0 if the loss fell and all digests are equal, else 1."""
    began = time.monotonic()
    out: Path = arguments.out
    print(
        f"1. Data: drawing 600 captioned pictures, 150 stories, 150 chats and 60 films into {out}"
    )
    make_demo_data(out / "data")
    file = out / "demo.toml"
    file.write_text(RECIPE)
    if arguments.data_only:
        return 0
    recipe = load_recipe(file)
    print("\n2. Training a tiny SigLIP + Qwen3 from random weights")
    if arguments.steps is not None and arguments.steps < 2:
        raise ConfigError(f"--steps must be at least 2, got {arguments.steps}")
    losses = train(recipe, out, seconds=arguments.seconds, steps=arguments.steps)
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
        f"\nDone in {time.monotonic() - began:.0f} s: the loss {'fell' if fell else 'DID NOT FALL'}"
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
    with recipe.pipeline() as pipeline, _progress(seconds, steps) as bar, one_thread():
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


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one core: its threads wait by spinning, the workers need the others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
    FigureCanvasAgg(figure).print_png(path)


def _progress(seconds: float, steps: int | None) -> tqdm:
    if steps:
        return tqdm(total=steps, unit="step", desc="   training")
    layout = "{desc} {percentage:3.0f}% |{bar}| {n:.0f}/{total:.0f} s{postfix}"
    return tqdm(total=seconds, desc="   training", bar_format=layout)
