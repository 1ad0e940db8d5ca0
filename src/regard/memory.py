"""Shorter memories: keys and values (b h m e) become fewer, before they are attended to."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from regard.errors import check_whole
from regard.mixer import Can


class Memory(nn.Module, ABC):
    """(k, v, mask) -> (k', v', mask'), with fewer keys."""

    can: Can = Can()
    length: int | None = None

    @abstractmethod
    def forward(self, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]: ...


class Projected(Memory):
    """k' = E k, v' = F v, with E and F (rank length) learned (Wang et al. 2020, arXiv 2006.04768).

    A shorter sequence uses the first columns of E and F, which is the same as filling it up with zeros; left-out tokens
    are such zeros.

    share   "none": E and F for each head; "heads": one E and one F for all; "kv": one matrix for both
    """

    def __init__(self, length: int, rank: int, heads: int, *, share: str = "heads") -> None:
        super().__init__()
        if share not in ("none", "heads", "kv"):
            raise ValueError(f"share must be 'none', 'heads' or 'kv', not {share!r}")
        check_whole(1, length=length, rank=rank, heads=heads)
        if rank > length:
            raise ValueError(f"rank must be between 1 and length, {length}, not {rank}")
        self.length = length
        mixed = "the projection mixes all positions"
        self.can = Can(causal=mixed, stream=mixed, length=f"its projections were built for {length} positions")
        shape = (heads if share == "none" else 1, rank, length)
        self.e = nn.Parameter(torch.randn(shape) / length**0.5)
        self.f = self.e if share == "kv" else nn.Parameter(torch.randn(shape) / length**0.5)

    def forward(self, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """(b h m e) -> (b h rank e), with no mask left: everything is in every row."""
        if mask is not None:
            k, v = (x.masked_fill(~mask[:, None, :, None], 0) for x in (k, v))
        m = k.shape[2]
        return self.e[..., :m] @ k, self.f[..., :m] @ v, None
