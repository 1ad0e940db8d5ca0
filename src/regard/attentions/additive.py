"""Additive attention: a small network scores query-key pairs (Bahdanau et al. 2015, arXiv 1409.0473)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.errors import check_int
from regard.mixer import Attention, check_batch
from regard.numerics import attention_mask, masked_softmax

MAX_ELEMENTS = 1 << 20  # of tanh(q + k) in memory at once


class AdditiveKVCache(NamedTuple):
    """All keys (b h m e) and values (b h m f) so far, or None before the first token."""

    k: Tensor | None
    v: Tensor | None


class AdditiveAttention(Attention):
    """softmax_j(w · tanh(q_i + k_j)) over the values, with a learned w (e) for each head."""

    no_rotary_reason = "its scores are not dot products of queries and keys"

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        check_int(1, heads=heads, width=width)
        self.heads = heads
        self.v = nn.Parameter(torch.empty(heads, width).uniform_(-1, 1) / width**0.5)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        mask: Tensor | None = None,
        state: AdditiveKVCache | None = None,
    ) -> tuple[Tensor, AdditiveKVCache | None]:
        """See `Attention.forward`."""
        if state is not None:
            if state.k is not None and state.v is not None:
                check_batch(state.k, k)
                k, v = torch.cat((state.k, k), 2), torch.cat((state.v, v), 2)
            state = AdditiveKVCache(k, v)
        keep = attention_mask(q.shape[2], k.shape[2], causal=causal, mask=mask, device=q.device)
        return masked_softmax(additive_scores(q, k, self.v), keep) @ v, state

    def initial_state(self) -> AdditiveKVCache:
        """An empty cache."""
        return AdditiveKVCache(None, None)


def additive_scores(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """w · tanh(q_i + k_j): q (b h n e), k (b h m e), w (h e) -> (b h n m).

    tanh(q + k) has e elements for each pair, so queries are processed in chunks, which are computed
    again in the backward pass.
    """

    def scores(q: Tensor) -> Tensor:
        return ((q[:, :, :, None] + k[:, :, None]).tanh_() @ w[:, None, :, None])[..., 0]

    chunk = max(1, MAX_ELEMENTS // max(1, k.numel()))
    if torch.compiler.is_exporting() or q.shape[2] <= chunk:  # an exported graph cannot loop
        return scores(q)
    return torch.cat(
        [checkpoint(scores, part, use_reentrant=False) for part in q.split(chunk, 2)], 2
    )
