"""The training loss as one module, so that DDP and FSDP see everything that has a gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard.auxiliary import collect_aux
from regard.device import autocast
from regard.tasks.base import Batch, Task


class LossModule(nn.Module):
    """Maps a batch to a scalar: target_share · (task loss) + token_share · (auxiliary losses).

    The shares are the fractions of all targets and of all tokens of a step that are in this batch.
    With them, the losses of the parts of a step add up to the mean over the step; this is exact for
    auxiliary losses that are means over tokens or that depend on weights only.
    """

    def __init__(
        self, model: nn.Module, task: Task, dtype: torch.dtype, *, label_smoothing: float = 0.0
    ) -> None:
        super().__init__()
        self.model, self.task, self.dtype = model, task, dtype
        self.options: dict[str, Any] = {}
        if label_smoothing:
            self.options["label_smoothing"] = label_smoothing

    def forward(self, batch: Batch, target_share: float = 1.0, token_share: float = 1.0) -> Tensor:
        """The weighted loss of one batch."""
        batch = self.task.training_batch(batch)
        with collect_aux() as aux:
            output = self.compute_output(batch)
        loss = self.task.loss(output, batch, **self.options)
        return loss * target_share + aux.loss() * token_share

    def compute_output(self, batch: Batch) -> Tensor:
        """The output of the model, under autocast unless the dtype is float32."""
        with autocast(batch.device, self.dtype):
            return self.model(**batch.inputs)
