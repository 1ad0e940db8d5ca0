"""Without attention: no queries, no keys."""

from __future__ import annotations

from regard.errors import check_whole
from regard.mixer import Mixer
from regard.mixers import Fourier, TokenMLP
from regard.registry import recipe


@recipe("Lee-Thorp et al. 2021", arxiv="2105.03824", row="H2", formula="Re F_n F_d x")
def fnet(dim: int, heads: int = 1, *, causal: bool = False) -> Mixer:
    """FNet: the real part of the Fourier transform over tokens and width.  There are no heads: `heads` must be 1."""
    _headless("fnet", heads)
    return Fourier(dim, causal=causal)


@recipe("Tolstikhin et al. 2021", arxiv="2105.01601", row="H3", formula="W₂ gelu(W₁ x) over tokens", small={"length": 32})
def mlp_mixer(dim: int, heads: int = 1, *, length: int, hidden: int | None = None, causal: bool = False) -> Mixer:
    """MLP-Mixer's token mixing: two layers over positions, the same for each channel.  There are no heads: it must be 1.

    hidden   the width between the two layers, half of `length` unless given
    """
    _headless("mlp_mixer", heads)
    check_whole(1, length=length)
    return TokenMLP(dim, length, max(1, length // 2) if hidden is None else hidden, causal=causal)


def _headless(name: str, heads: int) -> None:
    if heads != 1:
        raise ValueError(f"{name} has no heads: give heads=1 or leave it out, not {heads}")
