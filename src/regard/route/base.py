"""Base class of routers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor, nn

from regard.backends.token_groups import TokenGroups
from regard.mixer import Can


class Route(nn.Module, ABC):
    """Maps q (b h n e), k (b h m e), mask (b m) to groups of queries that share keys, by token
    index."""

    can: Can = Can(stream="the groups depend on all tokens")
    heads: int | None = None  # number of heads it was built for, or None for any number

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Sequence[TokenGroups]: ...
