"""Scenes: a few digits or shapes on a canvas, with the mask, box and class of each.

They are made on the spot, so that detection, segmentation and video need no data of the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from regard.errors import check_int
from regard.tasks import shapes
from regard.tasks.dataset_files import BUILT_IN, resolve_dataset

DIGITS = {"mnist": "mnist"}  # datasets whose images are objects on black
FOREGROUND = 0.35  # brightness from which a pixel belongs to its object
MAX_HIDDEN = 0.2  # share of an object that others may cover
TRIES = 40  # places tried for each object
WHITE = 255

# random generator, split -> brightness (height, width) of an object, 0..1, and its class
DrawObject = Callable[[np.random.Generator, str], tuple[np.ndarray, int]]


class Scene(NamedTuple):
    """A scene with k objects.

    Attributes:
        image: Gray levels (height, width) of uint8.
        masks: (k, height, width) of bool: the visible pixels of each object.
        boxes: (k, 4) of float: left, top, right, bottom of the visible pixels, in pixels from 0 to
            the width or height, as in COCO's corners.
        classes: (k) of int64.
    """

    image: np.ndarray
    masks: np.ndarray
    boxes: np.ndarray
    classes: np.ndarray


class SceneSource:
    """Draws scenes.

    Args:
        data: "built-in": shapes; "mnist" in the folder REGARD_DATA, or a folder with MNIST's files:
            digits, of the train split in training scenes and of the test split in test scenes.
        side: Rows and columns of a scene.
        objects: The smallest and the largest number of objects.
        scale: The smallest and the largest size of an object, as a share of the side.
        noise: Standard deviation of the background noise, where white is 1.
    """

    def __init__(
        self,
        data: str = BUILT_IN,
        *,
        side: int = 64,
        objects: tuple[int, int] = (1, 4),
        scale: tuple[float, float] = (0.25, 0.45),
        noise: float = 0.05,
    ) -> None:
        check_int(16, side=side)
        check_int(1, objects=objects[0])
        check_int(objects[0], objects=objects[1])
        if not 0 < scale[0] <= scale[1] <= 1:
            raise ValueError(f"scale must be two numbers from 0 to 1 in order, not {scale}.")
        self.side, self.objects, self.scale, self.noise = side, objects, scale, noise
        if data == BUILT_IN:
            self.draw_object: DrawObject = draw_shape
            self.labels: Sequence[str] = shapes.NAMES
        else:
            self.draw_object, self.labels = digit_source(data)

    def draw(self, rng: np.random.Generator, split: str) -> Scene:
        """A random scene; always the same for the same state of the generator."""
        side = self.side
        count = int(rng.integers(self.objects[0], self.objects[1] + 1))
        canvas = np.zeros((side, side))
        owner = np.full((side, side), -1)  # number of the visible object of each pixel
        sizes: list[int] = []  # pixels of each object, also those that others hide
        classes: list[int] = []
        for _ in range(count):
            brightness, label = self.draw_object(rng, split)
            size = max(8, round(side * rng.uniform(*self.scale)))
            brightness = crop_and_resize(brightness, size)
            solid = brightness >= FOREGROUND
            height, width = brightness.shape
            for _ in range(TRIES):
                top = int(rng.integers(side - height + 1))
                left = int(rng.integers(side - width + 1))
                place = np.s_[top : top + height, left : left + width]
                hidden = np.bincount(owner[place][solid] + 1, minlength=len(sizes) + 1)[1:]
                visible = np.bincount(owner.reshape(-1) + 1, minlength=len(sizes) + 1)[1:]
                if (visible - hidden >= (1 - MAX_HIDDEN) * np.array(sizes)).all():
                    break
            else:
                continue  # no room: the scene has fewer objects, but at least the first
            owner[place][solid] = len(sizes)
            canvas[place] = np.where(solid, brightness, np.maximum(canvas[place], brightness))
            sizes.append(int(solid.sum()))
            classes.append(label)
        canvas = canvas + self.noise * rng.standard_normal(canvas.shape)
        masks = owner == np.arange(len(sizes))[:, None, None]
        image = np.rint(WHITE * canvas.clip(0, 1)).astype(np.uint8)
        return Scene(image, masks, boxes_of_masks(masks), np.array(classes, dtype=np.int64))


def draw_shape(rng: np.random.Generator, split: str) -> tuple[np.ndarray, int]:
    """A random shape at a random angle, (48, 48), and its class."""
    label, angle = int(rng.integers(len(shapes.NAMES))), 2 * np.pi * rng.random()
    grid = np.linspace(-1.2, 1.2, 48)
    y, x = (each.reshape(-1) for each in np.meshgrid(grid, grid, indexing="ij"))
    sin, cos = np.sin(angle), np.cos(angle)
    inside = shapes.SHAPES[shapes.NAMES[label]](cos * y - sin * x, sin * y + cos * x)
    return inside.reshape(48, 48) * rng.uniform(0.6, 1.0), label


def digit_source(data: str) -> tuple[DrawObject, Sequence[str]]:
    """Random digits of a dataset in MNIST's format, and the names of their classes."""
    from regard.tasks.image_classification import load_image_splits

    splits = load_image_splits(resolve_dataset(data, DIGITS), None)
    classes = 1 + max(int(part.labels.max()) for part in splits.values())

    def draw_digit(rng: np.random.Generator, split: str) -> tuple[np.ndarray, int]:
        images, labels = splits[split]
        index = int(rng.integers(len(labels)))
        return images[index] / WHITE, int(labels[index])

    return draw_digit, [str(label) for label in range(classes)]


def crop_and_resize(brightness: np.ndarray, size: int) -> np.ndarray:
    """Cut an object out of (height, width), and scale its longer side to `size` pixels."""
    solid = brightness >= FOREGROUND
    if not solid.any():
        raise ValueError("An object has no pixel that is bright enough to be seen.")
    rows, columns = np.flatnonzero(solid.any(1)), np.flatnonzero(solid.any(0))
    cut = brightness[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    factor = size / max(cut.shape)
    shape = [max(3, round(factor * length)) for length in cut.shape]
    image = torch.as_tensor(np.ascontiguousarray(cut))[None, None].float()
    return F.interpolate(image, shape, mode="bilinear", antialias=True)[0, 0].numpy()


def boxes_of_masks(masks: np.ndarray) -> np.ndarray:
    """Masks (k, height, width) -> boxes (k, 4): left, top, right, bottom; the right and bottom
    edges are behind the last pixel."""
    boxes = np.zeros((len(masks), 4))
    for box, mask in zip(boxes, masks, strict=True):
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        if len(rows):
            box[:] = columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
    return boxes
