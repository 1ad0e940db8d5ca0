"""Object detection: boxes and classes of the objects of an image, on generated scenes or on images
annotated in COCO's format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import check_choice, check_int
from regard.models.config import DetectionHeadConfig, PatchInput
from regard.models.detection_head import DetectionOutput, set_prediction_loss, to_corners
from regard.tasks.base import (
    LABELS,
    SPLITS,
    Batch,
    Example,
    ModelNeeds,
    Task,
    check_index,
    collate,
    example_rng,
)
from regard.tasks.baselines import Baseline
from regard.tasks.coco import AnnotatedImage, Detections, average_precision, read_splits
from regard.tasks.dataset_files import BUILT_IN
from regard.tasks.example_source import SIZES, check_generated_only
from regard.tasks.generated_images import draw_box
from regard.tasks.image_folder import HALF, ImageProcessor, scale_pixels
from regard.tasks.metrics import Metric, UndefinedMetric
from regard.tasks.processors import Prediction
from regard.tasks.rendering import RenderedImage
from regard.tasks.row_splits import MISSING, SplitRows, check_not_empty, copy_notes, hash_bytes
from regard.tasks.rows import RowIterator, Rows
from regard.tasks.scenes import DIGITS, SceneSource

BOXES = "boxes"  # the target with the boxes, beside the labels
PADDING = -1.0  # in place of a score and of a class
THRESHOLD = 0.5  # score from which `predict` reports an object
TRUE_COLOUR, FOUND_COLOUR = (0, 158, 115), (213, 94, 0)
TEMPLATES, TEMPLATE_IMAGES, TEMPLATE_SCALES = "template matching", 400, (0.28, 0.35, 0.42)
MIN_OVERLAP = 0.3  # of two templates that cannot both be objects


class AveragePrecision(Metric):
    """Average precision of boxes, as pycocotools computes it: the mean over classes, and over IoU
    0.5, 0.55, ..., 0.95.

    The statistics of an example are its detections (score, class, corners) and its objects (class,
    corners), padded with -1.

    Args:
        labels: Names of the classes.
        queries: Largest number of detections in an image.
        objects: Largest number of objects in an image.
        size: Rows and columns of an image in pixels.
        half_overlap: Count an IoU of 0.5 as found: AP50.
    """

    margin = 0.01

    def __init__(
        self,
        labels: Sequence[str],
        *,
        queries: int,
        objects: int,
        size: int,
        half_overlap: bool = False,
    ) -> None:
        self.labels, self.queries, self.objects = tuple(labels), queries, objects
        self.size, self.half_overlap = size, half_overlap
        self.name = "ap50" if half_overlap else "ap"

    def update(self, output: Any, batch: Batch, predictions: Sequence[Any]) -> Tensor:
        """See `Metric`."""
        scores, classes, corners = decode_boxes(output)
        found = torch.cat((scores[..., None], classes[..., None], corners), -1)
        return self.pack(found, batch)

    def pack(self, found: Tensor, batch: Batch) -> Tensor:
        """Statistics of detections (b, queries, 6): score, class and corners as shares."""
        labels = batch.targets[LABELS].cpu().double()
        boxes = to_corners(batch.targets[BOXES].cpu().double())
        truth = torch.cat((labels[..., None], boxes), -1)
        truth = truth.masked_fill(labels[..., None] < 0, PADDING)
        missing = self.objects - truth.shape[1]
        truth = F.pad(truth, (0, 0, 0, missing), value=PADDING)
        return torch.cat((found.cpu().double().flatten(1), truth.flatten(1)), 1)

    def compute(self, statistics: Tensor) -> float:
        """See `Metric`."""
        by_class = self._by_class(statistics)
        if np.isnan(by_class).all():
            raise UndefinedMetric(f"{self.name} has no value: there is no object.")
        return float(np.nanmean(by_class))

    def breakdown(self, statistics: Tensor) -> dict[str, dict[str, float]]:
        """See `Metric`: the average precision of each class."""
        by_class = self._by_class(statistics).tolist()
        return {
            label: {self.name: value}
            for label, value in zip(self.labels, by_class, strict=True)
            if value == value
        }

    def _by_class(self, statistics: Tensor) -> np.ndarray:
        detections, truth = statistics.numpy().astype(np.float64), []
        found = []
        for row in detections:
            cut = 6 * self.queries
            rows = row[:cut].reshape(-1, 6)
            rows = rows[rows[:, 0] != PADDING]
            found.append(Detections(rows[:, 0], rows[:, 1].astype(int), self.size * rows[:, 2:]))
            objects = row[cut:].reshape(-1, 5)
            objects = objects[objects[:, 0] != PADDING]
            truth.append((objects[:, 0].astype(int), self.size * objects[:, 1:]))
        ap = average_precision(truth, found, len(self.labels))
        return ap[0] if self.half_overlap else ap.mean(0)


class DetectionProcessor(ImageProcessor):
    """Images for a detection model; width and height are scaled apart. See `ImageProcessor`."""

    stretch = True

    def decode(
        self, output: DetectionOutput, inputs: Mapping[str, Tensor | None]
    ) -> list[Prediction]:
        """See `Processor`: the objects with a score of at least 0.5, by score. A box is left, top,
        right, bottom as shares of the width and height of the image."""
        scores, classes, corners = (each.tolist() for each in decode_boxes(output))
        predictions = []
        for rows in zip(scores, classes, corners, strict=True):
            objects = [
                {"label": self.labels[int(label)], "score": score, "box": box}
                for score, label, box in zip(*rows, strict=True)
                if score >= THRESHOLD
            ]
            objects.sort(key=lambda found: -found["score"])
            predictions.append({"objects": objects})
        return predictions


def decode_boxes(output: DetectionOutput) -> tuple[Tensor, Tensor, Tensor]:
    """Scores (b, queries), classes (b, queries) and corners (b, queries, 4) in the image, as shares
    of width and height, of the last layer; float64 on the CPU."""
    probability = output.logits[-1].detach().cpu().double().softmax(-1)[..., :-1]
    scores, classes = probability.max(-1)
    corners = to_corners(output.boxes[-1].detach().cpu().double()).clamp(0, 1)
    return scores, classes, corners


class Detection(Task):
    """Object detection as set prediction (Carion et al. 2020, arXiv 2005.12872).

    Args:
        data: "built-in": scenes of shapes; "mnist": scenes of digits; see `regard.tasks.scenes`. Or
            annotations in COCO's format: a JSON file, or a folder with train.json and optionally
            valid.json and test.json.
        images: Folder of the image files of annotations. None: `images` beside them, or else their
            folder.
        size: Side of the images in pixels; others are stretched to it.
        patch: Side of a patch in pixels; it must divide `size`. A patch is a token.
        stem: "conv" for convolutions before the patches, or "linear".
        channels: 1 for gray, 3 for colour. None: 1 for scenes, 3 for the user's images.
        queries: Number of queries of the model; at least the objects of an image.
        decoder_layers: Layers of the decoder of queries.
        missing: What to do with images that cannot be read: "drop" or "error".
        seed: Seed of the scenes, or of the splits.
        examples: Size of the training split of scenes. None: endless.
    """

    processor: DetectionProcessor

    def __init__(
        self,
        data: str | Path = BUILT_IN,
        *,
        images: str | Path | None = None,
        size: int = 64,
        patch: int = 8,
        stem: str = "conv",
        channels: int | None = None,
        queries: int = 25,
        decoder_layers: int = 2,
        missing: str = "drop",
        seed: int = 0,
        examples: int | None = None,
    ) -> None:
        check_int(1, size=size, patch=patch, queries=queries, decoder_layers=decoder_layers)
        check_int(0, seed=seed)
        check_choice("missing", missing, MISSING)
        check_choice("stem", stem, ("conv", "linear"))
        if size % patch:
            divisors = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
            raise ValueError(f"patch={patch} does not divide size={size}: use one of {divisors}.")
        self.patch, self.stem, self.seed = patch, stem, seed
        self.queries, self.decoder_layers = queries, decoder_layers
        self.scenes: SceneSource | None = None
        self.stored: dict[str, list[tuple[np.ndarray, AnnotatedImage]]] = {}
        self.hashes: dict[str, np.ndarray] = {}
        self.rows: SplitRows[tuple[np.ndarray, AnnotatedImage, int]] | None = None
        if str(data) == BUILT_IN or str(data) in DIGITS:
            if images is not None:
                raise ValueError(
                    "images is the folder of annotated images, which scenes do not have."
                )
            self.scenes = SceneSource(str(data), side=size)
            self.sizes = SIZES if examples is None else SIZES | {"train": examples}
            labels, largest = list(self.scenes.labels), self.scenes.objects[1]
        else:
            check_generated_only(str(data), examples=examples)
            labels = self._read_images(data, images, size, channels or 3, drop=missing == "drop")
            self.sizes = {split: len(self.stored[split]) for split in SPLITS}
            largest = max(len(each.boxes) for part in self.stored.values() for _, each in part)
        if largest > queries:
            raise ValueError(
                f"An image has {largest} objects, more than queries={queries}: use a larger number."
            )
        self.labels = tuple(labels)
        default = 1 if self.scenes is not None else 3
        self.processor = DetectionProcessor(size, channels or default, self.labels)
        self.metrics = tuple(
            AveragePrecision(
                self.labels, queries=queries, objects=max(largest, 1), size=size, half_overlap=half
            )
            for half in (False, True)
        )

    def _read_images(
        self, data: str | Path, images: str | Path | None, size: int, channels: int, *, drop: bool
    ) -> list[str]:
        """Read the images of annotations; return the names of the categories."""
        reader = DetectionProcessor(size, channels, [])

        def parse(where: str, values: list[Any]) -> tuple[np.ndarray, AnnotatedImage, int]:
            (image,) = values
            return reader.read(image.path), image, hash_bytes(image.path.read_bytes())

        splits = read_splits(data, images)
        rows = {split: Rows(partial(_iter_images, found)) for split, found in splits.items()}
        self.rows = SplitRows(rows, ("image",), parse, drop=drop, seed=self.seed)
        for split in SPLITS:
            found = [item for _, item in self.rows.walk(split)]
            check_not_empty(split, len(found))
            self.stored[split] = [(pixels, image) for pixels, image, _ in found]
            self.hashes[split] = np.array([digest for *_, digest in found], dtype=np.uint64)
        known = sorted({name for _, image in self.stored["train"] for name in image.categories})
        if not known:
            raise ValueError(f"The training images of {data} have no objects.")
        for split in ("valid", "test"):
            for _, image in self.stored[split]:
                if unknown := sorted(set(image.categories) - set(known)):
                    raise ValueError(
                        f"{image.path} of the {split} split has the category {unknown[0]!r}, which "
                        f"no training image has: those are {', '.join(known[:20])}."
                    )
        return known

    @property
    def needs(self) -> ModelNeeds:
        """See `Task`: an encoder of patches, and a decoder of queries as its head."""
        size, rows = self.processor.size, self.processor.size // self.patch
        source = PatchInput(
            height=size,
            width=size,
            patch_size=self.patch,
            channels=self.processor.channels,
            class_token=False,
            stem="conv" if self.stem == "conv" else "linear",
        )
        head = DetectionHeadConfig(
            num_classes=len(self.labels),
            rows=rows,
            columns=rows,
            queries=self.queries,
            layers=self.decoder_layers,
        )
        return ModelNeeds(kind="encoder", input=source, head=head, length=source.length)

    def size(self, split: str) -> int:
        """See `Task`."""
        return self.sizes[split]

    def annotated_image(self, split: str, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Pixels (channels, size, size) of uint8, classes (k), and corners of boxes (k, 4) as
        shares of the image."""
        check_index(split, index, self.size(split))
        if self.scenes is None:
            pixels, image = self.stored[split][index]
            classes = np.array([self.labels.index(name) for name in image.categories], np.int64)
            return pixels, classes, image.boxes
        scene = self.scenes.draw(example_rng(self.seed, split, index), split)
        pixels = np.repeat(scene.image[None], self.processor.channels, 0)
        return pixels, scene.classes, scene.boxes / self.scenes.side

    def example(self, split: str, index: int) -> Example:
        """See `Task`."""
        pixels, classes, corners = self.annotated_image(split, index)
        first, last = torch.as_tensor(corners).float().split(2, -1)
        boxes = torch.cat(((first + last) / 2, last - first), -1)
        return Example(
            {"x": scale_pixels(pixels)}, {LABELS: torch.as_tensor(classes), BOXES: boxes}
        )

    def collate(self, examples: Sequence[Example]) -> Batch:
        """See `Task`: labels are padded with IGNORE_INDEX, boxes with 0."""
        longest = max(len(each.targets[LABELS]) for each in examples)
        padded = [
            Example(
                each.inputs,
                each.targets
                | {
                    BOXES: F.pad(each.targets[BOXES], (0, 0, 0, longest - len(each.targets[BOXES])))
                },
            )
            for each in examples
        ]
        return collate(padded)

    def count_targets(self, batch: Batch) -> int:
        """See `Task`: images, of which the loss is a mean."""
        return batch.size

    def loss(self, output: Any, batch: Batch, *, label_smoothing: float = 0.0) -> Tensor:
        """See `Task`: `set_prediction_loss`."""
        if label_smoothing:
            raise ValueError("label_smoothing does not apply to set prediction: leave it out.")
        labels, boxes = [], []
        for label, box in zip(batch.targets[LABELS], batch.targets[BOXES], strict=True):
            labels.append(label[label >= 0])
            boxes.append(box[label >= 0])
        return set_prediction_loss(output, labels, boxes)

    def notes(self) -> list[str]:
        """See `Task`."""
        if self.rows is None:
            return []
        notes = []
        boxes = sum(image.dropped for part in self.stored.values() for _, image in part)
        if boxes:
            notes.append(
                f"{boxes:,} boxes were left out: crowds, and boxes without area in the image."
            )
        if dropped := sum(self.rows.dropped.values()):
            reasons = [reason for each in self.rows.reasons.values() for reason in each][:5]
            shown = "; ".join(reason.rstrip(".") for reason in reasons)
            notes.append(f"{dropped:,} images that cannot be read were left out: {shown}.")
        return [*notes, *copy_notes(self.hashes, "images")]

    def baselines(self) -> dict[str, Baseline]:
        """See `Task`: the mean image of each class, compared with every place."""
        return {TEMPLATES: partial(_template_score, self)}

    def render(self, example: Example, prediction: Prediction | None = None) -> RenderedImage:
        """The image with the true boxes in green and the predicted ones in red."""
        pixels = ((example.inputs["x"] + 1) * HALF).round().to(torch.uint8).numpy()
        image = np.repeat(pixels, 4 - len(pixels), 0)[:3].transpose(1, 2, 0).copy()
        size = self.processor.size

        def draw(corners: Sequence[float], colour: tuple[int, ...]) -> None:
            left, top, right, bottom = (round(size * each) for each in corners)
            draw_box(image, np.array([top, bottom - 1, left, right - 1]), colour)

        for box in to_corners(example.targets[BOXES]).tolist():
            draw(box, TRUE_COLOUR)
        names = [self.labels[label] for label in example.targets[LABELS].tolist()]
        caption = f"objects: {', '.join(names) or 'none'}"
        if prediction is not None:
            for found in prediction["objects"]:
                draw(found["box"], FOUND_COLOUR)
            shown = [f"{found['label']} {found['score']:.2f}" for found in prediction["objects"]]
            caption += f"\npredicted: {', '.join(shown) or 'none'}"
        return RenderedImage(image, caption)

    @classmethod
    def load_processor(cls, content: Mapping[str, Any]) -> DetectionProcessor:
        """See `Task`."""
        processor = DetectionProcessor.from_dict(content)
        assert isinstance(processor, DetectionProcessor)
        return processor


