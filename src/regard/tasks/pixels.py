"""Grey images as sequences: a pixel is a token, row by row from the top left."""

from __future__ import annotations

import numpy as np

GREYS = 256
SHADES = " ░▒▓█"


def as_pixels(image: np.ndarray) -> np.ndarray:
    """Greys (side side) of 0..255 -> tokens (side²) of 1..256; 0 fills up."""
    return image.reshape(-1).astype(np.int64) + 1


def as_grey(image: np.ndarray) -> np.ndarray:
    """Brightness 0..1 -> greys 0..255."""
    return np.clip(np.rint((GREYS - 1) * image), 0, GREYS - 1).astype(np.uint8)


def as_image(tokens: np.ndarray) -> np.ndarray:
    """Tokens (side²) -> greys (side side)."""
    side = round(len(tokens) ** 0.5)
    return (np.asarray(tokens) - 1).reshape(side, side)


def in_blocks(image: np.ndarray) -> str:
    """An image for the terminal: two characters for a pixel, in five shades."""
    shades = (image.astype(np.int64) * len(SHADES)) // GREYS
    return "\n".join(
        "".join(2 * SHADES[shade] for shade in row).rstrip() for row in shades.tolist()
    )
