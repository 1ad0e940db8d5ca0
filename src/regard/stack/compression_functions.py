"""Compression functions of the Compressive Transformer: groups of hidden states become one each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from regard.errors import check_int
from regard.stack.memory_attention import HiddenStates


class CompressionFunction(nn.Module, ABC):
    """Compresses each group of `rate` hidden states to one: (b, t, d) -> (b, t / rate, d)."""

    def __init__(self, dim: int, rate: int) -> None:
        super().__init__()
        check_int(1, dim=dim, rate=rate)
        self.dim, self.rate = dim, rate

    @abstractmethod
    def forward(self, old: HiddenStates, usage: Callable[[], Tensor]) -> HiddenStates:
        """Compress states (b, t, d), where t is a multiple of `rate` and padding is zero.

        Args:
            usage: Returns how much attention each state receives, (b, t).

        Returns:
            Compressed states. Groups of padding only are padding.
        """

    def group(self, x: Tensor) -> Tensor:
        """Split into groups: (b, t, ...) -> (b, t / rate, rate, ...)."""
        return x.unflatten(1, (-1, self.rate))

    def with_group_mask(self, x: Tensor, old: HiddenStates) -> HiddenStates:
        """Compressed states x, where groups with a real state are real."""
        return HiddenStates(x, None if old.mask is None else self.group(old.mask).any(2))


class MeanPoolCompression(CompressionFunction):
    """Mean of the real states of a group."""

    def forward(self, old: HiddenStates, usage: Callable[[], Tensor]) -> HiddenStates:
        """See `CompressionFunction`."""
        total = self.group(old.x).sum(2)
        if old.mask is None:
            return HiddenStates(total / self.rate)
        count = self.group(old.mask).sum(2, keepdim=True).clamp(min=1).to(total.dtype)
        return self.with_group_mask(total / count, old)


class MaxPoolCompression(CompressionFunction):
    """Maximum of each channel over the real states of a group."""

    def forward(self, old: HiddenStates, usage: Callable[[], Tensor]) -> HiddenStates:
        """See `CompressionFunction`."""
        x = old.x if old.mask is None else old.x.masked_fill(~old.mask[..., None], -torch.inf)
        largest = self.group(x).amax(2)
        return self.with_group_mask(largest.masked_fill(largest == -torch.inf, 0), old)


class Conv1dCompression(CompressionFunction):
    """1D convolution with kernel size and stride `rate`."""

    def __init__(self, dim: int, rate: int) -> None:
        super().__init__(dim, rate)
        self.conv = nn.Conv1d(dim, dim, rate, stride=rate)

    def forward(self, old: HiddenStates, usage: Callable[[], Tensor]) -> HiddenStates:
        """See `CompressionFunction`."""
        return self.with_group_mask(self.conv(old.x.transpose(1, 2)).transpose(1, 2), old)


class MostUsedCompression(CompressionFunction):
    """Keeps the t / rate states with the most attention from the last segment, in their order."""

    def forward(self, old: HiddenStates, usage: Callable[[], Tensor]) -> HiddenStates:
        """See `CompressionFunction`."""
        best = usage().topk(old.x.shape[1] // self.rate).indices.sort().values
        mask = None if old.mask is None else old.mask.gather(1, best)
        return HiddenStates(old.x.gather(1, best[..., None].expand(-1, -1, self.dim)), mask)
