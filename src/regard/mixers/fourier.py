"""FNet: the Fourier transform mixes, without a single parameter."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.common import at_least_single
from regard.mixer import Can, Mixer, State

WHOLE = "the Fourier transform runs over the whole sequence"


class Fourier(Mixer):
    """out = Re F_n F_d x, with F the unnormalised discrete transform over tokens and over width
    (Lee-Thorp et al. 2021, arXiv 2105.03824)."""

    def __init__(self, dim: int, *, causal: bool = False) -> None:
        can = Can(causal=WHOLE, cross=WHOLE, mask=WHOLE, stream=WHOLE, maps="it mixes widths as well as tokens")
        super().__init__(dim, can=can, causal=causal)

    def mix(self, x: Tensor, memory: Tensor | None, mask: Tensor | None, state: State) -> tuple[Tensor, State]:
        """(b n d) -> (b n d), real."""
        return torch.fft.fft2(at_least_single(x)).real.to(x.dtype), None
