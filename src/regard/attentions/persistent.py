"""Attention that also sees vectors which are no tokens: a feed-forward layer merged into attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attend import attend
from regard.attentions.cached import Cached, Place
from regard.attentions.softmax import SoftmaxAttention
from regard.errors import check_whole
from regard.mixer import Can
from regard.pattern import Pattern, PerHead
from regard.pattern.algebra import Block, Leaf
from regard.prior import Prior

NO_MAP = "a part of its output comes from vectors that are no tokens, so no map of tokens times values is the output"


class Persistent(Cached):
    """softmax([q Kᵀ scale + prior, q Mᵀ scale]) [V; N] (all-attention: Sukhbaatar et al. 2019, arXiv 1907.01470).

    One softmax over the tokens that the pattern allows and over `count` learned keys M and values N of each head, which no
    pattern, mask or prior hides.  A query that sees no token sees them still.  As in the paper M = √e · m and N = √count · n
    with m and n learned.  The result is exact: the vectors stand as keys in front of the tokens.

    inner   softmax attention over the tokens, with its pattern, prior, scale and executor
    width   e, of a head
    """

    def __init__(self, inner: SoftmaxAttention, heads: int, width: int, count: int) -> None:
        super().__init__()
        check_whole(1, heads=heads, width=width, count=count)
        if inner.heads not in (None, heads):
            raise ValueError(f"the attention inside was made for {inner.heads} heads, not for {heads}")
        self.inner, self.pattern, self.heads, self.count = inner, inner.pattern, heads, count
        self.length, self.can = inner.length, Can(maps=NO_MAP) & inner.can
        self.prior = None if inner.prior is None else AfterCount(inner.prior, count)
        self.keys = nn.Parameter(torch.randn(heads, count, width) * width**-0.5)
        self.values = nn.Parameter(torch.randn(heads, count, width) * count**-0.5)

    def over(
        self, q: Tensor, k: Tensor, v: Tensor, place: Place, *, mask: Tensor | None = None, marks: Tensor | None = None
    ) -> Tensor:
        """See `Cached.over`; marks are refused before."""
        key, value = self.keys * self.keys.shape[-1] ** 0.5, self.values * self.count**0.5
        k, v = (torch.cat((new.to(t).expand(len(t), -1, -1, -1), t), 2) for new, t in ((key, k), (value, v)))
        return attend(
            q, k, v, pattern=after(place.pattern, self.count), prior=self.prior, scale=self.inner.scale,
            mask=None if mask is None else F.pad(mask, (self.count, 0), value=True),
            q_at=place.q_at + self.count, k_at=_after(place.k_at, self.count), backend=self.inner.backend,
        )  # fmt: skip


def _after(at: int | Tensor, count: int) -> int | Tensor:
    """Where keys stand once there are `count` more in front."""
    if isinstance(at, int) and at == 0:
        return 0
    raise NotImplementedError


def after(pattern: Pattern, count: int) -> Pattern:
    """The pattern, `count` places later; the keys in front are seen by all."""
    return PerHead(tuple(After(part, count) for part in pattern.parts)) if pattern.heads else After(pattern, count)
