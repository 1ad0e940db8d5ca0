"""Options of `regard train`: the schedule, the time, the model file, and what is printed."""

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from regard.cli import app
from regard.cli.training import format_duration
from regard.compare.ledger import DONE, LedgerEntry
from regard.compare.results import summarize_runs
from regard.models import ModuleSpec, build
from regard.tasks import TASKS, create_task
from regard.tasks.base import Batch
from regard.tasks.regression import Regression
from regard.train import Trainer, TrainSettings
from regard.train.loss_module import LossModule
from regard.train.plateau import PlateauDetector, constant_loss
from regard.train.run import RunSpec, model_config, read_model_settings, read_spec
from regard.train.settings import UNLIMITED_STEPS, parse_settings

SMALL = (
    *("--task", "parity:length=8", "--dim", 16, "--heads", 2, "--layers", 1),
    *("--batch-size", 4, "--set", "eval_examples=8"),
)


def run(*arguments, code=0, **more):
    result = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "120"}, **more)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def refused(*arguments, code=1):
    return run(*arguments, code=code).stderr


# ---------------------------------------------------------------------------------------- settings
def test_noam_is_the_formula_of_the_paper():
    """Fails if the learning rate is not that of section 5.3 of Vaswani et al. 2017."""
    settings = TrainSettings(schedule="noam", lr=2.0, warmup_steps=40)
    for number in (1, 10, 39, 40, 41, 400):
        want = 2.0 * 64**-0.5 * min(number**-0.5, number * 40**-1.5)
        got = settings.lr * settings.lr_factor(number - 1, 0.3, 64)
        assert got == pytest.approx(want, rel=1e-12)
    rsqrt = TrainSettings(schedule="rsqrt", lr=2.0 * (64 * 40) ** -0.5, warmup_steps=40)
    for step in (0, 20, 39, 200):  # the same shape
        other = settings.lr * settings.lr_factor(step, 0, 64)
        assert rsqrt.lr * rsqrt.lr_factor(step, 0) == pytest.approx(other)
    with pytest.raises(ValueError, match="noam' needs warmup_steps >= 1"):
        parse_settings({"schedule": "noam", "warmup_steps": 0})
    with pytest.raises(ValueError, match="needs a model with a configuration"):
        settings.lr_factor(3, 0)


def test_the_trainer_uses_the_width_of_the_model_for_noam():
    """Fails if another width than that of the model is in the formula."""
    task = create_task("parity", length=8)
    settings = {"schedule": "noam", "lr": 1.0, "warmup_steps": 4, "steps": 3, "batch_size": 4}
    spec = RunSpec(
        task=ModuleSpec(name="parity"),
        dim=16,
        heads=2,
        layers=1,
        settings=TrainSettings(**settings),
    )
    seen = []
    model = build(model_config(spec, task))
    Trainer(model, task, spec.settings, on_step=lambda progress: seen.append(progress.lr)).run()
    assert seen == pytest.approx([16**-0.5 * t * 4**-1.5 for t in (1, 2, 3)])


def test_label_smoothing_is_in_the_training_loss_only():
    """Fails if the setting is ignored, or changes the loss of an evaluation."""
    task = create_task("parity", length=8)
    spec = RunSpec(
        task=ModuleSpec(name="parity"),
        dim=16,
        heads=2,
        layers=1,
        settings=TrainSettings(label_smoothing=0.2, steps=1, batch_size=4),
    )
    model = build(model_config(spec, task))
    trainer = Trainer(model, task, spec.settings)
    batch = task.batch("train", range(4))
    logits, labels = model(**batch.inputs), batch.targets["labels"]
    p = logits.float().log_softmax(-1)
    flat = p.flatten(0, -2)
    smooth = -(0.8 * flat.gather(1, labels.flatten()[:, None])[:, 0] + 0.2 * flat.mean(-1)).mean()
    assert float(trainer.loss_module(batch).detach()) == pytest.approx(smooth.item(), rel=1e-5)
    plain = float(LossModule(model, task, torch.float32)(batch).detach())
    assert plain != pytest.approx(smooth.item())
    loss = trainer.evaluate("train", 4).loss
    assert loss == pytest.approx(float(task.loss(model(**_sample(task).inputs), _sample(task))))


