"""Additive attention: a small network scores query-key pairs
(Bahdanau et al. 2015, arXiv 1409.0473)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard import native
from regard.attentions.materialized import MaterializedAttention
from regard.backends.call import AttentionCall
from regard.errors import check_int

MAX_ELEMENTS = 1 << 20  # of tanh(q + k) in memory at once


class AdditiveAttention(MaterializedAttention):
    """softmax_j(w · tanh(q_i + k_j)) over the values, with a learned w (e) for each head."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        check_int(1, heads=heads, width=width)
        self.heads = heads
        self.can = self.can.without(rotary="its scores are not dot products of queries and keys")
        self.v = nn.Parameter(torch.empty(heads, width).uniform_(-1, 1) / width**0.5)

    def scores(self, call: AttentionCall) -> Tensor:
        """Scores of all pairs (b h n m)."""
        return additive_scores(call.q, call.k, self.v)


def additive_scores(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """w · tanh(q_i + k_j): q (b h n e), k (b h m e), w (h e) -> (b h n m).

    tanh(q + k) has e elements for each pair, so queries are processed in chunks, which are computed
    again in the backward pass, except inside `torch.func` transforms.
    """

    def scores(q: Tensor) -> Tensor:
        return ((q[:, :, :, None] + k[:, :, None]).tanh_() @ w[:, None, :, None])[..., 0]

    chunk = max(1, MAX_ELEMENTS // max(1, k.numel()))
    if torch.compiler.is_exporting() or q.shape[2] <= chunk:  # an exported graph cannot loop
        return scores(q)
    if native.inside_transform():  # torch.func has no checkpoints
        return torch.cat([scores(part) for part in q.split(chunk, 2)], 2)
    return torch.cat(
        [checkpoint(scores, part, use_reentrant=False) for part in q.split(chunk, 2)], 2
    )
