"""A run that is killed, however often and whenever, comes to the same end, bit by bit."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import regard
from fuzzing import SLOW
from regard.block import Block
from regard.compare.ledger import Ledger
from regard.ffn import MLP
from regard.json_files import CorruptFile
from regard.tasks import create_task
from regard.train import Trainer, TrainSettings, checkpoint
from regard.train.evaluation import Evaluation
from regard.train.metrics_log import MetricsLog
from regard.train.run import run_training
from resume_cases import spec

HERE = Path(__file__).parent


class Trains:
    """The program of `resume_cases`, which trains in one process after the other."""

    def __init__(self, *words, **given):
        path = os.pathsep.join([str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])
        command = [
            sys.executable,
            str(HERE / "resume_cases.py"),
            *words,
            *(f"{name}={value}" for name, value in given.items()),
        ]
        self.program = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        assert self.program.stdout.readline() == "ready\n"

    def begin(self, folder, number=-1):
        print(folder, number, file=self.program.stdin, flush=True)
        return int(self.program.stdout.readline())

    def end(self):
        return int(self.program.stdout.readline())

    def __call__(self, folder, number=-1):
        self.begin(folder, number)
        return self.end()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.program.stdin.close()
        self.program.wait(30)


def trained(folder):
    return load_file(folder / "model" / "model.safetensors")


def equal(got, want):
    return got.keys() == want.keys() and all(
        torch.equal(got[name], tensor) for name, tensor in want.items()
    )


def check_same(folder, whole):
    """Weights bit by bit, each step logged once with the same loss, the same result."""
    assert (folder / "model" / "config.json").read_bytes() == (
        whole / "model" / "config.json"
    ).read_bytes()
    assert equal(trained(folder), trained(whole))
    assert not list(folder.rglob(".*")), "something was left over"
    last, expected = (
        checkpoint.load(checkpoint.latest_checkpoint(each / "checkpoints"))[0]
        for each in (folder, whole)
    )
    assert last.keys() == expected.keys()
    assert all(equal(last[file], expected[file]) for file in expected)
    rows, wanted = (
        [json.loads(row) for row in (each / "metrics.jsonl").read_text().splitlines()]
        for each in (folder, whole)
    )
    timeless = [
        [{k: v for k, v in row.items() if k != "seconds"} for row in each]
        for each in (rows, wanted)
    ]
    assert timeless[0] == timeless[1]
    results = [json.loads((each / "result.json").read_text()) for each in (folder, whole)]
    for key in ("steps", "tokens", "loss", "best", "test", "stopped"):
        assert results[0][key] == results[1][key]


@pytest.mark.slow
def test_killed_at_random_moments_it_comes_to_the_same_end(tmp_path):
    """Fails if SIGKILL at any of these moments loses, repeats or changes anything."""
    draw = random.Random(11)
    with Trains(steps=24) as trains:
        began = time.monotonic()
        assert trains(tmp_path / "whole") == 0
        lasts = time.monotonic() - began
        killed = reached = 0
        for run in range(2):
            folder = tmp_path / f"run{run}"
            for _ in range(5):
                pid = trains.begin(folder)
                time.sleep(draw.uniform(0.05, 0.5) * lasts)
                with suppress(ProcessLookupError):  # it was faster
                    os.kill(pid, signal.SIGKILL)
                killed += trains.end() == -signal.SIGKILL
                reached += bool(checkpoint.list_checkpoints(folder / "checkpoints"))
            assert trains(folder) == 0
            check_same(folder, tmp_path / "whole")
    assert killed >= 5 and reached >= 2  # else it was killed before or after all that matters


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A program that trains for a few steps, and the folder of a run that nobody disturbed."""
    whole = tmp_path_factory.mktemp("short") / "whole"
    with Trains(steps=4) as trains:
        assert trains(whole) == 0
        yield trains, whole


@pytest.mark.slow
@pytest.mark.parametrize("first", range(5))
def test_killed_before_any_change_of_its_folder_it_comes_to_the_same_end(short, first, tmp_path):
    """Fails if there is a boundary, of the checkpoints, the metrics, the model or the result, at
    which a run must not die."""
    trains, whole = short
    changes = len(whole.with_suffix(".changes").read_text().splitlines())
    assert changes > 50
    for number in range(first, changes, 5):
        folder = tmp_path / f"at{number}"
        assert trains(folder, number) == -signal.SIGKILL
        assert trains(folder) == 0
        check_same(folder, whole)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """A program that compares two mixers, and the folder of a comparison that nobody disturbed."""
    whole = tmp_path_factory.mktemp("compare") / "whole"
    with Trains("compare", steps=2, eval_every=2) as compares:
        assert compares(whole) == 0
        yield compares, whole


TIMES = ("seconds", "tokens_per_second", "peak_bytes", "environment", "curve")


