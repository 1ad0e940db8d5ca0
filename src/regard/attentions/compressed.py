"""Attention to a shorter memory."""

from __future__ import annotations

from torch import Tensor

from regard.compression import KVCompression
from regard.mixer import Attention, State


class CompressedAttention(Attention):
    """inner(q, memory(k, v)): any attention, over keys and values that were made fewer."""

    no_rotary_reason = "its keys are mixtures of many positions, and no place is left to tell"

    def __init__(self, compression: KVCompression, inner: Attention) -> None:
        super().__init__()
        self.compression, self.inner = compression, inner
        self.can, self.length = compression.can & inner.can, compression.length

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        mask: Tensor | None = None,
        state: State = None,
    ) -> tuple[Tensor, State]:
        """See `Attention.forward`."""
        k, v, mask = self.compression(k, v, mask)
        return self.inner(q, k, v, causal=causal, mask=mask, state=state)