def _sample(task) -> Batch:
    return task.batch("train", task.sample("train", 4).tolist())


def test_every_option_reaches_the_settings(tmp_path):
    """Fails if an option is accepted and ignored."""
    options = {
        "--schedule": ("noam", "schedule", "noam"),
        "--warmup": (7, "warmup_steps", 7),
        "--weight-decay": (0.25, "weight_decay", 0.25),
        "--label-smoothing": (0.1, "label_smoothing", 0.1),
        "--clip-grad-norm": (0.5, "max_grad_norm", 0.5),
        "--accumulate": (2, "accumulation_steps", 2),
        "--keep": ("last", "keep", "last"),
        "--dtype": ("bfloat16", "dtype", "bfloat16"),
        "--device": ("cpu", "device", "cpu"),
    }
    words = [word for option, (value, *_) in options.items() for word in (option, value)]
    run("train", *SMALL, *words, "--steps", 2, "--out", tmp_path / "x")
    settings = read_spec(tmp_path / "x").settings
    assert {name: getattr(settings, name) for _, name, _ in options.values()} == {
        name: value for _, name, value in options.values()
    }
    assert settings.lr == 1.0  # the factor of the paper, unless --lr is given
    run("train", *SMALL, "--clip-grad-norm", 0, "--steps", 1, "--out", tmp_path / "y")
    settings = read_spec(tmp_path / "y").settings
    assert settings.max_grad_norm is None and settings.lr == 1e-3


def test_a_setting_is_given_once(tmp_path):
    """Fails if one of two values is dropped silently."""
    words = ("train", *SMALL, "--out", tmp_path / "x", "--warmup", 3)
    assert "--set warmup_steps=... repeats" in refused(*words, "--set", "warmup_steps=4")
    assert not (tmp_path / "x").exists()


# ------------------------------------------------------------------------------------ time, steps
def test_limits_are_those_that_are_given(tmp_path):
    """Fails if a time limit has a hidden number of steps, or steps a hidden time limit."""
    run("train", *SMALL, "--max-time", "1s", "--out", tmp_path / "time")
    spec = read_spec(tmp_path / "time")
    assert (spec.settings.steps, spec.settings.max_seconds) == (UNLIMITED_STEPS, 1.0)
    result = json.loads((tmp_path / "time" / "result.json").read_text())
    assert result["stopped"] == "seconds"
    words = ("--resume", tmp_path / "time", "--steps", result["steps"] + 20, "--json")
    more = json.loads(run("train", *words).stdout)
    assert (more["stopped"], more["steps"]) == ("steps", result["steps"] + 20)
    run("train", *SMALL, "--steps", 3, "--out", tmp_path / "steps")
    spec = read_spec(tmp_path / "steps")
    assert (spec.settings.steps, spec.settings.max_seconds) == (3, None)
    longer = ("--resume", tmp_path / "steps", "--max-time", "2s", "--json")
    more = json.loads(run("train", *longer).stdout)
    assert more["stopped"] == "seconds" and more["steps"] > 3
    run("train", *SMALL, "--steps", 3, "--max-time", "1h", "--out", tmp_path / "both")
    spec = read_spec(tmp_path / "both")
    assert (spec.settings.steps, spec.settings.max_seconds) == (3, 3600.0)
    run("train", *SMALL, "--set", "eval_every=100", "--steps", 2, "--out", tmp_path / "z")


