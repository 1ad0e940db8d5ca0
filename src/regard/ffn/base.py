"""What every feed-forward layer is: each token by itself, (b n d) -> (b n d)."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from regard.errors import check_int


class FeedForward(nn.Module, ABC):
    """x (b n d), mask (b n), True = a real token -> (b n d).  The mask is for kinds that count tokens or share room."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        check_int(1, dim=dim)
        self.dim = dim

    @abstractmethod
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor: ...
