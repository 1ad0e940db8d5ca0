"""Feature maps for linear attention: phi(x) of queries and keys, with phi(q)·phi(k) in place of exp(q·k)."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn


class Feature(nn.Module, ABC):
    """phi: (b h n e) -> (b h n r), positive, so that the weights are."""

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor: ...


class EluPlusOne(Feature):
    """phi(x) = elu(x) + 1 (Katharopoulos et al. 2020, arXiv 2006.16236)."""

    def forward(self, x: Tensor) -> Tensor:
        """Elementwise: (b h n e) -> (b h n e).  Written out: exp(x) below zero keeps the digits that elu(x) + 1 loses."""
        return torch.where(x > 0, x + 1, x.clamp(max=0).exp())
