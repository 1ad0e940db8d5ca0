"""Adaptive attention span: each head learns how far it looks, and only those keys are computed."""

from __future__ import annotations

from collections import defaultdict
from math import ceil

import torch
from torch import Tensor, nn

from regard.attentions.kv_cache import COMPARES_POSITIONS, CallPositions, KVCacheAttention
from regard.auxiliary import record_aux
from regard.backends import attend
from regard.errors import check_int, check_positive
from regard.mixer import Can, PackedAttention
from regard.pattern import Band, Causal, Pattern, PerHead, PerSegment
from regard.prior import Prior

STEP = 32  # windows are rounded up to multiples of this, so heads share calls and layouts


class AdaptiveSpanAttention(KVCacheAttention, PackedAttention):
    """Adaptive attention span (Sukhbaatar et al. 2019, arXiv 1905.07799).

        a_ij ∝ m_z(|i − j|) exp(s_ij),  m_z(x) = clamp((ramp + z − x) / ramp, 0, 1)

    with a learned span z for each head. Keys with m_z = 0 are not computed, so a shorter span is
    cheaper. Records the auxiliary loss "span", the ℓ1 term of the paper, and the statistic "spans".

    Args:
        heads: Number of heads.
        longest: Largest span z.
        ramp: Width over which the mask falls to zero.
        start: Initial span, as a fraction of `longest`.
        penalty: Weight of the loss penalty · mean(z).
    """

    def __init__(
        self, heads: int, *, longest: int, ramp: int, start: float, penalty: float
    ) -> None:
        super().__init__()
        check_int(1, longest=longest, ramp=ramp)
        if penalty:
            check_positive("penalty", penalty)
        if not isinstance(start, int | float) or not 0 <= start <= 1:
            raise ValueError(f"start must be a fraction of the longest span, 0 to 1, not {start}")
        self.heads, self.longest, self.ramp, self.penalty = heads, longest, ramp, penalty
        self.initial_share = float(start)
        self.share = nn.Parameter(torch.full((heads,), self.initial_share))
        self.can = Can("rotary", cross=COMPARES_POSITIONS)

    def spans(self) -> Tensor:
        """The span z of each head, in tokens (h)."""
        return self.share.clamp(0, 1) * self.longest

    def windows(self) -> list[int]:
        """How many tokens to each side each head computes: all with a weight, rounded up."""
        if torch.compiler.is_exporting():  # parameters have no values yet
            exact = [float(self.longest + self.ramp)] * self.share.shape[0]
        elif self.share.is_meta:
            exact = [self.initial_share * self.longest + self.ramp] * len(self.share)
        else:
            exact = (self.spans().detach() + self.ramp).tolist()
        largest = self.longest + self.ramp
        return [min(STEP * ceil((ceil(x) - 1) / STEP), largest) for x in exact]

    @property
    def pattern(self) -> PerHead:  # type: ignore[override]
        """A band for each head."""
        return PerHead(tuple(Band(window, window) for window in self.windows()))

    @property
    def causal_pattern(self) -> Pattern:  # type: ignore[override]
        """The causal part of it."""
        return self.pattern & Causal()

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
        """See `KVCacheAttention.attend`. Heads with the same window share a call."""
        pattern, q_start, k_positions = positions
        if self.training:  # as the authors do: beyond the bounds the gradient is zero
            self.share.data.clamp_(0, 1)
        spans = self.spans()
        if not isinstance(q_start, Tensor) and q_start == 0:  # once per stream
            record_aux("span", lambda: self.penalty * spans.mean(), is_loss=True)
            record_aux("spans", lambda: spans)
        heads_by_window = defaultdict(list)
        for head, window in enumerate(pattern.parts):
            heads_by_window[window].append(head)
        outs = []
        for window, heads in heads_by_window.items():
            index = heads if len(heads_by_window) > 1 else slice(None)
            outs.append(
                attend(
                    q[:, index],
                    k[:, index],
                    v[:, index],
                    pattern=window,
                    prior=SpanRamp(spans[index], self.ramp),
                    mask=mask,
                    attn_mask=None if attn_mask is None else _head_masks(attn_mask, index),
                    q_start=q_start,
                    k_positions=k_positions,
                )
            )
        if len(outs) == 1:
            return outs[0]
        order = [head for heads in heads_by_window.values() for head in heads]
        return torch.cat(outs, 1)[:, torch.argsort(torch.tensor(order))]

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
        pattern = PerSegment(self.causal_pattern if causal else self.pattern, lengths)
        return self.attend(q, k, v, CallPositions(pattern), mask=mask, attn_mask=attn_mask)

    def extra_repr(self) -> str:
        """Shown by `print`."""
        return f"longest={self.longest}, ramp={self.ramp}"


def _head_masks(attn_mask: Tensor, index: list[int] | slice) -> Tensor:
    """The pair masks (b 1 n m) or (b h n m) of some of the heads."""
    return attn_mask if attn_mask.shape[1] == 1 else attn_mask[:, index]


class SpanRamp(Prior):
    """log clamp((ramp + z_h − |i − j|) / ramp, 0, 1), which multiplies the weights by the soft
    mask."""

    relative = True

    def __init__(self, spans: Tensor, ramp: int) -> None:
        super().__init__()
        self.spans, self.ramp, self.heads = spans, ramp, len(spans)

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """See `regard.prior`."""
        distance = (q_pos - k_pos).abs()
        spans = self.spans.to(q.dtype).view(-1, *[1] * distance.dim())
        soft = (self.ramp + spans - distance) / self.ramp
        inside = soft > 0
        return torch.where(inside, torch.where(inside, soft, 1).clamp(max=1).log(), -torch.inf)
