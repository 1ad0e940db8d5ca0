"""Attention that needs its scores in hand: to mix them over heads, or to weigh them otherwise than by a softmax."""

from __future__ import annotations

import math

from torch import Tensor, nn

from regard.attentions.kv_cache import CallPositions, KVCacheAttention, pattern_capabilities
from regard.backends.call import make_call
from regard.pattern import Causal, Full, Pattern
from regard.score_weights import ScoreNormalizer, Softmax


class MaterializedAttention(KVCacheAttention):
    """after(weigh(before(q kᵀ / √e))) v, over the pairs that the pattern allows.  All scores are computed: (b h n m).

    weigh    from scores to weights
    before   mixes the scores over heads, (b h n m) -> (b g n m); `after` mixes the weights, (b g n m) -> (b h n m)
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
        self.before, self.after = (nn.Identity() if mix is None else mix for mix in (before, after))
        self.can = pattern_capabilities(pattern)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        place: CallPositions,
        *,
        mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """See `KVCacheAttention.attend`."""
        call = make_call(
            q,
            k,
            v,
            pattern=place.pattern,
            prior=None,
            mask=mask,
            global_attention_mask=global_attention_mask,
            scale=1 / math.sqrt(q.shape[-1]),
            q_start=place.q_start,
            k_positions=place.k_positions,
        )
        scores = self.before(call.q @ call.k.transpose(-1, -2) * call.scale)
        return self.after(self.normalize(scores, call.keep())) @ call.v
