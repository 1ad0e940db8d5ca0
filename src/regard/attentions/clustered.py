"""Improved clustered attention: clusters of queries attend once, then each query reweighs the top
keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.errors import check_int
from regard.mixer import QueryMaskAttention, State
from regard.numerics import at_least_float32, stable_argsort
from regard.query_prototypes import QueryClusters, gather_rows

TILE = 16  # queries of one cluster that attend to its top keys together


class ImprovedClusteredAttention(QueryMaskAttention):
    """Improved clustered attention (Vyas et al. 2020, arXiv 2007.04825, section 3.3).

    With A the attention of the centroids, T the `top` keys with the largest weight for the query's
    cluster, and m = Σ_{j∈T} A_j:

        out_i = m Σ_{j∈T} softmax_{j∈T}(q_i·k_j / √e) v_j  +  Σ_{j∉T} A_j v_j
    """

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
        """See `Attention.forward`."""
        scale, dtype = 1 / math.sqrt(q.shape[-1]), q.dtype
        q, k, v = (at_least_float32(x) for x in (q, k, v))  # scores overflow in float16
        if mask is None:
            mask = k.new_ones(k.shape[0], k.shape[2], dtype=torch.bool)
        else:
            v = v.masked_fill(~mask[:, None, :, None], 0)
        index = self.clusters.assign(q, query_mask)
        centroids = self.clusters.means(q, index, query_mask)
        hidden, scores = ~mask[:, None, None], centroids @ k.mT * scale  # (b h clusters m)
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        shared = scores.softmax(-1).masked_fill(hidden, 0)
        top = scores.topk(min(self.top, k.shape[2]), -1).indices  # small weights are all zero
        mass = shared.gather(-1, top).sum(-1, keepdim=True)
        rest = shared.scatter(-1, top, 0) @ v

        slot, owner = _tile_clusters(index, self.clusters.clusters)
        tiles = q.new_zeros(*q.shape[:2], owner.shape[2] * TILE, q.shape[3])
        tiles = tiles.scatter(2, slot[..., None].expand_as(q), q).unflatten(2, (-1, TILE))
        keys = gather_rows(top, owner)  # (b h tiles top)
        top_k, top_v = (
            gather_rows(x, keys.flatten(2)).unflatten(2, keys.shape[2:]) for x in (k, v)
        )
        keep = mask[:, None].expand(-1, q.shape[1], -1).gather(2, keys.flatten(2)).view(keys.shape)
        own = _softmax(tiles @ top_k.mT * scale, keep[..., None, :]) @ top_v
        own = gather_rows(own.flatten(2, 3), slot)
        return (gather_rows(mass, index) * own + gather_rows(rest, index)).to(dtype), None


def _tile_clusters(index: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """Arrange the queries of each cluster in tiles.

    Args:
        index: Cluster of each query (b h n).
        clusters: Number of clusters.

    Returns:
        The slot of each query (b h n), and the cluster of each tile (b h tiles). The number of
        tiles is the largest that could be needed, so the last ones may be empty.
    """
    n = index.shape[2]
    count = torch.zeros(*index.shape[:2], clusters, dtype=torch.long, device=index.device)
    count = count.scatter_add(2, index, torch.ones_like(index))
    order = stable_argsort(index)
    numbers = torch.arange(n, device=index.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(2, order, numbers)
    tiles = (count + TILE - 1) // TILE
    tiles_end, before = tiles.cumsum(2), count.cumsum(2) - count
    slot = rank + ((tiles_end - tiles) * TILE - before).gather(2, index)
    tile = torch.arange(n // TILE + min(clusters, n), device=index.device)
    owner = (tiles_end[..., None, :] <= tile[:, None]).sum(-1)
    return slot, owner.clamp(max=clusters - 1)


def _softmax(scores: Tensor, keep: Tensor) -> Tensor:
    """Softmax over the keys that are kept, zero elsewhere."""
    lowest = torch.finfo(scores.dtype).min
    return scores.masked_fill(~keep, lowest).softmax(-1).masked_fill(~keep, 0)
