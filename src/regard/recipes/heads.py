"""Variants of the heads: shared, mixed, or made to differ."""

from __future__ import annotations

from regard.attentions import DisagreementAttention, MaterializedAttention, SoftmaxAttention
from regard.errors import check_int
from regard.head_mixing import SharedProjection, TalkingHeads
from regard.mixer import Attention, Mixer, MultiHead, check_heads
from regard.registry import recipe


@recipe(
    "Shazeer et al. 2020",
    arxiv="2003.02436",
    family="priors",
    formula="P_w softmax(P_l (Q Kᵀ / √e)) V, P over heads",
)
def talking_heads(heads: int, head_dim: int, *, inner: int | None = None) -> Attention:
    """Talking heads: learned matrices mix the scores over heads before the softmax and the weights
    after it.

    Args:
        inner: Number of heads in the softmax. Default: heads.
    """
    inner = heads if inner is None else inner
    check_int(1, inner=inner)
    return MaterializedAttention(
        before=TalkingHeads(heads, inner), after=TalkingHeads(inner, heads)
    )


@recipe(
    "Cordonnier et al. 2020",
    arxiv="2006.16362",
    family="priors",
    formula="softmax(X W_Q diag(m_h) W_Kᵀ Xᵀ / √e) V_h",
    example_kwargs={"width": 5},
)
def collaborative(dim: int, heads: int, *, width: int | None = None, causal: bool = False) -> Mixer:
    """Collaborative heads: one projection of queries and keys for all heads, which each head mixes
    in its own way.

    `regard.mixers.collaborate` converts a trained layer.

    Args:
        width: Width of the shared projections. Default: dim / 2.
    """
    check_heads(dim, heads)
    width = max(1, dim // 2) if width is None else width
    check_int(1, width=width)
    mixer = MultiHead(dim, heads, SoftmaxAttention(scale=(dim // heads) ** -0.5), causal=causal)
    mixer.q = SharedProjection(dim, heads, width, mixed=True)
    mixer.k = SharedProjection(dim, heads, width, mixed=False)
    return mixer


@recipe(
    "Li et al. 2018",
    arxiv="1810.10183",
    family="priors",
    formula="softmax(Q Kᵀ / √e) V, cost λ/h² Σ_ij cos(o_i, o_j)",
)
def disagreement(
    heads: int, head_dim: int, *, kind: str = "outputs", penalty: float = 1.0
) -> Attention:
    """Softmax attention with an auxiliary loss on the similarity of its heads.

    Args:
        kind: What is compared: "subspace" (values), "positions" (attention maps) or "outputs".
        penalty: Weight of the loss; see `regard.collect_aux`.
    """
    return DisagreementAttention(SoftmaxAttention(), kind=kind, penalty=penalty)


@recipe(
    "Shazeer 2019",
    arxiv="1911.02150",
    family="priors",
    formula="softmax(Q_h Kᵀ / √e) V, one K and V for all heads",
)
def multi_query(dim: int, heads: int, *, causal: bool = False) -> Mixer:
    """Multi-query attention: all heads share one head of keys and values, so the KV cache is
    `heads` times smaller.
    """
    return MultiHead(dim, heads, SoftmaxAttention(), kv_heads=1, causal=causal)


@recipe(
    "Ainslie et al. 2023",
    arxiv="2305.13245",
    family="priors",
    formula="softmax(Q_h K_gᵀ / √e) V_g, g = ⌊h / group_size⌋",
    example_kwargs={"group_size": 2},
)
def grouped_query(dim: int, heads: int, *, group_size: int = 4, causal: bool = False) -> Mixer:
    """Grouped-query attention: groups of heads share one head of keys and values.

    Args:
        group_size: Query heads per key/value head.
    """
    check_heads(dim, heads)
    check_int(1, group_size=group_size)
    if heads % group_size:
        raise ValueError(f"heads={heads} must be divisible by group_size={group_size}")
    attention = SoftmaxAttention()
    return MultiHead(dim, heads, attention, kv_heads=heads // group_size, causal=causal)
