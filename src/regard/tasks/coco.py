"""Annotations of objects in COCO's JSON format, and average precision by pycocotools."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from regard.tasks.files import SPLIT_NAMES, existing_path

JSON_SUFFIX = ".json"
IMAGES = "images"


class AnnotatedImage(NamedTuple):
    """An image file and its objects.

    Attributes:
        path: The file.
        boxes: (k, 4) of float: left, top, right, bottom, as shares of width and height.
        categories: Names of the categories (k).
        dropped: Number of boxes that were left out: crowds, and boxes without area in the image.
    """

    path: Path
    boxes: np.ndarray
    categories: list[str]
    dropped: int


def read_splits(data: str | Path, images: str | Path | None) -> dict[str, list[AnnotatedImage]]:
    """The annotated images of each split, or under "all".

    Args:
        data: A JSON file, or a folder with train.json and optionally valid.json and test.json.
        images: Folder of the image files. None: the folder `images` beside the JSON file, or else
            the folder of the file.
    """
    path = existing_path(data)
    if not path.is_dir():
        return {"all": read_annotations(path, images)}
    splits = {}
    for each in sorted(path.glob(f"*{JSON_SUFFIX}")):
        for word in each.stem.lower().replace("-", "_").split("_"):
            if (split := SPLIT_NAMES.get(word)) is not None:
                splits[split] = read_annotations(each, images)
    if "train" not in splits:
        found = ", ".join(each.name for each in sorted(path.glob("*.json"))) or "no JSON file"
        raise ValueError(
            f"{path} needs train.json, and optionally valid.json and test.json; it has {found}."
        )
    return splits


def read_annotations(path: Path, images: str | Path | None) -> list[AnnotatedImage]:
    """The annotated images of a JSON file in COCO's format."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    for name in ("images", "annotations", "categories"):
        if not isinstance(content, dict) or not isinstance(content.get(name), list):
            raise ValueError(f"{path} is not in COCO's format: it needs a list {name!r}.")
    folder = _image_folder(path, images)
    names = {_get(path, row, "id"): str(_get(path, row, "name")) for row in content["categories"]}
    by_image: dict[Any, list[dict[str, Any]]] = {}
    for number, row in enumerate(content["annotations"]):
        image, category = _get(path, row, "image_id"), _get(path, row, "category_id")
        if category not in names:
            raise ValueError(f"{path}: annotation {number} has the unknown category {category!r}.")
        by_image.setdefault(image, []).append(row)
    found = []
    for row in content["images"]:
        size = tuple(_get(path, row, side) for side in ("width", "height"))
        if not all(isinstance(each, int | float) and each > 0 for each in size):
            raise ValueError(f"{path}: image {row['id']!r} has the size {size}.")
        boxes, categories, dropped = [], [], 0
        for each in by_image.pop(_get(path, row, "id"), []):
            box = clip_box(path, each, size)
            if box is None or each.get("iscrowd"):
                dropped += 1
                continue
            boxes.append(box)
            categories.append(names[each["category_id"]])
        corners = np.array(boxes).reshape(-1, 4)
        file = folder / str(_get(path, row, "file_name"))
        found.append(AnnotatedImage(file, corners, categories, dropped))
    if by_image:
        first = next(iter(by_image))
        raise ValueError(
            f"{path}: {len(by_image)} annotated images are not listed, first {first!r}."
        )
    return found


def clip_box(path: Path, row: dict[str, Any], size: Sequence[float]) -> list[float] | None:
    """The corners of a box as shares of the image, cut off at its edges; None if nothing is left
    of it."""
    box = _get(path, row, "bbox")
    numbers = isinstance(box, list) and all(isinstance(each, int | float) for each in box)
    if not numbers or len(box) != 4 or not all(math.isfinite(each) for each in box):
        raise ValueError(f"{path}: a bbox must be [x, y, width, height], not {box!r:.60}.")
    x, y, width, height = box
    corners = [
        min(max(value / side, 0.0), 1.0)
        for value, side in zip((x, y, x + width, y + height), (*size, *size), strict=True)
    ]
    if width <= 0 or height <= 0 or corners[2] <= corners[0] or corners[3] <= corners[1]:
        return None
    return corners


def _get(path: Path, row: Any, name: str) -> Any:
    if not isinstance(row, dict) or name not in row:
        raise ValueError(f"{path} is not in COCO's format: {row!r:.80} has no {name!r}.")
    return row[name]


def _image_folder(path: Path, images: str | Path | None) -> Path:
    if images is not None:
        return existing_path(images)
    beside = path.parent / IMAGES
    return beside if beside.is_dir() else path.parent


# ------------------------------------------------------------------------------- average precision
class Detections(NamedTuple):
    """Found objects of an image: scores (k), classes (k) and corners of boxes (k, 4) in pixels."""

    scores: np.ndarray
    classes: np.ndarray
    boxes: np.ndarray


def average_precision(
    truth: Sequence[tuple[np.ndarray, np.ndarray]], found: Sequence[Detections], classes: int
) -> np.ndarray:
    """Average precision by pycocotools, (10, classes): at an IoU of 0.5, 0.55, ..., 0.95, of each
    class; NaN for a class without an object.

    Args:
        truth: Classes (k) and corners of boxes (k, 4) in pixels of each image.
        found: The detections of each image.
        classes: Number of classes.
    """
    try:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    except ImportError:
        raise ImportError(
            "Average precision needs the package pycocotools: pip install 'regard[image]'"
        ) from None
    annotations: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for image, (labels, boxes) in enumerate(truth):
        for label, box in zip(labels.tolist(), boxes.tolist(), strict=True):
            annotations.append(_coco_box(image, label, box) | {"id": len(annotations) + 1})
    for image, each in enumerate(found):
        rows = zip(each.scores.tolist(), each.classes.tolist(), each.boxes.tolist(), strict=True)
        results += [_coco_box(image, label, box) | {"score": score} for score, label, box in rows]
    if not annotations:
        return np.full((10, classes), np.nan)
    if not results:
        present = np.isin(np.arange(classes), [each["category_id"] for each in annotations])
        return np.where(present, 0.0, np.nan) * np.ones((10, 1))
    with contextlib.redirect_stdout(io.StringIO()):
        truth_api = COCO()
        truth_api.dataset = {
            "images": [{"id": image} for image in range(len(truth))],
            "annotations": annotations,
            "categories": [{"id": label} for label in range(classes)],
            "info": {},
        }
        truth_api.createIndex()
        evaluation = COCOeval(truth_api, truth_api.loadRes(results), "bbox")
        evaluation.params.areaRng, evaluation.params.areaRngLbl = [[0, 1e10]], ["all"]
        evaluation.evaluate()
        evaluation.accumulate()
    precision = evaluation.eval["precision"][:, :, :, 0, -1]  # (10 IoUs, 101 recalls, classes)
    means: np.ndarray = np.where(precision > -1, precision, np.nan).mean(1)
    return means


def _coco_box(image: int, label: int, box: Sequence[float]) -> dict[str, Any]:
    left, top, right, bottom = box
    width, height = right - left, bottom - top
    return {
        "image_id": image,
        "category_id": label,
        "bbox": [left, top, width, height],
        "area": width * height,
        "iscrowd": 0,
    }
