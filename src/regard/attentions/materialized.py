"""Attention that materializes its scores: to mix them across heads, or to normalize them
differently."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attentions.kv_cache import CallPositions, KVCacheAttention, pattern_capabilities
from regard.backends.call import AttentionCall, make_call
from regard.backends.per_example import PositionGrid
from regard.errors import check_int
from regard.numerics import at_least_float32, masked_softmax
from regard.pattern import Causal, Full, Pattern

# Scores closer than this, relative to the largest, count as equal in `TopK`.
EQUAL_WITHIN = {torch.float64: 2.0**-47, torch.float32: 2.0**-18}


class MaterializedAttention(KVCacheAttention):
    """after(normalize(before(q kᵀ / √e))) v over the pairs that the pattern allows.

    Computes and stores all scores (b h n m).

    Args:
        pattern: Which keys each query sees.
        normalize: Maps scores to weights. Defaults to `Softmax()`.
        before: Mixes the scores across heads, (b h n m) -> (b g n m).
        after: Mixes the weights across heads, (b g n m) -> (b h n m).
    """

    def __init__(
        self,
        pattern: Pattern = Full(),
        *,
        normalize: ScoreNormalizer | None = None,
        before: nn.Module | None = None,
        after: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.pattern, self.causal_pattern = pattern, pattern & Causal()
        self.length, self.heads = pattern.length, pattern.heads
        self.normalize = Softmax() if normalize is None else normalize
        self.before = nn.Identity() if before is None else before
        self.after = nn.Identity() if after is None else after
        self.can = pattern_capabilities(pattern, "rotary", "dropout")

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: CallPositions,
        *,
        mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """See `KVCacheAttention.attend`."""
        pattern, q_start, k_positions = positions
        if isinstance(q_start, Tensor):
            visible = PositionGrid(q_start, k_positions, q.shape[2]).visible(pattern)
            attn_mask = visible if attn_mask is None else visible & attn_mask
            pattern, q_start, k_positions = Full(), 0, 0
        call = make_call(
            q,
            k,
            v,
            pattern=pattern,
            q_start=q_start,
            k_positions=k_positions,
            mask=mask,
            attn_mask=attn_mask,
            global_attention_mask=global_attention_mask,
            scale=1 / math.sqrt(q.shape[-1]),
        )
        scores = self.before(self.scores(call))
        weights = self.after(self.normalize(scores, call.dense_mask()))
        return F.dropout(weights, self.dropout, self.training).to(v.dtype) @ call.v

    def scores(self, call: AttentionCall) -> Tensor:
        """Scores of all pairs (b h n m), in float32 at least: they overflow in float16."""
        return at_least_float32(call.q) @ at_least_float32(call.k).mT * call.scale


class ScoreNormalizer(nn.Module, ABC):
    """Maps scores (b h n m) to weights (b h n m).

    `keep` broadcasts to the scores. Rows that keep nothing have no weight anywhere.
    """

    @abstractmethod
    def forward(self, scores: Tensor, keep: Tensor) -> Tensor: ...


class Softmax(ScoreNormalizer):
    """Softmax over the scores that are kept."""

    def forward(self, scores: Tensor, keep: Tensor) -> Tensor:
        """See `ScoreNormalizer`."""
        return masked_softmax(scores, keep)


class TopK(ScoreNormalizer):
    """Softmax over the k largest scores of each row, and over ties with the k-th
    (Zhao et al. 2019, arXiv 1912.11637)."""

    def __init__(self, k: int) -> None:
        super().__init__()
        check_int(1, k=k)
        self.k = k

    def forward(self, scores: Tensor, keep: Tensor) -> Tensor:
        """See `ScoreNormalizer`."""
        if self.k < scores.shape[-1]:
            kept = scores.detach().masked_fill(~keep, -torch.inf)
            best = kept.topk(self.k, -1).values
            threshold = best[..., -1:]
            if kept.dtype in EQUAL_WITHIN:  # rounding must not separate equal tokens
                largest = torch.maximum(best[..., :1].abs(), threshold.abs())
                threshold = threshold - EQUAL_WITHIN[kept.dtype] * largest
            keep = keep & (kept >= threshold)
        return masked_softmax(scores, keep)
