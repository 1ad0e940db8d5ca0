"""Linear attention and recurrences: a state of fixed size instead of a cache of keys.

`chunk` sets how many tokens the causal form processes at once. It changes the speed, not the
result.
"""

from __future__ import annotations

from regard.attentions import EfficientAttention, LinearAttention
from regard.errors import check_choice
from regard.feature import (
    CosineFeatures,
    PositiveFeatures,
    RandomFeatures,
    RandomFourierFeatures,
    ReluFeatures,
    TrigonometricFeatures,
)
from regard.mixer import Attention, Mixer
from regard.mixers import DeltaRule, GatedLinear, GatedRandomFeatures, Retention
from regard.registry import recipe


@recipe(
    "Katharopoulos et al. 2020",
    arxiv="2006.16236",
    family="linear",
    formula="φ(q)ᵀ Σ φ(k) vᵀ / φ(q)ᵀ Σ φ(k),  φ = elu + 1",
)
def linear(heads: int, head_dim: int, *, chunk: int = 64) -> Attention:
    """Linear Transformer: elu(x) + 1 as the feature map of queries and keys.

    Args:
        chunk: Tokens processed at once by the causal form.
    """
    return LinearAttention(chunk=chunk)


@recipe(
    "Shen et al. 2021",
    arxiv="1812.01243",
    family="linear",
    formula="softmax_e(Q) (softmax_n(K)ᵀ V)",
)
def efficient(heads: int, head_dim: int) -> Attention:
    """Efficient attention: softmax over channels for queries and over positions for keys."""
    return EfficientAttention()


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
    heads: int,
    head_dim: int,
    *,
    features: int | None = None,
    kernel: str = "positive",
    redraw: int | None = None,
    seed: int = 0,
    chunk: int = 64,
) -> Attention:
    """Performer (FAVOR+): softmax attention approximated by positive orthogonal random features.

    Args:
        features: Number m of random features. Default: 4 e, for heads of width e.
        kernel: "positive": exp(w·x − |x|²/2). "trigonometric": sine and cosine, for the same
            kernel. "relu": relu(w·x), which is another kernel.
        redraw: Draw new features every `redraw` training calls. Default: never.
        seed: Seed of the features.
        chunk: Tokens processed at once by the causal form.
    """
    check_choice("kernel", kernel, KERNELS)
    features = 4 * head_dim if features is None else features
    feature_map = KERNELS[kernel](head_dim, features, seed=seed, redraw=redraw)
    return LinearAttention(feature_map, chunk=chunk)


@recipe(
    "Peng et al. 2021",
    arxiv="2103.02143",
    family="linear",
    formula="φ(q)ᵀ Σ φ(k) vᵀ / φ(q)ᵀ Σ φ(k),  φ(x) = (sin Wx/|x|, cos Wx/|x|) / √m",
    example_kwargs={"features": 16},
)
def rfa(
    heads: int,
    head_dim: int,
    *,
    features: int = 64,
    redraw: int | None = None,
    seed: int = 0,
    chunk: int = 64,
) -> Attention:
    """Random feature attention: random Fourier features of a Gaussian kernel, for normalised
    queries and keys.

    Args:
        features: Number m of random projections; each gives a sine and a cosine.
        redraw: Draw new features every `redraw` training calls. Default: never.
        seed: Seed of the features.
        chunk: Tokens processed at once by the causal form.
    """
    feature_map = RandomFourierFeatures(head_dim, features, heads, seed=seed, redraw=redraw)
    return LinearAttention(feature_map, chunk=chunk)


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
    """Random feature attention with a gate that decides how much of the state is kept. Causal only.

    Args:
        features: Number m of random projections; each gives a sine and a cosine.
        redraw: Draw new features every `redraw` training calls. Default: never.
        seed: Seed of the features.
        chunk: Tokens processed at once.
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
def cosformer(heads: int, head_dim: int, *, length: int, chunk: int = 64) -> Attention:
    """cosFormer: relu features and a cosine re-weighting that favours nearby tokens.

    Args:
        length: Maximum length, M in the formula.
        chunk: Tokens processed at once by the causal form.
    """
    return LinearAttention(CosineFeatures(length), chunk=chunk)


@recipe(
    "Sun et al. 2023",
    arxiv="2307.08621",
    family="linear",
    formula="W⁰ (swish(W x) ∘ GN(S q)),  S ← γ S + k vᵀ, rotary q and k",
    example_kwargs={"expand": 1},
)
def retnet(dim: int, heads: int, *, expand: int = 2, chunk: int = 64, causal: bool = True) -> Mixer:
    """RetNet: multi-scale retention, a state that decays at a fixed rate in each head. Causal only.

    Args:
        expand: Width of the values, in multiples of the width of the keys.
        chunk: Tokens processed at once.
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
    """Gated linear attention: each token sets the decay of each row of the state. Causal only.

    Args:
        key: Width of keys and queries in each head. Default: half the width of the values.
        rank: Rank of the gate's projection.
        chunk: Tokens processed at once.
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
    """DeltaNet: each token replaces the value that the state stores under its key. Causal only.

    Args:
        convolution: Kernel size of the short convolution before the heads; 0 for none.
        chunk: Tokens processed at once.
    """
    return DeltaRule(dim, heads, convolution=convolution, causal=causal, chunk=chunk)
