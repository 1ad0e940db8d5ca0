"""Linearised: the sum over keys is taken before the queries ask."""

from __future__ import annotations

from regard.attentions import LinearAttention
from regard.mixer import Mixer, MultiHead
from regard.registry import recipe


@recipe("Katharopoulos et al. 2020", arxiv="2006.16236", row="E1", formula="φ(q)ᵀ Σ φ(k) vᵀ / φ(q)ᵀ Σ φ(k),  φ = elu + 1")
def linear(dim: int, heads: int, *, chunk: int = 64, causal: bool = False) -> Mixer:
    """The Linear Transformer: elu(x) + 1 in place of the exponential, sums as state.

    chunk   the causal form works through the sequence in chunks of so many tokens
    """
    return MultiHead(dim, heads, LinearAttention(chunk=chunk), causal=causal)
