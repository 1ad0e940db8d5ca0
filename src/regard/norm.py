"""Normalisation: (b n d) -> (b n d), and a mask that tells which tokens are real, for kinds that look at more than one."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import check_whole


class Norm(nn.Module, ABC):
    """x (b n d), mask (b n), True = a real token -> (b n d)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        check_whole(1, dim=dim)
        self.dim = dim

    @abstractmethod
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor: ...


class LayerNorm(Norm):
    """(x − mean) / √(variance + ε) · gain + bias, over the width of each token (Ba et al. 2016, arXiv 1607.06450)."""

    def __init__(self, dim: int, *, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__(dim)
        self.eps, self.gain = eps, nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if bias else None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `Norm`."""
        return F.layer_norm(x, (self.dim,), self.gain, self.bias, self.eps)