def check_same_comparison(folder, whole):
    """The same rows of the ledger but for times, and the same models."""
    entries = []
    for each in (folder, whole):
        ledger = Ledger(each / "ledger.sqlite")
        entries.append(
            [
                entry._replace(
                    result=entry.result
                    and {k: v for k, v in entry.result.items() if k not in TIMES}
                )
                for entry in ledger.entries()
            ]
        )
        ledger.close()
    assert entries[0] == entries[1] and len(entries[0]) == 3
    assert [entry.status for entry in entries[0]].count("done") == 2
    assert (folder / "plan.json").read_bytes() == (whole / "plan.json").read_bytes()
    for run in (whole / "runs").iterdir():
        check_same(folder / "runs" / run.name, run)


@pytest.mark.parametrize("part", range(2))
def test_killed_before_any_change_a_comparison_comes_to_the_same_end(comparison, part, tmp_path):
    """Fails if there is a write of the plan, the ledger or a run at which a comparison must not
    die: by default those of the comparison, in the slow tier all."""
    compares, whole = comparison
    changes = whole.with_suffix(".changes").read_text().splitlines()
    statements = [i for i, change in enumerate(changes) if "runs (" in change or "UPDATE" in change]
    files = [
        i for i, change in enumerate(changes) if "plan.json" in change or "spec.json" in change
    ]
    assert len(changes) > 100 and len(statements) >= 12 and len(files) >= 6
    chosen = range(len(changes)) if SLOW else sorted([*statements[::3], *files[::3]])
    for number in chosen[part::2]:
        folder = tmp_path / f"at{number}"
        assert compares(folder, number) == -signal.SIGKILL, changes[number]
        assert compares(folder) == 0, changes[number]
        check_same_comparison(folder, whole)


def test_half_a_line_is_forgotten_and_the_rest_is_not(tmp_path):
    """Fails if a row that was cut off spoils the log, or if a process that dies while it cleans up
    loses the other rows."""
    log = MetricsLog(tmp_path)
    log.truncate(0)
    for step in range(1, 5):
        log.write({"step": step, "loss": 0.5})
    with log.path.open("a") as file:
        file.write('{"step": 5, "lo')
    kept = log.path.read_text()
    log.truncate(3)
    assert [json.loads(row)["step"] for row in log.path.read_text().splitlines()] == [1, 2, 3]
    assert kept.startswith(log.path.read_text()) and not list(tmp_path.glob(".*"))


