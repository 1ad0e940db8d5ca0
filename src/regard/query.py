"""Fewer queries: those that are alike ask once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor, nn

from regard.mixer import Can

Back = Callable[[Tensor], Tensor]


class Query(nn.Module, ABC):
    """q (b h n e), mask (b n) -> (prototypes (b h p e), back), where back: (b h p f) -> (b h n f) gives each its answer."""

    can: Can = Can(
        causal="a prototype stands for queries at many positions",
        stream="a prototype stands for queries at many positions",
        cross="a mask over memory does not say which queries are real",
    )

    @abstractmethod
    def forward(self, q: Tensor, mask: Tensor | None) -> tuple[Tensor, Back]: ...
