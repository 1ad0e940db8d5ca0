"""Training: what is promised about steps, stopping and resuming."""

import json
import os
import signal
from contextlib import suppress

import pytest
import torch
from torch import nn

import regard
from regard import json_files
from regard.block import Block
from regard.ffn import GLU, MLP
from regard.models import ModuleSpec, build
from regard.tasks import create_task
from regard.train import CorruptFile, Diverged, Interrupted, Trainer, TrainSettings, checkpoint
from regard.train.run import RunSpec, model_config
from regard.train.sampler import batch_indices
from regard.train.settings import parse_settings


class Tiny(nn.Module):
    """Embedding, one block, a head."""

    def __init__(self, made, dim=16, dropout=0.1):
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(made.vocab_size, dim)
        self.block = Block(
            regard.create("vanilla", dim=dim, heads=2, causal=True), MLP(dim), dropout=dropout
        )
        self.head = nn.Linear(dim, made.classes)

    def forward(self, x, mask=None):
        return self.head(self.block(self.embed(x), mask=mask))


def trainer(folder=None, *, stop=None, poison=None, **given):
    made = create_task("parity", length=8)
    model = Tiny(made)

    def watch(progress):
        if progress.step == stop:
            os.kill(os.getpid(), signal.SIGINT)
        if progress.step == poison:
            with torch.no_grad():
                model.head.weight.fill_(float("nan"))

    plan = {
        "steps": 12,
        "batch_size": 8,
        "eval_every": 4,
        "eval_examples": 16,
        "save_every": 5,
        "ema_decay": 0.9,
        "warmup_steps": 3,
    }
    return Trainer(model, made, TrainSettings(**plan | given), folder=folder, on_step=watch)


def weights(run):
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])


def test_a_run_that_was_stopped_goes_on_bit_by_bit(tmp_path):
    """Fails if anything that matters, dropout included, is not in the checkpoint."""
    whole = trainer(tmp_path / "whole")
    first = whole.run()
    with pytest.raises(Interrupted, match=r"Stopped at step 7; saved to .*step-00000007"):
        trainer(tmp_path / "parts", stop=7).run()
    rest = trainer(tmp_path / "parts")
    second = rest.run()
    assert torch.equal(weights(whole), weights(rest))
    assert (first.test, first.best, first.tokens, first.steps) == (
        second.test,
        second.best,
        second.tokens,
        second.steps,
    )
    rows = [
        json.loads(line) for line in (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows if "tokens" in row] == list(range(1, 13))


def test_parts_of_a_batch_add_up_to_it():
    """Fails if accumulation changes the gradient."""
    runs = [
        trainer(accumulation_steps=parts, steps=1, max_grad_norm=None, ema_decay=None)
        for parts in (1, 3, 8)
    ]
    for run in runs:
        run.model = run.model.double()
        run.model.eval()
        run.model.train = lambda mode=True: None
        run.run()
    for run in runs[1:]:
        torch.testing.assert_close(weights(run), weights(runs[0]))


def test_what_is_no_number_stops_the_run(tmp_path):
    """Fails if a NaN is trained on, or overwrites the last good checkpoint."""
    run = trainer(tmp_path, poison=11)
    with pytest.raises(
        Diverged,
        match=r"The loss is nan .* at step 11; the last good checkpoint is .*step-00000010",
    ):
        run.run()
    tensors, _ = checkpoint.load(checkpoint.latest_checkpoint(tmp_path / "checkpoints"))
    assert all(t.isfinite().all() for t in tensors["model"].values())


def test_patience_and_time_stop_it():
    """Fails if a run goes on when nothing gets better, or when its time is over."""
    assert trainer(steps=400, lr=1e-12, eval_every=1, patience=3).run().stopped == "patience"
    result = trainer(steps=10**6, max_seconds=0.5, eval_every=10**6).run()
    assert result.stopped == "seconds" and result.steps > 1


class Slow:
    """A clock that each batch moves: so much for training, a third of it for judging."""

    def __init__(self, made, seconds):
        self.now, usual = 0.0, made.batch

        def batch(split, rows):
            self.now += seconds if split == "train" else seconds / 3
            return usual(split, rows)

        made.batch = batch

    def monotonic(self):
        return self.now


@pytest.mark.parametrize("step", [0.05, 1.0, 4.0, 11.0])
def test_time_is_kept_whatever_a_step_takes(monkeypatch, step):
    """Fails if the last evaluations come on top of the time, however many examples there are to
    judge, or steps go on to its end and leave none for them."""
    run = trainer(
        steps=10**6, max_seconds=30.0, eval_every=10**6, eval_examples=4096, batch_size=16
    )
    clock = Slow(run.task, step)
    monkeypatch.setattr("regard.train.trainer.time", clock)
    result = run.run()
    assert result.stopped == "seconds" and result.steps >= 1
    assert clock.now <= 30 + step / 3 and clock.now > 30 - 2 * step - 6
    assert 16 <= result.examples <= 2048 and (result.examples < 512) == (step >= 1)
    assert len(result.curve) >= max(1, min(8, result.steps - 2))
    assert [row["step"] for row in result.curve] == sorted({row["step"] for row in result.curve})


def test_a_run_that_is_over_can_go_on_for_longer(tmp_path):
    """Fails if more steps are not taken, or those that were are taken again."""
    trainer(tmp_path, steps=6).run()
    more = trainer(tmp_path, steps=12)
    assert more.run().steps == 12
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "tokens" in row] == list(range(1, 13))


