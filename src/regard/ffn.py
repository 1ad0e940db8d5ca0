"""Feed-forward layers: each token by itself, (b n d) -> (b n d)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import check_whole

Activation = Callable[[Tensor], Tensor]


class FeedForward(nn.Module, ABC):
    """x (b n d), mask (b n), True = a real token -> (b n d).  The mask is for kinds that count tokens or share room."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        check_whole(1, dim=dim)
        self.dim = dim

    @abstractmethod
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor: ...


class MLP(FeedForward):
    """W₂ σ(W₁ x + b₁) + b₂ (Vaswani et al. 2017, arXiv 1706.03762), four times as wide inside unless `hidden` is given."""

    def __init__(self, dim: int, hidden: int | None = None, *, activation: Activation = F.gelu, bias: bool = True) -> None:
        super().__init__(dim)
        hidden = 4 * dim if hidden is None else hidden
        check_whole(1, hidden=hidden)
        self.activation = activation
        self.up, self.down = nn.Linear(dim, hidden, bias=bias), nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `FeedForward`."""
        return self.down(self.activation(self.up(x)))
