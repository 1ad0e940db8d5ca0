"""DRAW: the equations of the paper, one by one; the task, and what it paints."""

import json

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from fake_device import fake_device
from oracles.early import filters
from real import real
from regard.cli import app
from regard.models import build, load, save
from regard.models.config import DRAWConfig, ModelConfig, PatchInput
from regard.models.draw import nats_per_image
from regard.tasks import create_task
from regard.tasks.generated_images import GeneratedImages, contact_sheet, save_images
from regard.testing import check_task
from regard.train import TrainSettings
from regard.train.run import RunSpec, run_training

image_module = pytest.importorskip("PIL.Image")
SIDE, DIM = 6, 5


def config(**changes):
    draw = DRAWConfig(**{"glimpses": 3, "latent": 4, "read_size": 2, "write_size": 3} | changes)
    source = PatchInput(height=SIDE, width=SIDE, patch_size=1, channels=1, class_token=False)
    return ModelConfig(kind="draw", input=source, dim=DIM, heads=1, layers=1, draw=draw)


def lstm(p, name, x, h, c):
    """Hochreiter & Schmidhuber 1997, as in `nn.LSTMCell`: gates i, f, g, o."""
    gates = p[f"{name}.weight_ih"] @ x + p[f"{name}.bias_ih"]
    gates = gates + p[f"{name}.weight_hh"] @ h + p[f"{name}.bias_hh"]
    i, f, g, o = gates.split(len(h))
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def sub(p, prefix):
    return {name.removeprefix(f"{prefix}."): t for name, t in p.items() if name.startswith(prefix)}


def bound(p, image, noise, attention):
    """Gregor et al. 2015, equations 3 to 12 and 19 to 29, for one image (side, side)."""
    canvas = p["first_canvas"][0]
    state = encoder = (torch.zeros(DIM).double(),) * 2
    kl = 0
    for z_noise in noise:
        error = image - 1 / (1 + torch.exp(-canvas))
        if attention:
            rows, columns, gamma = filters(sub(p, "reader"), state[0], SIDE, SIDE, 2)
            glimpse = torch.cat([(gamma * rows @ x @ columns.T).ravel() for x in (image, error)])
        else:
            glimpse = torch.cat([image.ravel(), error.ravel()])
        encoder = lstm(p, "encoder", torch.cat([glimpse, state[0]]), *encoder)
        mean, log_sigma = (p["posterior.weight"] @ encoder[0] + p["posterior.bias"]).split(4)
        sigma = log_sigma.exp()
        kl = kl + 0.5 * (mean**2 + sigma**2 - torch.log(sigma**2)).sum() - len(mean) / 2
        state = lstm(p, "decoder", mean + sigma * z_noise, *state)
        if attention:
            patch = (p["writer.draw.weight"] @ state[0] + p["writer.draw.bias"]).view(3, 3)
            rows, columns, gamma = filters(sub(p, "writer"), state[0], SIDE, SIDE, 3)
            canvas = canvas + rows.T @ patch @ columns / gamma
        else:
            canvas = canvas + (p["write_all.weight"] @ state[0] + p["write_all.bias"]).view(6, 6)
    probability = 1 / (1 + torch.exp(-canvas))
    likelihood = image * probability.log() + (1 - image) * (1 - probability).log()
    return kl - likelihood.sum()


