"""Positions and frequencies that the positional encodings share."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.device import widest_dtype

BASE = 10000.0  # the longest wavelength is 2π · BASE positions


def inverse_frequencies(
    width: int, base: float = BASE, device: torch.device | None = None
) -> Tensor:
    """base^(−2r/width) for r = 0 .. ⌈width/2⌉ − 1."""
    dtype = torch.float64 if device is None else widest_dtype(device)
    return base ** -(torch.arange(0, width, 2, dtype=dtype, device=device) / width)


def rotation_angles(positions: Tensor, width: int, base: float = BASE) -> Tensor:
    """positions (...) -> (... ⌈width/2⌉), p · base^(−2r/width).

    Computed in float64, except on MPS, which has none: at position 100,000 float32 angles are off
    by 0.01.
    """
    frequencies = inverse_frequencies(width, base, positions.device)
    return positions.to(frequencies.dtype)[..., None] * frequencies


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
