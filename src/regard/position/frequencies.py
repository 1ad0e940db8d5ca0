"""What the schemes share: places, on a line or on an image, and waves over them."""

from __future__ import annotations

import torch
from torch import Tensor

BASE = 10000.0  # the longest wave is 2π times so many positions


def inverse_frequencies(
    width: int, base: float = BASE, device: torch.device | None = None
) -> Tensor:
    """base^(−2r/width) for r = 0 .. ⌈width/2⌉ − 1: how fast each pair of a vector of this width turns."""
    return base ** -(torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)


def rotation_angles(places: Tensor, width: int, base: float = BASE) -> Tensor:
    """places (...) -> (... ⌈width/2⌉), p · base^(−2r/width).

    In float64: at position 100,000 the angles of float32 are off by a hundredth.
    """
    return places.to(torch.float64)[..., None] * inverse_frequencies(width, base, places.device)


def sinusoidal_encoding(places: Tensor, width: int, base: float = BASE) -> Tensor:
    """places (...) -> (... width): the sine and the cosine of each angle, in turn."""
    each = rotation_angles(places, width, base)
    return torch.stack((each.sin(), each.cos()), -1).flatten(-2)[..., :width]


def row_and_column(places: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Places in raster order -> rows and columns of an image so many columns wide."""
    return places // columns, places % columns
