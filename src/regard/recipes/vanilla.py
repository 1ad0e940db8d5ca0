"""Dense softmax attention, without projections and with them."""

from __future__ import annotations

from regard.attentions import SoftmaxAttention
from regard.mixer import Attention, Mixer, MultiHead
from regard.registry import recipe


@recipe("the simplest form", family="dense", formula="softmax(x xᵀ) x")
def parameter_free(dim: int, heads: int = 1, *, causal: bool = False) -> Mixer:
    """Self-attention without parameters.

    Scores are not scaled; each head takes dim / heads channels.
    """
    return MultiHead(dim, heads, SoftmaxAttention(scale=1.0), causal=causal, project=False)


@recipe("Vaswani et al. 2017", arxiv="1706.03762", family="dense", formula="softmax(Q Kᵀ / √e) V")
def vanilla(heads: int, head_dim: int) -> Attention:
    """Multi-head scaled dot-product attention: every token attends to every token."""
    return SoftmaxAttention()
