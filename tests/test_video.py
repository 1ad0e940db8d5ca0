"""Videos: what moves and how, tubelets against a loop, both targets."""

import numpy as np
import pytest
import torch

from regard import Band, Chunks
from regard.models import build
from regard.models.config import ModelConfig, VideoInput
from regard.models.model import outer_mixers
from regard.tasks import create_task
from regard.tasks.base import LABELS
from regard.tasks.video import MOTIONS
from regard.testing import check_task
from regard.train import TrainSettings
from regard.train.run import RunSpec, model_config, run_training


def test_tubelets_are_linear_maps_of_their_pixels_in_order():
    source = VideoInput(frames=4, height=6, width=9, patch_size=3, tubelet=2, channels=2)
    assert source.grid == (2, 6) and source.length == 12
    config = ModelConfig(kind="encoder", input=source, dim=8, heads=2, layers=1, position="none")
    embed = build(config).backbone.embed
    x = torch.randn(2, 4, 2, 6, 9)
    y, _ = embed(x)
    weight, bias = embed.project.weight.flatten(1), embed.project.bias
    n = 0
    for t in range(2):
        for row in range(2):
            for column in range(3):
                part = x[:, 2 * t : 2 * t + 2, :, 3 * row :, 3 * column :][..., :3, :3]
                pixels = part.transpose(1, 2).flatten(1)
                torch.testing.assert_close(y[:, n], pixels @ weight.T + bias)
                n += 1
    with pytest.raises(ValueError, match=r"of shape \(b, 4, 2, 6, 9\), not \(2, 4, 2, 6, 8\)"):
        embed(x[..., :8])
    with pytest.raises(ValueError, match="tubelet 3 does not divide the 4 frames"):
        VideoInput(frames=4, height=6, width=6, patch_size=3, tubelet=3)


def test_axial_passes_are_divided_attention_in_time_and_space():
    """With `axial_passes`, a token of a frame reads its own frame, and its place at all times."""
    task = create_task("video", frames=4, side=16, patch=8)
    mixer = {"name": "axial_passes", "arguments": {"width": task.source.grid[1]}}
    spec = RunSpec(task={"name": "video"}, mixer=mixer, layers=1)
    model = build(model_config(spec, task))
    (mixer,) = outer_mixers(model)
    assert mixer.rows.inner.pattern == Chunks(4)  # the four patches of a frame
    assert mixer.columns.inner.pattern == Band(step=4)


def test_objects_move_as_their_labels_say():
    task = create_task("video", noise=0.0, still=0)
    axis = np.arange(task.side)
    for index in range(60):
        video = task.video("train", index)
        first, last = video.frames[0].astype(float), video.frames[-1].astype(float)
        name = list(MOTIONS)[video.motion]
        y, x = ((f.sum(1) @ axis / f.sum(), f.sum(0) @ axis / f.sum()) for f in (first, last))
        right, down = x[1] - y[1], x[0] - y[0]
        expected = {"right": right, "left": -right, "down": down, "up": -down}
        assert expected.get(name, 9) > 3, name
        assert name in expected or max(abs(right), abs(down)) < 6, name
        ratio = last.sum() / first.sum()
        assert (ratio > 1.6) == (name == "grow") and (ratio < 0.6) == (name == "shrink"), name
        assert np.array_equal(video.frames, task.video("train", index).frames)


def test_both_targets_hold_their_promises():
    for predict in ("motion", "frame"):
        task = create_task("video", predict=predict, frames=4, side=16)
        assert check_task(task)
    assert task.baselines().keys() == {"last frame"}
    with pytest.raises(ValueError, match="predict must be one of"):
        create_task("video", predict="sound")


def test_the_next_frame_is_learned(tmp_path):
    arguments = {"predict": "frame", "frames": 4, "side": 16, "noise": 0.02, "still": 0}
    task = create_task("video", **arguments)
    spec = RunSpec(
        task={"name": "video", "arguments": arguments},
        dim=32,
        layers=1,
        settings=TrainSettings(steps=60, batch_size=32, lr=0.005, eval_every=60, eval_examples=128),
    )
    result = run_training(spec, tmp_path / "run")
    model = build(model_config(spec, task))
    batch = task.batch("test", range(64))
    with torch.no_grad():
        untrained = task.metric.compute(task.metric.update(model(**batch.inputs), batch, []))
    assert result["test"] > untrained + 1
    example = task.example("test", 0)
    assert example.targets[LABELS].shape == (1, 16, 16)
    (found, *_) = task.predict(model, batch)
    assert task.render(example, found).pixels.shape[1] == 6 * 16 + 5 * 2


def test_psnr_is_that_of_the_definition():
    task = create_task("video", predict="frame", side=16)
    batch = task.batch("test", [0])
    target = batch.targets[LABELS]
    found = task.metric.compute(task.metric.update(target + 0.1, batch, []))
    error = ((target + 0.1).clamp(-1, 1) - target).square().mean()
    assert found == pytest.approx(float(10 * torch.log10(4 / error)), abs=0.01)
