"""Clusters of tokens around centroids that follow them."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from regard.auxiliary import record_aux
from regard.backends.token_groups import TokenGroups
from regard.errors import check_int
from regard.mixer import Can
from regard.route.base import Route

SIMILARITY_STEPS = 1 << 16  # similarities are compared in these steps: they round differently


class KMeans(Route):
    """Each centroid takes its w nearest queries and w nearest keys, w = ⌈n / clusters⌉ of n real
    tokens (Roy et al. 2020, arXiv 2003.05997).

    Similarity is that of the cosine; of equally near tokens, the first are taken. The centroids
    (h clusters e) have unit length and follow the tokens during training:
    μ ← unit(decay μ + (1 − decay) unit(Σ x)) over the queries and keys x that are nearest to μ, in
    all processes. Records the statistics "cluster_load" and "in_no_cluster".

    Args:
        heads: Number of heads.
        width: Head width e.
        clusters: Number of clusters.
        decay: Decay of the moving average.
        shared: Whether queries and keys are the same vectors and form the same groups.
        seed: Seed of the initial centroids.
    """

    centroids: Tensor
    can = Can(
        causal="a cluster takes its nearest tokens of all, so later tokens displace earlier ones",
        stream="a cluster takes its nearest tokens out of all",
        cross="the queries and keys of a cluster are taken from one sequence",
    )

    def __init__(
        self,
        heads: int,
        width: int,
        *,
        clusters: int,
        decay: float = 0.999,
        shared: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_int(1, clusters=clusters)
        check_int(0, seed=seed)
        number = isinstance(decay, int | float) and not isinstance(decay, bool)
        if not number or not 0 <= decay <= 1:
            raise ValueError(f"decay must be a number between 0 and 1, not {decay!r}")
        self.heads, self.clusters, self.decay, self.shared = heads, clusters, float(decay), shared
        generator = torch.Generator().manual_seed(seed)
        centroids = torch.randn(heads, clusters, width, generator=generator)
        self.register_buffer("centroids", F.normalize(centroids, dim=-1))

    @torch.no_grad()
    def forward(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Sequence[TokenGroups]:
        """One group per cluster."""
        b, h, n, _ = q.shape
        real = q.new_ones(b, n, dtype=torch.bool) if mask is None else mask
        dtype = torch.promote_types(q.dtype, torch.float32)
        units = [F.normalize(x.to(dtype), dim=-1) for x in ((q,) if self.shared else (q, k))]
        similarities = [self.centroids.to(dtype) @ unit.mT for unit in units]  # (b h clusters n)
        taken = [self._take_nearest(similarity, real) for similarity in similarities]

        def load() -> Tensor:
            """Fraction of all queries and keys that are nearest to each cluster (h clusters)."""
            members = [_members(similarity, real) for similarity in similarities]
            counts = torch.stack([m.sum((0, 3)) for m in members]).sum(0)
            return counts / counts.sum(-1, keepdim=True).clamp(min=1)

        def in_no_cluster() -> Tensor:
            """Fraction of queries that no cluster took."""
            index = torch.where(taken[0] < 0, n, taken[0]).flatten(2)
            in_some = index.new_zeros(b, h, n + 1).scatter(2, index, 1)[..., :n] > 0
            return (~in_some & real[:, None]).sum() / (h * real.sum()).clamp(min=1)

        record_aux("cluster_load", load)
        record_aux("in_no_cluster", in_no_cluster)
        if self.training:
            members = [_members(similarity, real).to(dtype) for similarity in similarities]
            self._move_centroids(units, members)
        return [TokenGroups(taken[0], taken[-1])]

    def _take_nearest(self, similarity: Tensor, real: Tensor) -> Tensor:
        """Indices of the tokens that each cluster takes (b h clusters w); -1 if an example has
        fewer."""
        n = similarity.shape[-1]
        most = ceil(n / self.clusters)
        # `topk` breaks ties by the length. Equal tokens get equal numbers, then the first wins.
        closeness = (similarity * SIMILARITY_STEPS).round().long()
        order = closeness * n - torch.arange(n, device=similarity.device)
        lowest = torch.iinfo(order.dtype).min
        index = order.masked_fill(~real[:, None, None], lowest).topk(most, -1).indices
        size = (real.sum(-1) + self.clusters - 1) // self.clusters
        unused = torch.arange(most, device=index.device) >= size[:, None, None, None]
        return index.masked_fill(unused, -1)

    def _move_centroids(self, units: list[Tensor], members: list[Tensor]) -> None:
        """Move the centroids towards their nearest tokens. Those that have none stay."""
        pairs = zip(units, members, strict=True)
        sums = torch.stack([torch.einsum("bhcn,bhne->hce", m, unit) for unit, m in pairs]).sum(0)
        counts = torch.stack([m.sum((0, 3)) for m in members]).sum(0)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(sums)
            dist.all_reduce(counts)
        moved = self.decay * self.centroids + (1 - self.decay) * F.normalize(sums, dim=-1)
        moved = F.normalize(moved, dim=-1)
        self.centroids.copy_(torch.where(counts[..., None] > 0, moved, self.centroids))


def _members(similarity: Tensor, real: Tensor) -> Tensor:
    """Whether each cluster is the nearest of each real token (b h clusters n)."""
    nearest = similarity.argmax(2, keepdim=True)
    clusters = torch.arange(similarity.shape[2], device=similarity.device)[:, None]
    return (nearest == clusters) & real[:, None, None]
