"""DRAW's glimpses: a grid of Gaussian filters reads a patch, and writes one (Gregor et al. 2015, arXiv 1502.04623)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import check_int
from regard.numerics import at_least_float32

LARGEST = 20.0  # of a logarithm, up or down: beyond it squares of distances would overflow


class DrawFilters(NamedTuple):
    """Rows F_Y (b N height) and columns F_X (b N width), each summing to one, and the intensity γ (b)."""

    rows: Tensor
    columns: Tensor
    intensity: Tensor


class FilterBank(nn.Module):
    """(g̃_X, g̃_Y, log σ², log δ̃, log γ) = W h + b, and the N × N filters that they place:

    centre g = (size + 1)/2 (g̃ + 1),  stride δ = (max(height, width) − 1)/(N − 1) δ̃,  μ_i = g + (i − N/2 − 1/2) δ,
    F[i, a] = exp(−(a − μ_i)²/2σ²) / Z, with pixels at a = 1 .. size.
    """

    def __init__(self, state: int, patch: int) -> None:
        super().__init__()
        check_int(1, state=state, patch=patch)
        self.patch, self.place = patch, nn.Linear(state, 5)

    def forward(
        self, state: Tensor, height: int, width: int, *, heights: Tensor | None = None
    ) -> DrawFilters:
        """State (b state) -> filters of an image; `heights` (b) are those of images that fill only so many rows."""
        x, y, *logs = at_least_float32(self.place(state)).unbind(
            -1
        )  # pixels are counted beyond what bfloat16 can
        log_variance, log_stride, log_intensity = (t.clamp(-LARGEST, LARGEST) for t in logs)
        tall = torch.full_like(x, height) if heights is None else heights.to(x.dtype)
        longest = tall.clamp(min=width)
        stride = (longest - 1) / max(self.patch - 1, 1) * log_stride.exp()
        at = (
            torch.arange(1, self.patch + 1, device=state.device, dtype=x.dtype)
            - self.patch / 2
            - 0.5
        )
        steps = at * stride[:, None]
        rows = _bells((tall + 1) / 2 * (y + 1), steps, log_variance, height, tall)
        columns = _bells(
            (width + 1) / 2 * (x + 1), steps, log_variance, width, torch.full_like(x, width)
        )
        return DrawFilters(*(t.to(state.dtype) for t in (rows, columns, log_intensity.exp())))


def _bells(centre: Tensor, steps: Tensor, log_variance: Tensor, size: int, real: Tensor) -> Tensor:
    """(b N size), rows that sum to one over the first `real` pixels, by a softmax: no row can be empty."""
    a = torch.arange(1, size + 1, device=steps.device, dtype=steps.dtype)
    far = (a - (centre[:, None] + steps)[..., None]).square()
    near = far.detach().amin(
        -1, keepdim=True
    )  # cancels in the softmax, and keeps its exponents finite
    exponent = (near - far) / (2 * log_variance.exp()[:, None, None])
    return exponent.masked_fill(a > real[:, None, None], -torch.inf).softmax(-1)


def read_patch(image: Tensor, filters: DrawFilters) -> Tensor:
    """γ F_Y x F_Xᵀ of each channel: (b c height width) -> (b c N N)."""
    return filters.intensity[:, None, None, None] * (
        filters.rows[:, None] @ image @ filters.columns[:, None].mT
    )


def write_patch(patch: Tensor, filters: DrawFilters) -> Tensor:
    """1/γ F_Yᵀ w F_X of each channel: (b c N N) -> (b c height width)."""
    return (filters.rows[:, None].mT @ patch @ filters.columns[:, None]) / filters.intensity[
        :, None, None, None
    ]


class Reader(nn.Module):
    """image (b c height width), decoder state (b state) -> patch (b c N N) and the filters that read it.

    The paper reads the image and the error image: give both as channels.
    """

    def __init__(self, state: int, patch: int) -> None:
        super().__init__()
        self.bank = FilterBank(state, patch)

    def forward(self, image: Tensor, state: Tensor) -> tuple[Tensor, DrawFilters]:
        """Look."""
        filters = self.bank(state, *image.shape[2:])
        return read_patch(image, filters), filters


class Writer(nn.Module):
    """Decoder state (b state) -> what to add to the canvas (b c height width), and its filters: w = W h + b, then write."""

    def __init__(self, state: int, patch: int, *, channels: int = 1) -> None:
        super().__init__()
        check_int(1, channels=channels)
        self.bank, self.draw = FilterBank(state, patch), nn.Linear(state, channels * patch * patch)

    def forward(self, state: Tensor, height: int, width: int) -> tuple[Tensor, DrawFilters]:
        """Draw."""
        filters = self.bank(state, height, width)
        return write_patch(
            self.draw(state).unflatten(-1, (-1, self.bank.patch, self.bank.patch)), filters
        ), filters
