"""`--device` and `--dtype`: names, errors, mixed precision, and what each device needs."""

import json
import math
import os
import re
import signal

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import regard
from regard.bench import BenchCell, BenchPlan, DenseContender, RecipeContender
from regard.bench.cell import prepare_call
from regard.cli import app
from regard.cli.parsing import parse_spec
from regard.device import autocast, available_devices, resolve_device, resolve_dtype
from regard.hf import recover, swap
from regard.models import generate, load
from regard.tasks.base import Batch
from regard.train import Diverged, Interrupted, Trainer, TrainSettings
from regard.train.distributed import WorkerGroup, local_device
from regard.train.inference import evaluate, load_run, predict
from regard.train.run import build_task


@pytest.fixture
def machine(monkeypatch):
    """Pretend that this machine has GPUs: `machine(cuda=2)`, `machine(mps=True)`."""

    def pretend(cuda=0, mps=False, bfloat16=True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: bfloat16)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *_: bfloat16)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)

    pretend()
    return pretend


# ------------------------------------------------------------------------------------------- names
@pytest.mark.parametrize(
    ("has", "found"),
    [({}, "cpu"), ({"mps": True}, "mps"), ({"cuda": 2, "mps": True}, "cuda")],
)
def test_auto_prefers_cuda_then_mps(machine, has, found):
    machine(**has)
    assert resolve_device("auto") == resolve_device() == torch.device(found)


def test_devices_by_name(machine):
    machine(cuda=2)
    assert available_devices() == ["cpu", "cuda:0", "cuda:1"]
    for name in ("cpu", "cuda", "cuda:1"):
        assert resolve_device(name) == resolve_device(torch.device(name)) == torch.device(name)
    assert resolve_device("cuda:0").type == "cuda"
    machine(mps=True)
    assert resolve_device("mps:0") == torch.device("mps")  # as PyTorch prints it


@pytest.mark.parametrize(
    ("has", "name", "message"),
    [
        ({}, "cuda", "Device 'cuda' is not available on this machine. Available: cpu."),
        ({}, "mps", "Device 'mps' is not available on this machine. Available: cpu."),
        (
            {"cuda": 1},
            "cuda:1",
            "'cuda:1' is not available on this machine. Available: cpu, cuda:0",
        ),
        ({}, "", "device must be one of 'auto', 'cpu', 'cuda', 'cuda:N', 'mps', not ''"),
        ({}, "cpu,cuda", "not 'cpu,cuda': give one device"),
        ({}, "gpu", "did you mean 'cuda'?"),
        ({}, "CPU", "did you mean 'cpu'?"),
        ({}, "cuda:x", "did you mean 'cuda:N'?"),
        ({}, None, "not None"),
        ({}, 0, "not 0"),
    ],
)
def test_a_device_that_is_not_there(machine, has, name, message):
    machine(**has)
    with pytest.raises(ValueError, match=re.escape(message)):
        resolve_device(name)
    with pytest.raises(ValueError, match=r"device|available"):
        TrainSettings(device=name) if "available" not in message else WorkerGroup(name)


def test_settings_take_devices_and_dtypes_of_torch():
    """Fails if they are refused, or saved as something other than their names."""
    settings = TrainSettings(device=torch.device("cuda", 1), dtype=torch.bfloat16)
    assert (settings.device, settings.dtype) == ("cuda:1", "bfloat16")
    assert TrainSettings.model_validate_json(settings.model_dump_json()) == settings
    for wrong in ({"device": None}, {"device": 3}, {"device": torch.device("meta")}):
        with pytest.raises(ValueError, match="device must be one of 'auto', 'cpu'"):
            TrainSettings(**wrong)
    for wrong in (None, 3, torch.int32, torch.float64):
        with pytest.raises(ValueError, match="dtype must be one of 'float32', 'bfloat16'"):
            TrainSettings(dtype=wrong)


@pytest.mark.parametrize(
    ("has", "device", "dtype", "message"),
    [
        ({"mps": True}, "mps", "float64", "'mps' does not support float64. Supported: float32"),
        ({"cuda": 1, "bfloat16": False}, "cuda", "bfloat16", "'cuda' does not support bfloat16"),
        ({"mps": True, "bfloat16": False}, "mps", "bfloat16", "Supported: float32, float16"),
        ({}, "cpu", "bf16", "did you mean 'bfloat16'?"),
        ({}, "cpu", "", "dtype must be one of 'float32', 'bfloat16', 'float16', 'float64', not ''"),
        ({}, "cpu", torch.int8, "not 'int8'"),
        ({}, "cpu", None, "not None"),
    ],
)
def test_a_dtype_that_a_device_cannot_do(machine, has, device, dtype, message):
    machine(**has)
    choices = ("float32", "bfloat16", "float16", "float64")
    with pytest.raises(ValueError, match=re.escape(message)):
        resolve_dtype(dtype, resolve_device(device), choices)
    assert resolve_dtype(torch.float32, resolve_device(device)) == torch.float32


