"""Attention with a Gaussian whose centre and width each query predicts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.attend import attend
from regard.mixer import Attention, Can, State
from regard.prior import Prior

OF_THE_LENGTH = "centre and width are shares of the whole length, which the past does not know"
CENTRES, WINDOWS = ("token", "predicted"), ("query", "layer")


class LocatedAttention(Attention):
    """softmax(q kᵀ / √e + G) v, G_ij = −(j − P_i)² / (2 σ_i²), σ_i = D_i / 2 (Yang et al. 2018, arXiv 1810.10182).

    centre   "predicted": P_i = n · sigmoid(u_p · tanh(W q_i)); "token": P_i = i
    window   "query": D_i = n · sigmoid(u_d · tanh(W q_i)); "layer": one for all, from the mean of the keys

    n counts the real tokens; W (e e) and the u (e) are each head's own.
    """

    def __init__(self, heads: int, width: int, *, centre: str = "predicted", window: str = "query") -> None:
        super().__init__()
        for name, value, known in (("centre", centre, CENTRES), ("window", window, WINDOWS)):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, not {value!r}")
        self.can = Can(
            cross="it compares positions, and those of two sequences are not comparable",
            causal=OF_THE_LENGTH, stream=OF_THE_LENGTH,
        )  # fmt: skip
        self.heads, self.centre, self.window = heads, centre, window
        self.w = nn.Parameter(torch.randn(heads, width, width) / width**0.5)
        self.wide = nn.Parameter(torch.randn(heads, width) / width**0.5)
        self.where = nn.Parameter(torch.randn(heads, width) / width**0.5) if centre == "predicted" else None
        self.w_keys = nn.Parameter(torch.randn(heads, width, width) / width**0.5) if window == "layer" else None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Tensor | None = None, state: State = None
    ) -> tuple[Tensor, State]:
        """See `Attention.attend`."""
        n = q.new_full((q.shape[0],), k.shape[2]) if mask is None else mask.sum(1).to(q.dtype)
        return attend(q, k, v, prior=_Located(self, n, k.sum(2) if mask is None else _total(k, mask)), mask=mask), None


def _total(k: Tensor, mask: Tensor) -> Tensor:
    return k.masked_fill(~mask[:, None, :, None], 0).sum(2)


class _Located(Prior):
    """The Gaussian for one call: of examples with n (b) real tokens, whose keys sum up to `keys` (b h e)."""

    by: LocatedAttention

    def __init__(self, by: LocatedAttention, n: Tensor, keys: Tensor) -> None:
        super().__init__()
        object.__setattr__(self, "by", by)  # not a part of this one
        self.n, self.keys, self.heads = n, keys, by.heads

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """See `regard.prior`."""
        by, n = self.by, self.n.view(-1, *[1] * (q.dim() - 1))  # q (b h ... s e)
        hidden = _by_head(q, by.w).tanh()
        centre = q_pos if by.where is None else n * _dot(hidden, by.where).sigmoid()
        if by.w_keys is None:
            wide = _dot(hidden, by.wide).sigmoid()
        else:
            mean = self.keys / self.n.clamp(min=1).view(-1, 1, 1)
            wide = _dot(_by_head(mean, by.w_keys).tanh(), by.wide).sigmoid().view(*mean.shape[:2], *[1] * (q.dim() - 2))
        sigma = (n * wide / 2).clamp(min=1e-3)
        return -((k_pos - centre) ** 2) / (2 * sigma**2)


def _by_head(x: Tensor, w: Tensor) -> Tensor:
    """x (b h ... e), w (h e f) -> (b h ... f)."""
    return torch.einsum("bh...e,hef->bh...f", x, w)


def _dot(x: Tensor, u: Tensor) -> Tensor:
    """x (b h ... e), u (h e) -> (b h ... 1)."""
    return torch.einsum("bh...e,he->bh...", x, u)[..., None]
