"""Notice a loss that stands still."""

from __future__ import annotations

import math
from collections import deque

import torch

from regard.models.losses import IGNORE_INDEX
from regard.tasks.base import LABELS, Task

WINDOW, MIN_WINDOW = 100, 20  # steps that are averaged
LEARNED = 0.02  # of the constant loss: a loss this far below it has learned something
IMPROVED = 0.01  # of the constant loss: expected from one window to the next
SAMPLE = 256  # examples for the constant loss


class PlateauDetector:
    """Says once that nothing is learned.

    The loss is averaged over windows of 100 steps (or a tenth of the run, but at least 20). At the
    end of each window after the first, the loss stands still if it is less than 2 % below that of
    constant predictions, and not 1 % of that loss below the window before.

    Args:
        steps: Number of steps of the run.
        constant_loss: Loss of the best constant predictions.
    """

    def __init__(self, steps: int, constant_loss: float) -> None:
        self.window = max(MIN_WINDOW, min(WINDOW, steps // 10))
        self.constant_loss = constant_loss
        self.losses: deque[float] = deque(maxlen=2 * self.window)
        self.warned = False

    def update(self, step: int, loss: float) -> str:
        """Add the loss of a step; returns a warning, or "" if there is none."""
        self.losses.append(loss)
        if self.warned or step % self.window or len(self.losses) < 2 * self.window:
            return ""
        values = list(self.losses)
        before = sum(values[: self.window]) / self.window
        now = sum(values[self.window :]) / self.window
        learned = now < (1 - LEARNED) * self.constant_loss
        if learned or now < before - IMPROVED * self.constant_loss:
            return ""
        self.warned = True
        return (
            f"The loss stands still: {now:.4f} on average over the last {self.window} steps, "
            f"{before:.4f} over those before, and {self.constant_loss:.4f} for constant "
            "predictions. Nothing is learned so far: try another --lr, more --warmup or a "
            "shorter --length."
        )


def constant_loss(task: Task, label_smoothing: float = 0.0) -> float | None:
    """The loss of the best constant predictions, from a sample of the training split: the entropy
    of the classes in nats, or the variance of numbers. None if it is not known.

    It is known for tasks with the default loss.
    """
    if type(task).loss is not Task.loss:
        return None
    batch = task.batch("train", task.sample("train", min(SAMPLE, task.size("train"))).tolist())
    labels = batch.targets.get(LABELS)
    if labels is None:
        return None
    if labels.is_floating_point():
        return float(labels.double().var(0, correction=0).mean())
    classes = getattr(task.needs.head, "num_classes", None)
    counts = labels[labels != IGNORE_INDEX].flatten().bincount().double()
    if not counts.sum():
        return None
    classes = max(len(counts), classes or 0)
    p = torch.zeros(classes, dtype=torch.float64)
    p[: len(counts)] = counts / counts.sum()
    p = (1 - label_smoothing) * p + label_smoothing / classes
    entropy = -float((p * p.clamp(min=1e-300).log()).sum())
    return entropy if math.isfinite(entropy) and entropy > 0 else None
