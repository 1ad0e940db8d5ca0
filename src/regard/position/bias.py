"""Position biases of the attention scores. See `regard.prior`."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from regard.errors import check_int
from regard.position.frequencies import sinusoidal_encoding
from regard.prior import Prior

INIT_STD = 0.02


class DistanceBias(Prior):
    """B[clip(j − i)]: a learned bias for each head and each distance from −max_distance to
    max_distance."""

    relative = True

    def __init__(self, heads: int, *, max_distance: int = 128) -> None:
        super().__init__()
        check_int(1, heads=heads, max_distance=max_distance)
        self.heads, self.max_distance = heads, max_distance
        self.table = nn.Parameter(torch.randn(heads, 2 * max_distance + 1) * INIT_STD)

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """See `regard.prior`."""
        return self.table[:, _clip_distance(k_pos - q_pos, self.max_distance)]


class T5Bias(Prior):
    """B[bucket(j − i)]: a learned bias for each head and bucket of distances
    (Raffel et al. 2020, arXiv 1910.10683).

    See `relative_position_bucket`. T5 does not scale its scores:
    `SoftmaxAttention(prior=T5Bias(8), scale=1.0)`.

    Args:
        heads: Number of heads.
        buckets: Number of buckets.
        max_distance: Distances from here on share the last bucket.
        causal: Whether all buckets are for the past. Otherwise half of them are for later keys.
    """

    relative = True

    def __init__(
        self, heads: int, *, buckets: int = 32, max_distance: int = 128, causal: bool = False
    ) -> None:
        super().__init__()
        check_int(1, heads=heads)
        check_int(2 if causal else 4, buckets=buckets)
        if not causal and buckets % 2:
            raise ValueError(f"buckets must be even, half for each direction, not {buckets}")
        check_int((buckets if causal else buckets // 2) // 2 + 1, max_distance=max_distance)
        self.heads, self.buckets, self.max_distance = heads, buckets, max_distance
        self.causal = causal
        self.table = nn.Parameter(torch.randn(heads, buckets) * INIT_STD)

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """See `regard.prior`."""
        bucket = relative_position_bucket(
            k_pos - q_pos, self.buckets, self.max_distance, causal=self.causal
        )
        return self.table[:, bucket]


def relative_position_bucket(
    distance: Tensor, buckets: int, max_distance: int, *, causal: bool
) -> Tensor:
    """Bucket of each distance j − i.

    With c buckets for a direction, distances below c/2 have a bucket each. Larger ones have bucket
    c/2 + ⌊(c − c/2) · log(distance / (c/2)) / log(max_distance / (c/2))⌋, at most the last. If
    causal, later keys count as distance 0; otherwise they have the second half of the buckets.
    """
    if causal:
        first, distance = torch.zeros_like(distance), -distance.clamp(max=0)
    else:
        buckets //= 2
        first, distance = (distance > 0) * buckets, distance.abs()
    exact = buckets // 2
    ratio = torch.log(distance.clamp(min=1).float() / exact)  # in float32, as the authors do
    far = exact + (ratio / math.log(max_distance / exact) * (buckets - exact)).long()
    return first + torch.where(distance < exact, distance, far.clamp(max=buckets - 1))


class ShawBias(Prior):
    """q_i · a[clip(j − i)] / √e, with a learned vector for each distance from −clip to clip, shared
    by all heads (Shaw et al. 2018, arXiv 1803.02155).

    Only the key side of the paper. The value side, Σ_j w_ij b[clip(j − i)], does not depend on the
    values, so the output would not be the attention map times the values.
    """

    uses_qk = True

    def __init__(self, width: int, *, clip: int = 16) -> None:
        super().__init__()
        check_int(1, width=width)
        check_int(0, clip=clip)
        self.clip = clip
        self.vectors = nn.Parameter(torch.randn(2 * clip + 1, width) * INIT_STD)

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """See `regard.prior`."""
        scores = q @ self.vectors.to(q.dtype).T * q.shape[-1] ** -0.5
        return _select(scores, _clip_distance(k_pos - q_pos, self.clip))


class TransformerXLBias(Prior):
    """(u · k_j + (q_i + v) · W R[i − j]) / √e (Transformer-XL: Dai et al. 2019, arXiv 1901.02860).

    Added to q_i · k_j / √e it gives the scores ((q_i + u) · k_j + (q_i + v) · W R[i − j]) / √e. R
    is the sinusoidal encoding of the distance, of width `dim`; u and v (h e) and W (h e dim) are
    learned.
    """

    uses_qk = True

    def __init__(self, heads: int, width: int, dim: int) -> None:
        super().__init__()
        check_int(1, heads=heads, width=width, dim=dim)
        self.heads, self.dim = heads, dim
        self.u = nn.Parameter(torch.randn(heads, width) * INIT_STD)
        self.v = nn.Parameter(torch.randn(heads, width) * INIT_STD)
        self.w = nn.Parameter(torch.randn(heads, width, dim) / dim**0.5)

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """See `regard.prior`."""
        u, v, w = (x.to(q.dtype) for x in (self.u, self.v, self.w))
        distance = q_pos - k_pos
        least, most = (int(distance.min()), int(distance.max())) if distance.numel() else (0, 0)
        distances = torch.arange(least, most + 1, device=distance.device)
        encoding = sinusoidal_encoding(distances, self.dim).to(q.dtype)
        keys = torch.einsum("gd,hed->hge", encoding, w)
        queries = q + v.view(len(v), *[1] * (q.dim() - 3), -1)
        scores = torch.einsum("bh...e,hge->bh...g", queries, keys)
        # query heads that share a head of keys (grouped-query attention) have their own u
        content = torch.einsum("bk...e,kge->bkg...", k, u.unflatten(0, (k.shape[1], -1)))
        content = content.flatten(1, 2)
        return (_select(scores, distance - least) + content[..., None, :]) * q.shape[-1] ** -0.5


class TUPEBias(Prior):
    """(p_i U_Q) · (p_j U_K) / √(2e): positions with their own projections
    (TUPE: Ke et al. 2021, arXiv 2006.15595).

    q_i · k_j is divided by √(2e) as well.

    Args:
        heads: Number of heads.
        dim: Model width.
        length: Number of positions.
        first: Whether the first token is a special one, [CLS], without a position. As a key it has
            one learned bias for all queries, as a query 0 for all keys. (The paper learns a number
            there too, but adding it to a whole row does not change the softmax.)
        buckets: None for TUPE-A. A number for TUPE-R, which adds `T5Bias` with that many buckets.
        max_distance: See `T5Bias`.
        causal: See `T5Bias`.
    """

    num_terms = 2
    heads: int

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
            raise ValueError(f"dim={dim} must be divisible by heads={heads}")
        self.heads, self.length = heads, length
        self.positions = nn.Parameter(torch.randn(length, dim))
        self.q, self.k = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.to_first = nn.Parameter(torch.zeros(heads)) if first else None
        self.t5: T5Bias | None = None
        if buckets is not None:
            self.t5 = T5Bias(heads, buckets=buckets, max_distance=max_distance, causal=causal)

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """See `regard.prior`."""
        query, key = self._project(self.q, q_pos[..., 0]), self._project(self.k, k_pos[..., 0, :])
        scores = query @ key.mT * (self.num_terms * query.shape[-1]) ** -0.5
        if self.t5 is not None:
            scores = scores + self.t5(q_pos, k_pos, q, k)
        if self.to_first is None:
            return scores
        to_first = self.to_first.view(-1, *[1] * q_pos.dim())
        return torch.where(q_pos == 0, 0, torch.where(k_pos == 0, to_first, scores))

    def _project(self, linear: nn.Linear, positions: Tensor) -> Tensor:
        """positions (... s) -> (h ... s e): of these positions if they are few, else of the whole
        table."""
        if positions.numel() <= len(self.positions):
            projected = linear(self.positions[positions])
        else:
            projected = linear(self.positions)[positions]
        return projected.unflatten(-1, (self.heads, -1)).movedim(-2, 0)


class WindowBias(Prior):
    """B[y_i − y_j, x_i − x_j] for each head, inside windows of an image in raster order
    (Liu et al. 2021, arXiv 2103.14030; neighbourhoods: Hassani et al. 2023, arXiv 2204.07143).

    Args:
        heads: Number of heads.
        width: Columns of the image.
        rows: Rows of a window.
        cols: Columns of a window.
    """

    def __init__(self, heads: int, width: int, rows: int, cols: int) -> None:
        super().__init__()
        check_int(1, heads=heads, width=width, rows=rows, cols=cols)
        self.heads, self.width = heads, width
        self.table = nn.Parameter(torch.randn(heads, 2 * rows - 1, 2 * cols - 1) * INIT_STD)

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """See `regard.prior`."""
        rows, cols = self.table.shape[1:]
        y = q_pos // self.width - k_pos // self.width + rows // 2
        x = q_pos % self.width - k_pos % self.width + cols // 2
        return self.table[
            :, y.clamp(0, rows - 1), x.clamp(0, cols - 1)
        ]  # other pairs are not visible


class RelativeLabels(Prior):
    """q_i · a_l(i,j) / √e, with a learned vector for each head and label of a pair (Shaw et al.
    2018, arXiv 1803.02155; for global and long tokens: Ainslie et al. 2020, arXiv 2004.08483).

    The first `globals` tokens are global, the others long. Pairs of the same kind are labelled by
    j − i, clipped to −clip .. clip. Pairs of different kinds have one label, or two with `segment`.

    Args:
        heads: Number of heads.
        width: Head width e.
        globals: Number of global tokens.
        clip: Largest distance with a label.
        segment: Number of long tokens that belong to each global one, in order. Pairs of different
            kinds then have one label if they belong together, and another if not.
    """

    uses_qk = True

    def __init__(
        self, heads: int, width: int, *, globals: int, clip: int, segment: int | None = None
    ) -> None:
        super().__init__()
        check_int(1, heads=heads, width=width)
        check_int(0, globals=globals, clip=clip)
        if segment is not None:
            check_int(1, segment=segment)
        self.heads, self.globals, self.clip, self.segment = heads, globals, clip, segment
        labels = 2 * clip + 1 + (1 if segment is None else 2)
        self.vectors = nn.Parameter(torch.randn(heads, labels, width) * INIT_STD)

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """See `regard.prior`."""
        scores = torch.einsum("bh...e,hle->bh...l", q, self.vectors) * q.shape[-1] ** -0.5
        return _select(scores, self.label(q_pos, k_pos))

    def label(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """Label of each pair."""
        same = _clip_distance(k_pos - q_pos, self.clip)
        across = torch.full_like(same, 2 * self.clip + 1)
        if self.segment is not None:
            first, last = torch.minimum(q_pos, k_pos), torch.maximum(q_pos, k_pos)
            across = across + ((last - self.globals) // self.segment != first)
        return torch.where((q_pos < self.globals) == (k_pos < self.globals), same, across)


def _clip_distance(distance: Tensor, largest: int) -> Tensor:
    """Index 0 .. 2 largest of each distance, clipped to −largest .. largest."""
    return distance.clamp(-largest, largest) + largest


def _select(scores: Tensor, index: Tensor) -> Tensor:
    """scores (b h ... s g), index (... s t) -> (b h ... s t)."""
    return scores.gather(-1, index.expand(*scores.shape[:-1], -1))
