"""Attention asked by fewer queries."""

from __future__ import annotations

from torch import Tensor

from regard.mixer import Attention, State
from regard.query import Query


class Prototype(Attention):
    """back(inner(prototypes of q, k, v)): any attention, asked once for queries that are alike."""

    asks_queries = True

    def __init__(self, query: Query, inner: Attention) -> None:
        super().__init__()
        self.query, self.inner = query, inner
        self.can, self.length, self.turnless = query.can & inner.can, inner.length, inner.turnless

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Tensor | None = None, state: State = None,
        real: Tensor | None = None,
    ) -> tuple[Tensor, State]:  # fmt: skip
        """See `Attention.attend`; real (b n) says which queries count."""
        prototypes, back = self.query(q, real)
        y, state = self.inner.attend(prototypes, k, v, causal=causal, mask=mask, state=state)
        return back(y), state
