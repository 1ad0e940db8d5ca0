"""A moving average of the weights, for evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightEMA:
    """w̄ ← β w̄ + (1 − β) w after each step, with β brought up from small values so that the start is forgotten:
    min(β, (1 + t) / (10 + t))."""

    def __init__(self, model: nn.Module, beta: float) -> None:
        self.beta = beta
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.weights["steps"] = torch.zeros((), dtype=torch.long)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take the weights of now into the average."""
        steps = int(self.weights["steps"])
        beta = min(self.beta, (1 + steps) / (10 + steps))
        for name, p in model.named_parameters():
            self.weights[name].lerp_(p, 1 - beta)
        self.weights["steps"] += 1

    def pairs(self, model: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Names, weights and averages."""
        return ((name, p, self.weights[name]) for name, p in model.named_parameters())

    @staticmethod
    @contextmanager
    def swapped(average: WeightEMA | None, model: nn.Module) -> Iterator[None]:
        """Inside, the model has the averaged weights; without an average, its own."""
        if average is None:
            yield
            return
        own: dict[str, Tensor] = {name: p.detach().clone() for name, p in model.named_parameters()}
        _put(model, average.weights)
        try:
            yield
        finally:
            _put(model, own)


@torch.no_grad()
def _put(model: nn.Module, weights: dict[str, Tensor]) -> None:
    for name, p in model.named_parameters():
        p.copy_(weights[name])