@pytest.mark.parametrize(
    ("position", "scaled"), [("sinusoid", True), ("learned", False), ("alibi", False)]
)
def test_tokens_are_as_large_as_their_positions(position, scaled):
    """Fails if embeddings of 0.02 are added to sines of 1, and so can hardly be told from each
    other."""
    assert (
        model_config(
            RunSpec(task=ModuleSpec(name="parity"), position=ModuleSpec(name=position)),
            create_task("parity"),
        ).input.scale_embeddings
        == scaled
    )


def test_layers_are_those_of_the_run():
    """Fails if a choice of the run does not reach the model, or its width is ignored."""
    task = create_task("parity", length=8)

    def model(**fields):
        spec = RunSpec(task=ModuleSpec(name="parity"), dim=8, heads=2, layers=3, **fields)
        return build(model_config(spec, task))

    def kinds(made):
        return {type(module).__name__ for module in made.modules()}

    plain = kinds(model())
    assert {"MLP", "LayerNorm", "PreNorm", "SequentialStack"} <= plain
    swiglu = model(ffn=ModuleSpec(name="swiglu"), ffn_dim=12)
    (width,) = {tuple(m.up.weight.shape) for m in swiglu.modules() if isinstance(m, GLU)}
    assert width == (12, 8) and "MLP" not in kinds(swiglu)
    wide = model(ffn=ModuleSpec(name="mlp", arguments={"activation": "relu"}), ffn_dim=20)
    assert wide.config.ffn[0].arguments == {"activation": "relu", "hidden": 20}
    assert "MLP" not in kinds(model(ffn=None))
    rms = kinds(model(norm=ModuleSpec(name="rms")))
    assert "RMSNorm" in rms and "LayerNorm" not in rms
    assert "PostNorm" in kinds(model(residual=ModuleSpec(name="post"))) - plain
    shared = model(stack=ModuleSpec(name="shared"))
    assert sum(p.numel() for p in shared.parameters()) < sum(
        p.numel() for p in model().parameters()
    )
    with pytest.raises(ValueError, match="ffn_dim is the width of feed-forward layers, and the"):
        model(ffn=None, ffn_dim=12)
    for field in ("ffn", "norm", "residual", "stack"):
        with pytest.raises(ValueError, match=f"no .*{field}.* 'nothing'"):
            model(**{field: ModuleSpec(name="nothing")})


def test_schedules():
    """Fails if the warm-up does not rise, the cosine does not end at zero, or 1/√step is not
    that."""
    cosine = TrainSettings(warmup_steps=10)
    assert [cosine.lr_factor(i, 0) for i in (0, 4, 9)] == [0.1, 0.5, 1.0]
    assert cosine.lr_factor(10, 0) == 1 and cosine.lr_factor(500, 0.5) == pytest.approx(0.5)
    assert (
        cosine.lr_factor(999, 1) == 0 and TrainSettings(schedule="constant").lr_factor(999, 1) == 1
    )
    assert TrainSettings(schedule="rsqrt", warmup_steps=100).lr_factor(399, 0.1) == 0.5


