"""Attention over compressed keys and values."""

from __future__ import annotations

from torch import Tensor

from regard.compression import KVCompression
from regard.mixer import Attention, QueryMaskAttention, State


class CompressedAttention(QueryMaskAttention):
    """inner(q, compression(k, v)): any attention over fewer keys and values."""

    def __init__(self, compression: KVCompression, inner: Attention) -> None:
        super().__init__()
        self.compression, self.inner = compression, inner
        self.can = (compression.can & inner.can).without(
            rotary="its keys are mixtures of several positions"
        )
        self.length = compression.length

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
        """See `QueryMaskAttention.forward`."""
        k, v, mask = self.compression(k, v, mask)
        masks = {"mask": mask}
        if isinstance(self.inner, QueryMaskAttention):
            masks["query_mask"] = query_mask
        y, state = self.inner(q, k, v, causal=causal, state=state, **masks)
        return y, state