def test_what_is_left_of_a_removed_checkpoint_goes_too(tmp_path, monkeypatch):
    """Fails if a process that dies while it removes an old checkpoint leaves its files for ever."""

    def killed(path, **options):
        (path / "manifest.json").unlink()
        raise SystemExit("killed")

    checkpoint.save(tmp_path, 1, {"model": {"w": torch.ones(2)}}, {})
    monkeypatch.setattr(checkpoint.shutil, "rmtree", killed)
    with pytest.raises(SystemExit):
        checkpoint.save(tmp_path, 2, {"model": {"w": torch.ones(2)}}, {}, keep=1)
    monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == 2
    checkpoint.save(tmp_path, 3, {"model": {"w": torch.ones(2)}}, {}, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_a_process_killed_inside_safetensors_leaves_nothing(tmp_path):
    """Fails if the temporary file of the package blocks the next checkpoint of that step; what is
    somebody else's stays."""
    for partial, name in ((".partial-3", ".tmpk3EYOW"), (".partial-4", "notes.txt")):
        (tmp_path / partial).mkdir()
        (tmp_path / partial / name).write_bytes(b"half")
    checkpoint.save(tmp_path, 3, {"model": {"w": torch.ones(2)}}, {})
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000003", ".partial-4"}
    with pytest.raises(checkpoint.CheckpointWriteError, match=r"exists: .*\.partial-4"):
        checkpoint.save(tmp_path, 4, {"model": {"w": torch.ones(2)}}, {})


def test_the_same_seed_gives_the_same_bits(tmp_path):
    """Fails if anything but the seed decides; another seed must give something else."""
    found = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run_training(spec(seed=seed, steps=4), tmp_path / name)
        found[name] = trained(tmp_path / name)
    assert equal(found["a"], found["b"]) and not equal(found["a"], found["c"])


def test_a_checkpoint_without_settings_is_named(tmp_path):
    """Fails if facts that were tampered with end in a KeyError."""
    (tmp_path / "spec.json").write_text(spec().model_dump_json())
    checkpoint.save(tmp_path / "checkpoints", 2, {"model": {"w": torch.ones(2)}}, {"seconds": 1.0})
    with pytest.raises(CorruptFile, match="does not contain its training settings"):
        run_training(spec(), tmp_path)


# ------------------------------------------------------------------------------ the loop's promises
class Tiny(nn.Module):
    """Embedding, one block, a head; remembers the dtype of its logits."""

    def __init__(self, made, dim=16):
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(made.vocab_size, dim)
        self.block = Block(regard.create("vanilla", dim=dim, heads=2, causal=True), MLP(dim))
        self.head = nn.Linear(dim, made.classes)
        self.dtypes = set()

    def forward(self, x, mask=None):
        logits = self.head(self.block(self.embed(x), mask=mask))
        self.dtypes.add(logits.dtype)
        return logits


def trainer(folder=None, watch=lambda progress: None, **given):
    made = create_task("parity", length=8)
    plan = {
        "steps": 6,
        "batch_size": 8,
        "eval_every": 2,
        "eval_examples": 16,
        "save_every": 5,
        "warmup_steps": 3,
    }
    return Trainer(Tiny(made), made, TrainSettings(**plan | given), folder=folder, on_step=watch)


def test_the_moving_average_is_one_and_is_what_is_evaluated():
    """Fails if it forgets a step, moves at another pace, is not used for the score, or leaks into
    the weights."""
    seen = []
    run = trainer(
        ema_decay=0.5,
        lr=0.05,
        watch=lambda progress: seen.append(run.model.head.weight.detach().clone()),
    )
    want = run.model.head.weight.detach().clone()
    run.run()
    for t, weight in enumerate(seen):
        beta = min(0.5, (1 + t) / (10 + t))
        want = beta * want + (1 - beta) * weight
    torch.testing.assert_close(run.ema.weights["head.weight"], want)
    assert torch.equal(run.model.head.weight, seen[-1])
    batch = run.task.batch("valid", run.task.sample("valid", 16).tolist())
    own = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    with torch.no_grad():
        for name, p in run.model.named_parameters():
            p.copy_(run.ema.weights[name])
    right = run.model(**batch.inputs).argmax(-1) == batch.targets["labels"]
    score = float(right.double().mean())
    with torch.no_grad():
        for name, p in run.model.named_parameters():
            p.copy_(own[name])
    assert run.evaluate("valid").value == pytest.approx(score)


def test_narrow_numbers_are_used_for_the_layers_alone():
    """Fails if autocast is not on, or if weights or losses become narrow too."""
    narrow, wide = trainer(dtype="bfloat16"), trainer()
    results = [run.run() for run in (narrow, wide)]
    assert narrow.model.dtypes == {torch.bfloat16} and wide.model.dtypes == {torch.float32}
    assert all(p.dtype == torch.float32 for p in narrow.model.parameters())
    assert results[0].loss != results[1].loss and results[0].loss == pytest.approx(
        results[1].loss, rel=0.1
    )


def test_patience_counts_evaluations_since_the_best(monkeypatch):
    """Fails if it stops one evaluation too early or too late, or forgets the best when it goes
    on."""
    run = trainer(steps=50, eval_every=1, patience=3)
    values = iter([0.1, 0.5, 0.4, 0.5, 0.3, 0.9, 0.0])

    def evaluate(split, **limit):
        accuracy, macro_f1 = torch.tensor([[next(values), 1.0]]), torch.zeros(1, 2)
        return Evaluation(run.task, [0], {"accuracy": accuracy, "macro_f1": macro_f1}, loss=0.0)

    monkeypatch.setattr(run, "evaluate", evaluate)
    result = run.run()
    assert (result.stopped, result.steps, result.best) == ("patience", 5, pytest.approx(0.5))


def test_the_norm_of_the_gradient_is_cut():
    """Fails if clip is not applied, or applied to a gradient that is small enough."""
    for clip, want in ((1e-3, 1e-3), (1e6, None), (None, None)):
        run = trainer(max_grad_norm=clip)
        run.wrapped = run.loss_module
        run._backward()
        before = torch.cat([p.grad.flatten() for p in run.model.parameters()])
        norm = run.strategy.clip_gradients(clip)
        after = torch.cat([p.grad.flatten() for p in run.model.parameters()])
        assert norm == pytest.approx(float(before.norm()), rel=1e-5)
        assert float(after.norm()) == pytest.approx(want or norm, rel=1e-3)


# -------------------------------------------------------------------------------------- TensorBoard
def test_tensorboard_shows_what_the_log_says(tmp_path):
    """Fails if a curve is missing, or if a resumed run shows steps of before that it took again."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trainer(tmp_path, tensorboard=True, steps=5).run()
    trainer(tmp_path, tensorboard=True, steps=8).run()
    events = reader.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    rows = [json.loads(row) for row in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for key in ("loss", "valid"):
        got = [(event.step, event.value) for event in events.Scalars(key)]
        assert got == [(row["step"], pytest.approx(row[key])) for row in rows if key in row]


def test_tensorboard_is_named_where_it_is_missing(tmp_path, monkeypatch):
    """Fails if the error does not say what to install."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install 'regard\[track\]'"):
        trainer(tmp_path, tensorboard=True)
