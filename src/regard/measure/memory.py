"""Peak memory of a training step: predicted, and counted.

The peak is reached at one of three moments: when the loss is computed, all activations are saved;
in the backward pass, the activations of a layer are freed while the gradients of its parameters
appear; when the optimizer steps, all gradients are there and no activations. Parameters and
optimizer state are there all the time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import check_choice
from regard.measure.cost import Cost, cost
from regard.measure.count import PeakCounter
from regard.measure.model import model_sizes, training_loss
from regard.models import Model

OPTIMIZER_STATES = {"sgd": 0, "momentum": 1, "adamw": 2}  # numbers for each parameter
# tensors of the size of the largest parameter that the optimizer needs while it steps
STEP_TENSORS = {"sgd": 0, "momentum": 0, "adamw": 2}
PROCESS_OVERHEAD = 1.2  # memory the allocator does not return; 1.16 to 1.39 were measured


@dataclass(frozen=True)
class StepMemory:
    """Memory of a training step, in bytes.

    Args:
        parameter_bytes: Parameters.
        gradient_bytes: Gradients.
        optimizer_bytes: Optimizer state.
        activation_bytes: Activations that autograd saves, for the whole batch.
        workspace_bytes: Memory beyond the activations that is needed for a moment only.
        peak_bytes: The peak. Less than the sum of all, since gradients appear as activations are
            freed.
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    workspace_bytes: int
    peak_bytes: int

    @property
    def process_bytes(self) -> int:
        """What the process grows by: the peak, and memory that its allocator does not return."""
        return round(PROCESS_OVERHEAD * self.peak_bytes)


def step_memory(
    model: Model,
    length: int,
    *,
    batch: int = 1,
    itemsize: int = 4,
    optimizer: str = "adamw",
    total: Cost | None = None,
) -> StepMemory:
    """Predict the memory of a training step, for numbers of `itemsize` bytes.

    `total` is the cost of the model at these sizes, where it is known already.
    """
    check_choice("optimizer", optimizer, OPTIMIZER_STATES)
    if total is None:
        total = cost(model, length, batch=batch, itemsize=itemsize)
    sizes = model_sizes(model, length, batch)
    parameters = total.parameters * itemsize
    largest = max(p.numel() for p in model.parameters()) * itemsize

    moments = [
        total.activation_bytes + 2 * sizes.outputs * itemsize,  # at the loss
        parameters + STEP_TENSORS[optimizer] * largest,  # in the optimizer
    ]
    saved, gradients = total.activation_bytes, 0
    for part in reversed(total.parts):  # in the backward pass
        gradients += part.parameters * itemsize
        workspace = 2 * sizes.hidden * itemsize + part.activation_bytes // 2
        moments.append(saved + gradients + workspace)
        saved -= part.activation_bytes

    state = OPTIMIZER_STATES[optimizer] * parameters
    return StepMemory(
        parameter_bytes=parameters,
        gradient_bytes=parameters,
        optimizer_bytes=state,
        activation_bytes=total.activation_bytes,
        workspace_bytes=max(0, max(moments) - total.activation_bytes),
        peak_bytes=parameters + state + max(moments),
    )


def count_step_bytes(
    model: Model, batch: tuple[Tensor, ...], optimizer: torch.optim.Optimizer, *, steps: int = 2
) -> int:
    """Run training steps, and count the most bytes of tensors that were alive at once."""
    with PeakCounter() as counter:
        for p in model.parameters():
            counter.watch(p.detach())
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            training_loss(model, batch).backward()
            optimizer.step()
    return counter.peak_bytes
