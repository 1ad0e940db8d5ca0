"""Compression of hidden states: each run of them becomes one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from regard.errors import check_int
from regard.stack.memory_attention import HiddenStates

Usage = Callable[[], Tensor]


class CompressionFunction(nn.Module, ABC):
    """Each run of `rate` hidden states becomes one: (b t d) -> (b t/rate d)."""

    def __init__(self, dim: int, rate: int) -> None:
        super().__init__()
        check_int(1, dim=dim, rate=rate)
        self.dim, self.rate = dim, rate

    @abstractmethod
    def forward(self, old: HiddenStates, usage: Usage) -> HiddenStates:
        """old (b t d), t in whole runs; `usage()` tells how much each of them is looked at, (b t).

        What is left out is blank already.  A run of nothing but left-out states is left out.
        """

    def runs(self, x: Tensor) -> Tensor:
        """(b t ...) -> (b t/rate rate ...)."""
        return x.unflatten(1, (-1, self.rate))

    def held(self, x: Tensor, old: HiddenStates) -> HiddenStates:
        """The compressed states, and which runs hold a real one."""
        return HiddenStates(x, None if old.mask is None else self.runs(old.mask).any(2))


class MeanPoolCompression(CompressionFunction):
    """The mean of the real states of a run."""

    def forward(self, old: HiddenStates, usage: Usage) -> HiddenStates:
        """See `CompressionFunction`."""
        sums = self.runs(old.x).sum(2)
        counts = (
            self.rate
            if old.mask is None
            else self.runs(old.mask).sum(2, keepdim=True).clamp(min=1).to(sums.dtype)
        )
        return self.held(sums / counts, old)


class MaxPoolCompression(CompressionFunction):
    """The greatest of each number among the real states of a run."""

    def forward(self, old: HiddenStates, usage: Usage) -> HiddenStates:
        """See `CompressionFunction`."""
        x = old.x if old.mask is None else old.x.masked_fill(~old.mask[..., None], -torch.inf)
        most = self.runs(x).amax(2)
        return self.held(most.masked_fill(most == -torch.inf, 0), old)


class Conv1dCompression(CompressionFunction):
    """W [x_1 ; .. ; x_rate] + b: a convolution whose stride is its width."""

    def __init__(self, dim: int, rate: int) -> None:
        super().__init__(dim, rate)
        self.conv = nn.Conv1d(dim, dim, rate, stride=rate)

    def forward(self, old: HiddenStates, usage: Usage) -> HiddenStates:
        """See `CompressionFunction`."""
        return self.held(self.conv(old.x.transpose(1, 2)).transpose(1, 2), old)


class MostUsedCompression(CompressionFunction):
    """The states that the segment just ended looks at most, in their order: one in `rate` of all that are compressed."""

    def forward(self, old: HiddenStates, usage: Usage) -> HiddenStates:
        """See `CompressionFunction`."""
        best = usage().topk(old.x.shape[1] // self.rate).indices.sort().values
        mask = None if old.mask is None else old.mask.gather(1, best)
        return HiddenStates(old.x.gather(1, best[..., None].expand(-1, -1, self.dim)), mask)
