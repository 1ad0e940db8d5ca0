"""Gray images as sequences: each pixel is a token, row by row from the top left."""

from __future__ import annotations

import numpy as np

from regard.tasks.base import Example, with_prediction
from regard.tasks.processors import Prediction
from regard.tasks.rendering import RenderedImage

GRAY_LEVELS = 256
VOCAB_SIZE = 1 + GRAY_LEVELS  # 0 is padding


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


def render_pixels(example: Example, caption: str, prediction: Prediction | None) -> RenderedImage:
    """The image of an example whose tokens are pixels, with a caption and a prediction."""
    pixels = tokens_to_image(example.inputs["x"].numpy()).astype(np.uint8)
    return RenderedImage(pixels, with_prediction(caption, prediction).text)