def test_processes_of_torchrun_get_a_gpu_each(machine, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert local_device("auto") == local_device("cpu") == torch.device("cpu")
    machine(cuda=2)
    assert local_device("auto") == local_device("cuda") == torch.device("cuda:1")
    for has, name, message in (
        ({"cuda": 1}, "auto", "Process 1 of this machine has no GPU, since there are 1"),
        ({"cuda": 2}, "cuda:1", "use device 'cuda', not 'cuda:1'"),
        ({"mps": True}, "mps", "Several processes cannot share device 'mps'"),
        ({}, "cuda", "not available"),
    ):
        machine(**has)
        with pytest.raises(ValueError, match=message):
            local_device(name)
    machine(mps=True)
    assert local_device("auto") == torch.device("cpu")


# ----------------------------------------------------------------------------------------- commands
def run(*arguments, code=0):
    result = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "120"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


SIZES = ("--dim", 8, "--heads", 2, "--layers", 1, "--batch-size", 4, "--set", "eval_examples=8")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A trained classifier and a trained language model."""
    root = tmp_path_factory.mktemp("runs")
    rows = "".join(f"{'good' if i % 2 else 'bad'} {i},{i % 2}\n" for i in range(60))
    (root / "x.csv").write_text("text,label\n" + rows)
    task = ("--task", "classify:tokenizer=char", "--data", root / "x.csv", "--length", 8)
    run("train", *task, *SIZES, "--steps", 4, "--out", root / "labels", "--dtype", "bfloat16")
    run("train", "--task", "lm", "--length", 16, *SIZES, "--steps", 3, "--out", root / "lm")
    return root


COMMANDS = {
    "train": ("--task", "parity:length=8"),
    "compare": ("--mixers", "local", "--tasks", "parity"),
    "bench": ("local",),
    "eval": ("nowhere",),
    "predict": ("nowhere", "--text", "a"),
    "generate": ("nowhere",),
    "swap": ("nowhere", "--mixer", "local", "--data", "nothing.txt"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--device", "cuda"), "Device 'cuda' is not available on this machine. Available: cpu."),
        (("--device", "cpu,cuda"), "device must be one of"),
        (("--device", ""), "device must be one of"),
        (("--dtype", "bf16"), "did you mean 'bfloat16'?"),
    ],
)
def test_wrong_options_end_a_command(machine, tmp_path, monkeypatch, command, option, message):
    """Fails if an option is not checked first, or the error is not one line with exit code 2."""
    monkeypatch.chdir(tmp_path)
    result = run(command, *COMMANDS[command], *option, code=2)
    assert result.stdout == "" and result.stderr.startswith("error: "), result.output
    assert message in result.stderr and result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_settings_of_train_are_checked_too(machine, tmp_path):
    train = ("train", "--task", "parity", "--out", tmp_path / "r", "--set")
    assert "not available" in run(*train, "device=cuda", code=2).stderr
    assert "did you mean 'dtype'?" in run(*train, "precision=bfloat16", code=1).stderr


def test_another_machine_may_have_the_device(machine, tmp_path):
    """Fails if the devices of a cluster are looked for on the machine of the user."""
    compare = ("compare", "--mixers", "local", "--tasks", "nothing", "--out", tmp_path)
    cluster = ("--executor", "slurm:partition=gpu", "--device")
    assert "nothing" in run(*compare, *cluster, "cuda", code=1).stderr
    assert "did you mean" in run(*compare, *cluster, "cudda", code=2).stderr


def test_a_run_may_resume_on_another_device(machine, tmp_path, texts):
    """Fails if the device counts as another run; any other setting does."""
    out = ("train", "--task", "lm", "--length", 16, *SIZES, "--steps", 3, "--out", texts / "lm")
    run(*out, "--device", "cpu")
    run("train", "--resume", texts / "lm", "--device", "cpu")
    assert (
        "not available" in run("train", "--resume", texts / "lm", "--device", "mps", code=2).stderr
    )
    assert "a different settings" in run(*out, "--dtype", "bfloat16", code=1).stderr
    result = json.loads((texts / "lm/result.json").read_text())
    assert result["environment"]["device"] == "cpu" and result["peak_bytes"] >= 0


def test_mixed_precision_of_trained_models(texts):
    """Fails if --dtype is ignored: rounding shows, and changes little."""
    runs = [load_run(texts / "labels", device="cpu", dtype=d) for d in ("float32", "bfloat16")]
    assert all(p.dtype == torch.float32 for p in runs[1].model.parameters())
    wide, narrow = (next(predict(r, ["good 7"]))["probability"] for r in runs)
    assert wide != narrow == pytest.approx(wide, abs=0.02)
    task = build_task(runs[0].spec)
    losses = [
        evaluate(runs[0].model, task, "test", dtype=d)["loss"] for d in ("float32", "float16")
    ]
    assert losses[0] != losses[1] == pytest.approx(losses[0], abs=0.02)

    wide, narrow = (
        json.loads(
            run(
                *("generate", texts / "lm", "--prompt", "the", "--max-new-tokens", 5, "--json"),
                *("--temperature", 0, "--dtype", dtype, "--device", "cpu"),
            ).stdout
        )["logprobs"]
        for dtype in ("float32", "bfloat16")
    )
    assert wide != narrow and narrow[0] == pytest.approx(wide[0], abs=0.05)
    run("generate", texts / "lm", "--num-beams", 2, "--max-new-tokens", 2, "--dtype", "float16")
    for dtype in ("float32", "bfloat16"):
        run("eval", texts / "labels", "--dtype", dtype)
        run("predict", texts / "labels", "--text", "bad", "--dtype", dtype)


def test_python_loads_models_on_a_device(machine, texts):
    assert load(texts / "lm/model", device="auto").training is False
    for call in (
        lambda: load(texts / "lm/model", device="cuda"),
        lambda: load_run(texts / "lm", device="cuda"),
        lambda: generate(None, [[1]], max_new_tokens=1, device="cuda"),
        lambda: BenchPlan([[DenseContender()]], device="cuda"),
        lambda: swap(nn.TransformerEncoderLayer(8, 2, 8), "local", device="cuda"),
    ):
        with pytest.raises(ValueError, match="Device 'cuda' is not available"):
            call()
    with pytest.raises(ValueError, match="did you mean 'float16'"):
        load_run(texts / "lm", dtype="fp16")


def test_swap_and_recover_in_mixed_precision():
    """Fails if the dtype is ignored, or if weights are converted."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    sample = [torch.randn(1, 12, 16) for _ in range(10)]
    drift = []
    for dtype in ("float32", "bfloat16"):
        drift.append(
            swap(model, "local", window=2, report=sample, device="cpu", dtype=dtype).output
        )
        if dtype == "float32":
            regard.restore(model)
    assert drift[0] != drift[1] == pytest.approx(drift[0], abs=0.02)
    rows = [x[0] for x in sample]
    result = recover(model, rows, steps=4, batch_size=4, device="cpu", dtype="bfloat16")
    assert result.steps >= 4 and all(p.dtype == torch.float32 for p in model.parameters())


# ----------------------------------------------------------------------------------------- training
class Scores(nn.Module):
    """Logits from an embedding, scaled so that the gradients of float16 overflow if it is large."""

    def __init__(self, task, scale=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.scale = nn.Embedding(task.vocab_size, 8), scale
        self.out = nn.Linear(8, task.classes)

    def forward(self, x, mask=None):
        x = self.embed(x)
        return self.out(nn.functional.dropout(x, 0.2, self.training)) * self.scale


def trainer(folder=None, scale=1.0, stop=None, **settings):
    task = regard.tasks.create_task("parity", length=8)
    plan = {"steps": 8, "batch_size": 8, "eval_every": 4, "eval_examples": 8, "save_every": 4}

    def watch(progress):
        if progress.step == stop:
            os.kill(os.getpid(), signal.SIGINT)

    settings = TrainSettings(device="cpu", **plan | settings)
    return Trainer(Scores(task, scale), task, settings, folder=folder, on_step=watch)


def weights(run):
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision_resumes_bit_by_bit(tmp_path, dtype):
    """Fails if the loss scale is not in the checkpoint, or gradients keep their scale."""
    scale = 2e4 if dtype == "float16" else 1.0  # the first steps overflow
    whole = trainer(tmp_path / "whole", scale, dtype=dtype)
    whole.run()
    with pytest.raises(Interrupted):
        trainer(tmp_path / "parts", scale, dtype=dtype, stop=5).run()
    rest = trainer(tmp_path / "parts", scale, dtype=dtype)
    rest.run()
    assert torch.equal(weights(whole), weights(rest))
    if dtype == "float16":
        assert whole.scaler.get_scale() == rest.scaler.get_scale() < 2**16


def test_float16_learns_what_float32_learns():
    """Fails if gradients are not unscaled before they are clipped and used."""
    wide, narrow = (trainer(dtype=dtype, lr=1e-2) for dtype in ("float32", "float16"))
    results = [each.run() for each in (wide, narrow)]
    assert results[0].loss == pytest.approx(results[1].loss, rel=0.01)
    torch.testing.assert_close(weights(narrow), weights(wide), atol=5e-3, rtol=0)


def test_float16_overflow_skips_a_step_and_divergence_ends_the_run():
    """Fails if an overflow ends the run, changes weights, or if NaN halves the scale for ever."""
    run = trainer(scale=2e4, dtype="float16", steps=1, warmup_steps=0)
    before = weights(run)
    run.run()
    assert torch.equal(weights(run), before) and run.scaler.get_scale() == 2**15
    lost = trainer(dtype="float16", steps=60)
    lost.model.out.weight.register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(Diverged, match="gradient norm nan at step 16"):
        lost.run()


def test_batches_go_to_cuda_from_pinned_memory(monkeypatch):
    """Fails if a copy waits, or is made from pageable memory."""
    calls = []

    class Recorded(torch.Tensor):
        def pin_memory(self):
            calls.append("pin")
            return self

        def to(self, device, non_blocking=False):
            calls.append((str(device), non_blocking))
            return self

    x, mask, labels = (torch.zeros(2, 3).as_subclass(Recorded) for _ in range(3))
    batch = Batch({"x": x, "mask": mask}, {"labels": labels})
    batch.to(torch.device("cuda"))
    assert calls == ["pin", ("cuda", True)] * 3
    calls.clear()
    Batch({"x": x, "mask": None}, {"labels": labels}).to(torch.device("cpu"))
    assert calls == [("cpu", False)] * 2


# -------------------------------------------------------------------------------------------- bench
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("mode", ["forward", "training", "decode"])
@pytest.mark.parametrize("scope", ["kernel", "layer"])
def test_bench_uses_the_dtype(dtype, mode, scope, monkeypatch):
    """Fails if a contender computes in another dtype than the cell."""
    cell = BenchCell(scope, mode, 8, heads=2, head_dim=4, dtype=dtype)
    built = []

    def remember(build):
        def wrapped(self, cell):
            built.append(build(self, cell))
            return built[-1]

        return wrapped

    for contender in (DenseContender(), RecipeContender(parse_spec("linear"))):
        kind = type(contender)
        monkeypatch.setattr(kind, "build", remember(kind.build))
        prepare_call(contender, cell)()
        assert built[-1].call().dtype == resolve_dtype(dtype, choices=[dtype])
        assert torch.get_default_dtype() == torch.float32
    assert len(built) == 2


def test_bench_waits_for_the_device(monkeypatch):
    """Fails if a clock is read while an accelerator still works. Its calls run on the CPU here."""
    order = []
    monkeypatch.setattr(regard.bench.cell, "synchronize", lambda device: order.append(str(device)))
    monkeypatch.setattr(torch, "device", FakeContext)

    class Counted(DenseContender):
        def build(self, cell):
            run = super().build(cell)
            return run._replace(call=lambda: order.append("call") or run.call())

    call = prepare_call(
        Counted(), BenchCell("kernel", "forward", 4, heads=1, head_dim=4, device="x")
    )
    assert order == ["x"]
    call()
    assert order == ["x", "call", "x"]


class FakeContext:
    """Stands for `torch.device` of an accelerator, without moving anything."""

    type = "x"

    def __init__(self, name):
        self.name = name

    def __str__(self):
        return self.name

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


def test_bench_options(machine):
    assert BenchPlan([[DenseContender()]]).device == "cpu"
    with pytest.raises(ValueError, match="did you mean 'float16'"):
        BenchPlan([[DenseContender()]], dtype="fp16")
    machine(mps=True)
    plan = BenchPlan([[DenseContender()]])
    assert plan.device == "mps" and len(plan.threads) == 1
    assert {cell.device for cell in plan.cells()} == {"mps"}
    with pytest.raises(ValueError, match="'mps' does not support float64"):
        BenchPlan([[DenseContender()]], dtype="float64")
    with pytest.raises(ValueError, match="clock 'cpu' does not measure device 'mps'"):
        BenchPlan([[DenseContender()]], clock="cpu")


def test_autocast_context():
    x = torch.randn(2, 2)
    with autocast(torch.device("cpu"), torch.float16):
        assert (x @ x).dtype == torch.float16
    with autocast(torch.device("meta"), torch.float32):
        assert (x @ x).dtype == torch.float32
