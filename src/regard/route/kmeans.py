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


class KMeans(Route):
    """Each of `clusters` centroids takes the w queries and the w keys nearest to it, w = ⌈n / clusters⌉ of n real tokens.

    Roy et al. 2020, arXiv 2003.05997.  Nearness is that of direction.  The centroids (h clusters e), of length one, follow
    the tokens while training: μ ← unit(decay μ + (1 − decay) unit(Σ x)), over the queries and keys x nearest to μ, in all
    processes.

    shared   queries and keys are the same vectors, and form the same groups
    """

    centroids: Tensor
    can = Can(
        causal="a cluster takes its nearest tokens out of all, so that later ones push earlier ones out",
        stream="a cluster takes its nearest tokens out of all",
        cross="queries and keys of a cluster are counted in one sequence",
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
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay <= 1:
            raise ValueError(f"decay must be a number between 0 and 1, not {decay!r}")
        self.heads, self.clusters, self.decay, self.shared = heads, clusters, float(decay), shared
        draw = torch.randn(heads, clusters, width, generator=torch.Generator().manual_seed(seed))
        self.register_buffer("centroids", F.normalize(draw, dim=-1))

    @torch.no_grad()
    def forward(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Sequence[TokenGroups]:
        """One group a cluster."""
        real = q.new_ones(q.shape[0], q.shape[2], dtype=torch.bool) if mask is None else mask
        sides = [self._near(x) for x in ((q,) if self.shared else (q, k))]
        taken = [self._nearest(near, real) for _, near in sides]
        record_aux("cluster_load", lambda: _load(sides, real))
        record_aux("in_no_cluster", lambda: _left_over(taken[0], real))
        if self.training:
            self._follow(sides, real)
        return [TokenGroups(taken[0], taken[-1])]

    def _near(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Unit vectors (b h n e), and how near each is to each centroid, (b h clusters n)."""
        single = torch.promote_types(x.dtype, torch.float32)
        unit = F.normalize(x.to(single), dim=-1)
        return unit, self.centroids.to(single) @ unit.transpose(-1, -2)

    def _nearest(self, near: Tensor, real: Tensor) -> Tensor:
        """The numbers (b h clusters w) of the tokens that each cluster takes; -1 where an example has fewer."""
        most = ceil(near.shape[-1] / self.clusters)
        at = near.masked_fill(~real[:, None, None], -torch.inf).topk(most, -1).indices
        due = (real.sum(-1) + self.clusters - 1) // self.clusters
        return at.masked_fill(torch.arange(most, device=at.device) >= due[:, None, None, None], -1)

    def _follow(self, sides: list[tuple[Tensor, Tensor]], real: Tensor) -> None:
        """Move the centroids towards the tokens that are nearest to them; those that have none stay."""
        members = [(unit, _members(near, real).to(unit.dtype)) for unit, near in sides]
        sums = torch.stack(
            [torch.einsum("bhcn,bhne->hce", one, unit) for unit, one in members]
        ).sum(0)
        counts = torch.stack([one.sum((0, 3)) for _, one in members]).sum(0)
        if dist.is_available() and dist.is_initialized():
            for each in (sums, counts):
                dist.all_reduce(each)
        moved = self.decay * self.centroids + (1 - self.decay) * F.normalize(sums, dim=-1)
        self.centroids.copy_(
            torch.where(counts[..., None] > 0, F.normalize(moved, dim=-1), self.centroids)
        )


def _members(near: Tensor, real: Tensor) -> Tensor:
    """(b h clusters n): whether it is the cluster nearest to the token."""
    best = near.argmax(2, keepdim=True) == torch.arange(near.shape[2], device=near.device)[:, None]
    return best & real[:, None, None]


def _load(sides: list[tuple[Tensor, Tensor]], real: Tensor) -> Tensor:
    """(h clusters): the share of all queries and keys that are nearest to it."""
    counts = torch.stack([_members(near, real).sum((0, 3)) for _, near in sides]).sum(0)
    return counts / counts.sum(-1, keepdim=True).clamp(min=1)


def _left_over(taken: Tensor, real: Tensor) -> Tensor:
    """The share of queries that no cluster took."""
    b, h = taken.shape[:2]
    n = real.shape[1]
    some = (
        taken.new_zeros(b, h, n + 1).scatter(2, torch.where(taken < 0, n, taken).flatten(2), 1)[
            ..., :n
        ]
        > 0
    )
    return (~some & real[:, None]).sum() / (h * real.sum()).clamp(min=1)
