"""What heads have to do with each other."""

from __future__ import annotations

from regard.attentions import DisagreementAttention, MaterializedAttention, SoftmaxAttention
from regard.errors import check_int
from regard.head_mixing import SharedProjection, TalkingHeads
from regard.mixer import Mixer, MultiHead, check_heads
from regard.registry import recipe


@recipe(
    "Shazeer et al. 2020",
    arxiv="2003.02436",
    family="priors",
    formula="P_w softmax(P_l (Q Kᵀ / √e)) V, P over heads",
)
def talking_heads(dim: int, heads: int, *, inner: int | None = None, causal: bool = False) -> Mixer:
    """Heads talk before and after the softmax: scores, then weights, are mixed over heads by learned matrices.

    inner   how many heads stand between the two, as many as outside unless given
    """
    check_heads(dim, heads)
    inner = heads if inner is None else inner
    check_int(1, inner=inner)
    return MultiHead(
        dim,
        heads,
        MaterializedAttention(before=TalkingHeads(heads, inner), after=TalkingHeads(inner, heads)),
        causal=causal,
    )


@recipe(
    "Cordonnier et al. 2020",
    arxiv="2006.16362",
    family="priors",
    formula="softmax(X W_Q diag(m_h) W_Kᵀ Xᵀ / √e) V_h",
    example_kwargs={"width": 5},
)
def collaborative(dim: int, heads: int, *, width: int | None = None, causal: bool = False) -> Mixer:
    """Heads share one projection of queries and one of keys, of which each takes its own mixture.

    width   of the shared projections, half of dim unless given; `regard.mixers.collaborate` turns a trained layer into such
    """
    check_heads(dim, heads)
    width = max(1, dim // 2) if width is None else width
    check_int(1, width=width)
    mixer = MultiHead(dim, heads, SoftmaxAttention(scale=(dim // heads) ** -0.5), causal=causal)
    mixer.q, mixer.k = (SharedProjection(dim, heads, width, mixed=mixed) for mixed in (True, False))
    return mixer


@recipe(
    "Li et al. 2018",
    arxiv="1810.10183",
    family="priors",
    formula="softmax(Q Kᵀ / √e) V, cost λ/h² Σ_ij cos(o_i, o_j)",
)
def disagreement(
    dim: int, heads: int, *, kind: str = "outputs", penalty: float = 1.0, causal: bool = False
) -> Mixer:
    """Plain attention whose heads pay for being alike.

    kind      "subspace": alike in their values, "positions": in their maps, "outputs": in their results
    penalty   the weight of the cost, told to `regard.collect_aux`
    """
    return MultiHead(
        dim,
        heads,
        DisagreementAttention(SoftmaxAttention(), kind=kind, penalty=penalty),
        causal=causal,
    )


@recipe(
    "Shazeer 2019",
    arxiv="1911.02150",
    family="priors",
    formula="softmax(Q_h Kᵀ / √e) V, one K and V for all heads",
)
def multi_query(dim: int, heads: int, *, causal: bool = False) -> Mixer:
    """All heads share one head of keys and values, so a stream keeps `heads` times less."""
    return MultiHead(dim, heads, SoftmaxAttention(), kv_heads=1, causal=causal)


@recipe(
    "Ainslie et al. 2023",
    arxiv="2305.13245",
    family="priors",
    formula="softmax(Q_h K_gᵀ / √e) V_g, g = ⌊h / share⌋",
    example_kwargs={"share": 2},
)
def grouped_query(dim: int, heads: int, *, share: int = 4, causal: bool = False) -> Mixer:
    """Every `share` heads have one head of keys and values in common."""
    check_heads(dim, heads)
    check_int(1, share=share)
    if heads % share:
        raise ValueError(f"heads must be divisible by share, and {heads} is not by {share}")
    return MultiHead(dim, heads, SoftmaxAttention(), kv_heads=heads // share, causal=causal)
