"""Low-rank attention beside band attention."""

from __future__ import annotations

from torch import Tensor, nn

from regard.attentions import SoftmaxAttention
from regard.errors import check_int
from regard.mixer import (
    Can,
    Mixer,
    MultiHead,
    State,
    identity_values,
    merge_heads,
    run_attention,
)
from regard.pattern import Band


def narrow_queries_and_keys(mixer: MultiHead, rank: int) -> MultiHead:
    """Replace the projections of queries and keys by ones of width `rank` per head, in place."""
    check_int(1, rank=rank)
    mixer.q, mixer.k = (nn.Linear(mixer.dim, mixer.heads * rank, bias=False) for _ in range(2))
    return mixer


class LowRankBand(Mixer):
    """out = W⁰ (A + B) V, with low-rank attention A and band attention B.

    A = softmax(Q Kᵀ / √rank), where Q and K have `rank` columns per head. B is the softmax of a
    second pair of queries and keys, over |i − j| ≤ window. Guo et al. 2019, "Low-rank and locality
    constrained self-attention for sequence modeling".
    """

    def __init__(
        self, dim: int, heads: int, *, rank: int, window: int, causal: bool = False
    ) -> None:
        near = SoftmaxAttention(Band(window, window))
        super().__init__(dim, can=near.can & Can(), causal=causal)
        self.low = narrow_queries_and_keys(
            MultiHead(dim, heads, SoftmaxAttention(), causal=causal), rank
        )
        self.band = MultiHead(dim, heads, near, causal=causal)
        self.band.out = nn.Identity()
        del self.band.v  # it has the values of `low`

    def initial_state(self) -> State:
        """Empty KV caches of both parts."""
        return self.low.initial_state(), self.band.initial_state()

    def mix(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        state: State,
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """(b n d) -> (b n d)."""
        low, band = (None, None) if state is None else state
        q, k, v = self.low.project(x, context)
        masks = {"mask": mask, "attn_mask": attn_mask, "causal": self.causal}
        everywhere, low = run_attention(self.low.inner, q, k, v, state=low, **masks)
        q, k = self._band_queries_and_keys(x, context)
        near, band = run_attention(self.band.inner, q, k, v, state=band, **masks)
        return self.low.out(merge_heads(everywhere + near)), (low, band)

    def weights(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """A + B, whose rows sum to two."""
        low = self.low.weights(x, context, mask, attn_mask=attn_mask)
        q, k = self._band_queries_and_keys(x, context)
        values, causal = identity_values(k, k), self.causal
        return low + self.band.inner(q, k, values, causal=causal, mask=mask, attn_mask=attn_mask)[0]

    def _band_queries_and_keys(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        source = x if context is None else context
        return self.band.project_queries(x), self.band.project_keys(source)
