"""Attention through a few learned vectors, and blocks for sets."""

from __future__ import annotations

from regard.mixer import Mixer
from regard.mixers import ISAB, SAB, CausalLuna, Luna, Perceiver
from regard.registry import recipe


@recipe(
    "Lee et al. 2019",
    arxiv="1810.00825",
    family="compressed",
    formula="norm(H + rFF(H)),  H = norm(X + MultiHead(X, X))",
)
def sab(dim: int, heads: int, *, norm: bool = True, causal: bool = False) -> Mixer:
    """Set attention block (Set Transformer): attention among the elements of a set, and a
    feed-forward layer.

    Args:
        norm: Use the two layer norms.
    """
    return SAB(dim, heads, norm=norm, causal=causal)


@recipe(
    "Lee et al. 2019",
    arxiv="1810.00825",
    family="compressed",
    formula="MAB(X, MAB(I, X)),  I learned",
    example_kwargs={"points": 4},
)
def isab(
    dim: int, heads: int, *, points: int = 16, norm: bool = True, causal: bool = False
) -> Mixer:
    """Induced set attention block (Set Transformer): learned inducing points read the set, and the
    set reads them.

    Args:
        points: Number of inducing points.
        norm: Use the layer norms.
    """
    return ISAB(dim, heads, points=points, norm=norm, causal=causal)


@recipe(
    "Ma et al. 2021",
    arxiv="2106.01540",
    family="compressed",
    formula="MultiHead(X, MultiHead(P, X)),  P learned",
    example_kwargs={"packed": 4},
)
def luna(
    dim: int, heads: int, *, packed: int = 64, activation: str | None = None, causal: bool = False
) -> Mixer:
    """Luna: a short learned sequence attends to the tokens (pack), and the tokens attend to the
    result (unpack).

    Args:
        packed: Length of the learned sequence.
        activation: Causal form only, where it replaces the softmax over tokens: "softplus"
            (default) or "elu".
    """
    if causal:
        return CausalLuna(
            dim, heads, packed=packed, activation="softplus" if activation is None else activation
        )
    if activation is not None:
        raise ValueError(f"activation={activation!r} is for causal=True only; leave it out")
    return Luna(dim, heads, packed=packed)


@recipe(
    "Jaegle et al. 2021",
    arxiv="2103.03206",
    family="compressed",
    formula="read(x, process(read(Z, x))),  Z learned",
    example_kwargs={"latents": 4},
)
def perceiver(
    dim: int,
    heads: int,
    *,
    latents: int = 64,
    depth: int = 2,
    widening: int = 1,
    causal: bool = False,
) -> Mixer:
    """Perceiver: learned latents attend to the tokens, then to each other, and the tokens attend to
    the latents.

    Args:
        latents: Number of latents.
        depth: Self-attention layers of the latents.
        widening: Widening factor of the feed-forward layers.
    """
    return Perceiver(dim, heads, latents=latents, depth=depth, widening=widening, causal=causal)
