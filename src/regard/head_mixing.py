"""What heads have to do with each other: they talk, or they share a projection."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TalkingHeads(nn.Module):
    """Heads talk: (b h n m) -> (b g n m), out_g = Σ_h W_gh x_h (Shazeer et al. 2020, arXiv 2003.02436).

    It starts as the identity, so that training starts from heads that are apart; where heads are fewer on one side, they
    are taken in turn.
    """

    def __init__(self, heads: int, new: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(heads)[torch.arange(new) % heads])

    def forward(self, x: Tensor) -> Tensor:
        """(b h n m) -> (b g n m)."""
        return torch.einsum("gh,bhnm->bgnm", self.weight, x)


class SharedProjection(nn.Module):
    """One projection for all heads, (b n d) -> (b n h*w): head i is `mix_i ⊙ (W x)`, or `W x` itself where nothing mixes.

    What the heads of Cordonnier et al. 2020 (arXiv 2006.16362) have in common.
    """

    def __init__(self, dim: int, heads: int, width: int, *, mixed: bool) -> None:
        super().__init__()
        self.heads, self.weight = heads, nn.Linear(dim, width, bias=False)
        self.mix = nn.Parameter(torch.rand(heads, width) + 0.5) if mixed else None

    def forward(self, x: Tensor) -> Tensor:
        """(b n d) -> (b n h*w)."""
        one = self.weight(x).unsqueeze(-2)
        every = (
            one.expand(*x.shape[:-1], self.heads, -1)
            if self.mix is None
            else one * self.mix.to(one.dtype)
        )
        return every.flatten(-2)
