"""Key/value compression: fewer keys and values (b h m e) to attend to."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import check_choice, check_int
from regard.mixer import Can
from regard.numerics import slice_dim, token_matmul

COMPRESSED_KEYS = "a compressed key stands for several tokens"


class KVCompression(nn.Module, ABC):
    """Base class: maps (k, v, mask) to fewer (k', v', mask')."""

    can: Can = Can(attn_mask=COMPRESSED_KEYS)
    length: int | None = None

    @abstractmethod
    def forward(
        self, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]: ...


class LengthProjection(KVCompression):
    """k' = E k, v' = F v, with learned E and F (rank length)
    (Linformer: Wang et al. 2020, arXiv 2006.04768).

    A shorter sequence uses the first columns of E and F, as if it were padded with zeros. Masked
    tokens are zeros too.

    Args:
        length: Maximum sequence length.
        rank: Number of compressed keys.
        heads: Number of heads.
        share: "none": E and F for each head. "heads": one E and one F for all heads. "kv": one
            matrix for both. "layers": the same, for all layers that take this module.
    """

    def __init__(self, length: int, rank: int, heads: int, *, share: str = "heads") -> None:
        super().__init__()
        check_choice("share", share, ("none", "heads", "kv", "layers"))
        check_int(1, length=length, rank=rank, heads=heads)
        if rank > length:
            raise ValueError(f"rank must be between 1 and length={length}, not {rank}")
        self.length, self.rank, self.share = length, rank, share
        reason = "its length projection mixes all positions"
        limit = f"its projection was built for {length} positions"
        self.can = Can(causal=reason, stream=reason, length=limit, attn_mask=COMPRESSED_KEYS)
        shape = (heads if share == "none" else 1, rank, length)
        self.e = nn.Parameter(torch.randn(shape) / length**0.5)
        own_f = share in ("none", "heads")
        self.f = nn.Parameter(torch.randn(shape) / length**0.5) if own_f else self.e

    def forward(
        self, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(b h m e) -> (b h rank e). No mask is left, since every row has all positions."""
        if mask is not None:
            k, v = (x.masked_fill(~mask[:, None, :, None], 0) for x in (k, v))
        return self._project(self.e, k), self._project(self.f, v), None

    def _project(self, weight: Tensor, x: Tensor) -> Tensor:
        weight = slice_dim(weight, 2, 0, x.shape[2])
        if self.share == "none":
            return weight @ x
        y = token_matmul(weight.squeeze(0), x.transpose(1, 2).flatten(2))
        return y.unflatten(2, (x.shape[1], -1)).transpose(1, 2)


class BlockCompression(KVCompression):
    """One key and one value for each block of `kernel` tokens; block j starts at token j · stride.

    The last blocks may reach beyond the end, where the tokens are zero. Masked tokens are zero too,
    and blocks without a real token are masked.
    """

    def __init__(self, kernel: int, stride: int) -> None:
        super().__init__()
        check_int(1, stride=stride)
        check_int(stride, kernel=kernel)  # a smaller kernel would skip tokens
        self.kernel, self.stride = kernel, stride

    def forward(
        self, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(b h m e) -> (b h blocks e); mask (b m) -> (b blocks)."""
        m = k.shape[2]
        if mask is not None:
            k, v = (x.masked_fill(~mask[:, None, :, None], 0) for x in (k, v))
        real = k.new_ones(k.shape[0], m, dtype=torch.bool) if mask is None else mask
        padding = (m - 1) // self.stride * self.stride + self.kernel - m
        k, v = (F.pad(x, (0, 0, 0, padding)) for x in (k, v))
        real = F.pad(real, (0, padding)).unfold(1, self.kernel, self.stride)
        return *self.compress(k, v, real), None if mask is None else real.any(-1)

    @abstractmethod
    def compress(self, k: Tensor, v: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """Compress complete blocks.

        Args:
            k: Keys (b h m e).
            v: Values (b h m f).
            real: Which tokens of each block are real (b blocks kernel).

        Returns:
            Keys (b h blocks e) and values (b h blocks f).
        """


class ConvCompression(BlockCompression):
    """A convolution with kernel = stride over the keys, and one over the values, for each head
    (Liu et al. 2018, arXiv 1801.10198)."""

    can = Can(maps="its convolution mixes the channels of the values", attn_mask=COMPRESSED_KEYS)

    def __init__(self, dim: int, heads: int, stride: int) -> None:
        super().__init__(stride, stride)
        # a bias shared by all keys would not change the softmax
        self.k = nn.Conv1d(dim, dim, stride, stride=stride, groups=heads, bias=False)
        self.v = nn.Conv1d(dim, dim, stride, stride=stride, groups=heads)

    def compress(self, k: Tensor, v: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """See `BlockCompression.compress`."""
        k = self.k(k.transpose(2, 3).flatten(1, 2)).unflatten(1, (k.shape[1], -1))
        v = self.v(v.transpose(2, 3).flatten(1, 2)).unflatten(1, (v.shape[1], -1))
        # fused attention is slow on other strides
        return k.transpose(2, 3).contiguous(), v.transpose(2, 3).contiguous()


class MeanCompression(BlockCompression):
    """The mean of the real tokens of each block."""

    def compress(self, k: Tensor, v: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """See `BlockCompression.compress`."""
        count = real.sum(-1).clamp(min=1)[:, None, :, None].to(k.dtype)
        k, v = (x.unfold(2, self.kernel, self.stride).sum(-1) / count for x in (k, v))
        return k, v