def _iter_images(images: Sequence[AnnotatedImage]) -> RowIterator:
    for image in images:
        yield str(image.path), {"image": image}


# ------------------------------------------------------------------------------- template matching
def _template_score(task: Detection, test: Sequence[int]) -> Tensor:
    """Statistics of `AveragePrecision` of normalised cross-correlation with the mean image of each
    class in three sizes; of templates that overlap the best is kept."""
    metric = task.metrics[0]
    assert isinstance(metric, AveragePrecision)
    size = task.processor.size
    templates = list(_mean_templates(task))
    parts = []
    for index in test:
        batch = task.batch("test", [index])
        x = batch.inputs["x"]
        assert x is not None
        gray = (x.mean(1, keepdim=True) + 1) / 2
        rows = []
        for label, template in templates:
            score = correlate(gray, template)[0, 0]
            score = torch.where(score == F.max_pool2d(score[None], 5, 1, 2)[0], score, -1.0)
            best, place = score.flatten().clamp(min=0).topk(min(3, score.numel()))
            top, left = place // score.shape[1], place % score.shape[1]
            height, width = template.shape
            corners = torch.stack((left, top, left + width, top + height), -1) / size
            rows.append(torch.cat((best[:, None], torch.full((len(best), 1), label), corners), 1))
        found = keep_best(torch.cat(rows).double(), task.queries)
        parts.append(metric.pack(found[None], batch))
    return metric.merge(parts)


