"""The most memory that a training step needs at once: by formula, and counted.

A step has three moments.  When the loss is there, all activations are kept.  Going back, those of a layer are let go while the
gradients of its parameters come.  When the optimizer steps, all gradients are there and no activation is.  The peak is the
greatest of these; parameters and the optimizer's numbers are there all the time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import check_choice
from regard.measure.cost import Cost, cost
from regard.measure.count import PeakCounter
from regard.measure.model import Outline, outline, training_loss
from regard.models import Model

STATES = {"sgd": 0, "momentum": 1, "adamw": 2}  # numbers that an optimizer keeps for each parameter
KEPT = 1.2  # a process beside its tensors: what the allocator of the system does not give back; 1.16 to 1.39 were measured
AT_STEP = {
    "sgd": 0,
    "momentum": 0,
    "adamw": 2,
}  # tensors of the size of the largest parameter that it needs while it steps


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a training step.

    saved       activations that autograd keeps, of the whole batch
    workspace   what is there only for a moment
    peak        the most that is there at once; less than the sum of all, for gradients come as activations go
    process     what the process grows by: the peak, and what its allocator does not give back
    """

    parameters: int
    gradients: int
    optimizer: int
    saved: int
    workspace: int
    peak: int

    @property
    def process(self) -> int:
        return round(KEPT * self.peak)


def step_memory(
    model: Model, length: int, *, batch: int = 1, width: int = 4, optimizer: str = "adamw"
) -> StepMemory:
    """Predicted, for numbers of `width` bytes."""
    check_choice("optimizer", optimizer, STATES)
    found, sizes = cost(model, length, batch=batch, width=width), outline(model, length, batch)
    held = found.parameters * width
    largest = max(p.numel() for p in model.parameters()) * width
    loss_is_there = found.saved + 2 * sizes.logits * width
    moments = [loss_is_there, *_backward(found, sizes, width), held + AT_STEP[optimizer] * largest]
    states = STATES[optimizer] * held
    peak = held + states + max(moments)
    return StepMemory(held, held, states, found.saved, max(0, max(moments) - found.saved), peak)


def _backward(found: Cost, sizes: Outline, width: int) -> list[int]:
    """Bytes while each part goes back: what is kept of those before it, gradients of those behind it, and its own."""
    moments, saved, gradients = [], found.saved, 0
    for part in reversed(found.parts):
        moments.append(
            saved + gradients + part.parameters * width + 2 * sizes.stream * width + part.saved // 2
        )
        saved, gradients = saved - part.saved, gradients + part.parameters * width
    return moments


def count_step_bytes(
    model: Model, given: tuple[Tensor, ...], optimizer: torch.optim.Optimizer, *, steps: int = 2
) -> int:
    """The most bytes alive at once in so many training steps: parameters, and all tensors that operations made."""
    with PeakCounter() as seen:
        for p in model.parameters():
            seen.watch(p.detach())
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            training_loss(model, given).backward()
            optimizer.step()
    return seen.peak