@pytest.mark.parametrize("attention", [True, False])
def test_the_bound_is_that_of_the_paper_with_gradients(attention):
    torch.manual_seed(0)
    sizes = {} if attention else {"read_size": None, "write_size": None}
    model = build(config(**sizes)).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    x = torch.rand(2, 1, SIDE, SIDE).round().double()
    noise = model._draw_noise(x)
    ours = nats_per_image(model(x), x)
    names = dict(model.named_parameters())
    theirs = torch.stack([bound(names, x[i, 0], noise[:, i].double(), attention) for i in (0, 1)])
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-4)
    parameters = list(names.values())
    gradients = torch.autograd.grad(ours.sum(), parameters)
    for one, other in zip(gradients, torch.autograd.grad(theirs.sum(), parameters), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_an_image_has_the_same_bound_in_every_batch_and_training_draws_anew(tmp_path):
    model = build(config()).eval()
    x = torch.rand(3, 1, SIDE, SIDE).round()
    whole = nats_per_image(model(x), x)
    torch.testing.assert_close(nats_per_image(model(x[1:]), x[1:]), whole[1:])
    save(model, tmp_path / "model")
    torch.testing.assert_close(nats_per_image(load(tmp_path / "model")(x), x), whole)
    model.train()
    assert not torch.equal(model(x).logits, model(x).logits)
    with pytest.raises(ValueError, match=r"of shape \(b, 1, 6, 6\), not \(3, 1, 6, 5\)"):
        model(x[..., :5])


def test_the_window_is_where_the_canvas_changes():
    model = build(config(write_size=2)).eval()
    with torch.no_grad():
        bias = model.writer.bank.place.bias
        model.writer.bank.place.weight.zero_()
        bias.copy_(torch.tensor([0.5, -0.5, -6.0, -1.6, 0.0]))  # right, top; narrow filters
    painting = model.paint(4, torch.Generator().manual_seed(0))
    top, bottom, left, right, sigma = painting.windows[0, 0].tolist()
    assert 0 <= top < bottom < 2.5 < left < right <= 5 and sigma < 0.5
    change = (painting.canvases[-1] - model.first_canvas).abs().sum((0, 1))
    rows, columns = change.sum(1), change.sum(0)
    assert rows[:3].sum() > 0.9 * rows.sum() and columns[3:].sum() > 0.9 * columns.sum()
    again = model.paint(4, torch.Generator().manual_seed(0))
    assert torch.equal(painting.canvases, again.canvases)


def test_on_a_fake_accelerator():
    with fake_device() as gpu:
        model = build(config()).to(gpu.device).train()
        x = torch.zeros(2, 1, SIDE, SIDE, device=gpu.device)
        nats_per_image(model(x), x).mean().backward()
        assert model(x).logits.device.type == gpu.device.type


# ---------------------------------------------------------------------------------------- the task
def test_the_task_holds_its_promises_and_refuses_what_has_no_meaning():
    task = create_task("draw", side=8, glimpses=2, latent=3, write=3)
    assert "baselines" in check_task(task)
    example = task.example("train", 3)
    assert set(example.inputs["x"].unique().tolist()) <= {0.0, 1.0}
    batch = task.batch("train", [3, 4])
    first, second = (task.augment(batch, torch.Generator().manual_seed(i)) for i in (0, 1))
    assert not torch.equal(first.inputs["x"], second.inputs["x"])
    with pytest.raises(ValueError, match="read=9 is more than the 8 pixels"):
        create_task("draw", side=8, read=9)
    for changes, message in (
        ({"mixer": "local"}, "has no mixer"),
        ({"layers": 3}, "has no layers"),
        ({"dropout": 0.1}, "has no dropout"),
    ):
        spec = RunSpec(task={"name": "draw"}, **changes)
        with pytest.raises(ValueError, match=rf"A recurrent model \(draw\) {message}: leave it"):
            run_training(spec, "unused", task=task)
    with pytest.raises(ValueError, match=r"draw\.write_size is 7, more than the 6 pixels"):
        config(write_size=7)
    with pytest.raises(ValueError, match="kind 'draw' and draw belong together"):
        config().replace(draw=None)


def test_training_lowers_the_bound_and_resumes(tmp_path):
    spec = RunSpec(
        task={"name": "draw", "arguments": {"side": 8, "glimpses": 4, "latent": 4, "write": 4}},
        dim=32,
        settings=TrainSettings(steps=60, batch_size=32, lr=0.01, eval_every=60, eval_examples=64),
    )
    result = run_training(spec, tmp_path / "run")
    task = create_task("draw", side=8, glimpses=4, latent=4, write=4)
    untrained = build(load(tmp_path / "run" / "model").config).eval()
    batch = task.batch("test", range(64))
    with torch.no_grad():
        before = nats_per_image(untrained(**batch.inputs), batch.inputs["x"]).mean()
    assert result["metric"] == "nats" and result["test"] < 0.97 * float(before)

    runner = CliRunner()
    gif, png = tmp_path / "a.gif", tmp_path / "a.png"
    shown = runner.invoke(app, ["sample", str(tmp_path / "run"), "--out", str(gif), "--count", "5"])
    assert shown.exit_code == 0, shown.output
    assert image_module.open(gif).n_frames == 4
    arguments = ["sample", str(tmp_path / "run"), "--out", str(png), "--count", "5", "--json"]
    shown = runner.invoke(app, arguments)
    assert json.loads(shown.stdout)["images"] == 5
    first = png.read_bytes()
    runner.invoke(app, arguments)
    assert png.read_bytes() == first
    shown = runner.invoke(app, ["sample", str(tmp_path / "run"), "--out", str(tmp_path / "a.bmp")])
    assert shown.exit_code == 1 and "must end in .png or .gif" in shown.output


def test_sheets_and_boxes(tmp_path):
    images = np.arange(5, dtype=np.uint8)[:, None, None] * np.ones((4, 3), np.uint8)
    sheet = contact_sheet(images)
    assert sheet.shape == (2 * 4 + 2, 3 * 3 + 2 * 2) and sheet[6, 5] == 4 and sheet[-1, -1] == 96
    boxes = np.array([[[-5.0, 1, 0, 90]] * 5] * 2)
    save_images(tmp_path / "a.gif", GeneratedImages(np.stack([images, images[::-1]]), boxes))
    assert image_module.open(tmp_path / "a.gif").n_frames == 2
    with pytest.raises(ValueError, match="at least one image"):
        contact_sheet(images[:0])


def test_real_digits_have_the_entropy_of_independent_pixels(monkeypatch):
    """Salakhutdinov & Murray 2008 report 206 nats for binary MNIST with independent pixels."""
    monkeypatch.setenv("REGARD_DATA", str(real("mnist")))
    task = create_task("draw", data="mnist")
    nats = task.metric.compute(task.baselines()["pixel means"](range(300)))
    assert task.side == 28 and 180 < nats < 220 and isinstance(task.intensity("train", 0), Tensor)
