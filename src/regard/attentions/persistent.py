"""All-attention: attention that also sees learned key/value vectors, in place of a feed-forward
layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attentions.kv_cache import CallPositions, KVCacheAttention
from regard.attentions.softmax import SoftmaxAttention
from regard.backends import attend
from regard.errors import check_int
from regard.mixer import Can
from regard.pattern import Band, Block, Full, Keys, Leaf, Pattern
from regard.prior import Prior

NO_MAP = "part of its output comes from learned values, so no map of the tokens gives the output"


class PersistentMemoryAttention(KVCacheAttention):
    """softmax([q Kᵀ scale + prior, q Mᵀ scale]) [V; N]
    (all-attention: Sukhbaatar et al. 2019, arXiv 1907.01470).

    One softmax over the tokens that the pattern allows and over `count` learned keys M and values N
    of each head. No pattern, mask or prior applies to the learned keys. As in the paper, M = √e · m
    and N = √count · n with m and n learned. They are placed as keys before the tokens.

    Args:
        inner: Softmax attention over the tokens: its pattern, prior, scale and backend.
        heads: Number of heads.
        width: Head width e.
        count: Number of learned keys for each head.
    """

    def __init__(self, inner: SoftmaxAttention, heads: int, width: int, count: int) -> None:
        super().__init__()
        check_int(1, heads=heads, width=width, count=count)
        if inner.heads not in (None, heads):
            raise ValueError(f"The inner attention was built for {inner.heads} heads, not {heads}")
        self.inner, self.heads, self.count = inner, heads, count
        self.pattern, self.causal_pattern = inner.pattern, inner.causal_pattern
        self.length = inner.length
        self.can = Can(maps=NO_MAP, rotary="its learned keys have no position") & inner.can
        self.keys = nn.Parameter(torch.randn(heads, count, width) * width**-0.5)
        self.values = nn.Parameter(torch.randn(heads, count, width) * count**-0.5)

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
        """See `KVCacheAttention.attend`. There is no global mask."""
        pattern, q_start, k_positions = positions
        count, m = self.count, k.shape[2]
        keys, values = self.keys * self.keys.shape[-1] ** 0.5, self.values * count**0.5
        k = torch.cat((keys.to(k).expand(k.shape[0], -1, -1, -1), k), 2)
        v = torch.cat((values.to(v).expand(v.shape[0], -1, -1, -1), v), 2)
        if isinstance(k_positions, Tensor) or k_positions:
            if isinstance(k_positions, int):
                k_positions = torch.arange(k_positions, k_positions + m)
            learned = torch.arange(count, device=k_positions.device)
            shifted = torch.where(k_positions < 0, k_positions, k_positions + count)
            k_positions = torch.cat((learned.expand(*shifted.shape[:-1], -1), shifted), -1)
        prior = self.inner.prior
        return attend(
            q,
            k,
            v,
            pattern=shift_pattern(pattern, count),
            prior=None if prior is None else ShiftedPrior(prior, count),
            mask=None if mask is None else F.pad(mask, (count, 0), value=True),
            attn_mask=None if attn_mask is None else F.pad(attn_mask, (count, 0), value=True),
            scale=self.inner.scale,
            q_start=q_start + count,
            k_positions=k_positions,
            backend=self.inner.backend,
        )


@lru_cache(4096)
def shift_pattern(pattern: Pattern, count: int) -> Pattern:
    """The pattern moved by `count` positions. All queries see the `count` keys before it."""

    def shift(leaf: Pattern) -> Pattern:
        return leaf if isinstance(leaf, Band | Full) else ShiftedLeaf(leaf, count)

    return pattern.resolve_global_mask(False, False).map_leaves(shift) | Keys(0, count)


@dataclass(frozen=True, repr=False)
class ShiftedLeaf(Leaf):
    """A leaf pattern moved by `by` positions. Positions before `by` are treated as `by`."""

    leaf: Pattern
    by: int

    @property
    def _compares_positions(self) -> bool:  # type: ignore[override]
        return self.leaf.compares_positions

    @property
    def _length(self) -> int | None:  # type: ignore[override]
        return None if self.leaf.length is None else self.leaf.length + self.by

    def _allows(self, q: Tensor, k: Tensor) -> Tensor:
        return self.leaf._allows(*self._unshift(q, k))

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        return self.leaf._block(*self._unshift(q0, q1, k0, k1))

    def _unshift(self, *positions: Tensor) -> list[Tensor]:
        return [(x - self.by).clamp(min=0) for x in positions]


class ShiftedPrior(Prior):
    """A prior moved by `by` positions. It adds nothing to the scores of the keys before."""

    def __init__(self, prior: Prior, by: int) -> None:
        super().__init__()
        self.prior, self.by, self.heads = prior, by, prior.heads
        self.uses_qk, self.num_terms = prior.uses_qk, prior.num_terms
        self.length = None if prior.length is None else prior.length + by

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """See `regard.prior`."""
        bias = self.prior(q_pos - self.by, (k_pos - self.by).clamp(min=0), q, k)
        return torch.where(k_pos >= self.by, bias, 0)

    def for_scale(self, scale: float) -> Prior | None:
        """See `Prior.for_scale`."""
        prior = self.prior.for_scale(scale)
        return None if prior is None else ShiftedPrior(prior, self.by)

    def sink_logits(self) -> Tensor | None:
        """See `Prior.sink_logits`."""
        return self.prior.sink_logits()