# ------------------------------------------------------------------------------------------ config
def test_a_model_file_gives_every_part_and_options_override_it(tmp_path):
    """Fails if a part is ignored, or the command line is."""
    content = {
        "mixer": {"name": "local", "arguments": {"window": 4}},
        "dim": 24,
        "heads": 3,
        "layers": 2,
        "ffn": "swiglu",
        "ffn_dim": 20,
        "norm": "rms",
        "residual": "post",
        "position": "sinusoid",
        "stack": "sequential",
        "dropout": 0.1,
    }
    path = tmp_path / "model.json"
    path.write_text(json.dumps(content))
    given = read_model_settings(path)
    assert given.keys() == content.keys()
    assert given["mixer"] == ModuleSpec(name="local", arguments={"window": 4})
    words = ("--task", "parity:length=8", "--config", path, "--steps", 1, "--batch-size", 4)
    run("train", *words, "--dim", 12, "--position", "rope", "--out", tmp_path / "x")
    config = json.loads((tmp_path / "x" / "model" / "config.json").read_text())
    assert (config["dim"], config["heads"], config["layers"]) == (12, 3, 2)
    assert config["position"]["name"] == "rope" and config["norm"]["name"] == "rms"
    assert config["ffn"][0] == {"name": "swiglu", "arguments": {"hidden": 20}}
    assert config["residual"]["name"] == "post" and config["dropout"] == 0.1
    assert config["mixer"][0]["arguments"] == {"window": 4}
    for text, said in (
        ('{"dims": 3}', "did you mean 'dim'?"),
        ('{"dim": "3"}', "dim: Input should be a valid integer"),
        ("{", "Invalid JSON"),
        ('{"steps": 3}', "has no 'steps'"),
    ):
        path.write_text(text)
        assert said in refused("train", *words, "--out", tmp_path / "y")
    assert "does not exist" in refused(
        "train", "--task", "parity", "--config", tmp_path / "none.json", "--out", tmp_path / "y"
    )
    assert not (tmp_path / "y").exists()


# ---------------------------------------------------------------------------- what a user is told
def test_an_overview_comes_before_training(tmp_path):
    """Fails if the user is not told what a run will do."""
    shown = run("train", *SMALL, "--steps", 20, "--out", tmp_path / "x").stderr.splitlines()
    data, model, training = shown[:3]
    task = create_task("parity", length=8)
    assert data == (
        f"data: train endless, valid {task.size('valid'):,}, test {task.size('test'):,}; "
        "2 classes; at most 8 tokens"
    )
    parameters = json.loads((tmp_path / "x" / "result.json").read_text())["parameters"]
    assert model == f"model: {parameters:,} parameters"
    assert "20 steps of 4 examples" in training and "lr 0.001 cosine" in training
    assert "cpu in float32" in training
    assert shown[3] == (
        "warning: 20 steps end within the warmup of 50: the learning rate reaches 40% of its peak. "
        "Use more --steps or less --warmup."
    )
    measured = [line for line in shown if line.startswith("measured: ")]
    assert len(measured) == 1 and "s a step, about 1 s and the evaluations" in measured[0]
    assert run("train", *SMALL, "--steps", 5, "--out", tmp_path / "y", "--json").stderr == ""
    words = ("--steps", 3, "--warmup", 3, "--out", tmp_path / "z")
    assert "warmup of" not in run("train", *SMALL, *words).stderr


def test_texts_that_are_cut_off_are_counted(tmp_path):
    """Fails if a length that is too short goes unnoticed."""
    path = tmp_path / "rows.csv"
    rows = [f"{'abcd' if i % 4 else 'abcdefghijklmnop'},{'xy'[i % 2]}" for i in range(200)]
    path.write_text("\n".join(["text,label", *rows]) + "\n")
    words = ("train", "--task", "classify:tokenizer=byte", "--data", path, "--length", 8)
    shown = run(*words, "--dim", 8, "--heads", 2, "--steps", 1, "--out", tmp_path / "x").stderr
    assert "2 classes; at most 8 tokens (2" in shown and "% of the texts reach that" in shown


def test_durations_in_words():
    """Fails if a unit is wrong."""
    words = [format_duration(seconds) for seconds in (0.2, 59.4, 60, 200, 7500)]
    assert words == ["1 s", "59 s", "1 min 0 s", "3 min 20 s", "2 h 5 min"]


