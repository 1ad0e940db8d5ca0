"""The trivial baseline: what is known without looking at the input, only at how often each target occurs."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.models.losses import IGNORE_INDEX
from regard.tasks import Example, Task

EXAMPLES = 512  # of the training split that are counted, and of the test split that are judged


def constant_baseline_score(made: Task) -> float:
    """The metric of always saying the same: the most frequent target, or their frequencies, each counted once more."""
    seen = torch.cat(
        [
            _targets(made.example("train", index))
            for index in range(min(EXAMPLES, made.size("train")))
        ]
    )
    counts = torch.bincount(seen, minlength=made.classes).double() + 1
    logits = (counts / counts.sum()).log()
    asked = [
        _targets(made.example("test", index)) for index in range(min(EXAMPLES, made.size("test")))
    ]
    scores = [made.score(logits.expand(len(each), -1), each) for each in asked]
    return sum(summed for summed, _ in scores) / max(1, sum(count for _, count in scores))


def _targets(example: Example) -> Tensor:
    flat = example.target.view(-1)
    return flat[flat != IGNORE_INDEX]
