"""Attention that needs its scores in hand: to mix them over heads, or to weigh them otherwise than by a softmax."""

from __future__ import annotations

import math

from torch import Tensor, nn

from regard.attend.call import make_call
from regard.attentions.cached import Cached, Place, can_over
from regard.pattern import Causal, Full, Pattern
from regard.weigh import Softmax, Weigh


class ScoredAttention(Cached):
    """after(weigh(before(q kᵀ / √e))) v, over the pairs that the pattern allows.  All scores are computed: (b h n m).

    weigh    from scores to weights
    before   mixes the scores over heads, (b h n m) -> (b g n m); `after` mixes the weights, (b g n m) -> (b h n m)
    """

    def __init__(
        self, pattern: Pattern = Full(), *, weigh: Weigh | None = None, before: nn.Module | None = None,
        after: nn.Module | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.pattern, self.past = pattern, pattern & Causal()
        self.length, self.heads = pattern.limit, pattern.heads
        self.weigh = Softmax() if weigh is None else weigh
        self.before, self.after = (nn.Identity() if mix is None else mix for mix in (before, after))
        self.can = can_over(pattern)

    def over(
        self, q: Tensor, k: Tensor, v: Tensor, place: Place, *, mask: Tensor | None = None, marks: Tensor | None = None
    ) -> Tensor:
        """See `Cached.over`."""
        call = make_call(
            q, k, v, pattern=place.pattern, prior=None, mask=mask, marks=marks, scale=1 / math.sqrt(q.shape[-1]),
            q_at=place.q_at, k_at=place.k_at,
        )  # fmt: skip
        scores = self.before(call.q @ call.k.transpose(-1, -2) * call.scale)
        return self.after(self.weigh(scores, call.keep())) @ call.v
