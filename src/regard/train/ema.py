"""Exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightEMA:
    """Averages w̄ ← β w̄ + (1 − β) w after each step, where β = min(decay, (1 + t) / (10 + t))
    forgets the first steps t."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.weights["steps"] = torch.zeros((), dtype=torch.long)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Add the current weights to the average."""
        steps = int(self.weights["steps"])
        decay = min(self.decay, (1 + steps) / (10 + steps))
        for name, p in model.named_parameters():
            self.weights[name].lerp_(p, 1 - decay)
        self.weights["steps"] += 1


@contextmanager
def averaged_weights(ema: WeightEMA | None, model: nn.Module) -> Iterator[None]:
    """Give the model its averaged weights while the block runs; without an average, do nothing."""
    if ema is None:
        yield
        return
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    _copy_weights(model, ema.weights)
    try:
        yield
    finally:
        _copy_weights(model, own)


@torch.no_grad()
def _copy_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    for name, p in model.named_parameters():
        p.copy_(weights[name])
