"""Priors: what is known of the weights before any token is read."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from regard.attentions import (
    AdaptiveSpanAttention,
    HardCodedAttention,
    LocalnessAttention,
    SoftmaxAttention,
)
from regard.errors import check_int, check_single_head
from regard.mixer import Mixer, MultiHead, check_heads
from regard.mixers import Average, RealFormer, TaskAttention
from regard.pattern import Band, PerHead
from regard.prior import Gaussian
from regard.registry import recipe


@recipe(
    "Yang et al. 2018",
    arxiv="1810.10182",
    family="priors",
    formula="softmax(Q Kᵀ / √e + G) V,  G_ij = −(j − P_i)² / 2σ²",
    example_kwargs={"sigma": 3.0},
)
def gaussian_prior(
    dim: int,
    heads: int,
    *,
    sigma: float | None = 10.0,
    learn: bool = True,
    centre: str = "token",
    window: str = "query",
    causal: bool = False,
) -> Mixer:
    """Near tokens are preferred, by a Gaussian around each token or around a place that it predicts.

    sigma    the width, half of the paper's window D; None: predicted, as `window` says
    learn    whether sigma is learned, head by head; only around the token itself
    centre   "token": the token itself, or "predicted"
    window   "query": each token predicts its own width, "layer": one for all
    """
    check_heads(dim, heads)
    if sigma is not None and window != "query":
        raise ValueError("window is for a predicted width: give sigma=None with it")
    if sigma is not None and centre == "token":
        return MultiHead(
            dim, heads, SoftmaxAttention(prior=Gaussian(heads, sigma, learn=learn)), causal=causal
        )
    if not learn:
        raise ValueError("learn=False is for a Gaussian of given sigma around the token itself")
    located = LocalnessAttention(heads, dim // heads, centre=centre, window=window, sigma=sigma)
    return MultiHead(dim, heads, located, causal=causal)


@recipe(
    "Pilault et al. 2021",
    arxiv="2009.09139",
    family="priors",
    formula="softmax(Q Kᵀ / √e + M(z)) V,  M(z) = ⊕ A_n γ(z) + β(z)",
    example_kwargs={"length": 32, "tasks": 3},
)
def conditional_prior(
    dim: int,
    heads: int,
    *,
    length: int,
    blocks: int | None = None,
    tasks: int = 2,
    causal: bool = False,
) -> Mixer:
    """A block-diagonal bias that depends on the task: CA-MTL's conditional attention.  `mixer.of(task)` picks the task.

    blocks   along the diagonal: 8 unless given, or as many as there are tokens
    """
    check_int(1, length=length)
    blocks = min(8, length) if blocks is None else blocks
    return TaskAttention(dim, heads, length=length, blocks=blocks, tasks=tasks, causal=causal)


@recipe(
    "He et al. 2021",
    arxiv="2012.11747",
    family="priors",
    formula="softmax(S_l) V,  S_l = Q Kᵀ / √e + S_{l−1}",
)
def realformer(dim: int, heads: int, *, causal: bool = False) -> Mixer:
    """The scores of the layer before are a prior for this one; `mixer.chain` hands them on."""
    return RealFormer(dim, heads, causal=causal)


@recipe(
    "Zhang et al. 2018",
    arxiv="1805.00631",
    family="priors",
    formula="gate(x_i, FFN(mean of x_j, j ≤ i))",
)
def average(dim: int, heads: int = 1, *, hidden: int | None = None, causal: bool = False) -> Mixer:
    """Every token so far weighs the same: the mean, a small network and a gate.

    hidden   of the network, 4 dim unless given
    """
    check_single_head("average", heads)
    return Average(dim, hidden=hidden, causal=causal)


@recipe("You et al. 2020", arxiv="2005.00742", family="priors", formula="Σ_j N(j; i + o_h, σ²) v_j")
def hard_gaussian(
    dim: int,
    heads: int,
    *,
    offsets: Sequence[int] | None = None,
    sigma: float = 1.0,
    causal: bool = False,
) -> Mixer:
    """Weights fixed before training: a Gaussian around the token before, the token itself or the one after, head by head.

    offsets   of the centres, in turn over heads: (-1, 0, 1) unless given, (-1, 0) where causal
    """
    check_heads(dim, heads)
    offsets = ((-1, 0) if causal else (-1, 0, 1)) if offsets is None else tuple(offsets)
    mixer = MultiHead(
        dim, heads, HardCodedAttention(heads, offsets=offsets, sigma=sigma), causal=causal
    )
    mixer.q, mixer.k = nn.Identity(), nn.Identity()  # nobody asks, so nobody is asked
    return mixer


@recipe(
    "Sukhbaatar et al. 2019",
    arxiv="1905.07799",
    family="priors",
    formula="softmax over |i − j| ≤ z_h",
    example_kwargs={"spans": (2, 6)},
)
def fixed_span(
    dim: int, heads: int, *, spans: Sequence[int] = (16, 64, 256, 1024), causal: bool = False
) -> Mixer:
    """Each head looks a fixed number of tokens to either side, or back where causal: `spans`, in turn."""
    check_heads(dim, heads)
    if not isinstance(spans, Sequence) or not spans:
        raise ValueError(f"spans must name at least one number of tokens, as a list, not {spans!r}")
    check_int(0, **{f"spans[{i}]": span for i, span in enumerate(spans)})
    bands = tuple(Band(spans[h % len(spans)], spans[h % len(spans)]) for h in range(heads))
    return MultiHead(
        dim,
        heads,
        SoftmaxAttention(bands[0] if len(set(bands)) == 1 else PerHead(bands)),
        causal=causal,
    )


@recipe(
    "Sukhbaatar et al. 2019",
    arxiv="1905.07799",
    family="priors",
    formula="∝ m_z(|i − j|) exp(q_i·k_j / √e),  z learned",
    example_kwargs={"longest": 12, "ramp": 4},
)
def adaptive_span(
    dim: int,
    heads: int,
    *,
    longest: int = 1024,
    ramp: int = 32,
    start: float = 0.5,
    penalty: float = 2e-6,
    causal: bool = False,
) -> Mixer:
    """Each head learns how far it looks, pays for it, and computes no further.

    longest   the most a span can grow to; `start` is the share of it to begin with
    ramp      over so many tokens the weight falls from one to zero
    penalty   of one token of span, told as a cost: see `regard.collect_aux`
    """
    check_heads(dim, heads)
    return MultiHead(
        dim,
        heads,
        AdaptiveSpanAttention(heads, longest=longest, ramp=ramp, start=start, penalty=penalty),
        causal=causal,
    )


if __name__ == "__main__":
    from regard.show import draw_family

    draw_family("G")
