"""Linearised: the sum over keys is taken before the queries ask, or kept in a state that they read.

All take `chunk`: their causal form works through the sequence in chunks of so many tokens.  The result does not depend on it.
"""

from __future__ import annotations

from regard.attentions import EfficientAttention, LinearAttention
from regard.errors import did_you_mean
from regard.feature import (
    CosineFeatures,
    PositiveFeatures,
    RandomFeatures,
    RandomFourierFeatures,
    ReluFeatures,
    TrigonometricFeatures,
)
from regard.mixer import Mixer, MultiHead, check_heads
from regard.mixers import DeltaRule, GatedLinear, GatedRandomFeatures, Retention
from regard.registry import recipe


@recipe(
    "Katharopoulos et al. 2020",
    arxiv="2006.16236",
    family="linear",
    formula="φ(q)ᵀ Σ φ(k) vᵀ / φ(q)ᵀ Σ φ(k),  φ = elu + 1",
)
def linear(dim: int, heads: int, *, chunk: int = 64, causal: bool = False) -> Mixer:
    """The Linear Transformer: elu(x) + 1 in place of the exponential, sums as state."""
    return MultiHead(dim, heads, LinearAttention(chunk=chunk), causal=causal)


@recipe(
    "Shen et al. 2021",
    arxiv="1812.01243",
    family="linear",
    formula="softmax_e(Q) (softmax_n(K)ᵀ V)",
)
def efficient(dim: int, heads: int, *, causal: bool = False) -> Mixer:
    """Efficient attention: a softmax over features for queries, and one over positions for keys."""
    return MultiHead(dim, heads, EfficientAttention(), causal=causal)


KERNELS: dict[str, type[RandomFeatures]] = {
    "positive": PositiveFeatures,
    "trigonometric": TrigonometricFeatures,
    "relu": ReluFeatures,
}


@recipe(
    "Choromanski et al. 2021",
    arxiv="2009.14794",
    family="linear",
    formula="φ(q)ᵀ Σ φ(k) vᵀ / φ(q)ᵀ Σ φ(k),  φ(x) = exp(Wx − |x|²/2) / √m",
    example_kwargs={"features": 6},
)
def performer(
    dim: int,
    heads: int,
    *,
    features: int | None = None,
    kernel: str = "positive",
    redraw: int | None = None,
    seed: int = 0,
    chunk: int = 64,
    causal: bool = False,
) -> Mixer:
    """The Performer, FAVOR+: softmax attention estimated by positive orthogonal random features.

    features  the number m of random rows; 4 e of them unless given, for heads of width e
    kernel    "positive": exp(w·x − |x|²/2); "trigonometric": sin and cos, the other estimate of the same; "relu": relu(w·x),
              an attention of its own
    redraw    draw rows anew every so many training calls; None: never
    """
    check_heads(dim, heads)
    if kernel not in KERNELS:
        raise ValueError(f"no kernel {kernel!r}: {did_you_mean(str(kernel), KERNELS)}")
    width = dim // heads
    features = 4 * width if features is None else features
    feature = KERNELS[kernel](width, features, seed=seed, redraw=redraw)
    return MultiHead(dim, heads, LinearAttention(feature, chunk=chunk), causal=causal)


@recipe(
    "Peng et al. 2021",
    arxiv="2103.02143",
    family="linear",
    formula="φ(q)ᵀ Σ φ(k) vᵀ / φ(q)ᵀ Σ φ(k),  φ(x) = (sin Wx/|x|, cos Wx/|x|) / √m",
    example_kwargs={"features": 16},
)
def rfa(
    dim: int,
    heads: int,
    *,
    features: int = 64,
    redraw: int | None = None,
    seed: int = 0,
    chunk: int = 64,
    causal: bool = False,
) -> Mixer:
    """Random feature attention: a Gaussian kernel of normalised queries and keys, estimated by sines and cosines.

    features  the number m of random rows; there are twice as many features
    redraw    draw rows anew every so many training calls; None: never
    """
    check_heads(dim, heads)
    feature = RandomFourierFeatures(dim // heads, features, heads, seed=seed, redraw=redraw)
    return MultiHead(dim, heads, LinearAttention(feature, chunk=chunk), causal=causal)


@recipe(
    "Peng et al. 2021",
    arxiv="2103.02143",
    family="linear",
    formula="rfa with S ← g S + (1 − g) φ(k) vᵀ,  g = σ(w·x)",
    example_kwargs={"features": 16},
)
def rfa_gated(
    dim: int,
    heads: int,
    *,
    features: int = 64,
    redraw: int | None = None,
    seed: int = 0,
    chunk: int = 64,
    causal: bool = True,
) -> Mixer:
    """Random feature attention with a gate by which each token sets how much of the past stays; causal only.

    features  the number m of random rows; there are twice as many features
    redraw    draw rows anew every so many training calls; None: never
    """
    return GatedRandomFeatures(
        dim, heads, features=features, seed=seed, redraw=redraw, causal=causal, chunk=chunk
    )


@recipe(
    "Qin et al. 2022",
    arxiv="2202.08791",
    family="linear",
    formula="Σ relu(q_i)·relu(k_j) cos(π (i − j) / 2M) v_j / Σ …",
    example_kwargs={"length": 32},
)
def cosformer(dim: int, heads: int, *, length: int, chunk: int = 64, causal: bool = False) -> Mixer:
    """cosFormer: relu in place of the exponential, and a cosine that favours near tokens.

    length   the longest sequence, the M of the formula
    """
    return MultiHead(
        dim, heads, LinearAttention(CosineFeatures(length), chunk=chunk), causal=causal
    )


@recipe(
    "Sun et al. 2023",
    arxiv="2307.08621",
    family="linear",
    formula="W⁰ (swish(W x) ∘ GN(S q)),  S ← γ S + k vᵀ, q and k turned",
    example_kwargs={"expand": 1},
)
def retnet(dim: int, heads: int, *, expand: int = 2, chunk: int = 64, causal: bool = True) -> Mixer:
    """RetNet's multi-scale retention: a state that fades at a rate of each head's own; causal only.

    expand   values are so many times as wide as keys
    """
    return Retention(dim, heads, expand=expand, causal=causal, chunk=chunk)


@recipe(
    "Yang et al. 2024",
    arxiv="2312.06635",
    family="linear",
    formula="W⁰ (swish(W x) ∘ LN(S q)),  S ← diag(α) S + k vᵀ, α = σ(W² W¹ x)^1/16",
)
def gated_linear(
    dim: int,
    heads: int,
    *,
    key: int | None = None,
    rank: int = 16,
    chunk: int = 64,
    causal: bool = True,
) -> Mixer:
    """Gated linear attention: each token sets how fast each row of the state fades; causal only.

    key     the width of a head's keys and queries, half of that of its values unless given
    rank    the width between the two matrices of the gate
    """
    return GatedLinear(dim, heads, key=key, rank=rank, causal=causal, chunk=chunk)


@recipe(
    "Yang et al. 2024",
    arxiv="2406.06484",
    family="linear",
    formula="W⁰ RMS(S q),  S ← S + β k (v − S k)ᵀ, β = σ(w·x)",
)
def delta_rule(
    dim: int, heads: int, *, convolution: int = 4, chunk: int = 64, causal: bool = True
) -> Mixer:
    """DeltaNet: each token replaces what the state says of its key; causal only.

    convolution   a short one over so many tokens before the heads; 0: none
    """
    return DeltaRule(dim, heads, convolution=convolution, causal=causal, chunk=chunk)
