"""Classification of images in folders, whose names are the classes; needs the package Pillow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.errors import check_int
from regard.models.config import PatchInput
from regard.tasks.base import LABELS, Example, ModelNeeds, with_prediction
from regard.tasks.baselines import Baseline, linear_classifier
from regard.tasks.file_classification import FileClassification
from regard.tasks.processors import Prediction, Processor, predict_classes
from regard.tasks.rendering import RenderedImage
from regard.tasks.row_splits import UnusableRow

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm")
CHANNELS = (1, 3)
HALF = 127.5  # of the gray levels: 0..255 -> -1..1
LINEAR = "linear on pixels"
LINEAR_SIDE, LINEAR_IMAGES = 16, 5000  # of the linear baseline: some seconds


class ImageProcessor(Processor):
    """Images for a classifier.

    Args:
        size: Side of the images in pixels. Others are scaled and cropped at the centre.
        channels: 1 for gray, 3 for colour.
        labels: Names of the classes.
    """

    suffixes = SUFFIXES
    stretch = False  # scale width and height apart instead of cropping, so that boxes stay relative

    def __init__(self, size: int, channels: int, labels: Sequence[str]) -> None:
        check_int(1, size=size)
        if channels not in CHANNELS:
            raise ValueError(f"channels must be 1 (gray) or 3 (colour), not {channels!r}")
        self.size, self.channels, self.labels = size, channels, tuple(labels)

    def read(self, path: str | Path) -> np.ndarray:
        """The pixels (channels, size, size) of uint8 of an image file."""
        try:
            from PIL import Image, ImageOps
        except ImportError:
            raise ImportError(
                f"Reading {path} requires the package Pillow: pip install 'regard[image]'"
            ) from None
        try:
            with Image.open(path) as file:
                image = ImageOps.exif_transpose(file)
                image.load()
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise UnusableRow(
                f"it is no complete image ({' '.join(str(error).split())})."
            ) from None
        if image.mode.startswith("I") or image.mode == "F":  # 16 or 32 bits: spread the levels
            levels = np.asarray(image, dtype=float)
            highest = 65535 if image.mode.startswith("I;16") else max(float(levels.max()), 1.0)
            image = Image.fromarray(np.clip(255 * levels / highest, 0, 255).astype(np.uint8))
        if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image)
        image = image.convert("L" if self.channels == 1 else "RGB")
        size, bilinear = (self.size, self.size), Image.Resampling.BILINEAR
        if self.stretch:
            image = image.resize(size, bilinear)
        else:
            image = ImageOps.fit(image, size, bilinear)
        pixels = np.asarray(image, dtype=np.uint8).reshape(self.size, self.size, self.channels)
        return pixels.transpose(2, 0, 1)

    def encode(self, raw: Any) -> dict[str, Tensor]:
        """See `Processor`: the path of an image."""
        if not isinstance(raw, str | Path):
            raise TypeError(f"Expected the path of an image, not {type(raw).__name__}.")
        try:
            return {"x": scale_pixels(self.read(raw))}
        except UnusableRow as error:
            raise ValueError(f"{raw}: {error}") from None

    def decode(self, output: Any, inputs: Mapping[str, Tensor | None]) -> list[Prediction]:
        """See `Processor`: the most probable label, and the probabilities of all."""
        return predict_classes(output, self.labels)

    def to_dict(self) -> dict[str, Any]:
        """See `Processor`."""
        return {"size": self.size, "channels": self.channels, "labels": list(self.labels)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> ImageProcessor:
        """The processor that `to_dict` described."""
        try:
            return cls(content["size"], content["channels"], list(map(str, content["labels"])))
        except (KeyError, TypeError) as error:
            raise ValueError(f"Not a saved processor of images: {error!r}") from None


def scale_pixels(pixels: np.ndarray) -> Tensor:
    """Gray levels 0..255 -> -1..1."""
    return torch.as_tensor(np.array(pixels)).float() / HALF - 1


class ImageFolder(FileClassification):
    """Classify images, cut into patches: one sub-folder for each class, optionally in folders
    named train, valid and test. Needs the package Pillow.

    Args:
        data: The folder.
        size: Side of the images in pixels. Others are scaled and cropped at the centre.
        patch: Side of a patch in pixels; it must divide `size`. A patch is a token.
        channels: 1 for gray, 3 for colour. Transparent pixels become white.
        missing: What to do with files that cannot be read: "drop" or "error".
        seed: Seed of the splits.
    """

    processor: ImageProcessor

    def __init__(
        self,
        data: str | Path,
        *,
        size: int = 32,
        patch: int = 4,
        channels: int = 3,
        missing: str = "drop",
        seed: int = 0,
    ) -> None:
        check_int(1, patch=patch)
        reader = ImageProcessor(size, channels, [])
        if size % patch:
            divisors = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
            raise ValueError(f"patch={patch} does not divide size={size}: use one of {divisors}.")
        self.patch = patch

        def load(path: Path) -> np.ndarray:
            return reader.read(path)[None]

        super().__init__(data, suffixes=SUFFIXES, load=load, missing=missing, seed=seed)
        self.processor = ImageProcessor(size, channels, self.labels)

    @property
    def needs(self) -> ModelNeeds:
        """See `Task`: an encoder of patches."""
        size, channels = self.processor.size, self.processor.channels
        source = PatchInput(
            height=size, width=size, patch_size=self.patch, channels=channels, class_token=False
        )
        return ModelNeeds(kind="encoder", input=source, head=self.head, length=source.length)

    def example(self, split: str, index: int) -> Example:
        """See `Task`."""
        pixels = self.value(split, index)[0]
        label = torch.tensor(int(self.files[split].classes[index]))
        return Example({"x": scale_pixels(pixels)}, {LABELS: label})

    def baselines(self) -> dict[str, Baseline]:
        """See `Task`."""
        return {**super().baselines(), LINEAR: self._linear_score}

    def _linear_score(self, test: Sequence[int]) -> Tensor:
        """Statistics of logistic regression on the pixels, averaged to at most 16 × 16."""
        step = -(-self.processor.size // LINEAR_SIDE)
        side = self.processor.size // step

        def features(split: str, indices: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
            images = self.values[split][indices][..., : side * step, : side * step]
            blocks = images.reshape(len(images), -1, side, step, side, step).mean((3, 5))
            return blocks.reshape(len(images), -1), self.files[split].classes[indices]

        train = self.sample("train", LINEAR_IMAGES).tolist()
        return linear_classifier(features("train", train), features("test", list(test)))

    def render(self, example: Example, prediction: Prediction | None = None) -> RenderedImage:
        """The image, and its class."""
        pixels = ((example.inputs["x"] + 1) * HALF).round().to(torch.uint8).numpy()
        shown = pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)
        label = self.labels[int(example.targets[LABELS])]
        return RenderedImage(shown, with_prediction(label, prediction).text)

    @classmethod
    def load_processor(cls, content: Mapping[str, Any]) -> ImageProcessor:
        """See `Task`."""
        return ImageProcessor.from_dict(content)
