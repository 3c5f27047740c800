"""The check of a CUDA machine, in the form that any machine can run."""

from pathlib import Path

import pytest
import torch

from benchmarks.cuda_check import check, recipe_on_photographs
from benchmarks.train.run import Settings


@pytest.mark.slow
def test_the_check_runs_on_a_cpu_and_finds_equal_digests(photographs: Path) -> None:
    recipe = recipe_on_photographs("tiny_vlm", photographs, 24)
    found = check(recipe, Settings(steps=3, dtype=torch.bfloat16, digests=True))
    assert found["digests_equal"]
    assert found["tensors_equal"]
    assert len(found["losses"]) == 3
    assert found["tokens_per_s"] > 0
