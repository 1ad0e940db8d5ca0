"""Images that a model generates: sheets of many, and animations of how they came about."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from regard.tasks.processors import Processor

if TYPE_CHECKING:
    from regard.models import Model

GAP = 2  # pixels between the images of a sheet
GAP_LEVEL = 96  # gray level of the gap
MIN_SIDE = 64  # pixels that a small image is enlarged to
GIF_COLOURS = 16
LAST_FRAME_MS = 1500


@dataclass(frozen=True)
class GeneratedImages:
    """Images, and how they came about.

    Attributes:
        frames: (t, k, height, width) or (t, k, height, width, 3) of uint8: the k images after each
            of t steps; the last frame has the finished images.
        boxes: (t, k, 4), rows and columns (top, bottom, left, right) of the part that a step
            changed, in pixels; None: not known.
    """

    frames: np.ndarray
    boxes: np.ndarray | None = None


class ImageGenerator(Processor):
    """A processor whose models generate images."""

    @abstractmethod
    def generate_images(
        self, model: Model, count: int, generator: torch.Generator
    ) -> GeneratedImages:
        """Generate images.

        Args:
            model: A model of the task, in evaluation mode.
            count: Number of images.
            generator: The only source of random numbers, on the CPU.
        """


def contact_sheet(images: np.ndarray, columns: int | None = None) -> np.ndarray:
    """Images (k, height, width, ...) side by side, as near to a square as possible, with gaps.

    Args:
        columns: Number of columns. None: √k, rounded up.
    """
    count, height, width = images.shape[:3]
    if not count:
        raise ValueError("A sheet needs at least one image.")
    columns = columns or int(np.ceil(np.sqrt(count)))
    rows = -(-count // columns)
    shape = (rows * (height + GAP) - GAP, columns * (width + GAP) - GAP, *images.shape[3:])
    sheet = np.full(shape, GAP_LEVEL, np.uint8)
    for i, image in enumerate(images):
        top, left = i // columns * (height + GAP), i % columns * (width + GAP)
        sheet[top : top + height, left : left + width] = image
    return sheet


def save_images(path: str | Path, generated: GeneratedImages, *, milliseconds: int = 80) -> None:
    """Write a sheet of the finished images (.png), or an animation of all steps (.gif) with a frame
    around the part that each step changed.

    Args:
        milliseconds: Time of a frame of the animation.
    """
    try:
        from PIL import Image
    except ImportError:
        raise ImportError(
            f"Writing {path} requires the package Pillow: pip install 'regard[image]'"
        ) from None
    path = Path(path)
    if path.suffix.lower() not in (".png", ".gif"):
        raise ValueError(f"{path} must end in .png or .gif.")
    scale = max(1, -(-MIN_SIDE // min(generated.frames.shape[2:4])))

    def draw(step: int) -> Image.Image:
        images = generated.frames[step].repeat(scale, 1).repeat(scale, 2)
        if generated.boxes is not None and path.suffix.lower() == ".gif":
            images = images if images.ndim == 4 else np.repeat(images[..., None], 3, -1)
            for image, box in zip(images, generated.boxes[step], strict=True):
                draw_box(image, np.rint(box * scale).astype(int))
        return Image.fromarray(contact_sheet(images))

    def draw_frame(step: int) -> Image.Image:
        return draw(step).convert("P", palette=Image.Palette.ADAPTIVE, colors=GIF_COLOURS)

    if path.suffix.lower() == ".png":
        draw(-1).save(path)
        return
    pictures = [draw_frame(step) for step in range(len(generated.frames))]
    durations = [milliseconds] * (len(pictures) - 1) + [LAST_FRAME_MS]
    pictures[0].save(
        path, save_all=True, append_images=pictures[1:], duration=durations, loop=0, optimize=True
    )


def draw_box(image: np.ndarray, box: np.ndarray, colour: tuple[int, ...] = (255, 64, 64)) -> None:
    """Draw a rectangle (top, bottom, left, right) into an image (height, width, 3), in place; what
    is outside the image is cut off."""
    height, width = image.shape[:2]
    top, bottom = np.clip(box[:2], 0, height - 1)
    left, right = np.clip(box[2:], 0, width - 1)
    image[[top, bottom], left : right + 1] = colour
    image[top : bottom + 1, [left, right]] = colour
