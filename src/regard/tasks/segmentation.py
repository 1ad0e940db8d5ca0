"""Semantic segmentation: a class for each pixel, on generated scenes or on images with masks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import check_choice, check_int
from regard.models.config import PatchInput, SegmentationHeadConfig
from regard.models.losses import IGNORE_INDEX
from regard.tasks.base import (
    LABELS,
    SPLITS,
    Batch,
    Example,
    ModelNeeds,
    Task,
    check_index,
    example_rng,
)
from regard.tasks.baselines import CONSTANT, Baseline
from regard.tasks.dataset_files import BUILT_IN
from regard.tasks.example_source import SIZES, check_generated_only
from regard.tasks.files import SPLIT_NAMES, existing_path
from regard.tasks.image_folder import HALF, SUFFIXES, ImageProcessor, scale_pixels
from regard.tasks.metrics import Metric, UndefinedMetric
from regard.tasks.processors import Prediction
from regard.tasks.rendering import Rendered, RenderedImage
from regard.tasks.row_splits import (
    MISSING,
    SplitRows,
    UnusableRow,
    check_not_empty,
    copy_notes,
    hash_bytes,
)
from regard.tasks.rows import RowIterator, Rows
from regard.tasks.scenes import DIGITS, SceneSource

BACKGROUND = "background"
VOID = 255  # a pixel of a mask without a class, as in PASCAL VOC
IMAGES, MASKS = "images", "masks"  # sub-folders of the user's data
MAX_CLASSES = 255
LINEAR, LINEAR_IMAGES, LINEAR_PIXELS, RADIUS = "linear on 7 × 7 pixels", 500, 20_000, 3
PALETTE = (  # red, green, blue of the classes, repeated beyond the last
    (0, 0, 0),
    (230, 159, 0),
    (86, 180, 233),
    (0, 158, 115),
    (240, 228, 66),
    (0, 114, 178),
    (213, 94, 0),
    (204, 121, 167),
    (255, 255, 255),
    (127, 127, 127),
    (170, 255, 0),
)


class MeanIoU(Metric):
    """Intersection over union of predicted and true pixels, the mean over the classes that occur as
    prediction or target. The statistics of an example are the pixels of each class: in both, as
    prediction, as target.

    Args:
        labels: Names of the classes.
    """

    name, margin = "miou", 0.01

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = tuple(labels)

    def update(self, output: Any, batch: Batch, predictions: Sequence[Any]) -> Tensor:
        """See `Metric`."""
        return self.count_pixels(output.argmax(1), batch.targets[LABELS].to(output.device))

    def count_pixels(self, predicted: Tensor, target: Tensor) -> Tensor:
        """Statistics (b, 3 c) of class maps (b, height, width)."""
        counted, classes = target != IGNORE_INDEX, len(self.labels)
        rows = []
        for p, t, keep in zip(predicted, target, counted, strict=True):
            p, t = p[keep], t[keep]
            parts = (t[p == t], p, t)
            rows.append(torch.cat([torch.bincount(each, minlength=classes) for each in parts]))
        return torch.stack(rows).double().cpu()

    def compute(self, statistics: Tensor) -> float:
        """See `Metric`."""
        both, union = self._both_and_union(statistics)
        if not (union > 0).any():
            raise UndefinedMetric("miou has no value: no pixel has a class.")
        return float((both[union > 0] / union[union > 0]).mean())

    def breakdown(self, statistics: Tensor) -> dict[str, dict[str, float]]:
        """See `Metric`: the IoU of each class."""
        both, union = self._both_and_union(statistics)
        return {
            label: {"iou": float(b / u)}
            for label, b, u in zip(self.labels, both, union, strict=True)
            if u > 0
        }

    def _both_and_union(self, statistics: Tensor) -> tuple[Tensor, Tensor]:
        both, predicted, target = statistics.sum(0).view(3, -1)
        return both, predicted + target - both


class PixelAccuracy(Metric):
    """Share of the pixels with a class whose class is predicted."""

    name, margin = "pixel_accuracy", 0.01

    def update(self, output: Any, batch: Batch, predictions: Sequence[Any]) -> Tensor:
        """See `Metric`."""
        target = batch.targets[LABELS].to(output.device)
        counted = target != IGNORE_INDEX
        correct = (output.argmax(1) == target) & counted
        return torch.stack((correct.sum((1, 2)), counted.sum((1, 2))), -1).double().cpu()

    def compute(self, statistics: Tensor) -> float:
        """See `Metric`."""
        correct, counted = statistics.sum(0).tolist()
        if not counted:
            raise UndefinedMetric("pixel_accuracy has no value: no pixel has a class.")
        return float(correct / counted)


class SegmentationProcessor(ImageProcessor):
    """Images for a segmentation model; see `ImageProcessor`."""

    def decode(self, output: Tensor, inputs: Mapping[str, Tensor | None]) -> list[Prediction]:
        """See `Processor`: the class of each pixel in rows, and the share of each class."""
        predictions = []
        for classes in output.argmax(1).cpu():
            counts = torch.bincount(classes.reshape(-1), minlength=len(self.labels)).double()
            shares = (counts / classes.numel()).tolist()
            predictions.append(
                {
                    "classes": classes.tolist(),
                    "shares": {
                        label: share
                        for label, share in zip(self.labels, shares, strict=True)
                        if share > 0
                    },
                }
            )
        return predictions

    def render(self, prediction: Prediction) -> RenderedImage:
        """See `Processor`: the classes in colours."""
        classes = np.array(prediction["classes"])
        return RenderedImage(paint_classes(classes), legend_text(self.labels, classes))


class MaskedImage(NamedTuple):
    """An image (channels, size, size) of uint8, and the classes of its pixels (size, size) of
    uint8, `VOID` where there is none."""

    pixels: np.ndarray
    classes: np.ndarray


class Segmentation(Task):
    """Semantic segmentation: which class each pixel belongs to.

    Args:
        data: "built-in": scenes of shapes; "mnist": scenes of digits; see `regard.tasks.scenes`. Or
            a folder with the sub-folders `images` and `masks`, optionally in folders named train,
            valid and test. A mask has the name of its image and the suffix .png; its gray levels,
            or the indices of its palette, are the classes; 255 stands for no class.
        size: Side of the images in pixels. Others are scaled and cropped at the centre.
        patch: Side of a patch in pixels; it must divide `size`. A patch is a token.
        channels: 1 for gray, 3 for colour. None: 1 for scenes, 3 for the user's images.
        labels: Names of the classes, from class 0. None: those of the scenes, or numbers.
        missing: What to do with images that cannot be read or have no mask: "drop" or "error".
        seed: Seed of the scenes, or of the splits.
        examples: Size of the training split of scenes. None: endless.
    """

    def __init__(
        self,
        data: str | Path = BUILT_IN,
        *,
        size: int = 64,
        patch: int = 4,
        channels: int | None = None,
        labels: Sequence[str] | None = None,
        missing: str = "drop",
        seed: int = 0,
        examples: int | None = None,
    ) -> None:
        check_int(1, size=size, patch=patch)
        check_int(0, seed=seed)
        check_choice("missing", missing, MISSING)
        if size % patch:
            divisors = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
            raise ValueError(f"patch={patch} does not divide size={size}: use one of {divisors}.")
        self.patch, self.seed = patch, seed
        self.scenes: SceneSource | None = None
        self.stored: dict[str, list[MaskedImage]] = {}
        self.hashes: dict[str, np.ndarray] = {}
        self.rows: SplitRows[tuple[MaskedImage, int]] | None = None
        if str(data) == BUILT_IN or str(data) in DIGITS:
            if labels is not None:
                raise ValueError("labels are for your own images: scenes have names of classes.")
            self.scenes = SceneSource(str(data), side=size)
            self.sizes = SIZES if examples is None else SIZES | {"train": examples}
            labels = (BACKGROUND, *self.scenes.labels)
        else:
            check_generated_only(str(data), examples=examples)
            reader = ImageProcessor(size, channels or 3, [])
            self._read_images(existing_path(data), reader, drop=missing == "drop")
            self.sizes = {split: len(self.stored[split]) for split in SPLITS}
            labels = self._check_classes(labels)
        self.labels = tuple(labels)
        default = 1 if self.scenes is not None else 3
        self.processor: SegmentationProcessor = SegmentationProcessor(
            size, channels or default, self.labels
        )
        self.metrics = (MeanIoU(self.labels), PixelAccuracy())

    @property
    def needs(self) -> ModelNeeds:
        """See `Task`: an encoder of patches with logits for each pixel."""
        size, rows = self.processor.size, self.processor.size // self.patch
        source = PatchInput(
            height=size,
            width=size,
            patch_size=self.patch,
            channels=self.processor.channels,
            class_token=False,
        )
        head = SegmentationHeadConfig(
            num_classes=len(self.labels), rows=rows, columns=rows, patch_size=self.patch
        )
        return ModelNeeds(kind="encoder", input=source, head=head, length=source.length)

    def size(self, split: str) -> int:
        """See `Task`."""
        return self.sizes[split]

    def masked_image(self, split: str, index: int) -> MaskedImage:
        """An image and the classes of its pixels."""
        check_index(split, index, self.size(split))
        if self.scenes is None:
            return self.stored[split][index]
        scene = self.scenes.draw(example_rng(self.seed, split, index), split)
        classes = np.zeros(scene.image.shape, np.uint8)
        for mask, label in zip(scene.masks, scene.classes.tolist(), strict=True):
            classes[mask] = 1 + label
        return MaskedImage(np.repeat(scene.image[None], self.processor.channels, 0), classes)

    def example(self, split: str, index: int) -> Example:
        """See `Task`."""
        pixels, classes = self.masked_image(split, index)
        labels = torch.as_tensor(classes.astype(np.int64))
        labels[labels == VOID] = IGNORE_INDEX
        return Example({"x": scale_pixels(pixels)}, {LABELS: labels})

    def count_targets(self, batch: Batch) -> int:
        """See `Task`: pixels with a class."""
        return int((batch.targets[LABELS] != IGNORE_INDEX).sum())

    def notes(self) -> list[str]:
        """See `Task`."""
        if self.rows is None:
            return []
        dropped = sum(self.rows.dropped.values())
        notes = []
        if dropped:
            reasons = [reason for each in self.rows.reasons.values() for reason in each][:5]
            shown = "; ".join(reason.rstrip(".") for reason in reasons)
            notes.append(f"{dropped:,} images that cannot be used were left out: {shown}.")
        return [*notes, *copy_notes(self.hashes, "images")]

    # ------------------------------------------------------------------------------- own images
    def _read_images(self, folder: Path, reader: ImageProcessor, *, drop: bool) -> None:
        """Read all images and masks of a folder."""

        def parse(where: str, values: list[Any]) -> tuple[MaskedImage, int]:
            image, mask = values
            pixels = reader.read(image)
            classes = read_mask(mask, reader.size)
            return MaskedImage(pixels, classes), hash_bytes(Path(image).read_bytes())

        self.rows = SplitRows(
            find_masked_images(folder), ("image", "mask"), parse, drop=drop, seed=self.seed
        )
        for split in SPLITS:
            found = [item for _, item in self.rows.walk(split)]
            check_not_empty(split, len(found))
            self.stored[split] = [item for item, _ in found]
            self.hashes[split] = np.array([digest for _, digest in found], dtype=np.uint64)

    def _check_classes(self, labels: Sequence[str] | None) -> list[str]:
        """The names of the classes; classes that are only in valid and test are an error."""
        present = {split: _present_classes(self.stored[split]) for split in SPLITS}
        count = max(present["train"], default=-1) + 1
        if labels is not None:
            labels = [labels] if isinstance(labels, str) else [str(label) for label in labels]
            if count > len(labels):
                raise ValueError(
                    f"A training mask has the class {count - 1}, but there are {len(labels)} "
                    "labels: name them all, from class 0, or write 255 for no class."
                )
            count = len(labels)
        if len(present["train"]) < 2:
            only = ", ".join(map(str, present["train"])) or "none"
            raise ValueError(
                f"The training masks have one class ({only}): there is nothing to learn."
            )
        for split in ("valid", "test"):
            unknown = sorted(value for value in present[split] if value >= count)
            if unknown:
                raise ValueError(
                    f"A mask of the {split} split has the class {unknown[0]}, which no training "
                    f"mask has: those are {', '.join(map(str, sorted(present['train'])))}; 255 "
                    "stands for no class."
                )
        return list(labels) if labels is not None else [str(number) for number in range(count)]

    # -------------------------------------------------------------------------------- baselines
    def baselines(self) -> dict[str, Baseline]:
        """See `Task`."""
        return {
            CONSTANT: partial(_constant_score, self),
            LINEAR: partial(_linear_score, self),
        }

    # ------------------------------------------------------------------------------- for people
    def render(self, example: Example, prediction: Prediction | None = None) -> Rendered:
        """The image, its classes in colours, and the predicted classes."""
        pixels = ((example.inputs["x"] + 1) * HALF).round().to(torch.uint8).numpy()
        image = np.repeat(pixels, 4 - len(pixels), 0)[:3].transpose(1, 2, 0)
        classes = example.targets[LABELS].numpy()
        shown = [image, paint_classes(np.where(classes == IGNORE_INDEX, VOID, classes))]
        caption = "image, classes"
        if prediction is not None:
            shown.append(paint_classes(np.array(prediction["classes"])))
            caption += ", prediction"
        return RenderedImage(
            np.concatenate(shown, 1), f"{caption}: {legend_text(self.labels, classes)}"
        )

    @classmethod
    def load_processor(cls, content: Mapping[str, Any]) -> SegmentationProcessor:
        """See `Task`."""
        processor = SegmentationProcessor.from_dict(content)
        assert isinstance(processor, SegmentationProcessor)
        return processor


# -------------------------------------------------------------------------------------------- masks
def find_masked_images(folder: Path) -> dict[str, Rows]:
    """Rows with the columns "image" and "mask" by split, or under "all"."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file: expected a folder with {IMAGES} and {MASKS}.")
    splits: dict[str, list[Path]] = {}
    for each in sorted(folder.iterdir()):
        split = SPLIT_NAMES.get(each.name.lower())
        if each.is_dir() and split is not None:
            splits.setdefault(split, []).append(each)
    if "train" not in splits:
        splits = {"all": [folder]}
    rows: dict[str, Rows] = {}
    for split, folders in splits.items():
        pairs = []
        for each in folders:
            images, masks = each / IMAGES, each / MASKS
            if not images.is_dir() or not masks.is_dir():
                found = ", ".join(sorted(p.name for p in each.iterdir() if p.is_dir())) or "none"
                raise ValueError(
                    f"{each} needs the sub-folders {IMAGES} and {MASKS}; it has: {found}."
                )
            for path in sorted(images.rglob("*")):
                if path.suffix.lower() in SUFFIXES and path.name[0] != ".":
                    mask = masks / path.relative_to(images).with_suffix(".png")
                    pairs.append((path, mask))
        if not pairs:
            raise ValueError(f"There are no images in {IMAGES} of {folders[0]}.")
        rows[split] = Rows(partial(_iter_pairs, pairs))
    return rows


