"""The weights with the best validation metric so far."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard.models.serialization import unique_tensors
from regard.tasks.metrics import Metric, UndefinedMetric
from regard.train.evaluation import Evaluation
from regard.train.strategy import ParallelStrategy

STEP, STATISTICS, LOSS = "step", "statistics", "loss"


class BestWeights:
    """Keeps a copy of the weights at the best evaluation.

    Two evaluations are compared on the examples that both have: a time limit can end one early, and
    the first part of a sample is a sample. Of equal ones, that with the lower loss is better, and
    then the earlier: a metric that stands still at 0 or 1 says nothing about the weights.

    Args:
        metric: The metric that decides.
        keeps_weights: False: only find the step.

    Attributes:
        step: Step of the best evaluation, -1 before the first.
        weights: Copies of the tensors of the model in this process, by name; of FSDP, its shards.
    """

    def __init__(self, metric: Metric, *, keeps_weights: bool) -> None:
        self.metric, self.keeps_weights = metric, keeps_weights
        self.step = -1
        self.statistics, self.loss = torch.empty(0), math.inf
        self.weights: dict[str, Tensor] = {}

    def update(self, step: int, evaluation: Evaluation, model: nn.Module) -> None:
        """Take over the weights of the model, if their evaluation is the best so far."""
        statistics = evaluation.statistics[self.metric.name]
        if self.step < 0 or self._is_better(statistics, evaluation.loss):
            self.step, self.statistics, self.loss = step, statistics, evaluation.loss
            self.weights = copy_tensors(model) if self.keeps_weights else {}

    def _is_better(self, statistics: Tensor, loss: float) -> bool:
        common = min(len(statistics), len(self.statistics))
        try:
            new = self.metric.compute(statistics[:common])
            best = self.metric.compute(self.statistics[:common])
        except UndefinedMetric:  # for example without a positive example among the common ones
            return len(statistics) > len(self.statistics)
        if new == best:
            return loss < self.loss
        return new > best if self.metric.higher_is_better else new < best

    # ---------------------------------------------------------------------------- checkpoints
    def to_files(self, strategy: ParallelStrategy) -> dict[str, Mapping[str, Tensor]]:
        """The files of a checkpoint; all processes must call this."""
        if self.step < 0:
            return {}
        parameters = unique_tensors(strategy.model)
        weights = {
            strategy.full_name(name): strategy.full_tensor(tensor, parameters[name])
            for name, tensor in self.weights.items()
        }
        evaluation = {
            STEP: torch.tensor(self.step),
            STATISTICS: self.statistics,
            LOSS: torch.tensor(self.loss, dtype=torch.float64),
        }
        return {"best_evaluation": evaluation, **({"best_model": weights} if weights else {})}

    def load_files(
        self, files: Mapping[str, Mapping[str, Tensor]], strategy: ParallelStrategy
    ) -> None:
        """Load what `to_files` returned, possibly with another number of processes."""
        if "best_evaluation" not in files:
            return
        evaluation = files["best_evaluation"]
        self.step, self.statistics = int(evaluation[STEP]), evaluation[STATISTICS]
        self.loss = float(evaluation[LOSS])
        if not self.keeps_weights:
            return
        for name, tensor in unique_tensors(strategy.model).items():
            full = files["best_model"][strategy.full_name(name)]
            shard = strategy.local_shard(full, tensor)
            self.weights[name] = shard.to(tensor.device).clone()


def copy_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters and buffers of a model, by name."""
    return {name: tensor.detach().clone() for name, tensor in unique_tensors(model).items()}


@contextmanager
def replaced_tensors(model: nn.Module, tensors: Mapping[str, Any]) -> Iterator[None]:
    """Give a model other weights while the block runs."""
    own = copy_tensors(model)
    _copy_into(model, tensors)
    try:
        yield
    finally:
        _copy_into(model, own)


@torch.no_grad()
def _copy_into(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in unique_tensors(model).items():
        tensor.copy_(tensors[name])
