"""The constant baseline: it ignores its input and predicts the class frequencies."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.models.losses import IGNORE_INDEX
from regard.tasks import Task

EXAMPLES = 512  # training examples used for the frequencies, and test examples used for the score


def constant_baseline_score(task: Task) -> float:
    """Return the test metric of predicting the training frequencies (with add-one smoothing).

    For accuracy this is the majority class.
    """

    def targets(split: str) -> list[Tensor]:
        count = min(EXAMPLES, task.size(split))
        flat = (task.example(split, index).target.view(-1) for index in range(count))
        return [target[target != IGNORE_INDEX] for target in flat]

    counts = torch.bincount(torch.cat(targets("train")), minlength=task.classes).double() + 1
    logits = (counts / counts.sum()).log()
    scores = [task.score(logits.expand(len(target), -1), target) for target in targets("test")]
    return sum(total for total, _ in scores) / max(1, sum(count for _, count in scores))
