"""What every route is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor, nn

from regard.backends.token_groups import TokenGroups
from regard.mixer import Can


class Route(nn.Module, ABC):
    """q (b h n e), k (b h m e), mask (b m) -> groups of queries that share keys, by token number."""

    can: Can = Can(stream="the groups depend on all tokens")
    heads: int | None = None  # how many it was made for, None: any

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Sequence[TokenGroups]: ...
