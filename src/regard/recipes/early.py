"""Before 2017: the mechanisms from which attention grew.  The recurrent networks around them are in `regard.cells`."""

from __future__ import annotations

from torch import nn

from regard.attentions import AdditiveAttention
from regard.errors import check_int, check_single_head
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
    """A small network compares each token with each, and the tokens themselves are averaged.

    With several heads each has its own part of the network, and averages its share of the width.
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
def graves_window(dim: int, heads: int = 1, *, mixtures: int = 10, causal: bool = False) -> Mixer:
    """A window of Gaussian bells that only moves forward over the memory.  There is one window: `heads` must be 1.

    mixtures   bells in the window
    """
    check_single_head("graves_window", heads)
    return GaussianWindow(dim, mixtures, causal=causal)


@recipe(
    "Gregor et al. 2015",
    arxiv="1502.04623",
    family="early",
    formula="γ F_Yᵀ (F_Y x F_Xᵀ) F_X",
    example_kwargs={"width": 5, "patch": 3},
)
def draw_read(
    dim: int, heads: int = 1, *, width: int, patch: int = 5, causal: bool = False
) -> Mixer:
    """DRAW's glimpse: `patch` × `patch` Gaussian filters read an image, and lay back what they saw.  `heads` must be 1.

    width   columns of the image whose pixels the tokens are
    """
    check_single_head("draw_read", heads)
    return GlimpseRead(dim, patch, width, causal=causal)


@recipe(
    "Gregor et al. 2015",
    arxiv="1502.04623",
    family="early",
    formula="1/γ F_Yᵀ w F_X,  w = W s",
    example_kwargs={"width": 5, "patch": 3},
)
def draw_write(
    dim: int, heads: int = 1, *, width: int, patch: int = 5, causal: bool = False
) -> Mixer:
    """DRAW's brush: a patch made from the mean of all tokens, written through Gaussian filters.  `heads` must be 1.

    width   columns of the image whose pixels the tokens are
    """
    check_single_head("draw_write", heads)
    return GlimpseWrite(dim, patch, width, causal=causal)


@recipe(
    "Xu et al. 2015",
    arxiv="1502.03044",
    family="early",
    formula="σ(w · h_t) Σ_i softmax_i(f(a_i, h_t)) a_i",
)
def show_attend(
    dim: int,
    heads: int = 1,
    *,
    hidden: int | None = None,
    penalty: float = 1.0,
    causal: bool = False,
) -> Mixer:
    """Show, attend and tell's soft attention, with its gate and its cost.  There is one head: `heads` must be 1.

    hidden    width of the network that compares, `dim` unless given
    penalty   λ of the cost for cells that are looked at too little or too much; see `regard.collect_aux`
    """
    check_single_head("show_attend", heads)
    check_int(1, dim=dim, hidden=dim if hidden is None else hidden)
    return SoftVisualAttention(
        dim, dim if hidden is None else hidden, penalty=penalty, causal=causal
    )
