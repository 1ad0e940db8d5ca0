"""Attention combined with other layers in one mixer."""

from __future__ import annotations

from regard.attentions import PersistentMemoryAttention, SoftmaxAttention
from regard.errors import check_int
from regard.mixer import Attention, Mixer, MultiHead
from regard.mixers import Branches, DynamicConv
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
    heads: int, head_dim: int, *, count: int | None = None, window: int | None = None
) -> Attention:
    """All-attention layer: every token also attends to `count` learned keys and values per head,
    which replace the feed-forward layer.

    Args:
        count: Learned keys and values per head. Default: 4 · heads · head_dim, the parameter
            count of a feed-forward layer.
        window: Attend to tokens at most this far away on each side (±window). Default: all tokens.
    """
    if window is not None:
        check_int(0, window=window)
    tokens = SoftmaxAttention(Full() if window is None else Band(window, window))
    count = 4 * heads * head_dim if count is None else count
    return PersistentMemoryAttention(tokens, heads, head_dim, count)


@recipe(
    "Wu et al. 2020",
    arxiv="2004.11886",
    family="hybrid",
    formula="[attention(x₁) ; convolution(x₂)],  x = [x₁ ; x₂]",
    example_kwargs={"kernel": 5},
)
def lite(
    dim: int,
    heads: int,
    *,
    kernel: int = 7,
    near: int | None = None,
    dynamic: bool = False,
    causal: bool = False,
) -> Mixer:
    """Lite Transformer: one half of the channels attends to all tokens, the other half is
    convolved.

    Args:
        heads: Heads of each half.
        kernel: Kernel size of the convolution.
        near: Channels that are convolved. Default: dim / 2.
        dynamic: Predict the kernel from the token (dynamic convolution) instead of learning one.
    """
    check_int(2, dim=dim)
    near = dim // 2 if near is None else near
    check_int(1, near=near)
    if near >= dim:
        raise ValueError(
            f"near must be less than dim={dim}, so that some channels attend, not {near}"
        )
    attention = MultiHead(dim - near, heads, SoftmaxAttention(), causal=causal)
    return Branches([attention, DynamicConv(near, heads, kernel, dynamic=dynamic, causal=causal)])
