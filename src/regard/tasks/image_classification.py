"""Image classification pixel by pixel, as in Long Range Arena."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from regard.errors import check_int
from regard.tasks import shapes
from regard.tasks.base import Example
from regard.tasks.dataset_files import BUILT_IN, HELD_OUT, read_array, resolve_dataset
from regard.tasks.example_source import (
    ExampleSource,
    GeneratedExamples,
    SourceTask,
    StoredExamples,
    check_generated_only,
)
from regard.tasks.files import existing_path
from regard.tasks.pixels import VOCAB_SIZE, image_to_tokens, quantize, render_pixels
from regard.tasks.processors import Prediction
from regard.tasks.rendering import Rendered

DATASETS = {"cifar10": "cifar10-gray", "mnist": "mnist"}
MIN_SIDE = 8
SIDE, NOISE = 32, 0.1  # of the built-in images
FILES = {  # prefixes of the file names of images and labels
    "train": (("train_x", "train-images"), ("train_y", "train-labels")),
    "test": (("test_x", "t10k-images"), ("test_y", "t10k-labels")),
}


class LabelledImages(NamedTuple):
    """Images (k, side, side) of uint8, and their classes (k)."""

    images: np.ndarray
    labels: np.ndarray


class ImageClassification(SourceTask):
    """Classify a gray image from its side² pixels, row by row (Long Range Arena, Tay et al. 2020,
    arXiv 2011.04006, with CIFAR-10 in gray).

    Args:
        side: Side length of the images. None: 32, or that of the data. It must divide the side of
            the data; pixels are averaged.
        data: "built-in": shapes, see `regard.tasks.shapes`; "cifar10" or "mnist" in the folder
            REGARD_DATA; or a folder with train_x.npy (k, side, side) of uint8, train_y.npy (k),
            test_x.npy and test_y.npy, or with MNIST's files.
        noise: Standard deviation of the noise on built-in images, where white is 1. None: 0.1.
        seed: Seed of the built-in images.
        examples: Size of the training split of built-in images. None: endless.
    """

    def __init__(
        self,
        side: int | None = None,
        *,
        data: str = BUILT_IN,
        noise: float | None = None,
        seed: int = 0,
        examples: int | None = None,
    ) -> None:
        check_int(MIN_SIDE, side=SIDE if side is None else side)
        self.data, self.noise = data, NOISE if noise is None else noise
        is_number = isinstance(self.noise, int | float) and not isinstance(self.noise, bool)
        if not is_number or not 0 <= self.noise < 10:
            raise ValueError(f"noise must be a number from 0 to 10, not {noise!r}")
        source: ExampleSource = GeneratedExamples(self.draw, seed=seed, examples=examples)
        self.side, classes = side or SIDE, len(shapes.NAMES)
        if data != BUILT_IN:
            check_generated_only(data, noise=noise, seed=seed, examples=examples)
            splits = load_image_splits(resolve_dataset(data, DATASETS), side)
            self.side = splits["train"].images.shape[1]
            classes = 1 + max(int(part.labels.max()) for part in splits.values())
            sizes = {split: len(part.labels) for split, part in splits.items()}
            source = StoredExamples(
                sizes,
                lambda split, i: (
                    image_to_tokens(splits[split].images[i]),
                    int(splits[split].labels[i]),
                ),
            )
        super().__init__(source, vocab_size=VOCAB_SIZE, classes=classes, length=self.side**2)

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, int]:
        """Generate the pixels (side²) of a built-in image, and its class."""
        image, label = shapes.draw_shape(rng, self.side, self.noise)
        return image_to_tokens(quantize(image)), label

    def render(self, example: Example, prediction: Prediction | None = None) -> Rendered:
        """The image in block characters, and its class."""
        label = int(example.targets["labels"])
        source = f"image of {self.data}"
        if self.data == BUILT_IN:
            source = f"generated image: {shapes.NAMES[label]}"
        return render_pixels(example, f"{source} (class {label})", prediction)


def load_image_splits(folder: Path, side: int | None) -> dict[str, LabelledImages]:
    """The splits of a folder; as in LRA, the last tenth of train is for validation."""
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is a file; expected a folder with train_x.npy, train_y.npy, test_x.npy and "
            "test_y.npy."
        )
    train, test = (_read_images(folder, split, side) for split in ("train", "test"))
    cut = len(train.labels) - len(train.labels) // HELD_OUT
    return {
        "train": LabelledImages(train.images[:cut], train.labels[:cut]),
        "valid": LabelledImages(train.images[cut:], train.labels[cut:]),
        "test": test,
    }


def _read_images(folder: Path, split: str, side: int | None) -> LabelledImages:
    arrays = []
    for prefixes in FILES[split]:
        files = sorted(file for file in folder.iterdir() if file.name.startswith(prefixes))
        path = files[0] if files else existing_path(folder / f"{prefixes[0]}.npy")
        arrays.append(read_array(path))
    images, labels = arrays
    if images.dtype != np.uint8 or images.ndim != 3 or images.shape[1] != images.shape[2]:
        raise ValueError(
            f"{folder}: images must be (k, side, side) of uint8, not {images.shape} of "
            f"{images.dtype}."
        )
    is_integer = np.issubdtype(labels.dtype, np.integer)
    if labels.shape != images.shape[:1] or not is_integer or len(labels) < 2 or labels.min() < 0:
        raise ValueError(
            f"{folder}: {len(images)} images need as many integers >= 0 as labels, "
            f"not {labels.shape} of {labels.dtype}."
        )
    return LabelledImages(downsample(images, side or images.shape[1]), labels.astype(np.int64))


def downsample(images: np.ndarray, side: int) -> np.ndarray:
    """Images (k, s, s) -> (k, side, side), by averaging squares of pixels."""
    size = images.shape[1]
    if size % side:
        divisors = [str(n) for n in range(MIN_SIDE, size + 1) if size % n == 0]
        raise ValueError(
            f"side={side} does not divide the {size} pixels of the images: use one of "
            f"{', '.join(divisors)}."
        )
    if side == size:
        return images
    factor = size // side
    blocks = images.reshape(-1, side, factor, side, factor)
    return np.rint(blocks.mean((2, 4))).astype(np.uint8)