def _mean_templates(task: Detection) -> Iterator[tuple[int, Tensor]]:
    """The mean of the objects of each class, in three sizes: (label, (height, width))."""
    side = task.processor.size
    sums: dict[int, list[Tensor]] = {}
    for index in task.sample("train", TEMPLATE_IMAGES).tolist():
        pixels, classes, corners = task.annotated_image("train", index)
        gray = torch.as_tensor(pixels.mean(0) / 255).float()
        for label, box in zip(classes.tolist(), corners.tolist(), strict=True):
            left, top, right, bottom = (round(side * each) for each in box)
            crop = gray[top : max(bottom, top + 1), left : max(right, left + 1)]
            sums.setdefault(label, []).append(F.interpolate(crop[None, None], (32, 32))[0, 0])
    for label, crops in sorted(sums.items()):
        mean = torch.stack(crops).mean(0)
        for scale in TEMPLATE_SCALES:
            shape = (max(3, round(scale * side)),) * 2
            yield label, F.interpolate(mean[None, None], shape, mode="bilinear")[0, 0]


def correlate(image: Tensor, template: Tensor) -> Tensor:
    """Normalised cross-correlation of an image (1, 1, h, w) with a template (height, width) at
    every place where it fits, from -1 to 1."""
    centred = template - template.mean()
    ones = torch.ones_like(template)[None, None] / template.numel()
    mean = F.conv2d(image, ones)
    variance = (F.conv2d(image.square(), ones) - mean.square()).clamp(min=1e-4)
    product = F.conv2d(image, centred[None, None]) / template.numel()
    spread = centred.square().mean().sqrt().clamp(min=1e-4)
    return product / (variance.sqrt() * spread)


def keep_best(found: Tensor, count: int) -> Tensor:
    """The best of detections (k, 6) that overlap little, (count, 6), padded with -1."""
    kept: list[Tensor] = []
    for row in found[found[:, 0].argsort(descending=True)]:
        if len(kept) == count:
            break
        left, top, right, bottom = row[2:].tolist()
        for other in kept:
            width = min(right, float(other[4])) - max(left, float(other[2]))
            height = min(bottom, float(other[5])) - max(top, float(other[3]))
            if max(width, 0) * max(height, 0) > MIN_OVERLAP * (right - left) * (bottom - top):
                break
        else:
            kept.append(row)
    padded = torch.full((count, 6), PADDING, dtype=torch.float64)
    if kept:
        padded[: len(kept)] = torch.stack(kept)
    return padded