def test_every_example_is_seen_once_in_each_epoch_by_one_process():
    """Fails if processes overlap, miss an example, or repeat the order of the last epoch."""
    for world in (1, 2, 4):
        seen = [
            sorted(
                i
                for r in range(world)
                for i in batch_indices(12, 4, s, seed=3, rank=r, world_size=world)
            )
            for s in range(6)
        ]
        assert seen == [sorted(batch_indices(12, 4, s, seed=3)) for s in range(6)]
    epochs = [
        [i for s in steps for i in batch_indices(12, 4, s, seed=3)]
        for steps in ((0, 1, 2), (3, 4, 5))
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(12)) and epochs[0] != epochs[1]
    with pytest.raises(ValueError, match="not divisible by the number of processes, 3"):
        batch_indices(12, 4, 0, seed=0, world_size=3)
    with pytest.raises(ValueError, match="There are no examples"):
        batch_indices(0, 4, 0, seed=0)


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    """Fails if a file that was cut off is loaded, or the one before it is lost."""
    trainer(tmp_path, steps=10).run()
    last = checkpoint.latest_checkpoint(tmp_path / "checkpoints")
    assert last.name == "step-00000010"
    path = last / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CorruptFile, match="modified or truncated"):
        checkpoint.load(last)
    skipped = {}
    latest = checkpoint.latest_checkpoint(tmp_path / "checkpoints", skipped.__setitem__)
    assert latest.name == "step-00000005" and "truncated" in skipped[last]
    for text in (
        "",
        "{",
        '{"files": 3}',
        '{"files": {"../x": "0"}, "metadata": {}}',
        "[" * 100_000,
    ):
        (last / "manifest.json").write_text(text)
        with pytest.raises(CorruptFile):
            checkpoint.load(last)


@pytest.mark.parametrize("moment", range(12))
def test_whatever_moment_a_save_is_killed_at_the_last_one_is_whole(tmp_path, moment, monkeypatch):
    """Fails if there is a moment at which the old checkpoint is gone and the new one not there."""
    root = tmp_path / "checkpoints"
    tensors = {name: {"w": torch.arange(5.0)} for name in ("model", "optimizer")}
    checkpoint.save(root, 1, tensors, {"n": 1}, keep=1)
    calls = iter(range(10**6))
    for owner, name in (
        (checkpoint, "flush_to_disk"),
        (json_files, "flush_to_disk"),
        (checkpoint, "save_file"),
        (checkpoint.shutil, "rmtree"),
    ):
        usual = getattr(owner, name)

        def killed(*arguments, usual=usual, **more):
            if next(calls) == moment:
                raise SystemExit("killed")
            return usual(*arguments, **more)

        monkeypatch.setattr(owner, name, killed)
    with suppress(SystemExit):
        checkpoint.save(root, 2, tensors, {"n": 2}, keep=1)
    monkeypatch.undo()
    path = checkpoint.latest_checkpoint(root)
    assert checkpoint.load(path)[1]["n"] in (1, 2)
    assert checkpoint.load(checkpoint.save(root, 3, tensors, {"n": 3}, keep=1))[1]["n"] == 3


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"step": 3}, "did you mean 'steps'"),
        ({"steps": 0}, "steps: "),
        ({"lr": float("nan")}, "lr: "),
        ({"schedule": "linear"}, "schedule must be one of"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"ema_decay": 1.0}, "ema_decay: "),
        ({"batch_size": "many"}, "batch_size: "),
    ],
)
def test_wrong_settings_are_named(given, words):
    """Fails if nonsense is accepted."""
    with pytest.raises(ValueError, match=words):
        parse_settings(given)


def test_other_settings_are_not_resumed(tmp_path):
    """Fails if a run goes on with a rate that it did not begin with; more steps are fine."""
    trainer(tmp_path, steps=5).run()
    with pytest.raises(ValueError, match="different lr"):
        trainer(tmp_path, steps=5, lr=0.5).run()
    assert trainer(tmp_path, steps=7).run().steps == 7
