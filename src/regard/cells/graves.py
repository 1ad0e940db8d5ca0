"""A window of Gaussians that moves forward over a text (Graves 2013, arXiv 1308.0850)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import check_int
from regard.numerics import at_least_float32, saturate

MAX_EXPONENT = 20.0  # beyond it sums and squares would overflow


class WindowParameters(NamedTuple):
    """K Gaussians for each state: height α, narrowness β and forward step, each (... K)."""

    alpha: Tensor
    beta: Tensor
    step: Tensor


class WindowShape(nn.Module):
    """(α, β, step) = exp(W h + b): (... inputs) -> three of (... mixtures), positive and finite."""

    def __init__(self, inputs: int, mixtures: int) -> None:
        super().__init__()
        check_int(1, inputs=inputs, mixtures=mixtures)
        self.shape = nn.Linear(inputs, 3 * mixtures)

    def forward(self, h: Tensor) -> WindowParameters:
        """In float32 at least, because positions are sums of many steps."""
        exponents = at_least_float32(self.shape(h)).clamp(max=MAX_EXPONENT)
        return WindowParameters(*exponents.exp().chunk(3, -1))


def window_weights(alpha: Tensor, beta: Tensor, kappa: Tensor, positions: Tensor) -> Tensor:
    """φ(u) = Σ_k α_k exp(−β_k (κ_k − u)²): three of (... K), positions (m) -> (... m)."""
    total = kappa.new_zeros(*kappa.shape[:-1], positions.shape[0])
    for a, b, k in zip(alpha.unbind(-1), beta.unbind(-1), kappa.unbind(-1), strict=True):
        total = total + a[..., None] * torch.exp(
            -b[..., None] * (k[..., None] - positions).square()
        )
    return total


class WindowCell(nn.Module):
    """One step: state h (b inputs), κ (b K), text (b m c), mask (b m) -> window Σ_u φ(u) text_u (b
    c), new κ, φ (b m).

    κ starts at zero and only moves forward. Characters are at positions u = 1 .. m.
    """

    def __init__(self, inputs: int, mixtures: int) -> None:
        super().__init__()
        self.shape, self.mixtures = WindowShape(inputs, mixtures), mixtures

    def initial_state(self, text: Tensor) -> Tensor:
        """κ before the first step (b K)."""
        return at_least_float32(text.new_zeros(text.shape[0], self.mixtures))

    def forward(
        self, h: Tensor, kappa: Tensor, text: Tensor, *, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The window, the new κ, and the weights φ."""
        window = self.shape(h)
        kappa = kappa + window.step
        positions = torch.arange(1, text.shape[1] + 1, device=text.device, dtype=kappa.dtype)
        phi = window_weights(window.alpha, window.beta, kappa, positions)
        if mask is not None:
            phi, text = phi * mask, text.masked_fill(~mask[..., None], 0)
        read = (phi[:, None] @ at_least_float32(text))[:, 0]
        return saturate(read, text.dtype), kappa, saturate(phi, text.dtype)
