"""Attention that also sees vectors which are no tokens: a feed-forward layer merged into attention."""

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

NO_PLACE = "the vectors that are no tokens have no place, and turned queries would ask them otherwise at every place"
NO_MAP = "a part of its output comes from vectors that are no tokens, so no map of tokens times values is the output"


class PersistentMemoryAttention(KVCacheAttention):
    """softmax([q Kᵀ scale + prior, q Mᵀ scale]) [V; N] (all-attention: Sukhbaatar et al. 2019, arXiv 1907.01470).

    One softmax over the tokens that the pattern allows and over `count` learned keys M and values N of each head, which no
    pattern, mask or prior hides.  A query that sees no token sees them still.  As in the paper M = √e · m and N = √count · n
    with m and n learned.  The result is exact: the vectors stand as keys in front of the tokens.

    Queries and keys may not be turned by their places, for the learned keys have none.

    inner   softmax attention over the tokens, with its pattern, prior, scale and executor
    width   e, of a head
    """

    no_rotary_reason = NO_PLACE

    def __init__(self, inner: SoftmaxAttention, heads: int, width: int, count: int) -> None:
        super().__init__()
        check_int(1, heads=heads, width=width, count=count)
        if inner.heads not in (None, heads):
            raise ValueError(
                f"the attention inside was made for {inner.heads} heads, not for {heads}"
            )
        self.inner, self.heads, self.count = inner, heads, count
        self.pattern, self.causal_pattern = inner.pattern, inner.causal_pattern
        self.length, self.can = inner.length, Can(maps=NO_MAP) & inner.can
        self.keys = nn.Parameter(torch.randn(heads, count, width) * width**-0.5)
        self.values = nn.Parameter(torch.randn(heads, count, width) * count**-0.5)

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
        """See `KVCacheAttention.attend`; marks are refused before."""
        key, value = self.keys * self.keys.shape[-1] ** 0.5, self.values * self.count**0.5
        m, prior = (
            k.shape[2],
            None if self.inner.prior is None else ShiftedPrior(self.inner.prior, self.count),
        )
        k, v = (
            torch.cat((new.to(t).expand(t.shape[0], -1, -1, -1), t), 2)
            for new, t in ((key, k), (value, v))
        )
        return attend(
            q,
            k,
            v,
            pattern=shift_pattern(place.pattern, self.count),
            prior=prior,
            scale=self.inner.scale,
            mask=None if mask is None else F.pad(mask, (self.count, 0), value=True),
            q_start=place.q_start + self.count,
            k_positions=_later(place.k_positions, m, self.count),
            backend=self.inner.backend,
        )


def _later(at: int | Tensor, m: int, count: int) -> int | Tensor:
    """Where `count` keys in front, and then m keys that stood at `at`, stand."""
    if isinstance(at, int) and at == 0:
        return 0
    tokens = torch.arange(at, at + m) if isinstance(at, int) else at
    return torch.cat((torch.arange(count, device=tokens.device), tokens + count))


@lru_cache(4096)
def shift_pattern(pattern: Pattern, count: int) -> Pattern:
    """The pattern `count` places later, for queries from there on; the keys in front of it are seen by all."""

    def shift(leaf: Pattern) -> Pattern:
        return (
            leaf if isinstance(leaf, Band | Full) else ShiftedLeaf(leaf, count)
        )  # distances stay what they were

    return pattern.resolve_global_mask(False, False).map_leaves(shift) | Keys(0, count)


@dataclass(frozen=True, repr=False)
class ShiftedLeaf(Leaf):
    """A leaf of the algebra, `by` places later.  Places before those are as the first of them."""

    leaf: Pattern
    by: int

    @property
    def _compares_positions(self) -> bool:  # type: ignore[override]
        return self.leaf.compares_positions

    @property
    def _length(self) -> int | None:  # type: ignore[override]
        return None if self.leaf.length is None else self.leaf.length + self.by

    def _allows(self, q: Tensor, k: Tensor) -> Tensor:
        return self.leaf._allows(*self._before(q, k))

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        return self.leaf._block(*self._before(q0, q1, k0, k1))

    def _before(self, *positions: Tensor) -> list[Tensor]:
        return [(at - self.by).clamp(min=0) for at in positions]


class ShiftedPrior(Prior):
    """A prior `by` places later; nothing is added for the keys in front of it."""

    def __init__(self, prior: Prior, by: int) -> None:
        super().__init__()
        self.prior, self.by, self.heads, self.uses_qk, self.num_terms = (
            prior,
            by,
            prior.heads,
            prior.uses_qk,
            prior.num_terms,
        )
        self.length = None if prior.length is None else prior.length + by

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """See `regard.prior`."""
        addend = self.prior(q_pos - self.by, (k_pos - self.by).clamp(min=0), q, k)
        return torch.where(k_pos >= self.by, addend, 0)
