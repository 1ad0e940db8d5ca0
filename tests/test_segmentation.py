"""Scenes and segmentation: what is drawn, masks of all kinds, mIoU against a loop, training."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from real import real
from regard.models.config import SegmentationHeadConfig
from regard.models.heads import SegmentationHead
from regard.models.losses import IGNORE_INDEX
from regard.tasks import create_task
from regard.tasks.base import LABELS, SPLITS, Batch
from regard.tasks.scenes import SceneSource, boxes_of_masks
from regard.tasks.segmentation import VOID, MeanIoU
from regard.testing import check_task
from regard.train import TrainSettings
from regard.train.inference import load_run
from regard.train.run import RunSpec, run_training

image_module = pytest.importorskip("PIL.Image")


# ------------------------------------------------------------------------------------------- scenes
def test_objects_do_not_hide_each_other_and_boxes_are_tight():
    source = SceneSource(side=48, objects=(2, 5), noise=0.0)
    counts = []
    for seed in range(30):
        scene = source.draw(np.random.default_rng(seed), "train")
        again = source.draw(np.random.default_rng(seed), "train")
        assert np.array_equal(scene.image, again.image)
        assert scene.masks.sum(0).max() <= 1  # a pixel belongs to one object
        for mask, (left, top, right, bottom) in zip(scene.masks, scene.boxes, strict=True):
            rows, columns = np.nonzero(mask)
            assert (left, right) == (columns.min(), columns.max() + 1)
            assert (top, bottom) == (rows.min(), rows.max() + 1)
            assert (scene.image[mask] > 60).all()
        counts.append(len(scene.classes))
    assert min(counts) >= 1 and max(counts) <= 5 and np.mean(counts) > 2.5
    assert boxes_of_masks(np.zeros((1, 4, 4), bool)).tolist() == [[0, 0, 0, 0]]


def test_digits_of_the_test_scenes_are_not_in_training_scenes(monkeypatch):
    monkeypatch.setenv("REGARD_DATA", str(real("mnist")))
    task = create_task("segmentation", data="mnist", size=32)
    assert task.labels == ("background", *map(str, range(10)))
    train, test = (task.masked_image(split, 0) for split in ("train", "test"))
    assert not np.array_equal(train.pixels, test.pixels)


# ----------------------------------------------------------------------------- the head, the metric
def test_the_head_puts_each_patch_in_its_place():
    head = SegmentationHead(3, 2, (2, 3), 4)
    x = torch.randn(2, 7, 3)  # a class token, and six patches
    logits = head(x)
    assert logits.shape == (2, 2, 8, 12)
    for row in range(2):
        for column in range(3):
            patch = head.out(x[:, 1 + 3 * row + column]).view(2, 2, 4, 4)
            torch.testing.assert_close(
                logits[:, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4], patch
            )
    labels = torch.randint(0, 2, (2, 8, 12))
    labels[0, 0] = IGNORE_INDEX
    config = SegmentationHeadConfig(num_classes=2, rows=2, columns=3, patch_size=4)
    torch.testing.assert_close(config.loss(logits, labels), F.cross_entropy(logits, labels))


def test_miou_is_that_of_a_loop_over_pixels():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, 5, 6, generator=generator)
    labels = torch.randint(0, 3, (3, 5, 6), generator=generator)  # class 3 is only predicted
    labels[0, :2] = IGNORE_INDEX
    metric = MeanIoU("abcd")
    batch = Batch({"x": None}, {LABELS: labels})
    found = metric.compute(metric.merge([metric.update(logits, batch, [])]))
    predicted, ious = logits.argmax(1), []
    for c in range(4):
        both = union = 0
        for p, t in zip(predicted.ravel().tolist(), labels.ravel().tolist(), strict=True):
            if t != IGNORE_INDEX:
                both += p == t == c
                union += c in (p, t)
        ious.append(both / union)
    assert found == pytest.approx(np.mean(ious))
    assert set(metric.breakdown(metric.update(logits, batch, []))) == set("abcd")


# --------------------------------------------------------------------------------------- own images
def write_masked_images(folder, count=24, mode="L"):
    """Light squares (class 1) and dark ones (class 2) on gray, of different sizes."""
    rng = np.random.default_rng(0)
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    for i in range(count):
        side = 20 + i % 3
        image = np.full((side, side, 3), 120, np.uint8)
        mask = np.zeros((side, side), np.uint8)
        for label, level in ((1, 230), (2, 20)):
            top, left = rng.integers(0, side - 6, 2)
            image[top : top + 6, left : left + 6] = level
            mask[top : top + 6, left : left + 6] = label
        mask[0] = VOID
        image_module.fromarray(image).save(folder / "images" / f"{i:02d}.png")
        image_module.fromarray(mask).convert(mode).save(folder / "masks" / f"{i:02d}.png")
    return folder


def test_own_masks_train_a_model_that_beats_the_constant(tmp_path):
    folder = write_masked_images(tmp_path / "a")
    task = create_task(
        "segmentation", data=folder, size=16, patch=4, labels=["gray", "light", "dark"]
    )
    assert sum(map(task.size, SPLITS)) == 24 and task.notes() == []
    assert check_task(task)
    example = task.example("train", 0)
    assert set(example.targets[LABELS].unique().tolist()) == {IGNORE_INDEX, 0, 1, 2}
    scores = {n: task.metric.compute(b([0, 1])) for n, b in task.baselines().items()}
    assert scores["linear on 7 × 7 pixels"] > 0.7 > 0.4 > scores["constant"]
    spec = RunSpec(
        task={"name": "segmentation", "arguments": {"data": str(folder), "size": 16}},
        dim=32,
        settings=TrainSettings(steps=80, batch_size=16, lr=0.005, eval_every=80),
    )
    assert run_training(spec, tmp_path / "run")["test"] > 0.6
    run = load_run(tmp_path / "run")
    (prediction,) = run.predict([folder / "images" / "00.png"])
    assert len(prediction["classes"]) == 16 and sum(prediction["shares"].values()) == 1.0
    assert run.processor.render(prediction).pixels.shape == (16, 16, 3)


def test_masks_that_cannot_be_used_are_counted_or_refused(tmp_path):
    folder = write_masked_images(tmp_path / "a")
    masks = folder / "masks"
    (masks / "01.png").unlink()
    image_module.new("RGB", (20, 20)).save(masks / "02.png")
    image_module.fromarray(np.full((20, 20), 900, np.uint16)).save(masks / "03.png")
    (masks / "04.png").write_bytes(b"no image")
    task = create_task("segmentation", data=folder, size=16)
    (note,) = task.notes()
    assert note.startswith("4 images that cannot be used were left out")
    for words in ("there is no mask", "has the mode RGB", "has the value 900", "no complete image"):
        assert words in note
    with pytest.raises(ValueError, match="omit missing='error'"):
        create_task("segmentation", data=folder, size=16, missing="error")
    with pytest.raises(ValueError, match="has the class 2, but there are 2 labels"):
        create_task("segmentation", data=folder, size=16, labels=["a", "b"])
    with pytest.raises(ValueError, match="needs the sub-folders images and masks; it has: a"):
        create_task("segmentation", data=tmp_path)
    with pytest.raises(ValueError, match="patch=5 does not divide size=16"):
        create_task("segmentation", data=folder, size=16, patch=5)
    for path in masks.iterdir():
        image_module.new("L", (20, 20)).save(path)
    with pytest.raises(ValueError, match=r"training masks have one class \(0\)"):
        create_task("segmentation", data=folder, size=16)


def test_a_class_that_only_test_masks_have_is_named(tmp_path):
    for split in ("train", "val", "test"):
        write_masked_images(tmp_path / "a" / split, count=4)
    mask = tmp_path / "a" / "test" / "masks" / "00.png"
    image_module.fromarray(np.full((20, 20), 7, np.uint8)).save(mask)
    with pytest.raises(ValueError, match="test split has the class 7, which no training mask has"):
        create_task("segmentation", data=tmp_path / "a", size=16)
