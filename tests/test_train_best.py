"""The best weights are kept: saved, tested and resumed."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from regard.models import ModuleSpec
from regard.tasks import create_task
from regard.tasks.metrics import MeanMetric
from regard.train import Interrupted, TrainSettings, checkpoint
from regard.train.best_weights import BestWeights, copy_tensors
from regard.train.evaluation import Evaluation
from regard.train.run import RunSpec, read_result, run_training
from regard.train.trainer import Trainer

VALUES = [0.1, 0.7, 0.4, 0.7, 0.3, 0.2]  # of the evaluations after steps 2, 4, 6, 8, 10, 12


def spec(**settings):
    plan = {"steps": 12, "batch_size": 4, "eval_every": 2, "eval_examples": 8, "save_every": 2}
    return RunSpec(
        task=ModuleSpec(name="parity", arguments={"length": 8}),
        dim=8,
        heads=2,
        layers=1,
        dropout=0.1,
        threads=1,
        settings=TrainSettings(**plan | {"warmup_steps": 2, "lr": 0.01} | settings),
    )


def fake_evaluation(task, value, count=8):
    statistics = torch.tensor([[value, 1.0]] * count, dtype=torch.float64)
    return Evaluation(task, list(range(count)), {task.metric.name: statistics}, 0.5)


@pytest.fixture
def scripted(monkeypatch):
    """Evaluations on valid have the values of `VALUES`; the weights of each are recorded."""
    seen = {}
    usual = Trainer.evaluate

    def evaluate(self, split, *rest, kept=False, **more):
        if split == "valid":
            with self.kept_weights() if kept else _averaged(self):
                seen[self.step] = copy_tensors(self.model)
            return fake_evaluation(self.task, VALUES[self.step // 2 - 1])
        with self.kept_weights() if kept else _averaged(self):
            seen["test"] = copy_tensors(self.model)
        return usual(self, split, *rest, kept=kept, **more)

    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    return seen


def _averaged(trainer):
    from regard.train.ema import averaged_weights

    return averaged_weights(trainer.ema, trainer.model)


def equal(got, want):
    return got.keys() == want.keys() and all(torch.equal(got[k], want[k]) for k in want)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, 4),
        ({"ema_decay": 0.5}, 4),
        ({"keep": "last"}, 12),
        ({"keep": "last", "ema_decay": 0.5}, 12),
        ({"dtype": "bfloat16"}, 4),
        ({"dtype": "float16", "ema_decay": 0.5}, 4),
    ],
)
def test_the_best_weights_are_saved_and_tested(tmp_path, scripted, settings, kept):
    """Fails if the last weights are saved, those of a later evaluation that is as good, if the test
    split is evaluated with others than those saved, or if mixed precision rounds them."""
    result = run_training(spec(**settings), tmp_path)
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert equal(saved, scripted[kept]) and equal(scripted["test"], scripted[kept])
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert any((tensor.bfloat16().float() != tensor).any() for tensor in saved.values())
    assert not equal(scripted[4], scripted[12]) and not equal(scripted[4], scripted[8])
    assert (result["best_step"], result["best"]) == (4, 0.7)
    assert read_result(tmp_path)["best_step"] == 4


def test_lower_is_better_for_metrics_that_say_so():
    """Fails if the direction of the metric is not used."""

    class Error(MeanMetric):
        name, higher_is_better = "error", False

        def update(self, output, batch, predictions):
            raise NotImplementedError

    task = create_task("parity", length=8)
    task.metrics = (Error(),)
    model = torch.nn.Linear(2, 2)
    best = BestWeights(task.metric, keeps_weights=True)
    for step, value in enumerate([0.5, 0.2, 0.3, 0.2]):
        best.update(step, fake_evaluation(task, value), model)
    assert best.step == 1


def test_evaluations_of_other_sizes_are_compared_on_common_examples():
    """Fails if a lucky short evaluation beats a longer one, or one that is worse replaces it."""
    task = create_task("parity", length=8)
    best = BestWeights(task.metric, keeps_weights=False)

    def update(step, values):
        statistics = torch.tensor([[value, 1.0] for value in values], dtype=torch.float64)
        evaluation = Evaluation(task, [], {task.metric.name: statistics}, 0.5)
        best.update(step, evaluation, torch.nn.Linear(2, 2))

    update(1, [1, 0])
    update(2, [1, 1, 0, 0, 0, 0])  # better on the common two, though 0.33 is less than 0.5
    assert best.step == 2
    update(3, [1, 1])  # equal on the common two, though 1.0 is more
    assert best.step == 2


@pytest.mark.parametrize("settings", [{}, {"ema_decay": 0.5}, {"keep": "last"}])
def test_the_best_weights_survive_an_interruption(tmp_path, scripted, monkeypatch, settings):
    """Fails if a run that was stopped after its best evaluation forgets those weights."""
    whole = run_training(spec(**settings), tmp_path / "whole")
    stops = iter([6, 10])

    def stop_at(limit):
        def on_step(progress):
            if progress.step == limit:
                raise Interrupted("stopped")

        return on_step

    for limit in stops:
        with pytest.raises(Interrupted):
            run_training(spec(**settings), tmp_path / "parts", stop_at(limit))
        assert not (tmp_path / "parts" / "model").exists()
    parts = run_training(spec(**settings), tmp_path / "parts")
    files = [load_file(tmp_path / each / "model/model.safetensors") for each in ("whole", "parts")]
    assert equal(*files)
    assert (parts["best_step"], parts["test"]) == (whole["best_step"], whole["test"])
    last = checkpoint.latest_checkpoint(tmp_path / "parts" / "checkpoints")
    names = {path.name for path in last.iterdir()}
    assert ("best_model.safetensors" in names) == (settings.get("keep") != "last")
    manifest = json.loads((last / "manifest.json").read_text())
    assert "best_evaluation.safetensors" in manifest["files"]


def test_a_longer_run_keeps_the_best_of_all_its_steps(tmp_path, scripted):
    """Fails if `--resume --steps` forgets an evaluation of the run that it continues."""
    run_training(spec(steps=6), tmp_path)
    result = run_training(spec(steps=12), tmp_path, extend=True)
    assert result["best_step"] == 4 and result["steps"] == 12
    assert equal(load_file(tmp_path / "model" / "model.safetensors"), scripted[4])


def test_patience_counts_from_the_best_step(scripted):
    """Fails if an evaluation that is only as good resets the count."""
    task = create_task("parity", length=8)
    from regard.models import build
    from regard.train.run import model_config

    run = spec(patience=3)
    result = Trainer(build(model_config(run, task)), task, run.settings).run()
    assert (result.stopped, result.steps, result.best_step) == ("patience", 10, 4)


def test_mixed_precision_and_the_best_weights(tmp_path, scripted):
    """Fails if mixed precision saves anything but the float32 weights of the best evaluation."""
    run_training(spec(dtype="bfloat16"), tmp_path)
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert equal(saved, scripted[4]) and {t.dtype for t in saved.values()} == {torch.float32}


def test_of_equal_metrics_the_lower_loss_is_kept():
    """Fails if a metric that stands still, such as F1 of 0, keeps the weights of the first step."""
    task = create_task("parity", length=8)
    model, best = torch.nn.Linear(1, 1), BestWeights(task.metric, keeps_weights=True)
    for step, (value, loss) in enumerate([(0.0, 2.1), (0.0, 1.5), (0.0, 1.5), (0.0, 1.9)]):
        best.update(step, replace(fake_evaluation(task, value), loss=loss), model)
    assert (best.step, best.loss) == (1, 1.5)


def test_keep_takes_two_values():
    """Fails if a third is accepted."""
    with pytest.raises(ValueError, match="keep must be one of 'best', 'last', not 'bset'"):
        TrainSettings(keep="bset")