def test_a_loss_that_stands_still_is_told_once():
    """Fails if the rule is another than the documented one."""
    detector = PlateauDetector(1000, 0.7)
    said = [detector.update(step, 0.699) for step in range(1, 601)]
    assert [step for step, text in enumerate(said, 1) if text] == [200]
    assert "0.6990 on average over the last 100 steps" in said[199] and "0.7000" in said[199]
    falling = PlateauDetector(1000, 0.7)  # 0.01 in 100 steps is more than 1 % of 0.7
    assert not any(falling.update(s, 1.0 - 1e-4 * s) for s in range(1, 2001))
    learned = PlateauDetector(1000, 0.7)  # stands still, but 2 % below constant predictions
    assert not any(learned.update(s, 0.68) for s in range(1, 1001))
    short = PlateauDetector(100, 0.7)  # windows of 20 steps
    assert [s for s in range(1, 101) if short.update(s, 0.7)] == [40]


def test_the_warning_reaches_the_user(tmp_path):
    """Fails if `train` says nothing where nothing is learned, or says it more than once."""
    words = ("--lr", "1e-9", "--steps", 80, "--out", tmp_path / "x", "--json")
    shown = run("train", *SMALL, *words).stderr
    assert shown.count("warning: The loss stands still") == 1 and shown.count("\n") == 1


def test_the_loss_of_constant_predictions():
    """Fails if it is not the entropy of the classes, or not known for a task with its own loss."""
    task = create_task("parity", length=8)
    labels = torch.cat([_labels(task)])
    p = float((labels == 1).double().mean())
    entropy = -(p * math.log(p) + (1 - p) * math.log(1 - p))
    assert constant_loss(task) == pytest.approx(entropy)
    q = 0.8 * p + 0.1
    smooth = -(q * math.log(q) + (1 - q) * math.log(1 - q))
    assert constant_loss(task, 0.2) == pytest.approx(smooth)

    class Own(type(task)):
        def loss(self, output, batch, **options):
            return output.mean()

    assert constant_loss(Own(length=8)) is None


def _labels(task):
    labels = task.batch("train", task.sample("train", 256).tolist()).targets["labels"]
    return labels[labels >= 0]


class ByR2(Regression):
    """Regression whose first metric has no value where all targets are equal."""

    def __init__(self, data):
        super().__init__(data, target="y")
        self.metrics = self.metrics[::-1]


def test_a_metric_without_a_value_on_the_test_split_loses_no_run(tmp_path, monkeypatch):
    """Fails if hours of training end in an error because the test split is too small, or if an
    error does not name the split."""
    monkeypatch.setitem(TASKS, "by_r2", ByR2)
    for split, target in (("train", "i"), ("valid", "i"), ("test", "7")):
        rows = [f"{i},{i if target == 'i' else target}" for i in range(20)]
        (tmp_path / f"{split}.csv").write_text("\n".join(["a,y", *rows]) + "\n")
    words = ("--task", "by_r2", "--data", tmp_path, "--dim", 8, "--heads", 2, "--layers", 1)
    words += ("--steps", 2, "--batch-size", 4, "--out")
    shown = run("train", *words, tmp_path / "x")
    assert "r2 no value on 20 examples of test, best on valid -" in shown.stdout
    result = json.loads((tmp_path / "x" / "result.json").read_text())
    assert result["test"] is None and set(result["metrics"]) == {"mae", "rmse"}
    assert "r2" in run("runs", "list", tmp_path).stdout
    said = run("eval", tmp_path / "x", code=1).stderr
    assert said.startswith("error: In 20 examples of the test split: r2 has no value: all targets")
    run("eval", tmp_path / "x", "--split", "valid")
    entry = LedgerEntry("k", "n", DONE, {"mixer": "linear", "task": "t", "length": 8}, result, "")
    entry.settings.update(mixer={"name": "linear"}, task={"name": "t"})
    (row,) = summarize_runs([entry])
    assert not row.scores and row.reason == "r2 has no value on the test examples"
