"""FNet: token mixing by the Fourier transform, without parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.autograd import apply_function
from regard.can import NO_HEADS
from regard.device import widest_dtype
from regard.mixer import Can, Mixer, State
from regard.numerics import at_least_float32

WHOLE = "the Fourier transform runs over the whole sequence"


class FourierMixer(Mixer):
    """FNet (Lee-Thorp et al. 2021, arXiv 2105.03824): out = Re F_n F_d x.

    F_n and F_d are the unnormalised discrete Fourier transforms over tokens and channels.
    """

    def __init__(self, dim: int, *, causal: bool = False) -> None:
        can = Can(
            causal=WHOLE,
            cross=WHOLE,
            mask=WHOLE,
            attn_mask=WHOLE,
            stream=WHOLE,
            maps="it mixes channels as well as tokens",
            heads=NO_HEADS,
        )
        super().__init__(dim, can=can, causal=causal)

    def mix(
        self, x: Tensor, context: Tensor | None, mask: Tensor | None, state: State
    ) -> tuple[Tensor, State]:
        """(b n d) -> (b n d), real."""
        x, kind = at_least_float32(x), x.dtype
        if torch.compiler.is_exporting():
            # Matrix products, because the transforms of other runtimes lose precision.
            (rows, cols), (up, down) = _waves(x, 1), _waves(x, 2)
            return (rows @ x @ up - cols @ x @ down).to(kind), None
        return apply_function(_Transform, x).to(kind), None


class _Transform(torch.autograd.Function):
    """Re F_n F_d x from half of the spectrum: for real x, Y_kj is the conjugate of Y_-k,-j.

    The function is symmetric, cos(2π (ik/n + jl/d)), so it is its own backward pass.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        half = torch.fft.rfft2(x).real
        return torch.cat((half, half[..., 1 : (x.shape[-1] + 1) // 2].flip(-2, -1).roll(1, -2)), -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Nothing to save."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return apply_function(_Transform, grad)


def _waves(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin of 2π i j / size along a dimension of x, (size size) each."""
    size = x.shape[dim]
    at = torch.arange(size, device=x.device)
    turns = (at[:, None] * at % (at[-1:] + 1)).to(widest_dtype(x.device)) / size
    angle = turns * (2 * torch.pi)
    return angle.cos().to(x.dtype), angle.sin().to(x.dtype)
