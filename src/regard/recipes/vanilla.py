"""2017, and before it: softmax attention without weights, and with them."""

from __future__ import annotations

from regard.attentions import SoftmaxAttention
from regard.mixer import Mixer, MultiHead
from regard.registry import recipe


@recipe("the plainest form", family="dense", formula="softmax(x xᵀ) x")
def parameter_free(dim: int, heads: int = 1, *, causal: bool = False) -> Mixer:
    """Self-attention without a single weight.  Scores are not scaled; with several heads each takes its share of the width."""
    return MultiHead(dim, heads, SoftmaxAttention(scale=1.0), causal=causal, project=False)


@recipe("Vaswani et al. 2017", arxiv="1706.03762", family="dense", formula="softmax(Q Kᵀ / √e) V")
def vanilla(
    dim: int, heads: int, *, kv_heads: int | None = None, bias: bool = False, causal: bool = False
) -> Mixer:
    """Scaled dot-product attention with several heads: every token sees every token.

    kv_heads   fewer heads of keys and values, shared among the queries
    bias       whether the four projections have one
    """
    return MultiHead(dim, heads, SoftmaxAttention(), kv_heads=kv_heads, bias=bias, causal=causal)
