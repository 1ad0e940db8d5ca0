"""Detection: matching and losses against loops, COCO files of all kinds, average precision."""

import itertools
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fake_device import fake_device
from regard.models import build
from regard.models.config import DetectionHeadConfig, ModelConfig, PatchInput
from regard.models.detection_head import (
    DetectionOutput,
    generalized_iou,
    match,
    set_prediction_loss,
)
from regard.tasks import create_task
from regard.tasks.base import LABELS
from regard.tasks.coco import Detections, average_precision
from regard.tasks.detection import BOXES
from regard.testing import check_task
from regard.train import TrainSettings
from regard.train.inference import load_run
from regard.train.run import RunSpec, run_training

image_module = pytest.importorskip("PIL.Image")
pytest.importorskip("pycocotools")


# -------------------------------------------------------------------------------- matching and loss
def giou_of_pixels(a, b, grid=400):
    """Rezatofighi et al. 2019, algorithm 1, by counting points."""
    axis = (np.arange(grid) + 0.5) / grid
    y, x = np.meshgrid(axis, axis, indexing="ij")

    def inside(cx, cy, w, h):
        return (abs(x - cx) < w / 2) & (abs(y - cy) < h / 2)

    one, other = inside(*a), inside(*b)
    rows = np.flatnonzero((one | other).any(1))
    columns = np.flatnonzero((one | other).any(0))
    around = (rows[-1] - rows[0] + 1) * (columns[-1] - columns[0] + 1)
    union = (one | other).sum()
    return (one & other).sum() / union - (around - union) / around


def random_boxes(count, generator):
    return torch.rand(count, 4, generator=generator) * 0.4 + torch.tensor([0.3, 0.3, 0.05, 0.05])


def test_generalized_iou_is_that_of_the_areas():
    generator = torch.Generator().manual_seed(0)
    first, second = random_boxes(4, generator), random_boxes(3, generator)
    found = generalized_iou(first, second)
    for i, j in itertools.product(range(4), range(3)):
        expected = giou_of_pixels(first[i].tolist(), second[j].tolist())
        assert float(found[i, j]) == pytest.approx(expected, abs=0.03)
    assert float(generalized_iou(first[:1], first[:1])) == pytest.approx(1)


def test_the_loss_is_that_of_the_best_of_all_assignments():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 2, 4, 3, generator=generator, dtype=torch.float64)
    predicted = torch.stack([random_boxes(4, generator).double() for _ in range(4)])
    predicted = predicted.view(2, 2, 4, 4).requires_grad_()
    labels = [torch.tensor([1, 0]), torch.tensor([], dtype=torch.long)]
    boxes = [random_boxes(2, generator).double(), torch.zeros(0, 4).double()]
    total = 0
    for layer in range(2):
        p, box = logits[layer, 0].softmax(-1), predicted[layer, 0]
        pairs = {}
        for q, k in itertools.product(range(4), range(2)):
            pairs[q, k] = (
                5 * (box[q] - boxes[0][k]).abs().sum()
                - 2 * generalized_iou(box[q : q + 1], boxes[0][k : k + 1])[0, 0]
            )
        chosen = min(
            itertools.permutations(range(4), 2),
            key=lambda qs: float(
                sum(pairs[q, k] - p[q, labels[0][k]] for k, q in enumerate(qs)).detach()
            ),
        )
        queries, objects = match(logits[layer, 0], box, labels[0], boxes[0])
        assert dict(zip(objects.tolist(), queries.tolist(), strict=True)) == dict(enumerate(chosen))
        target = torch.full((2, 4), 2)
        for k, q in enumerate(chosen):
            target[0, q] = labels[0][k]
        weights = torch.tensor([1.0, 1.0, 0.1]).double()
        nll = F.cross_entropy(logits[layer].flatten(0, 1), target.flatten(), reduction="none")
        share = weights[target.flatten()]
        total = total + (nll * share).sum() / share.sum()
        total = total + (sum(pairs[q, k] for k, q in enumerate(chosen)) + 2 * 2) / 2
    found = set_prediction_loss(DetectionOutput(logits, predicted), labels, boxes)
    torch.testing.assert_close(found.double(), total / 2, rtol=1e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad(found, predicted)
    (expected,) = torch.autograd.grad(total / 2, predicted)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)


def test_queries_start_on_a_grid_and_a_class_token_is_left_out():
    for class_token in (False, True):
        source = PatchInput(
            height=8, width=12, patch_size=4, channels=1, class_token=class_token, stem="linear"
        )
        head = DetectionHeadConfig(num_classes=3, rows=2, columns=3, queries=6)
        config = ModelConfig(kind="encoder", input=source, head=head, dim=16, heads=2, layers=1)
        with fake_device() as gpu:
            model = build(config).to(gpu.device)
            output = model(torch.zeros(2, 1, 8, 12, device=gpu.device))
            assert output.boxes.shape == (2, 2, 6, 4)
        centres = build(config)(torch.zeros(1, 1, 8, 12)).boxes[-1, 0, :, :2]
        assert centres[:, 0].tolist() == pytest.approx([1 / 6, 1 / 2, 5 / 6] * 2, abs=0.01)
        assert centres[:, 1].tolist() == pytest.approx([0.25] * 3 + [0.75] * 3, abs=0.01)


