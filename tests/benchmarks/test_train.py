"""Training: one loss and one sequence of steps, however many ranks, simulated or real."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from benchmarks.reproduce.losses import ours
from benchmarks.train.__main__ import parse, report
from benchmarks.train.model import make_language, make_vision
from benchmarks.train.run import Settings, make_model, microbatches, process_group, save, train
from benchmarks.train.trainer import Trainer
from zephon_mm.errors import ConfigError
from zephon_mm.recipe import Recipe

ROOT = Path(__file__).parents[2]
STEPS, SAVED_AT = 4, 2
pytestmark = pytest.mark.slow


def lines_of(recipe: Recipe, **settings: Any) -> list[dict[str, Any]]:
    with process_group("cpu"):
        return list(train(recipe, Settings(steps=STEPS, digests=True, **settings)))


@pytest.fixture(scope="module")
def alone(tiny: Recipe) -> list[dict[str, Any]]:
    return lines_of(tiny)


@pytest.fixture(scope="module")
def two(tiny: Recipe, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    """What two processes did, and where they left a checkpoint."""
    folder = tmp_path_factory.mktemp("two")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "benchmarks.train", "--config", str(tiny.file)]
    command += ["--steps", str(STEPS), "--checkpoint", str(folder), "--every", str(SAVED_AT)]
    command += ["--digests", "--deterministic", "--device", "cpu", "--out", str(folder / "out")]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
    lines = [json.loads(line) for line in (folder / "out").read_text().splitlines()]
    return lines, folder / f"step-{SAVED_AT}"


def test_the_loss_of_a_step_is_the_mean_over_all_its_tokens(
    tiny: Recipe, alone: list[dict[str, Any]]
) -> None:
    model = make_model(tiny, Settings())
    with tiny.pipeline() as pipeline, torch.no_grad():
        logits, labels = [], []
        for micro in islice(microbatches(pipeline, Settings()), 8):
            labels.append(micro.inputs["labels"][:, 1:].flatten())
            logits.append(logits_of(model, micro.inputs))
    expected = functional.cross_entropy(torch.cat(logits), torch.cat(labels))
    assert alone[0]["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert alone[0]["valid"] == int((torch.cat(labels) != -100).sum())


def logits_of(model: Any, inputs: Any) -> torch.Tensor:
    """Return the logits of a batch, computed by the language model itself."""
    embeddings = model.language.model.embed_tokens(inputs["input_ids"])
    places = (inputs["input_ids"] == model.image_token_id)[..., None]
    patches = model.projector(model.vision(inputs["pixel_values"]).last_hidden_state)
    logits: torch.Tensor = model.language(
        inputs_embeds=embeddings.masked_scatter(places, patches.flatten(0, 1)),
        attention_mask=inputs["attention_mask"],
        position_ids=inputs["position_ids"],
        use_cache=False,
    ).logits
    return logits[:, :-1].flatten(0, 1)


def test_two_processes_train_on_what_one_trains_on(
    alone: list[dict[str, Any]], two: tuple[list[Any], Path]
) -> None:
    lines, _ = two
    for name in ("sha256", "step", "valid", "tokens", "samples"):
        assert [line[name] for line in lines] == [line[name] for line in alone]
    losses = [line["loss"] for line in alone]
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-4)


def test_one_process_goes_on_where_two_were(
    tiny: Recipe, alone: list[dict[str, Any]], two: tuple[list[Any], Path]
) -> None:
    lines = lines_of(tiny, resume=two[1])
    assert [line["sha256"] for line in lines] == [line["sha256"] for line in alone[SAVED_AT:]]
    losses = [line["loss"] for line in alone[SAVED_AT:]]
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-4)


def test_a_run_that_is_resumed_at_its_end_does_nothing(
    tiny: Recipe, two: tuple[list[Any], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(steps=SAVED_AT, resume=two[1])
    with process_group("cpu"):
        assert not list(train(tiny, settings))
        report(tiny, settings, tmp_path / "new" / "lines")
    assert "nothing to do" in capsys.readouterr().out


def test_a_checkpoint_that_is_written_over_is_whole_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("ended")

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    with process_group("cpu"):
        save({"one": torch.ones(2)}, tmp_path)
        save({"one": torch.zeros(2)}, tmp_path)
        with pytest.raises(RuntimeError, match="ended"):
            save({"one": Broken()}, tmp_path)
    command = ["train", "--config", "configs/tiny_vlm.toml", "--resume", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit):
        parse()
    assert "has no .metadata" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_simulated_ranks_train_as_real_ones(
    tiny: Recipe, alone: list[dict[str, Any]], dtype: torch.dtype
) -> None:
    settings = Settings(steps=2, digests=True, dtype=dtype)
    for degree in (1, 4):
        curve = ours(tiny, degree, settings)
        assert [sha for _, sha in curve] == [line["sha256"] for line in alone[:2]]
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        losses = [line["loss"] for line in alone[:2]]
        assert [loss for loss, _ in curve] == pytest.approx(losses, rel=tolerance)


def test_the_encoder_is_frozen_and_the_rest_learns(tiny: Recipe) -> None:
    model = make_model(tiny, Settings())
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    trainer = Trainer(model, torch.float32, 1e-3)
    with tiny.pipeline() as pipeline:
        micro = next(microbatches(pipeline, Settings()))
    trainer.add(micro.inputs)
    trainer.update(0, 1 / micro.valid)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name]) == name.startswith("vision."), name


def test_the_projector_learns_from_the_tokens_of_each_patch(tiny: Recipe) -> None:
    model = make_model(tiny, Settings())
    weights = list(model.projector.parameters())
    with tiny.pipeline() as pipeline:
        inputs = next(microbatches(pipeline, Settings())).inputs
    labels = inputs["labels"][:, 1:].flatten()
    expected = functional.cross_entropy(logits_of(model, inputs), labels, reduction="sum")
    for one, other in zip(
        torch.autograd.grad(model(**inputs), weights),
        torch.autograd.grad(expected, weights),
        strict=True,
    ):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)


def test_weights_come_from_local_folders(tiny: Recipe, tmp_path: Path) -> None:
    model = make_model(tiny, Settings(), seed=1)
    model.vision.save_pretrained(tmp_path / "vision")
    model.language.save_pretrained(tmp_path / "language")
    folders = {"vision": str(tmp_path / "vision"), "language": str(tmp_path / "language")}
    loaded = make_model(tiny, Settings(**folders)).state_dict()
    for name, weight in model.state_dict().items():
        if not name.startswith("projector."):
            assert torch.equal(loaded[name], weight)
    with torch.device("meta"):  # as on CUDA, where transformers would refuse or ask for accelerate
        assert make_vision("tiny_vlm", folders["vision"]).device.type == "cpu"
        assert make_language("tiny_vlm", 0, "sdpa", folders["language"]).device.type == "cpu"


def test_weights_that_are_not_there_are_never_random_ones(tiny: Recipe, tmp_path: Path) -> None:
    model = make_model(tiny, Settings())
    model.vision.save_pretrained(tmp_path / "vision")
    model.language.save_pretrained(tmp_path / "language")
    other = {"vision": str(tmp_path / "language"), "language": str(tmp_path / "vision")}
    for name, folder in other.items():
        with pytest.raises(ValueError, match=rf"{folder} lacks \d+ weights .* of another model"):
            make_model(tiny, Settings(**{name: folder}))
        with pytest.raises(ValueError, match="owner/name: there is no such folder"):
            make_model(tiny, Settings(**{name: "owner/name"}))
    with pytest.raises(ValueError, match="the tokenizer of the model"):
        make_language("tiny_vlm", 513, "sdpa", other["vision"])


@pytest.mark.parametrize("section", ["interleave", "image_processor", "batch"])
def test_a_recipe_that_no_such_model_is_trained_on_says_what_it_lacks(
    tiny: Recipe, section: str
) -> None:
    tables = {name: table for name, table in tiny.tables.items() if name != section}
    tables.setdefault("batch", {"microbatch_size": 1})
    with process_group("cpu"), pytest.raises(ConfigError, match=rf"needs .*\[{section}\]"):
        next(train(replace(tiny, tables=tables), Settings()))


@pytest.mark.parametrize("more", [-1, 1])
def test_images_of_another_size_are_refused(tiny: Recipe, more: int) -> None:
    """The first batch with an image proves the sizes, behind any number of others."""
    model = make_model(tiny, Settings())
    with tiny.pipeline() as pipeline:
        inputs = dict(next(m for m in microbatches(pipeline, Settings()) if m.samples > 1).inputs)
    text = {**inputs, "input_ids": torch.zeros_like(inputs["input_ids"])}
    model(**text)
    pixels = inputs["pixel_values"]
    inputs["pixel_values"] = torch.cat([pixels, pixels])[: len(pixels) + more]
    with pytest.raises(ValueError, match="the image and patch size of the model"):
        model(**inputs)
