"""Additive attention: a small network compares, in place of a product (Bahdanau et al. 2015, arXiv 1409.0473)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.errors import check_int
from regard.mixer import Attention, check_batch
from regard.numerics import attention_mask, masked_softmax

MAX_ELEMENTS = 1 << 20  # numbers of tanh(q + k) that are held at once


class AdditiveKVCache(NamedTuple):
    """All keys and values so far, k (b h m e) and v (b h m f); None: none yet."""

    k: Tensor | None
    v: Tensor | None


class AdditiveAttention(Attention):
    """softmax_j(v · tanh(q_i + k_j)) over the values, with v (h e) learned."""

    no_rotary_reason = "its scores are no products of queries and keys, in which turns would cancel"

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
        if state is not None and state.k is not None and state.v is not None:
            check_batch(state.k, k)
            k, v = torch.cat((state.k, k), 2), torch.cat((state.v, v), 2)
        keep = attention_mask(q.shape[2], k.shape[2], causal=causal, mask=mask, device=q.device)
        weights = masked_softmax(additive_scores(q, k, self.v), keep)
        return weights @ v, None if state is None else AdditiveKVCache(k, v)

    def initial_state(self) -> AdditiveKVCache:
        """No keys yet."""
        return AdditiveKVCache(None, None)


def additive_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """v · tanh(q_i + k_j): q (b h n e), k (b h m e), v (h e) -> (b h n m).

    tanh(q + k) has e numbers for each pair.  So queries come in parts, each of which is computed anew in the backward pass.
    """
    size = max(1, MAX_ELEMENTS // max(1, k.numel()))
    if torch.compiler.is_exporting() or q.shape[2] <= size:  # a graph for any length has no parts
        return _scores(q, k, v)
    parts = [checkpoint(_scores, part, k, v, use_reentrant=False) for part in q.split(size, 2)]
    return torch.cat(parts, 2)


def _scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q[:, :, :, None] + k[:, :, None]).tanh_() @ v[:, None, :, None])[..., 0]
