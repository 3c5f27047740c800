"""One optimizer step of a global batch: gradients of summed losses, divided by its tokens.

Laws (tests/benchmarks/test_train.py):
    1. The loss of a step is that of all its tokens, over all ranks and microbatches: the mean over
       labels that are not -100, however they are spread.
    2. Ranks that are simulated in one process get the gradients that real ones get.

Imports: torch. Used by: benchmarks.train.run, benchmarks.reproduce.losses.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

BETAS = (0.9, 0.98)
WARM_UP_STEPS = 10
MAX_NORM = 1.0


class Micro(NamedTuple):
    """What one rank computes at once.

    Attributes:
        inputs: The model's, on its device.
        valid: Labels that carry loss.
        tokens: Tokens that are not padding.
        samples: Documents.
        rows: Sequence number -> digest; empty unless they were asked for.
    """

    inputs: Mapping[str, Any]
    valid: int
    tokens: int
    samples: int
    rows: Mapping[int, str]


class Trainer:
    """A model with its optimizer. Call `add` for each microbatch of a step, then `update`.

    Args:
        model: Gives the summed loss of `inputs`.
        dtype: What matrix products are computed in; weights and their sums stay float32.
        learning_rate: After `WARM_UP_STEPS` steps.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, learning_rate: float) -> None:
        self.model = model
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        self.learning_rate = learning_rate
        self.optimizer = torch.optim.AdamW(self.weights, lr=learning_rate, betas=BETAS)
        self._sums: list[Tensor] = []
        device = self.weights[0].device.type
        self._autocast = torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16)

    def add(self, inputs: Mapping[str, Any]) -> Tensor:
        """Add the gradients of a microbatch; return its summed loss, still on the device."""
        with self._autocast:
            loss = self.model(**inputs)
        loss.backward()
        return loss.detach()

    def next_rank(self) -> None:
        """Set the gradients aside, to be summed with those of the next simulated rank."""
        grads = [weight.grad for weight in self.weights]
        self._sums = torch._foreach_add(self._sums, grads) if self._sums else grads
        self.optimizer.zero_grad()

    def update(self, step: int, scale: float) -> None:
        """Finish step number `step`: scale the gradients, and apply them.

        Args:
            step: From 0.
            scale: 1 / the labels of the step over all ranks, times what the ranks' gradients were
                divided by when they were averaged.
        """
        for weight, total in zip(self.weights, self._sums, strict=bool(self._sums)):
            weight.grad = total
        self._sums = []
        torch._foreach_mul_([weight.grad for weight in self.weights], scale)
        torch.nn.utils.clip_grad_norm_(self.weights, MAX_NORM)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * min(1.0, (step + 1) / WARM_UP_STEPS)
        self.optimizer.step()
        self.optimizer.zero_grad()
