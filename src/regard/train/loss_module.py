"""What a model has to learn from a batch, as one module: so that whoever brings gradients together sees all of the loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.auxiliary import collect_aux
from regard.tasks.base import Batch, Task


class LossModule(nn.Module):
    """batch -> loss, a scalar: a · the task's mean over the targets + b · the costs that parts of the model tell.

    a and b are the shares that the batch has of all targets and of all tokens of a step, so that the parts of a step add up
    to the mean over it.  Costs that are means over tokens add up exactly, as do those that depend on weights alone.
    """

    def __init__(self, model: nn.Module, task: Task, precision: str) -> None:
        super().__init__()
        self.model, self.task, self.narrow = model, task, precision == "bfloat16"

    def forward(self, batch: Batch, targets: float = 1.0, tokens: float = 1.0) -> Tensor:
        """See the class."""
        with collect_aux() as notes:
            logits = self.answer(batch)
        return self.task.loss(logits, batch.target) * targets + notes.loss() * tokens

    def answer(self, batch: Batch) -> Tensor:
        """The logits."""
        with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=self.narrow):
            return self.model(batch.tokens, mask=batch.mask)


def move_batch(batch: Batch, device: torch.device) -> Batch:
    """The same on another device."""
    return Batch(*(None if each is None else each.to(device) for each in batch))  # type: ignore[arg-type]


def count_tokens(batch: Batch) -> int:
    """How many are no padding."""
    return batch.tokens.numel() if batch.mask is None else int(batch.mask.sum())
