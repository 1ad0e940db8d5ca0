"""Softmax attention over a pattern."""

from __future__ import annotations

from torch import Tensor

from regard.attentions.kv_cache import CallPositions, KVCacheAttention, pattern_capabilities
from regard.backends import attend, softmax_backends
from regard.backends.traced import intern_pattern
from regard.mixer import PackedAttention
from regard.pattern import Causal, Full, Pattern, PerSegment
from regard.prior import Prior, restart_prior

_FULL = Full()


class SoftmaxAttention(KVCacheAttention, PackedAttention):
    """softmax(q kᵀ · scale + prior) v over the pairs that the pattern allows, computed exactly.

    Args:
        pattern: Which keys each query sees.
        prior: Bias added to the scores.
        scale: Scale of the scores. Defaults to 1/√e, or to what the prior defines.
        backend: See `regard.attend`.
    """

    def __init__(
        self,
        pattern: Pattern = Full(),
        prior: Prior | None = None,
        *,
        scale: float | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        softmax_backends.check_name(backend)
        self.pattern, self.causal_pattern = pattern, pattern & Causal()
        intern_pattern(self.pattern)
        intern_pattern(self.causal_pattern)
        self.prior, self.scale, self.backend = prior, scale, backend
        self.length, self.heads = pattern.length, pattern.heads
        compares_positions = prior is not None and prior.compares_positions
        self.can = pattern_capabilities(
            pattern, "gqa", "rotary", "dropout", compares_positions=compares_positions
        )
        if prior is None:
            return
        self.heads = pattern.heads or prior.heads
        if prior.length is not None:
            reason = f"its prior was built for {prior.length} positions"
            self.can = self.can.without(length=reason)
            self.length = min(prior.length, self.length or prior.length)
        if prior.uses_qk:
            self.can = self.can.without(
                rotary="its prior reads the queries and keys without rotation"
            )

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
        moved = not isinstance(q_start, Tensor) and (
            type(k_positions) is not int or k_positions or q_start
        )
        if moved and self.prior is None and pattern == _FULL:
            q_start = k_positions = 0  # positions have no effect, and these calls are cached
        return attend(
            q,
            k,
            v,
            pattern=pattern,
            prior=self.prior,
            mask=mask,
            attn_mask=attn_mask,
            global_attention_mask=global_attention_mask,
            scale=self.scale,
            q_start=q_start,
            k_positions=k_positions,
            dropout=self.dropout if self.training else 0.0,
            backend=self.backend,
        )

    def attend_packed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: tuple[int, ...],
        *,
        causal: bool = False,
        mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """See `PackedAttention.attend_packed`."""
        return attend(
            q,
            k,
            v,
            pattern=PerSegment(self.causal_pattern if causal else self.pattern, lengths),
            prior=restart_prior(self.prior, lengths),
            mask=mask,
            attn_mask=attn_mask,
            global_attention_mask=global_attention_mask,
            scale=self.scale,
            dropout=self.dropout if self.training else 0.0,
            backend=self.backend,
        )
