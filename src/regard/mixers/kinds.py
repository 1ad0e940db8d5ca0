"""Two kinds of tokens with projections of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ByKind(nn.Module):
    """(b n d) -> (b n d): one matrix for the first `globals` tokens and another for the others, as ETC's global and long
    input have (Ainslie et al. 2020, arXiv 2004.08483).  Stands in the place of a projection of `MultiHead`."""

    def __init__(self, dim: int, globals: int) -> None:
        super().__init__()
        self.globals = globals
        self.first, self.rest = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.first(x[:, : self.globals]), self.rest(x[:, self.globals :])), 1)
