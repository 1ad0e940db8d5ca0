"""Attention asked by fewer queries."""

from __future__ import annotations

from torch import Tensor

from regard.mixer import Attention, State
from regard.query_prototypes import QueryPrototypes


class PrototypeAttention(Attention):
    """back(inner(prototypes of q, k, v)): any attention, asked once for queries that are alike."""

    needs_query_mask = True

    def __init__(self, query: QueryPrototypes, inner: Attention) -> None:
        super().__init__()
        self.query, self.inner = query, inner
        self.can, self.length, self.no_rotary_reason = (
            query.can & inner.can,
            inner.length,
            inner.no_rotary_reason,
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        mask: Tensor | None = None,
        state: State = None,
        query_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """See `Attention.forward`; query_mask (b n) says which queries count."""
        prototypes, back = self.query(q, query_mask)
        y, state = self.inner(prototypes, k, v, causal=causal, mask=mask, state=state)
        return back(y), state
