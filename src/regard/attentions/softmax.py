"""Softmax attention over a pattern, exactly."""

from __future__ import annotations

from torch import Tensor

from regard.attentions.kv_cache import CallPositions, KVCacheAttention, pattern_capabilities
from regard.backends import attend, check_backend
from regard.backends.traced import register_pattern
from regard.mixer import Can
from regard.pattern import Causal, Full, Pattern
from regard.prior import Prior

_FULL = Full()


class SoftmaxAttention(KVCacheAttention):
    """softmax(q kᵀ scale + prior) v, over the pairs that the pattern allows; exact, by whichever executor is fastest.

    scale    of the scores, 1/sqrt(e) unless given, or what a prior of several terms asks for
    backend  see `regard.attend`
    """

    supports_gqa = True

    def __init__(
        self,
        pattern: Pattern = Full(),
        prior: Prior | None = None,
        *,
        scale: float | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_backend(backend)
        self.pattern, self.causal_pattern = pattern, pattern & Causal()
        for each in (self.pattern, self.causal_pattern):
            register_pattern(each)
        self.prior, self.scale, self.backend = prior, scale, backend
        self.length, self.heads = (
            pattern.length,
            pattern.heads or (None if prior is None else prior.heads),
        )
        self.can = pattern_capabilities(pattern, compares_positions=prior is not None)
        if prior is not None and prior.length is not None:
            self.can = self.can & Can(
                supports_global_mask=True,
                length=f"its prior was built for {prior.length} positions",
            )
            self.length = prior.length if self.length is None else min(self.length, prior.length)
        if prior is not None and prior.uses_qk:
            self.no_rotary_reason = (
                "its prior reads the queries and keys, and turned ones would tell it something else"
            )

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
        elsewhere = type(place.k_positions) is not int or place.k_positions or place.q_start
        if (
            elsewhere and self.prior is None and place.pattern == _FULL
        ):  # positions say nothing then
            place = CallPositions(_FULL)
        return attend(
            q,
            k,
            v,
            pattern=place.pattern,
            prior=self.prior,
            mask=mask,
            global_attention_mask=global_attention_mask,
            scale=self.scale,
            q_start=place.q_start,
            k_positions=place.k_positions,
            backend=self.backend,
        )
