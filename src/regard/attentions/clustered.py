"""Improved clustered attention: a cluster asks once, and each of its queries weighs the keys that matter anew."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.errors import check_int
from regard.mixer import Attention, State
from regard.numerics import stable_argsort
from regard.query_prototypes import QueryClusters, gather_rows

TILE = 16  # queries of one cluster that ask its keys together


class ImprovedClusteredAttention(Attention):
    """Vyas et al. 2020, arXiv 2007.04825, section 3.3.  With A the attention of the centroids, T the `top` keys with most
    of it for the query's cluster, and m = Σ_{j∈T} A_j:

        out_i = m Σ_{j∈T} softmax_{j∈T}(q_i·k_j / √e) v_j  +  Σ_{j∉T} A_j v_j
    """

    needs_query_mask = True

    def __init__(self, clusters: QueryClusters, top: int) -> None:
        super().__init__()
        check_int(1, top=top)
        self.clusters, self.top, self.can = clusters, top, clusters.can

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        mask: Tensor | None = None,
        state: State = None,
        query_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """See `Attention.forward`; query_mask (b n) says which queries count."""
        scale = 1 / math.sqrt(q.shape[-1])
        keep = (
            k.new_ones(k.shape[0], 1, 1, k.shape[2], dtype=torch.bool)
            if mask is None
            else mask[:, None, None]
        )
        v = v if mask is None else v.masked_fill(~mask[:, None, :, None], 0)
        index = self.clusters.assign(q, query_mask)
        shared = _softmax(
            self.clusters.means(q, index, query_mask) @ k.transpose(-1, -2) * scale, keep
        )  # (b h clusters m)
        top = shared.topk(min(self.top, k.shape[2]), -1).indices
        mass = shared.gather(-1, top).sum(-1, keepdim=True)
        rest = shared.scatter(-1, top, 0) @ v
        slot, owner = _tiles(index, self.clusters.clusters)
        tiles = q.new_zeros(*q.shape[:2], owner.shape[2] * TILE, q.shape[3]).scatter(
            2, slot[..., None].expand_as(q), q
        )
        near = gather_rows(top, owner)  # (b h tiles top): the keys of each tile
        near_k, near_v = (
            gather_rows(x, near.flatten(2)).unflatten(2, near.shape[2:]) for x in (k, v)
        )
        seen = (
            keep[:, 0]
            .expand(-1, q.shape[1], -1)
            .gather(2, near.flatten(2))
            .view(near.shape)[..., None, :]
        )
        own = _softmax(tiles.unflatten(2, (-1, TILE)) @ near_k.mT * scale, seen) @ near_v
        return gather_rows(mass, index) * gather_rows(own.flatten(2, 3), slot) + gather_rows(
            rest, index
        ), None


def _tiles(index: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """The queries of each cluster in tiles of their own: index (b h n) -> the slot of each query (b h n), and the cluster of
    each tile (b h tiles).  There are as many tiles as could be needed, whatever the clusters: the last ones may be empty."""
    n = index.shape[2]
    count = torch.zeros(*index.shape[:2], clusters, dtype=torch.long, device=index.device)
    count.scatter_add_(2, index, torch.ones_like(index))
    order = stable_argsort(index)
    place = torch.empty_like(order).scatter_(
        2, order, torch.arange(n, device=index.device).expand_as(order)
    )
    needed = (count + TILE - 1) // TILE
    behind, before = needed.cumsum(2), count.cumsum(2) - count
    slot = place + ((behind - needed) * TILE - before).gather(2, index)
    numbers = torch.arange(n // TILE + min(clusters, n), device=index.device)
    owner = (behind[..., None, :] <= numbers[:, None]).sum(-1)
    return slot, owner.clamp(max=clusters - 1)


def _softmax(scores: Tensor, keep: Tensor) -> Tensor:
    """Over the keys that are kept; zero where none is."""
    lowest = torch.finfo(scores.dtype).min
    return scores.masked_fill(~keep, lowest).softmax(-1).masked_fill(~keep, 0)
