"""Pictures of ten kinds of shapes, at any place, size and angle, light on dark or dark on light, with noise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Inside = Callable[
    [np.ndarray, np.ndarray], np.ndarray
]  # places (k), of which a shape has about the unit disc -> (k), True within


def _polygon(corners: int) -> Inside:
    """Regular, with its corners on the unit circle: within all its sides."""
    turns = (2 * np.arange(corners) + 1) * np.pi / corners
    return lambda y, x: (
        (np.cos(turns)[:, None] * x + np.sin(turns)[:, None] * y).max(0) <= np.cos(np.pi / corners)
    )


def _star(y: np.ndarray, x: np.ndarray) -> np.ndarray:
    return np.hypot(y, x) <= 0.62 + 0.38 * np.cos(5 * np.arctan2(y, x))


SHAPES: dict[str, Inside] = {
    "disc": lambda y, x: np.hypot(y, x) <= 0.9,
    "ring": lambda y, x: np.abs(np.hypot(y, x) - 0.75) <= 0.22,
    "half disc": lambda y, x: (np.hypot(y + 0.4, x) <= 1) & (y >= -0.4),
    "triangle": _polygon(3),
    "square": _polygon(4),
    "star": _star,
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
KINDS = tuple(SHAPES)
FINE = 3  # points across a pixel: its brightness is their mean


def picture(random: np.random.Generator, side: int, noise: float) -> tuple[np.ndarray, int]:
    """Brightness (side side), 0..1 but for the noise, and the kind."""
    kind, angle = int(random.integers(len(KINDS))), 2 * np.pi * random.random()
    radius = side * random.uniform(0.22, 0.45)
    middle = random.uniform(radius, side - radius, 2)
    ground, ink = random.permutation(random.uniform((0.0, 0.6), (0.4, 1.0)))
    at = (np.arange(FINE * side) + 0.5) / FINE
    y, x = (
        (each / radius).reshape(-1)
        for each in np.meshgrid(at - middle[0], at - middle[1], indexing="ij")
    )
    turned = np.cos(angle) * y - np.sin(angle) * x, np.sin(angle) * y + np.cos(angle) * x
    inside = SHAPES[KINDS[kind]](*turned).reshape(side, FINE, side, FINE).mean((1, 3))
    return ground + (ink - ground) * inside + noise * random.standard_normal((side, side)), kind
