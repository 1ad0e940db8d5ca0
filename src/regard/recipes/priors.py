"""Priors: attention weights that also depend on positions or on the layer before."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from regard.attentions import (
    AdaptiveSpanAttention,
    HardCodedAttention,
    LocalnessAttention,
    SoftmaxAttention,
)
from regard.errors import check_int
from regard.mixer import Attention, Mixer, MultiHead, check_heads
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
    heads: int,
    head_dim: int,
    *,
    sigma: float | None = 10.0,
    learn: bool = True,
    centre: str = "token",
    window: str = "query",
) -> Attention:
    """Localness: a Gaussian bias around each token, or around a position that it predicts.

    Args:
        sigma: Standard deviation, half of the paper's window D. None: predicted, as `window` says.
        learn: Learn sigma for each head; for centre="token" only.
        centre: "token": the token itself. "predicted": a predicted position.
        window: For sigma=None. "query": each token predicts its sigma. "layer": one sigma for all
            tokens.
    """
    if sigma is not None and window != "query":
        raise ValueError("window is for a predicted sigma only: pass sigma=None")
    if sigma is not None and centre == "token":
        return SoftmaxAttention(prior=Gaussian(heads, sigma, learn=learn))
    if not learn:
        raise ValueError("learn=False requires a given sigma and centre='token'")
    return LocalnessAttention(heads, head_dim, centre=centre, window=window, sigma=sigma)


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
    """CA-MTL's conditional attention: a block-diagonal bias that depends on the task.

    `mixer.for_task(task)` selects one, `regard.mixers.for_task(model, task)` for a whole model.

    Args:
        length: Maximum length.
        blocks: Blocks on the diagonal. Default: 8, or `length` if that is less.
        tasks: Number of tasks.
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
    """RealFormer: the scores of the layer before are added to the scores of this one; `mixer.chain`
    passes them on.
    """
    return RealFormer(dim, heads, causal=causal)


@recipe(
    "Zhang et al. 2018",
    arxiv="1805.00631",
    family="priors",
    formula="gate(x_i, FFN(mean of x_j, j ≤ i))",
)
def average(dim: int, *, hidden: int | None = None, causal: bool = False) -> Mixer:
    """Average attention network: the mean of all tokens so far, a feed-forward layer and a gate.

    Args:
        hidden: Width of the feed-forward layer. Default: 4 · dim.
    """
    return Average(dim, hidden=hidden, causal=causal)


@recipe(
    "You et al. 2020",
    arxiv="2005.00742",
    family="priors",
    formula="Σ_j N(j; i + o_h, σ²) v_j",
)
def hard_gaussian(
    dim: int,
    heads: int,
    *,
    offsets: Sequence[int] | None = None,
    sigma: float = 1.0,
    causal: bool = False,
) -> Mixer:
    """Hard-coded Gaussian attention: fixed weights around the previous token, the token itself or
    the next one.

    Args:
        offsets: Centre of each head relative to the token, repeated over heads. Default:
            (-1, 0, 1), or (-1, 0) if causal.
        sigma: Standard deviation.
    """
    check_heads(dim, heads)
    if offsets is None:
        offsets = (-1, 0) if causal else (-1, 0, 1)
    attention = HardCodedAttention(heads, offsets=tuple(offsets), sigma=sigma)
    mixer = MultiHead(dim, heads, attention, causal=causal)
    mixer.q, mixer.k = nn.Identity(), nn.Identity()  # the weights are fixed, so neither is used
    return mixer


@recipe(
    "Sukhbaatar et al. 2019",
    arxiv="1905.07799",
    family="priors",
    formula="softmax over |i − j| ≤ z_h",
    example_kwargs={"spans": (2, 6)},
)
def fixed_span(
    heads: int, head_dim: int, *, spans: Sequence[int] = (16, 64, 256, 1024)
) -> Attention:
    """Fixed spans: a sliding window of a different size in each head.

    Args:
        spans: Tokens on each side (±span), repeated over heads.
    """
    if not isinstance(spans, Sequence) or not spans:
        raise ValueError(f"spans must be a list of at least one number of tokens, not {spans!r}")
    check_int(0, **{f"spans[{i}]": span for i, span in enumerate(spans)})
    bands = tuple(Band(spans[h % len(spans)], spans[h % len(spans)]) for h in range(heads))
    pattern = bands[0] if len(set(bands)) == 1 else PerHead(bands)
    return SoftmaxAttention(pattern)


@recipe(
    "Sukhbaatar et al. 2019",
    arxiv="1905.07799",
    family="priors",
    formula="∝ m_z(|i − j|) exp(q_i·k_j / √e),  z learned",
    example_kwargs={"longest": 12, "ramp": 4},
)
def adaptive_span(
    heads: int,
    head_dim: int,
    *,
    longest: int = 1024,
    ramp: int = 32,
    start: float = 0.5,
    penalty: float = 2e-6,
) -> Attention:
    """Adaptive spans: each head learns the size of its window, and computes no more than that.

    Args:
        longest: Maximum span on each side (±longest).
        ramp: Tokens over which the weight falls from one to zero.
        start: Initial span, as a fraction of `longest`.
        penalty: Weight of the auxiliary loss on the spans; see `regard.collect_aux`.
    """
    return AdaptiveSpanAttention(heads, longest=longest, ramp=ramp, start=start, penalty=penalty)
