"""Shorter memories: keys and values (b h m e) become fewer, before they are attended to."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import check_int
from regard.mixer import Can
from regard.numerics import slice_dim, token_matmul


class KVCompression(nn.Module, ABC):
    """(k, v, mask) -> (k', v', mask'), with fewer keys."""

    can: Can = Can()
    length: int | None = None

    @abstractmethod
    def forward(
        self, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]: ...


class LengthProjection(KVCompression):
    """k' = E k, v' = F v, with E and F (rank length) learned (Wang et al. 2020, arXiv 2006.04768).

    A shorter sequence uses the first columns of E and F, which is the same as filling it up with zeros; left-out tokens
    are such zeros.

    share   "none": E and F for each head; "heads": one E and one F for all; "kv": one matrix for both
    """

    def __init__(self, length: int, rank: int, heads: int, *, share: str = "heads") -> None:
        super().__init__()
        if share not in ("none", "heads", "kv"):
            raise ValueError(f"share must be 'none', 'heads' or 'kv', not {share!r}")
        check_int(1, length=length, rank=rank, heads=heads)
        if rank > length:
            raise ValueError(f"rank must be between 1 and length, {length}, not {rank}")
        self.length, self.rank, self.share = length, rank, share
        mixed = "the projection mixes all positions"
        self.can = Can(
            causal=mixed, stream=mixed, length=f"its projections were built for {length} positions"
        )
        shape = (heads if share == "none" else 1, rank, length)
        self.e = nn.Parameter(torch.randn(shape) / length**0.5)
        self.f = self.e if share == "kv" else nn.Parameter(torch.randn(shape) / length**0.5)

    def forward(
        self, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(b h m e) -> (b h rank e), with no mask left: everything is in every row."""
        if mask is not None:
            k, v = (x.masked_fill(~mask[:, None, :, None], 0) for x in (k, v))
        return self._shorter(self.e, k), self._shorter(self.f, v), None

    def _shorter(self, weight: Tensor, x: Tensor) -> Tensor:
        weight = slice_dim(weight, 2, 0, x.shape[2])
        if self.share == "none":
            return weight @ x
        return (
            token_matmul(weight.squeeze(0), x.transpose(1, 2).flatten(2))
            .unflatten(2, (x.shape[1], -1))
            .transpose(1, 2)
        )


class BlockCompression(KVCompression):
    """One key and one value for each `kernel` tokens in a row, every `stride` tokens: block j begins at token j stride.

    The last blocks may reach beyond the end, where there is nothing.  A block without a real token is left out; other
    left-out tokens come in as zeros.
    """

    def __init__(self, kernel: int, stride: int) -> None:
        super().__init__()
        check_int(1, stride=stride)
        check_int(stride, kernel=kernel)  # a smaller one would leave tokens out
        self.kernel, self.stride = kernel, stride

    def forward(
        self, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(b h m e) -> (b h blocks e); mask (b m) -> (b blocks)."""
        real = k.new_ones(k.shape[0], k.shape[2], dtype=torch.bool) if mask is None else mask
        k, v = (
            (x.masked_fill(~real[:, None, :, None], 0) for x in (k, v))
            if mask is not None
            else (k, v)
        )
        beyond = self.beyond(k.shape[2])
        real = F.pad(real, (0, beyond))
        k, v = (F.pad(x, (0, 0, 0, beyond)) for x in (k, v))
        inside = real.unfold(1, self.kernel, self.stride)
        return *self.shorten(k, v, inside), None if mask is None else inside.any(-1)

    def beyond(self, m: int) -> int:
        """How far the last block reaches beyond m tokens."""
        return (m - 1) // self.stride * self.stride + self.kernel - m

    @abstractmethod
    def shorten(self, k: Tensor, v: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
        """k and v (b h m e) of whole blocks -> (b h blocks e); inside (b blocks kernel): which of their tokens are real."""


class ConvCompression(BlockCompression):
    """A convolution with kernel = stride over keys, and one over values, for each head (Liu et al. 2018, arXiv 1801.10198)."""

    can = Can(
        maps="the convolution mixes the widths of the values, so that no single number tells what a token gives"
    )

    def __init__(self, dim: int, heads: int, stride: int) -> None:
        super().__init__(stride, stride)
        # a bias on all keys alike would change no softmax
        self.k, self.v = (
            nn.Conv1d(dim, dim, stride, stride=stride, groups=heads, bias=bias)
            for bias in (False, True)
        )

    def shorten(self, k: Tensor, v: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
        """See `Blocks.shorten`."""
        k, v = (
            f(x.transpose(2, 3).flatten(1, 2)).unflatten(1, k.shape[1::2])
            for f, x in ((self.k, k), (self.v, v))
        )
        return k.transpose(2, 3).contiguous(), v.transpose(
            2, 3
        ).contiguous()  # fused attention is slow on other strides


class MeanCompression(BlockCompression):
    """The mean of the real tokens of each block."""

    def shorten(self, k: Tensor, v: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
        """See `Blocks.shorten`."""
        count = inside.sum(-1).clamp(min=1)[:, None, :, None].to(k.dtype)
        return self._sums(k) / count, self._sums(v) / count

    def _sums(self, x: Tensor) -> Tensor:
        return x.unfold(2, self.kernel, self.stride).sum(-1)
