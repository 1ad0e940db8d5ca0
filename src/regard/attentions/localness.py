"""Attention with a Gaussian whose centre and width each query predicts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.backends import attend
from regard.errors import check_choice, check_positive
from regard.mixer import Attention, Can, State
from regard.numerics import at_least_float32
from regard.prior import Prior

OF_THE_LENGTH = "centre and width are shares of the whole length, which the past does not know"
CENTRES, WINDOWS = ("token", "predicted"), ("query", "layer")


class LocalnessAttention(Attention):
    """softmax(q kᵀ / √e + G) v, G_ij = −(j − P_i)² / (2 σ_i²), σ_i = D_i / 2 (Yang et al. 2018, arXiv 1810.10182).

    centre   "predicted": P_i = f + n · sigmoid(u_p · tanh(W q_i)); "token": P_i = i
    window   "query": D_i = n · sigmoid(u_d · tanh(W q_i)); "layer": one for all, from the mean of the keys
    sigma    a number: σ for all, and no window is predicted

    n counts the real tokens, and f is where the first of them stands; W (e e) and the u (e) are each head's own.
    """

    no_rotary_reason = "it predicts places from its queries, and turned ones would predict others"

    def __init__(
        self,
        heads: int,
        width: int,
        *,
        centre: str = "predicted",
        window: str = "query",
        sigma: float | None = None,
    ) -> None:
        super().__init__()
        check_choice("centre", centre, CENTRES)
        check_choice("window", window, WINDOWS)
        if sigma is not None:
            check_positive("sigma", sigma)
        self.can = Can(
            cross="it compares positions, and those of two sequences are not comparable",
            causal=OF_THE_LENGTH,
            stream=OF_THE_LENGTH,
        )
        self.heads, self.sigma = heads, sigma

        def weights(*shape: int, wanted: bool = True) -> nn.Parameter | None:
            return nn.Parameter(torch.randn(heads, *shape) / width**0.5) if wanted else None

        layer = window == "layer" and sigma is None
        self.w = weights(
            width, width, wanted=centre == "predicted" or (sigma is None and not layer)
        )
        self.where = weights(width, wanted=centre == "predicted")
        self.wide = weights(width, wanted=sigma is None)
        self.w_keys = weights(width, width, wanted=layer)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        mask: Tensor | None = None,
        state: State = None,
    ) -> tuple[Tensor, State]:
        """See `Attention.forward`."""
        real = (
            torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device)
            if mask is None
            else mask
        )
        keys = k.masked_fill(~real[:, None, :, None], 0).sum(2)
        return attend(
            q, k, v, prior=_Located(self, real.sum(1), real.long().argmax(1), keys), mask=mask
        ), None


class _Located(Prior):
    """The Gaussian for one call: of examples with n (b) real tokens from `first` (b) on, whose keys sum to `count_keys` (b h e)."""

    by: LocalnessAttention
    uses_qk = True

    def __init__(self, by: LocalnessAttention, n: Tensor, first: Tensor, keys: Tensor) -> None:
        super().__init__()
        object.__setattr__(self, "by", by)  # not a part of this one
        self.n, self.first, self.keys, self.heads = n, first, keys, by.heads

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """See `regard.prior`."""
        q = at_least_float32(q)
        flat = (-1, *[1] * (q.dim() - 1))  # beside q (b h ... s e)
        n, first = self.n.to(q.dtype).view(flat), self.first.view(flat)
        hidden = None if self.by.w is None else _by_head(q, self.by.w.to(q.dtype)).tanh()
        centre = q_pos
        if hidden is not None and self.by.where is not None:
            centre = first + n * _dot(hidden, self.by.where.to(q.dtype)).sigmoid()
        return -((k_pos - centre) ** 2) / (2 * self._sigma(hidden, n) ** 2)

    def _sigma(self, hidden: Tensor | None, n: Tensor) -> Tensor | float:
        """The width: given, of each query, or of the mean of the keys."""
        if self.by.wide is None:
            return self.by.sigma or 0.0
        if self.by.w_keys is not None:
            mean = at_least_float32(self.keys) / self.n.clamp(min=1).view(-1, 1, 1)
            of = _by_head(mean, self.by.w_keys.to(mean.dtype)).tanh()
            share = (
                _dot(of, self.by.wide.to(of.dtype))
                .sigmoid()
                .view(*mean.shape[:2], *[1] * (n.dim() - 2))
            )
        else:
            assert hidden is not None
            share = _dot(hidden, self.by.wide.to(hidden.dtype)).sigmoid()
        return (n * share / 2).clamp(min=1e-3)


def _by_head(x: Tensor, w: Tensor) -> Tensor:
    """x (b h ... e), w (h e f) -> (b h ... f)."""
    return torch.einsum("bh...e,hef->bh...f", x, w)


def _dot(x: Tensor, u: Tensor) -> Tensor:
    """x (b h ... e), u (h e) -> (b h ... 1)."""
    return torch.einsum("bh...e,he->bh...", x, u)[..., None]
