"""Images of ten shapes at random positions, sizes and angles, light on dark or dark on light."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

# coordinates y (k), x (k) -> (k), True inside; a shape fills about the unit disc
Inside = Callable[[np.ndarray, np.ndarray], np.ndarray]


def _polygon(corners: int) -> Inside:
    """A regular polygon with its corners on the unit circle."""
    angles = (2 * np.arange(corners) + 1) * np.pi / corners
    return lambda y, x: (
        (np.cos(angles)[:, None] * x + np.sin(angles)[:, None] * y).max(0)
        <= np.cos(np.pi / corners)
    )


SHAPES: dict[str, Inside] = {
    "disc": lambda y, x: np.hypot(y, x) <= 0.9,
    "ring": lambda y, x: np.abs(np.hypot(y, x) - 0.75) <= 0.22,
    "half disc": lambda y, x: (np.hypot(y + 0.4, x) <= 1) & (y >= -0.4),
    "triangle": _polygon(3),
    "square": _polygon(4),
    "star": lambda y, x: np.hypot(y, x) <= 0.62 + 0.38 * np.cos(5 * np.arctan2(y, x)),
    "cross": lambda y, x: (
        (np.minimum(np.abs(y), np.abs(x)) <= 0.28) & (np.maximum(np.abs(y), np.abs(x)) <= 0.95)
    ),
    "bar": lambda y, x: (np.abs(y) <= 0.28) & (np.abs(x) <= 0.95),
    "stripes": lambda y, x: (np.abs(np.abs(y) - 0.55) <= 0.24) & (np.abs(x) <= 0.85),
    "angle": lambda y, x: (
        ((np.abs(y - 0.6) <= 0.27) | (np.abs(x + 0.6) <= 0.27))
        & (np.maximum(np.abs(y), np.abs(x)) <= 0.87)
    ),
}
NAMES = tuple(SHAPES)
SUPERSAMPLING = 3  # points per pixel and direction; a pixel is their mean


def draw_shape(rng: np.random.Generator, side: int, noise: float) -> tuple[np.ndarray, int]:
    """A random image: brightness (side, side), 0..1 before the noise is added, and its class."""
    label, angle = int(rng.integers(len(NAMES))), 2 * np.pi * rng.random()
    radius = side * rng.uniform(0.22, 0.45)
    center = rng.uniform(radius, side - radius, 2)
    background, foreground = rng.permutation(rng.uniform((0.0, 0.6), (0.4, 1.0)))
    points = (np.arange(SUPERSAMPLING * side) + 0.5) / SUPERSAMPLING
    grid = np.meshgrid(points - center[0], points - center[1], indexing="ij")
    y, x = ((each / radius).reshape(-1) for each in grid)
    sin, cos = np.sin(angle), np.cos(angle)
    inside = SHAPES[NAMES[label]](cos * y - sin * x, sin * y + cos * x)
    share = inside.reshape(side, SUPERSAMPLING, side, SUPERSAMPLING).mean((1, 3))
    image = background + (foreground - background) * share
    return image + noise * rng.standard_normal((side, side)), label
