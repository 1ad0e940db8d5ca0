"""Attention with fewer queries."""

from __future__ import annotations

from torch import Tensor

from regard.mixer import Attention, QueryMaskAttention, State
from regard.query_prototypes import QueryPrototypes


class PrototypeAttention(QueryMaskAttention):
    """Any attention, called with prototypes of the queries. Each query gets the output of its
    prototype."""

    def __init__(self, query: QueryPrototypes, inner: Attention) -> None:
        super().__init__()
        self.query, self.inner = query, inner
        self.can, self.length = query.can & inner.can, inner.length

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
        """See `Attention.forward`."""
        prototypes, expand = self.query(q, query_mask)
        y, state = self.inner(prototypes, k, v, causal=causal, mask=mask, state=state)
        return expand(y), state
