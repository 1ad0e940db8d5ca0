"""A few learned vectors stand between the tokens, and blocks that know no order."""

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
    """Set Transformer's SAB: attention among the elements of a set, and a feed-forward layer.

    norm   whether it has its two layer normalisations
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
    """Set Transformer's ISAB: a few inducing points read the set, and the set reads them.

    norm   whether it has its layer normalisations
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
    """Luna: a learned sequence of `packed` vectors packs the tokens, and the tokens unpack it.

    activation   of the causal form, which cannot take a softmax over tokens: "softplus" unless given, or "elu"
    """
    if causal:
        return CausalLuna(
            dim, heads, packed=packed, activation="softplus" if activation is None else activation
        )
    if activation is not None:
        raise ValueError(
            f"only the causal form has an activation in place of the softmax; leave {activation!r} out"
        )
    return Luna(dim, heads, packed=packed)


@recipe(
    "Jaegle et al. 2021",
    arxiv="2103.03206",
    family="compressed",
    formula="read(x, think(read(Z, x))),  Z learned",
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
    """Perceiver: latent vectors read the tokens, attend to each other `depth` times, and are read by the tokens.

    widening   of the feed-forward layers
    """
    return Perceiver(dim, heads, latents=latents, depth=depth, widening=widening, causal=causal)
