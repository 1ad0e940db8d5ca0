"""Improved clustered attention: a cluster asks once, and each of its queries weighs the keys that matter anew."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.errors import check_whole
from regard.mixer import Attention, State
from regard.query import Clusters, take


class ImprovedClustered(Attention):
    """Vyas et al. 2020, arXiv 2007.04825, section 3.3.  With A the attention of the centroids, T the `top` keys with most
    of it for the query's cluster, and m = Σ_{j∈T} A_j:

        out_i = m Σ_{j∈T} softmax_{j∈T}(q_i·k_j / √e) v_j  +  Σ_{j∉T} A_j v_j
    """

    asks_queries = True

    def __init__(self, clusters: Clusters, top: int) -> None:
        super().__init__()
        check_whole(1, top=top)
        self.clusters, self.top, self.can = clusters, top, clusters.can

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Tensor | None = None, state: State = None,
        real: Tensor | None = None,
    ) -> tuple[Tensor, State]:  # fmt: skip
        """See `Attention.attend`; real (b n) says which queries count."""
        scale = 1 / math.sqrt(q.shape[-1])
        keep = k.new_ones(k.shape[0], 1, 1, k.shape[2], dtype=torch.bool) if mask is None else mask[:, None, None]
        v = v.masked_fill(~keep.transpose(-1, -2), 0)
        index = self.clusters.assign(q, real)
        shared = _softmax(self.clusters.means(q, index, real) @ k.transpose(-1, -2) * scale, keep)  # (b h clusters m)
        top = shared.topk(min(self.top, k.shape[2]), -1).indices
        mass = shared.gather(-1, top).sum(-1, keepdim=True)
        rest = shared.scatter(-1, top, 0) @ v
        mine = take(top, index).flatten(2)  # (b h n*top)
        shape = (q.shape[2], top.shape[3])
        near_k, near_v = (take(x, mine).unflatten(2, shape) for x in (k, v))
        seen = keep[:, 0].expand(-1, q.shape[1], -1).gather(2, mine).unflatten(2, shape)
        own = _softmax((near_k @ q[..., None])[..., 0] * scale, seen)
        return take(mass, index) * (own[..., None, :] @ near_v)[..., 0, :] + take(rest, index), None


def _softmax(scores: Tensor, keep: Tensor) -> Tensor:
    """Over the keys that are kept; zero where none is."""
    lowest = torch.finfo(scores.dtype).min
    return scores.masked_fill(~keep, lowest).softmax(-1).masked_fill(~keep, 0)
