"""Attention before 2017. The recurrent networks around it are in `regard.cells`."""

from __future__ import annotations

from torch import nn

from regard.attentions import AdditiveAttention
from regard.errors import check_int
from regard.mixer import Mixer, MultiHead, check_heads
from regard.mixers import GaussianWindow, GlimpseRead, GlimpseWrite, SoftVisualAttention
from regard.registry import recipe


@recipe(
    "Bahdanau et al. 2015",
    arxiv="1409.0473",
    family="early",
    formula="softmax_j(v · tanh(W s_i + U h_j)) h_j",
)
def bahdanau(dim: int, heads: int = 1, *, causal: bool = False) -> Mixer:
    """Additive attention: a small network scores each pair of tokens, and the tokens themselves are
    averaged.

    Each head has its own network, and averages dim / heads channels.
    """
    check_heads(dim, heads)
    mixer = MultiHead(dim, heads, AdditiveAttention(heads, dim // heads), causal=causal)
    mixer.v, mixer.out = nn.Identity(), nn.Identity()  # the paper averages annotations as they are
    return mixer


@recipe(
    "Graves 2013",
    arxiv="1308.0850",
    family="early",
    formula="Σ_u Σ_k α exp(−β (κ − u)²) c_u,  κ_t = κ_{t−1} + exp(κ̂_t)",
)
def graves_window(dim: int, *, mixtures: int = 10, causal: bool = False) -> Mixer:
    """Graves' window: a mixture of Gaussians that only moves forward over the context.

    Args:
        mixtures: Number of Gaussians.
    """
    return GaussianWindow(dim, mixtures, causal=causal)


@recipe(
    "Gregor et al. 2015",
    arxiv="1502.04623",
    family="early",
    formula="γ F_Yᵀ (F_Y x F_Xᵀ) F_X",
    example_kwargs={"width": 5, "patch": 3},
)
def draw_read(dim: int, *, width: int, patch: int = 5, causal: bool = False) -> Mixer:
    """DRAW's read operation: a grid of Gaussian filters reads a patch of the image and writes it
    back in place.

    Args:
        width: Columns of the image whose pixels are the tokens.
        patch: Rows and columns of the filter grid.
    """
    return GlimpseRead(dim, patch, width, causal=causal)


@recipe(
    "Gregor et al. 2015",
    arxiv="1502.04623",
    family="early",
    formula="1/γ F_Yᵀ w F_X,  w = W s",
    example_kwargs={"width": 5, "patch": 3},
)
def draw_write(dim: int, *, width: int, patch: int = 5, causal: bool = False) -> Mixer:
    """DRAW's write operation: a patch predicted from the mean of all tokens is written through
    Gaussian filters.

    Args:
        width: Columns of the image whose pixels are the tokens.
        patch: Rows and columns of the filter grid.
    """
    return GlimpseWrite(dim, patch, width, causal=causal)


@recipe(
    "Xu et al. 2015",
    arxiv="1502.03044",
    family="early",
    formula="σ(w · h_t) Σ_i softmax_i(f(a_i, h_t)) a_i",
)
def show_attend(
    dim: int,
    *,
    hidden: int | None = None,
    penalty: float = 1.0,
    causal: bool = False,
) -> Mixer:
    """Soft attention of Show, Attend and Tell, with its gate and its doubly stochastic loss.

    Args:
        hidden: Width of the scoring network. Default: dim.
        penalty: Weight λ of the loss on tokens that get too little or too much attention; see
            `regard.collect_aux`.
    """
    hidden = dim if hidden is None else hidden
    check_int(1, dim=dim, hidden=hidden)
    return SoftVisualAttention(dim, hidden, penalty=penalty, causal=causal)
