"""DRAW: a grid of Gaussian filters reads and writes patches of an image
(Gregor et al. 2015, arXiv 1502.04623)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import check_int
from regard.numerics import at_least_float32, saturate

MAX_LOG = 20.0  # bound of the logarithms: beyond it squared distances would overflow


class DrawFilters(NamedTuple):
    """Rows F_Y (b N height) and columns F_X (b N width), each summing to one, and the intensity γ
    (b), in float32 at least."""

    rows: Tensor
    columns: Tensor
    intensity: Tensor


class FilterBank(nn.Module):
    """N × N Gaussian filters placed by (g̃_X, g̃_Y, log σ², log δ̃, log γ) = W h + b:

        centre g = (size + 1)/2 (g̃ + 1),  stride δ = (max(height, width) − 1)/(N − 1) δ̃,
        μ_i = g + (i − N/2 − 1/2) δ,  F[i, a] = exp(−(a − μ_i)²/2σ²) / Z for pixels a = 1 .. size

    Args:
        state: Width of the state h.
        patch: Number N of filters along each axis.
    """

    def __init__(self, state: int, patch: int) -> None:
        super().__init__()
        check_int(1, state=state, patch=patch)
        self.patch, self.place = patch, nn.Linear(state, 5)

    def forward(
        self, state: Tensor, height: int, width: int, *, heights: Tensor | None = None
    ) -> DrawFilters:
        """Filters for an image, from a state (b state).

        `heights` (b) are the real heights of images that fill only some rows.
        """
        # float32 at least: bfloat16 cannot count the pixels
        x, y, *logs = at_least_float32(self.place(state)).unbind(-1)
        log_variance, log_stride, log_intensity = (t.clamp(-MAX_LOG, MAX_LOG) for t in logs)
        heights = torch.full_like(x, height) if heights is None else heights.to(x.dtype)
        stride = (heights.clamp(min=width) - 1) / max(self.patch - 1, 1) * log_stride.exp()
        number = torch.arange(1, self.patch + 1, device=state.device, dtype=x.dtype)
        offsets = (number - self.patch / 2 - 0.5) * stride[:, None]
        widths = torch.full_like(x, width)
        rows = _gaussians((heights + 1) / 2 * (y + 1), offsets, log_variance, height, heights)
        columns = _gaussians((width + 1) / 2 * (x + 1), offsets, log_variance, width, widths)
        return DrawFilters(rows, columns, log_intensity.exp())


def _gaussians(
    centre: Tensor, offsets: Tensor, log_variance: Tensor, size: int, real: Tensor
) -> Tensor:
    """Filters (b N size) that sum to one over the first `real` pixels. A softmax, so none is
    empty."""
    pixel = torch.arange(1, size + 1, device=offsets.device, dtype=offsets.dtype)
    distance = (pixel - (centre[:, None] + offsets)[..., None]).square()
    nearest = distance.detach().amin(-1, keepdim=True)  # cancels, and keeps the exponents finite
    exponent = (nearest - distance) / (2 * log_variance.exp()[:, None, None])
    return exponent.masked_fill(pixel > real[:, None, None], -torch.inf).softmax(-1)


def read_patch(image: Tensor, filters: DrawFilters) -> Tensor:
    """γ F_Y x F_Xᵀ of each channel: (b c height width) -> (b c N N)."""
    patch = filters.rows[:, None] @ at_least_float32(image) @ filters.columns[:, None].mT
    return saturate(filters.intensity[:, None, None, None] * patch, image.dtype)


def write_patch(patch: Tensor, filters: DrawFilters) -> Tensor:
    """1/γ F_Yᵀ w F_X of each channel: (b c N N) -> (b c height width)."""
    image = filters.rows[:, None].mT @ at_least_float32(patch) @ filters.columns[:, None]
    return saturate(image / filters.intensity[:, None, None, None], patch.dtype)


class Reader(nn.Module):
    """Reads a patch: image (b c height width), decoder state (b state) -> patch (b c N N) and its
    filters.

    The paper reads the image and the error image: pass both as channels.
    """

    def __init__(self, state: int, patch: int) -> None:
        super().__init__()
        self.bank = FilterBank(state, patch)

    def forward(self, image: Tensor, state: Tensor) -> tuple[Tensor, DrawFilters]:
        """Patch and filters."""
        filters = self.bank(state, *image.shape[2:])
        return read_patch(image, filters), filters


class Writer(nn.Module):
    """Writes a patch w = W h + b: decoder state (b state) -> image to add to the canvas (b c height
    width)."""

    def __init__(self, state: int, patch: int, *, channels: int = 1) -> None:
        super().__init__()
        check_int(1, channels=channels)
        self.bank = FilterBank(state, patch)
        self.draw = nn.Linear(state, channels * patch * patch)

    def forward(self, state: Tensor, height: int, width: int) -> tuple[Tensor, DrawFilters]:
        """Image and filters."""
        filters, size = self.bank(state, height, width), self.bank.patch
        return write_patch(self.draw(state).unflatten(-1, (-1, size, size)), filters), filters
