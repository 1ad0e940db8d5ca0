"""Positions and frequencies that the positional encodings share."""

from __future__ import annotations

import torch
from torch import Tensor

BASE = 10000.0  # the longest wavelength is 2π · BASE positions


def inverse_frequencies(
    width: int, base: float = BASE, device: torch.device | None = None
) -> Tensor:
    """base^(−2r/width) for r = 0 .. ⌈width/2⌉ − 1."""
    return base ** -(torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)


def rotation_angles(positions: Tensor, width: int, base: float = BASE) -> Tensor:
    """positions (...) -> (... ⌈width/2⌉), p · base^(−2r/width).

    Computed in float64: at position 100,000 float32 angles are off by 0.01.
    """
    frequencies = inverse_frequencies(width, base, positions.device)
    return positions.to(torch.float64)[..., None] * frequencies


def sinusoidal_encoding(positions: Tensor, width: int, base: float = BASE) -> Tensor:
    """positions (...) -> (... width): sine and cosine of each angle, interleaved."""
    angle = rotation_angles(positions, width, base)
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(-2)[..., :width]


def row_and_column(positions: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Rows and columns of positions in raster order, in an image of `columns` columns."""
    return positions // columns, positions % columns


def token_positions(start: int | Tensor, n: int, device: torch.device | None = None) -> Tensor:
    """Positions of n tokens from `start` on: (n), or (b n) if `start` is a tensor (b)."""
    if isinstance(start, Tensor):
        return start.to(device)[:, None] + torch.arange(n, device=device)
    return torch.arange(start, start + n, device=device)
