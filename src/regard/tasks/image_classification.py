"""Images pixel by pixel: which kind is it?"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from regard.errors import check_int
from regard.tasks import shapes
from regard.tasks.base import Example
from regard.tasks.dataset_files import BUILT_IN, read_array, resolve_dataset
from regard.tasks.example_source import (
    ExampleSource,
    GeneratedExamples,
    SourceTask,
    StoredExamples,
    check_generated_only,
)
from regard.tasks.files import existing_path
from regard.tasks.pixels import GREYS, as_grey, as_image, as_pixels, in_blocks

KNOWN = {"cifar10": "cifar10-gray", "mnist": "mnist"}
SMALLEST = 8
SIDE, NOISE = 32, 0.1  # of the built-in images
HELD = 10  # one in so many training images is kept for validation, at the end
FILES = {  # of the two splits that data have: how the names of the images and of the labels begin
    "train": (("train_x", "train-images"), ("train_y", "train-labels")),
    "test": (("test_x", "t10k-images"), ("test_y", "t10k-labels")),
}


class LabelledImages(NamedTuple):
    """Images (k side side) of uint8 and their classes (k)."""

    images: np.ndarray
    labels: np.ndarray


class ImageClassification(SourceTask):
    """Grey images as sequences of side² tokens, row by row: which of the classes (as in Long Range Arena, Tay et al. 2020,
    arXiv 2011.04006, whose images are those of CIFAR-10 in grey).

    side    of an image; None: 32, or that of the data, of which it must be a divisor: squares of pixels become their mean
    data    "built-in": shapes, see `regard.tasks.shapes`; "cifar10" or "mnist", in the folder that REGARD_DATA names; or a
            folder with train_x.npy (k side side) of uint8, train_y.npy (k), test_x.npy and test_y.npy, or with MNIST's files
    noise   of the built-in shapes: its standard deviation, white being 1; None: 0.1
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
        check_int(SMALLEST, side=SIDE if side is None else side)
        self.data, self.noise = data, NOISE if noise is None else noise
        if (
            isinstance(self.noise, bool)
            or not isinstance(self.noise, int | float)
            or not 0 <= self.noise < 10
        ):
            raise ValueError(f"noise must be a number from 0 to 10, not {noise!r}")
        source: ExampleSource = GeneratedExamples(self.draw, seed=seed, examples=examples)
        self.side, classes = side or SIDE, len(shapes.KINDS)
        if data != BUILT_IN:
            check_generated_only(data, noise=noise, seed=seed, examples=examples)
            self.side, classes, source = listed(load(resolve_dataset(data, KNOWN), side))
        super().__init__(source, vocab_size=1 + GREYS, classes=classes, length=self.side**2)

    def draw(self, random: np.random.Generator) -> tuple[np.ndarray, int]:
        """Pixels (side²) of a built-in image, and its class."""
        image, kind = shapes.picture(random, self.side, self.noise)
        return as_pixels(as_grey(image)), kind

    def show(self, example: Example) -> str:
        """The image in block characters, and its class."""
        kind = int(example.target)
        said = (
            f"a built-in image: {shapes.KINDS[kind]}"
            if self.data == BUILT_IN
            else f"an image of {self.data}"
        )
        return f"{in_blocks(as_image(example.tokens.numpy()))}\n{said} (class {kind})"


# ---------------------------------------------------------------------------------------------- real images
def listed(splits: dict[str, LabelledImages]) -> tuple[int, int, ExampleSource]:
    """The side, the number of classes, and the examples."""
    sizes = {split: len(part.labels) for split, part in splits.items()}
    classes = 1 + max(int(part.labels.max()) for part in splits.values())

    def at(split: str, index: int) -> tuple[np.ndarray, int]:
        return as_pixels(splits[split].images[index]), int(splits[split].labels[index])

    return splits["train"].images.shape[1], classes, StoredExamples(sizes, at)


def load(folder: Path, side: int | None) -> dict[str, LabelledImages]:
    """The splits of a folder; the last tenth of the training images is for validation, as in Long Range Arena."""
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is a file, and a folder with train_x.npy, train_y.npy, test_x.npy and test_y.npy is expected"
        )
    train, test = (_labelled(folder, split, side) for split in ("train", "test"))
    kept = len(train.labels) - len(train.labels) // HELD
    valid = LabelledImages(train.images[kept:], train.labels[kept:])
    return {
        "train": LabelledImages(train.images[:kept], train.labels[:kept]),
        "valid": valid,
        "test": test,
    }


def _labelled(folder: Path, split: str, side: int | None) -> LabelledImages:
    images, labels = (read_array(_file(folder, names)) for names in FILES[split])
    if images.dtype != np.uint8 or images.ndim != 3 or images.shape[1] != images.shape[2]:
        raise ValueError(
            f"{folder}: images must be (k side side) of uint8, not {images.shape} of {images.dtype}"
        )
    if (
        labels.shape != images.shape[:1]
        or not np.issubdtype(labels.dtype, np.integer)
        or len(labels) < 2
        or labels.min() < 0
    ):
        raise ValueError(
            f"{folder}: {len(images)} images need as many whole numbers as labels, not {labels.shape}"
        )
    return LabelledImages(
        shrunk(images, images.shape[1] if side is None else side), labels.astype(np.int64)
    )


def _file(folder: Path, names: tuple[str, ...]) -> Path:
    found = sorted(file for file in folder.iterdir() if file.name.startswith(names))
    return found[0] if found else existing_path(folder / f"{names[0]}.npy")


def shrunk(images: np.ndarray, side: int) -> np.ndarray:
    """Images (k s s) -> (k side side): squares of pixels become their mean."""
    whole = images.shape[1]
    if whole % side:
        fit = [str(known) for known in range(SMALLEST, whole + 1) if whole % known == 0]
        raise ValueError(
            f"images of {whole} × {whole} do not shrink evenly to a side of {side}: take one of {', '.join(fit)}"
        )
    if side == whole:
        return images
    times = whole // side
    return np.rint(images.reshape(-1, side, times, side, times).mean((2, 4))).astype(np.uint8)
