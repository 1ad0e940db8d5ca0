"""More capacity inside attention: vectors that every token sees beside the others."""

from __future__ import annotations

from regard.attentions import PersistentMemoryAttention, SoftmaxAttention
from regard.errors import check_int
from regard.mixer import Mixer, MultiHead, check_heads
from regard.pattern import Band, Full
from regard.registry import recipe


@recipe(
    "Sukhbaatar et al. 2019",
    arxiv="1907.01470",
    family="hybrid",
    formula="softmax(Q [K; M]ᵀ / √e) [V; N], M and N learned",
    example_kwargs={"count": 5},
)
def all_attention(
    dim: int,
    heads: int,
    *,
    count: int | None = None,
    window: int | None = None,
    causal: bool = False,
) -> Mixer:
    """Every token also sees `count` learned keys and values of each head, which take the place of a feed-forward layer.

    count    4 · dim unless given: then they have as many parameters as a feed-forward layer of that width
    window   tokens see so many to each side, and the learned vectors; None: all
    """
    check_heads(dim, heads)
    count = 4 * dim if count is None else count
    if window is not None:
        check_int(0, window=window)
    near = SoftmaxAttention(Full() if window is None else Band(window, window))
    return MultiHead(
        dim, heads, PersistentMemoryAttention(near, heads, dim // heads, count), causal=causal
    )
