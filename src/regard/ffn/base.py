"""Base class of feed-forward layers."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from regard.errors import check_int


class FeedForward(nn.Module, ABC):
    """Maps x (b, n, d) with mask (b, n), True = keep, to (b, n, d).

    The mask matters only to layers that count tokens or limit their number.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        check_int(1, dim=dim)
        self.dim = dim

    @abstractmethod
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor: ...