# ------------------------------------------------------------------------------- average precision
def test_average_precision_of_a_case_by_hand():
    """Two objects of a class: the best detection is right, the second wrong, the third right."""
    truth = [(np.array([0, 0]), np.array([[0.0, 0, 10, 10], [20, 20, 30, 30]]))]
    boxes = np.array([[0.0, 0, 10, 10], [50, 50, 60, 60], [20, 20, 30, 30]])
    found = [Detections(np.array([0.9, 0.8, 0.7]), np.zeros(3, int), boxes)]
    ap = average_precision(truth, found, 2)
    expected = (51 * 1.0 + 50 * 2 / 3) / 101  # precision 1 up to a recall of .5, then 2/3
    assert ap[:, 0] == pytest.approx(expected) and np.isnan(ap[:, 1]).all()
    none = [Detections(np.zeros(0), np.zeros(0, int), np.zeros((0, 4)))]
    assert average_precision(truth, none, 1).tolist() == [[0.0]] * 10
    assert np.isnan(average_precision([(np.zeros(0, int), np.zeros((0, 4)))], none, 1)).all()


# --------------------------------------------------------------------------------------- own images
def write_coco(folder, count=30):
    """Light squares ("box") and dark ones ("hole") on gray images of different sizes."""
    rng = np.random.default_rng(0)
    (folder / "images").mkdir(parents=True)
    images, annotations = [], []
    for i in range(count):
        height, width = 30 + i % 5, 40 - i % 7
        pixels = np.full((height, width, 3), 120, np.uint8)
        for category, level in ((3, 240), (8, 10)):
            top, left = int(rng.integers(height - 12)), int(rng.integers(width - 12))
            pixels[top : top + 12, left : left + 12] = level
            row = {"image_id": i, "category_id": category, "bbox": [left, top, 12, 12]}
            annotations.append(row | {"id": len(annotations), "iscrowd": 0})
        image_module.fromarray(pixels).save(folder / "images" / f"{i:02d}.png")
        images.append({"id": i, "file_name": f"{i:02d}.png", "width": width, "height": height})
    categories = [{"id": 3, "name": "box"}, {"id": 8, "name": "hole"}]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "objects.json").write_text(json.dumps(content))
    return folder / "objects.json", content


def test_own_annotations_train_a_model_that_finds_objects(tmp_path):
    path, _ = write_coco(tmp_path / "a")
    task = create_task("detection", data=path, size=16, patch=4, queries=6)
    assert task.labels == ("box", "hole") and task.notes() == []
    assert check_task(task)
    batch = task.batch("train", [0, 1])
    assert batch.targets[LABELS].shape == (2, 2) and batch.targets[BOXES].shape == (2, 2, 4)
    arguments = {"data": str(path), "size": 16, "patch": 4, "queries": 6}
    spec = RunSpec(
        task={"name": "detection", "arguments": arguments},
        dim=32,
        settings=TrainSettings(steps=150, batch_size=16, lr=0.003, eval_every=150),
    )
    result = run_training(spec, tmp_path / "run")
    assert result["metric"] == "ap" and result["metrics"]["ap50"] > 0.1
    run = load_run(tmp_path / "run")
    (prediction,) = run.predict([tmp_path / "a" / "images" / "00.png"])
    assert all(set(found) == {"label", "score", "box"} for found in prediction["objects"])
    shown = task.render(task.example("test", 0), prediction)
    assert shown.pixels.shape == (16, 16, 3) and "predicted:" in shown.caption


def test_boxes_without_area_are_counted_and_others_are_cut_off(tmp_path):
    path, content = write_coco(tmp_path / "a")
    boxes = [each["bbox"] for each in content["annotations"]]
    boxes[0][:] = [-6, -6, 12, 12]  # a quarter is inside
    boxes[1][:] = [3, 3, 0, 5]
    boxes[2][:] = [500, 3, 9, 9]
    content["annotations"][3]["iscrowd"] = 1
    path.write_text(json.dumps(content))
    (tmp_path / "a" / "images" / "07.png").write_bytes(b"no image")
    (tmp_path / "a" / "images" / "08.png").unlink()
    task = create_task("detection", data=path, size=16, patch=4)
    boxes_note, images_note = task.notes()
    assert boxes_note.startswith("3 boxes were left out: crowds, and boxes without area")
    assert images_note.startswith("2 images that cannot be read were left out") and "07.png" in (
        images_note
    )
    corners = [
        image.boxes for part in task.stored.values() for _, image in part if "00.png" in str(image)
    ]
    assert corners[0].tolist() == [[0.0, 0.0, 6 / 40, 6 / 30]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("categories"), "not in COCO's format: it needs a list 'categories'"),
        (lambda c: c["annotations"][0].update(bbox=[1, 2, 3]), r"bbox must be \[x, y, width, heig"),
        (lambda c: c["annotations"][0].update(bbox=[1, 2, 3, "x"]), "bbox must be"),
        (lambda c: c["annotations"][0].update(category_id=5), "unknown category 5"),
        (lambda c: c["annotations"][0].update(image_id=99), "1 annotated images are not listed"),
        (lambda c: c["images"][0].update(width=0), r"has the size \(0, 30\)"),
        (lambda c: c["images"][0].pop("file_name"), "has no 'file_name'"),
        (lambda c: c["annotations"].clear(), "have no objects"),
    ],
)
def test_files_that_are_not_coco_are_refused(tmp_path, change, message):
    path, content = write_coco(tmp_path / "a", count=20)
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        create_task("detection", data=path, size=16, patch=4)


def test_wrong_arguments(tmp_path):
    path, _ = write_coco(tmp_path / "a", count=20)
    with pytest.raises(ValueError, match="2 objects, more than queries=1"):
        create_task("detection", data=path, size=16, patch=4, queries=1)
    with pytest.raises(ValueError, match=r"needs train\.json.*it has no JSON file"):
        create_task("detection", data=tmp_path)
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="is not JSON"):
        create_task("detection", data=path)


def test_templates_find_some_objects():
    task = create_task("detection", size=48)
    scores = task.baselines()["template matching"](range(30))
    assert 0.02 < task.metric.compute(scores) < 0.6
    assert set(task.metric.breakdown(scores)) <= set(task.labels)