def _iter_pairs(pairs: Sequence[tuple[Path, Path]]) -> RowIterator:
    for image, mask in pairs:
        yield str(image), {"image": image, "mask": mask}


def read_mask(path: Path, size: int) -> np.ndarray:
    """The classes (size, size) of uint8 of a mask: gray levels or indices of a palette, scaled and
    cropped as its image, without mixing classes."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise ImportError(
            f"Reading {path} requires the package Pillow: pip install 'regard[image]'"
        ) from None
    if not path.is_file():
        raise UnusableRow(f"there is no mask {path}.")
    try:
        with Image.open(path) as file:
            file.load()
            mask = file.copy()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = " ".join(str(error).split())
        raise UnusableRow(f"its mask {path} is no complete image ({reason}).") from None
    if mask.mode not in ("1", "L", "P", "I", "I;16"):
        raise UnusableRow(
            f"its mask {path} has the mode {mask.mode}: expected gray levels or a palette, whose "
            "numbers are the classes."
        )
    values = np.asarray(mask).astype(np.int64)
    if values.min() < 0 or values.max() > MAX_CLASSES:
        wrong = int(values.max() if values.max() > MAX_CLASSES else values.min())
        raise UnusableRow(f"its mask {path} has the value {wrong}: classes are 0 to 254, 255 none.")
    fitted = ImageOps.fit(
        Image.fromarray(values.astype(np.uint8)), (size, size), Image.Resampling.NEAREST
    )
    return np.array(fitted)


def _present_classes(images: Sequence[MaskedImage]) -> set[int]:
    found: set[int] = set()
    for each in images:
        found |= set(np.unique(each.classes).tolist())
    return found - {VOID}


def paint_classes(classes: np.ndarray) -> np.ndarray:
    """Classes (height, width) as colours (height, width, 3) of uint8; `VOID` is gray."""
    colours = np.array(PALETTE, dtype=np.uint8)[classes % len(PALETTE)]
    colours[classes == VOID] = 64
    return colours


def legend_text(labels: Sequence[str], classes: np.ndarray) -> str:
    """The names of the classes that occur, in order."""
    present = sorted(set(np.unique(classes).tolist()) - {VOID, IGNORE_INDEX})
    return ", ".join(labels[number] for number in present)


# ---------------------------------------------------------------------------------------- baselines
def _score(task: Segmentation, test: Sequence[int], predict: Any) -> Tensor:
    """Statistics of `MeanIoU` of a function: pixels (channels, h, w) -> classes (h, w)."""
    metric = task.metrics[0]
    assert isinstance(metric, MeanIoU)
    parts = []
    for index in test:
        example = task.example("test", index)
        predicted = torch.as_tensor(predict(example.inputs["x"]))
        parts.append(metric.count_pixels(predicted[None], example.targets[LABELS][None]))
    return metric.merge(parts)


def _training_pixels(task: Segmentation) -> list[Example]:
    return [task.example("train", i) for i in task.sample("train", LINEAR_IMAGES).tolist()]


def _constant_score(task: Segmentation, test: Sequence[int]) -> Tensor:
    """The most frequent class of the training pixels, everywhere."""
    labels = torch.cat([each.targets[LABELS].reshape(-1) for each in _training_pixels(task)])
    frequent = int(torch.bincount(labels[labels != IGNORE_INDEX]).argmax())
    return _score(task, test, lambda x: torch.full(x.shape[1:], frequent))


def _linear_score(task: Segmentation, test: Sequence[int]) -> Tensor:
    """Logistic regression on the 7 × 7 pixels around each pixel: one convolution."""
    try:
        from sklearn.linear_model import LogisticRegression
    except ImportError:
        raise ImportError(
            f"{LINEAR} needs the package scikit-learn: pip install 'regard[image]'"
        ) from None

    def features(x: Tensor) -> Tensor:
        """(channels, h, w) -> (h * w, channels * 49)."""
        padded = F.pad(x[None], (RADIUS,) * 4, value=-1.0)
        return F.unfold(padded, 2 * RADIUS + 1)[0].mT

    generator = torch.Generator().manual_seed(0)
    rows, labels = [], []
    images = _training_pixels(task)
    for example in images:
        target = example.targets[LABELS].reshape(-1)
        known = (target != IGNORE_INDEX).nonzero()[:, 0]
        chosen = known[
            torch.randperm(len(known), generator=generator)[: LINEAR_PIXELS // len(images)]
        ]
        rows.append(features(example.inputs["x"])[chosen])
        labels.append(target[chosen])
    model = LogisticRegression(max_iter=100)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 100 iterations are enough for a baseline
        model.fit(torch.cat(rows).numpy(), torch.cat(labels).numpy())

    def predict(x: Tensor) -> Tensor:
        found = model.predict(features(x).numpy())
        return torch.as_tensor(found).reshape(x.shape[1:])

    return _score(task, test, predict)
