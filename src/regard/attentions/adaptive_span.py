"""Adaptive span: each head learns how far back it looks, and only so many keys are computed."""

from __future__ import annotations

from collections import defaultdict
from math import ceil

import torch
from torch import Tensor, nn

from regard.attentions.kv_cache import COMPARES_POSITIONS, CallPositions, KVCacheAttention
from regard.auxiliary import record_aux
from regard.backends import attend
from regard.errors import check_int, check_positive
from regard.mixer import Can
from regard.pattern import Band, Causal, Pattern, PerHead
from regard.prior import Prior

STEP = 32  # reaches are rounded up to multiples of this, so that heads share calls and layouts


class AdaptiveSpanAttention(KVCacheAttention):
    """a_ij ∝ m_z(|i − j|) exp(s_ij), m_z(x) = clamp((ramp + z − x) / ramp, 0, 1), with one learned z for each head
    (Sukhbaatar et al. 2019, arXiv 1905.07799).

    z is `longest` times a parameter in [0, 1].  Keys at which the mask is zero are not computed, so a shorter span is a
    cheaper one.  The cost `penalty` · mean z is told as "span", the ℓ1 term of the paper.
    """

    def __init__(
        self, heads: int, *, longest: int, ramp: int, start: float, penalty: float
    ) -> None:
        super().__init__()
        check_int(1, longest=longest, ramp=ramp)
        if penalty:
            check_positive("penalty", penalty)
        if not isinstance(start, int | float) or not 0 <= start <= 1:
            raise ValueError(f"start must be a share of the longest span, from 0 to 1, not {start}")
        self.heads, self.longest, self.ramp, self.penalty = heads, longest, ramp, penalty
        self.begun = float(start)
        self.share = nn.Parameter(torch.full((heads,), self.begun))
        self.can = Can(cross=COMPARES_POSITIONS)

    def spans(self) -> Tensor:
        """z (h), in tokens."""
        return self.share.clamp(0, 1) * self.longest

    def reaches(self) -> list[int]:
        """How many tokens back (and ahead, where not causal) each head computes: all with a weight, rounded up."""
        if torch.compiler.is_exporting():  # a graph has no numbers yet: as far as any may reach
            exact = [float(self.longest + self.ramp)] * self.share.shape[0]
        elif self.share.is_meta:  # it has no numbers: what it began with
            exact = [self.begun * self.longest + self.ramp] * len(self.share)
        else:
            exact = (self.spans().detach() + self.ramp).tolist()
        return [min(STEP * ceil((ceil(x) - 1) / STEP), self.longest + self.ramp) for x in exact]

    @property
    def pattern(self) -> PerHead:  # type: ignore[override]
        """A band for each head."""
        return PerHead(tuple(Band(reach, reach) for reach in self.reaches()))

    @property
    def causal_pattern(self) -> Pattern:  # type: ignore[override]
        """The same, where causal."""
        return self.pattern & Causal()

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
        """See `KVCacheAttention.attend`: heads that reach equally far share a call."""
        if self.training:  # held in its bounds as the authors do: a share beyond them would have no gradient to come back by
            self.share.data.clamp_(0, 1)
        spans, alike = self.spans(), defaultdict(list)
        for head, part in enumerate(place.pattern.parts):
            alike[part].append(head)
        outs, order = [], []
        for pattern, heads in alike.items():
            own = heads if len(alike) > 1 else slice(None)
            outs.append(
                attend(
                    q[:, own],
                    k[:, own],
                    v[:, own],
                    pattern=pattern,
                    prior=SpanRamp(spans[own], self.ramp),
                    mask=mask,
                    q_start=place.q_start,
                    k_positions=place.k_positions,
                )
            )
            order += heads
        if place.q_start == 0:  # once for a stream
            record_aux("span", lambda: self.penalty * spans.mean(), is_loss=True)
            record_aux("spans", lambda: spans)
        return (
            outs[0] if len(outs) == 1 else torch.cat(outs, 1)[:, torch.argsort(torch.tensor(order))]
        )

    def extra_repr(self) -> str:
        """Shown by print."""
        return f"longest={self.longest}, ramp={self.ramp}"


class SpanRamp(Prior):
    """log clamp((ramp + z_h − |i − j|) / ramp, 0, 1): added to the scores, it multiplies the weights."""

    relative = True

    def __init__(self, spans: Tensor, ramp: int) -> None:
        super().__init__()
        self.spans, self.ramp, self.heads = spans, ramp, len(spans)

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """See `regard.prior`."""
        gap = (q_pos - k_pos).abs()
        soft = (self.ramp + self.spans.to(q.dtype).view(-1, *[1] * gap.dim()) - gap) / self.ramp
        inside = soft > 0
        return torch.where(inside, torch.where(inside, soft, 1).clamp(max=1).log(), -torch.inf)
