"""Gray images as sequences: each pixel is a token, row by row from the top left."""

from __future__ import annotations

import numpy as np

GRAY_LEVELS = 256
VOCAB_SIZE = 1 + GRAY_LEVELS  # 0 is padding
SHADES = " ░▒▓█"


def image_to_tokens(image: np.ndarray) -> np.ndarray:
    """Gray levels (side, side) of 0..255 -> tokens (side²) of 1..256."""
    return image.reshape(-1).astype(np.int64) + 1


def quantize(image: np.ndarray) -> np.ndarray:
    """Brightness 0..1 -> gray levels 0..255."""
    highest = GRAY_LEVELS - 1
    return np.clip(np.rint(highest * image), 0, highest).astype(np.uint8)


def tokens_to_image(tokens: np.ndarray) -> np.ndarray:
    """Tokens (side²) -> gray levels (side, side)."""
    side = round(len(tokens) ** 0.5)
    return (np.asarray(tokens) - 1).reshape(side, side)


def render_tokens(tokens: np.ndarray) -> str:
    """An image for the terminal: two characters per pixel, in five shades."""
    shades = (tokens_to_image(tokens).astype(np.int64) * len(SHADES)) // GRAY_LEVELS
    rows = ("".join(2 * SHADES[shade] for shade in row) for row in shades.tolist())
    return "\n".join(row.rstrip() for row in rows)
