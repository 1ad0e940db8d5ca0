"""Images painted by DRAW, a recurrent autoencoder with attention
(Gregor et al. 2015, arXiv 1502.04623)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from regard.errors import check_int
from regard.models.config import DRAWConfig, PatchInput
from regard.models.draw import DRAW, nats_per_image
from regard.tasks import shapes
from regard.tasks.base import Batch, Example, ModelNeeds, Task, check_index, example_rng
from regard.tasks.baselines import Baseline
from regard.tasks.dataset_files import BUILT_IN, resolve_dataset
from regard.tasks.example_source import SIZES, check_generated_only
from regard.tasks.generated_images import GeneratedImages, ImageGenerator
from regard.tasks.image_classification import DATASETS, MIN_SIDE, SIDE, load_image_splits
from regard.tasks.metrics import MeanMetric
from regard.tasks.pixels import quantize
from regard.tasks.processors import Prediction
from regard.tasks.rendering import RenderedImage

if TYPE_CHECKING:
    from regard.models import Model

WHITE = 255
INTENSITY = "intensity"  # the gray image as a target, of which the input is a draw of bits
PIXEL_MEANS = "pixel means"
MEAN_IMAGES = 10_000  # training images of that baseline


class Nats(MeanMetric):
    """The variational bound on the negative log-likelihood of an image, in nats."""

    name, unit, higher_is_better, format = "nats", "nats", False, ".2f"

    def update(self, output: Any, batch: Batch, predictions: Sequence[Any]) -> Tensor:
        """See `Metric`."""
        x = batch.inputs["x"]
        assert x is not None
        nats = nats_per_image(output, x).double().cpu()
        return torch.stack((nats, torch.ones_like(nats)), -1)


class DRAWProcessor(ImageGenerator):
    """Paints images; it takes no raw inputs.

    Args:
        side: Rows and columns of an image.
    """

    def __init__(self, side: int) -> None:
        check_int(1, side=side)
        self.side = side

    def encode(self, raw: Any) -> dict[str, Tensor]:
        """See `Processor`: refused."""
        raise ValueError("A DRAW model paints images: regard generate RUN --out images.gif")

    def decode(self, output: Any, inputs: Mapping[str, Tensor | None]) -> list[Prediction]:
        """See `Processor`: the probability of white of each pixel, (height, width)."""
        return [{"image": each.tolist()} for each in output.logits.detach().sigmoid()[:, 0].cpu()]

    def generate_images(
        self, model: Model, count: int, generator: torch.Generator
    ) -> GeneratedImages:
        """See `ImageGenerator`: one frame for each glimpse."""
        if not isinstance(model, DRAW):
            raise TypeError(f"Expected a DRAW model, not {type(model).__name__}.")
        painting = model.paint(count, generator)
        frames = to_gray(painting.canvases.sigmoid()[:, :, 0])
        boxes = None if painting.windows is None else painting.windows[..., :4].cpu().numpy()
        return GeneratedImages(frames, boxes)

    def to_dict(self) -> dict[str, Any]:
        """See `Processor`."""
        return {"side": self.side}


class DRAWTask(Task):
    """Learn the distribution of binary images, and paint new ones.

    The gray level of a pixel is the probability that it is white. Training draws the pixels anew
    each time; validation and test images are drawn once. The metric is the variational bound in
    nats per image; see `regard.models.draw.DRAW`.

    Args:
        side: Side of the images. None: 32, or that of the data, which it must divide.
        data: "built-in": shapes, see `regard.tasks.shapes`; "mnist" or "cifar10" in the folder
            REGARD_DATA; or a folder as for the task `image`.
        glimpses: Number of steps of the model.
        latent: Width of the latent vector of each step.
        read: Rows and columns of the patch that a step reads; 0: the whole image, no attention.
        write: Rows and columns of the patch that a step writes; 0: the whole image.
        noise: Standard deviation of the noise on built-in images. None: 0.
        seed: Seed of built-in images and of the pixels.
        examples: Size of the training split of built-in images. None: endless.
    """

    metrics = (Nats(),)
    processor: DRAWProcessor

    def __init__(
        self,
        side: int | None = None,
        *,
        data: str | Path = BUILT_IN,
        glimpses: int = 16,
        latent: int = 32,
        read: int = 5,
        write: int = 5,
        noise: float | None = None,
        seed: int = 0,
        examples: int | None = None,
    ) -> None:
        check_int(MIN_SIDE, side=SIDE if side is None else side)
        check_int(1, glimpses=glimpses, latent=latent)
        check_int(0, read=read, write=write, seed=seed)
        self.data, self.seed, self.noise = str(data), seed, noise or 0.0
        self.side, self.images = side or SIDE, None
        if self.data == BUILT_IN:
            self.sizes = SIZES if examples is None else SIZES | {"train": examples}
        else:
            check_generated_only(self.data, noise=noise, examples=examples)
            splits = load_image_splits(resolve_dataset(self.data, DATASETS), side)
            self.images = {split: part.images for split, part in splits.items()}
            self.side = self.images["train"].shape[1]
            self.sizes = {split: len(images) for split, images in self.images.items()}
        for name, size in (("read", read), ("write", write)):
            if size > self.side:
                raise ValueError(f"{name}={size} is more than the {self.side} pixels of the image.")
        self.config = DRAWConfig(
            glimpses=glimpses, latent=latent, read_size=read or None, write_size=write or None
        )
        self.processor = DRAWProcessor(self.side)

    @property
    def needs(self) -> ModelNeeds:
        """See `Task`."""
        source = PatchInput(
            height=self.side, width=self.side, patch_size=1, channels=1, class_token=False
        )
        return ModelNeeds(
            kind="draw", input=source, head=None, length=source.length, draw=self.config
        )

    def size(self, split: str) -> int:
        """See `Task`."""
        return self.sizes[split]

    def intensity(self, split: str, index: int) -> Tensor:
        """The gray levels of an image, (1, side, side), from 0 to 1."""
        check_index(split, index, self.size(split))
        if self.images is not None:
            levels = self.images[split][index]
        else:
            rng = example_rng(self.seed, split, index)
            levels = quantize(shapes.draw_shape(rng, self.side, self.noise)[0])
        return torch.as_tensor(np.array(levels))[None].float() / WHITE

    def example(self, split: str, index: int) -> Example:
        """See `Task`: bits, and the gray levels that they were drawn from."""
        intensity = self.intensity(split, index)
        generator = torch.Generator().manual_seed(
            int(example_rng(self.seed + 1, split, index).integers(1 << 62))
        )
        return Example(
            {"x": torch.bernoulli(intensity, generator=generator)}, {INTENSITY: intensity}
        )

    def augment(self, batch: Batch, generator: torch.Generator) -> Batch:
        """See `Task`: draw the bits anew."""
        intensity = batch.targets[INTENSITY]
        return Batch({"x": torch.bernoulli(intensity, generator=generator)}, batch.targets)

    def loss(self, output: Any, batch: Batch, *, label_smoothing: float = 0.0) -> Tensor:
        """See `Task`: the bound in nats per pixel."""
        if label_smoothing:
            raise ValueError("label_smoothing applies to classes, and DRAW predicts pixels.")
        x = batch.inputs["x"]
        assert x is not None
        return nats_per_image(output, x).mean() / self.side**2

    def count_targets(self, batch: Batch) -> int:
        """See `Task`: images."""
        return batch.size

    def predict(self, model: Model, batch: Batch) -> list[Prediction]:
        """See `Task`: the reconstruction of each image."""
        return self.processor.decode(model(batch.inputs["x"]), batch.inputs)

    def baselines(self) -> dict[str, Baseline]:
        """See `Task`: independent pixels."""
        return {PIXEL_MEANS: partial(_pixel_means_score, self)}

    def render(self, example: Example, prediction: Prediction | None = None) -> RenderedImage:
        """The image, with its reconstruction beside it."""
        pixels = to_gray(example.inputs["x"][0])
        if prediction is None:
            return RenderedImage(pixels)
        painted = to_gray(torch.tensor(prediction["image"]))
        return RenderedImage(np.concatenate((pixels, painted), 1), "image, and reconstruction")

    @classmethod
    def load_processor(cls, content: Mapping[str, Any]) -> DRAWProcessor:
        """See `Task`."""
        try:
            return DRAWProcessor(content["side"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"Not a saved processor of DRAW: {error!r}") from None


def to_gray(probability: Tensor) -> np.ndarray:
    """Probabilities of white as gray levels of uint8."""
    return (probability.detach().cpu() * WHITE).round().to(torch.uint8).numpy()


def _pixel_means_score(task: DRAWTask, test: Sequence[int]) -> Tensor:
    """Statistics of `Nats` of independent pixels, each with its mean in the training images."""
    train = task.sample("train", MEAN_IMAGES).tolist()
    total = torch.zeros(1, task.side, task.side, dtype=torch.float64)
    for index in train:
        total += task.intensity("train", index)
    p = (total + 0.5) / (len(train) + 1)
    nats = [
        float(-torch.where(task.example("test", i).inputs["x"] > 0, p.log(), (1 - p).log()).sum())
        for i in test
    ]
    return torch.tensor([[each, 1.0] for each in nats], dtype=torch.float64)
