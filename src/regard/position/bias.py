"""Positions that stand in the scores: priors by learned biases, buckets and vectors of positions.  See `regard.prior`."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from regard.errors import check_int
from regard.position.frequencies import sinusoidal_encoding
from regard.prior import Prior

SPREAD = 0.02  # of the learned numbers before training


class DistanceBias(Prior):
    """B[clip(j − i)], a learned number for each head and each distance from −furthest to furthest; beyond, that of the end."""

    relative = True

    def __init__(self, heads: int, *, max_distance: int = 128) -> None:
        super().__init__()
        check_int(1, heads=heads, max_distance=max_distance)
        self.heads, self.max_distance = heads, max_distance
        self.table = nn.Parameter(torch.randn(heads, 2 * max_distance + 1) * SPREAD)

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """See `regard.prior`."""
        return self.table[
            :, (k_pos - q_pos).clamp(-self.max_distance, self.max_distance) + self.max_distance
        ]


class T5Bias(Prior):
    """B[bucket(j − i)], a learned number for each head and each bucket of distances (Raffel et al. 2020, arXiv 1910.10683).

    See `relative_position_bucket`.  T5 itself does not scale its scores: `SoftmaxAttention(prior=T5(8), scale=1.0)`.

    causal   all buckets are for the past; else half of them are for keys that come after the query
    """

    relative = True

    def __init__(
        self, heads: int, *, buckets: int = 32, max_distance: int = 128, causal: bool = False
    ) -> None:
        super().__init__()
        check_int(1, heads=heads)
        _check_buckets(buckets, max_distance, causal)
        self.heads, self.buckets, self.max_distance, self.causal = (
            heads,
            buckets,
            max_distance,
            causal,
        )
        self.table = nn.Parameter(torch.randn(heads, buckets) * SPREAD)

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """See `regard.prior`."""
        return self.table[
            :,
            relative_position_bucket(
                k_pos - q_pos, self.buckets, self.max_distance, causal=self.causal
            ),
        ]


def relative_position_bucket(
    gap: Tensor, buckets: int, max_distance: int, *, causal: bool
) -> Tensor:
    """The number of the bucket of each distance j − i.

    With c buckets for a direction, distances below c/2 have each their own; from there on bucket c/2 + ⌊(c − c/2) ·
    log(distance / (c/2)) / log(furthest / (c/2))⌋, and the last for all from `furthest` on.  Causal, keys that come later count
    as distance 0; else they have the second half of the buckets.
    """
    if causal:
        first, gap = torch.zeros_like(gap), -gap.clamp(max=0)
    else:
        buckets //= 2
        first, gap = (gap > 0) * buckets, gap.abs()
    exact = buckets // 2
    share = torch.log(gap.clamp(min=1).float() / exact) / math.log(
        max_distance / exact
    )  # in float32, as the authors do
    far = exact + (share * (buckets - exact)).long()
    return first + torch.where(gap < exact, gap, far.clamp(max=buckets - 1))


def _check_buckets(buckets: int, max_distance: int, causal: bool) -> None:
    check_int(2 if causal else 4, buckets=buckets)
    if not causal and buckets % 2:
        raise ValueError(
            f"half of the buckets are for each direction, so there must be an even number, not {buckets}"
        )
    check_int((buckets if causal else buckets // 2) // 2 + 1, max_distance=max_distance)


class ShawBias(Prior):
    """q_i · a[clip(j − i)] / √e, with a vector for each distance from −clip to clip, for all heads the same: the key side of
    Shaw et al. 2018 (arXiv 1803.02155).

    Their value side, Σ_j w_ij (v_j + b[clip(j − i)]), is left out: its second part does not depend on the values, so that no
    map times the values would be the output.
    """

    uses_qk = True

    def __init__(self, width: int, *, clip: int = 16) -> None:
        super().__init__()
        check_int(1, width=width)
        check_int(0, clip=clip)
        self.clip = clip
        self.vectors = nn.Parameter(torch.randn(2 * clip + 1, width) * SPREAD)

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """See `regard.prior`."""
        each = q @ self.vectors.to(q.dtype).T * q.shape[-1] ** -0.5
        return _taken(each, (k_pos - q_pos).clamp(-self.clip, self.clip) + self.clip)


class TransformerXLBias(Prior):
    """What Transformer-XL adds to q_i · k_j / √e: (u · k_j + (q_i + v) · W R[i − j]) / √e (Dai et al. 2019, arXiv 1901.02860).

    So the scores are ((q_i + u) · k_j + (q_i + v) · W R[i − j]) / √e.  R is the sinusoid, of `dim` numbers, of the distance,
    before and after; u and v (h e) and W (h e dim) are learned.
    """

    uses_qk = True

    def __init__(self, heads: int, width: int, dim: int) -> None:
        super().__init__()
        check_int(1, heads=heads, width=width, dim=dim)
        self.heads, self.dim = heads, dim
        self.u, self.v = (nn.Parameter(torch.randn(heads, width) * SPREAD) for _ in range(2))
        self.w = nn.Parameter(torch.randn(heads, width, dim) / dim**0.5)

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """See `regard.prior`."""
        gap = q_pos - k_pos
        least, most = (int(gap.min()), int(gap.max())) if gap.numel() else (0, 0)
        waves = sinusoidal_encoding(torch.arange(least, most + 1, device=gap.device), self.dim).to(
            q.dtype
        )
        places = torch.einsum("gd,hed->hge", waves, self.w.to(q.dtype))
        asks = q + self.v.to(q.dtype).view(len(self.v), *[1] * (q.dim() - 3), -1)
        by_place = _taken(torch.einsum("bh...e,hge->bh...g", asks, places), gap - least)
        by_key = torch.einsum("bh...e,he->bh...", k, self.u.to(q.dtype))
        return (by_place + by_key[..., None, :]) * q.shape[-1] ** -0.5


class TUPEBias(Prior):
    """(p_i U_Q) · (p_j U_K) / √(2e): positions that ask and answer by projections of their own, apart from the words, whose
    q_i · k_j is over √(2e) too (Ke et al. 2021, arXiv 2006.15595).

    first     the first token is a special one, [CLS], that has no place: as a key it has one learned number for all queries, as
              a query 0 for all keys.  There the paper learns a number too, but what is added to a whole row changes no softmax
    buckets   None: TUPE-A; a number: TUPE-R, which adds the biases of `T5Bias` with so many buckets
    """

    num_terms = 2

    def __init__(
        self,
        heads: int,
        dim: int,
        length: int,
        *,
        first: bool = True,
        buckets: int | None = None,
        max_distance: int = 128,
        causal: bool = False,
    ) -> None:
        super().__init__()
        check_int(1, heads=heads, dim=dim, length=length)
        if dim % heads:
            raise ValueError(f"dim must be divisible by heads, and {dim} is not by {heads}")
        self.heads, self.length = heads, length
        self.places = nn.Parameter(torch.randn(length, dim))
        self.q, self.k = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.to_first = nn.Parameter(torch.zeros(heads)) if first else None
        self.by_distance = (
            None
            if buckets is None
            else T5Bias(heads, buckets=buckets, max_distance=max_distance, causal=causal)
        )

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """See `regard.prior`."""
        ask, answer = (
            self._projected(self.q, q_pos[..., 0]),
            self._projected(self.k, k_pos[..., 0, :]),
        )
        scores = ask @ answer.transpose(-1, -2) * (self.num_terms * ask.shape[-1]) ** -0.5
        if self.by_distance is not None:
            scores = scores + self.by_distance(q_pos, k_pos, q, k)
        if self.to_first is None:
            return scores
        to_first = self.to_first.view(-1, *[1] * q_pos.dim())
        return torch.where(q_pos == 0, 0, torch.where(k_pos == 0, to_first, scores))

    def _projected(self, project: nn.Linear, at: Tensor) -> Tensor:
        """Places at (... s) -> (h ... s e): those asked for where they are few, as in a stream, else of the whole table."""
        few = at.numel() <= len(self.places)
        each = project(self.places[at]) if few else project(self.places)[at]
        return each.unflatten(-1, (self.heads or 1, -1)).movedim(-2, 0)


def _taken(each: Tensor, index: Tensor) -> Tensor:
    """each (b h ... s g), index (... s t) -> (b h ... s t)."""
    return each.gather(-1, index.expand(*each.shape[:-1], -1))
