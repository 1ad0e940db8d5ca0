"""Modules that mix or share heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TalkingHeads(nn.Module):
    """Mix across heads: (b h n m) -> (b g n m), out_g = Σ_h W_gh x_h
    (Shazeer et al. 2020, arXiv 2003.02436).

    Starts as the identity. If there are more new heads than heads, they repeat.
    """

    def __init__(self, heads: int, new_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(heads)[torch.arange(new_heads) % heads])

    def forward(self, x: Tensor) -> Tensor:
        """(b h n m) -> (b g n m)."""
        return torch.einsum("gh,bhnm->bgnm", self.weight.to(x.dtype), x)


class SharedProjection(nn.Module):
    """One projection shared by all heads: (b n d) -> (b n h*w)
    (Cordonnier et al. 2020, arXiv 2006.16362).

    Args:
        dim: Model width d.
        heads: Number of heads h.
        width: Width w of the projection.
        mixed: Whether head i is `mix_i ⊙ (W x)` with a learned mix (h w). Otherwise it is `W x`.
    """

    def __init__(self, dim: int, heads: int, width: int, *, mixed: bool) -> None:
        super().__init__()
        self.heads, self.weight = heads, nn.Linear(dim, width, bias=False)
        self.mix = nn.Parameter(torch.rand(heads, width) + 0.5) if mixed else None

    def forward(self, x: Tensor) -> Tensor:
        """(b n d) -> (b n h*w)."""
        y = self.weight(x).unsqueeze(-2)
        if self.mix is None:
            return y.expand(*x.shape[:-1], self.heads, -1).flatten(-2)
        return (y * self.mix.to(y.dtype)).flatten(-2)
