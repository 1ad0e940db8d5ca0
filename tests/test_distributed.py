"""Two real processes train what one does."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import regard
from distributed_cases import CASES, EXPERTS, PLAN, STACKS, WORDS, Ragged, Small, outcome, trainer
from regard.block import Block
from regard.ffn import MLP
from regard.models import load
from regard.stack import SequentialStack
from regard.train import ProcessLost, TrainSettings, distributed, strategy
from regard.train.loss_module import LossModule
from regard.train.settings import parse_settings

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
CLOSE = {"rtol": 1e-7, "atol": 1e-9}


def environment(**more):
    path = os.pathsep.join([str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | more


def torchrun(*words):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        *map(str, words),
    ]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=280)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The folder in which two processes left what came of all cases, and a reader of it."""
    folder = tmp_path_factory.mktemp("two")
    for kind in ("ddp", "fsdp"):  # what they go on from
        trainer(folder / f"one-{kind}", ema_decay=0.9, steps=3, schedule="constant").run()
    done = torchrun(HERE / "distributed_cases.py", folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def left(folder, name, rank=0):
    return torch.load(folder / f"{name}-{rank}.pt", weights_only=False)


def same(got, want):
    assert (
        got.keys() == want.keys()
        and got["parameters"] == want["parameters"]
        and got["tokens"] == want["tokens"]
    )
    for key in ("numbers", "curve"):
        assert got[key] == pytest.approx(want[key], rel=1e-6)
    for key in {"weights", "average", "best"} & want.keys():
        assert list(got[key]) == list(want[key])
        for name, tensor in want[key].items():
            torch.testing.assert_close(
                got[key][name], tensor, **CLOSE, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("case", CASES)
def test_two_processes_are_one(two, case):
    """Fails if the loss is not the mean over all targets of the batch, whoever has them; if
    gradients, the norm that they are cut to, costs, averaged weights or evaluations are other ones;
    if a weight that only a cost knows of is left out."""
    want = outcome(trainer(**CASES[case]))
    same(left(two, case), want)
    same(left(two, case, 1), want)
    assert (want["weights"]["hidden"] != 0).all() and (want["weights"]["idle"] == 1).all()
    before = Small().double().state_dict()
    assert not torch.equal(
        want["weights"]["layers.layers.0.mixer_residual.scale"],
        before["layers.layers.0.mixer_residual.scale"],
    )


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", STACKS)
def test_layers_that_run_again_or_twice_train_as_in_one_process(two, name, kind):
    """Fails if the weights are not there when a layer is run again on the way back, or if its
    gradients come together early."""
    want = outcome(trainer(model=Small(stack=STACKS[name]).double(), steps=3, accumulation_steps=2))
    same(left(two, f"{name}-{kind}"), want)


@pytest.mark.parametrize("case", EXPERTS)
def test_experts_on_two_processes_train_as_on_one(two, case):
    """Fails if the gradients of experts that live in one place are averaged with those of others,
    or their share of the norm is left out; or if one process cannot go on from the checkpoint."""

    def one(folder=None, **more):
        return outcome(
            trainer(
                folder,
                model=Small(experts=True).double(),
                **EXPERTS[case] | {"parallel": "ddp"} | more,
            )
        )

    same(left(two, case), one(steps=3))
    same(one(two / case), one())


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_any_number_of_processes_goes_on_from_a_checkpoint(two, kind):
    """Fails if a checkpoint of two processes says less than one of one process, or the other way
    round."""
    want = outcome(trainer(ema_decay=0.9, schedule="constant"))
    same(left(two, f"from-one-{kind}"), want)
    same(outcome(trainer(two / f"two-{kind}", ema_decay=0.9, schedule="constant")), want)


def test_all_processes_stop_when_one_finds_no_number(two):
    """Fails if a NaN in one process lets the other train on or wait, or if they tell different
    stories."""
    said = [left(two, "nan", rank) for rank in range(2)]
    assert said[0] == said[1] and "The loss is nan" in said[0] and "at step 4" in said[0]
    assert "the last good checkpoint is" in said[0] and "step-00000003" in said[0]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_all_processes_stop_together_and_go_on_bit_by_bit(two, kind):
    """Fails if a signal to one process leaves the other behind, if dropout is the same in both, or
    if it does not go on where it was."""
    said = [left(two, f"stop-{kind}", rank) for rank in range(2)]
    assert said[0] == said[1] and "Stopped at step 4" in said[0]
    drawn = []
    for rank in range(2):
        rest, whole, seed = left(two, f"rest-{kind}", rank)
        assert all(
            torch.equal(rest["weights"][name], tensor) for name, tensor in whole["weights"].items()
        )
        assert rest["numbers"] == whole["numbers"] and rest["curve"] == whole["curve"]
        drawn.append(seed)
    assert drawn[0] != drawn[1]


def test_only_the_first_process_writes(two):
    """Fails if a step is logged twice, or the trained model is not whole."""
    rows = [
        json.loads(line) for line in (two / "execute" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows if "tokens" in row] == [1, 2, 3, 4, 5, 6]
    results = [left(two, "execute", rank) for rank in range(2)]
    assert results[0]["test"] == results[1]["test"] and results[0]["environment"]["processes"] == 2
    assert json.loads((two / "execute" / "result.json").read_text())["test"] == results[0]["test"]
    model = load(two / "execute" / "model")
    assert sum(p.numel() for p in model.parameters()) == results[0]["parameters"]
    assert model(torch.ones(1, 5, dtype=torch.long)).isfinite().all()


def test_the_saved_model_is_the_averaged_one_that_was_evaluated(two):
    """Fails if what is written is not what the result speaks of."""
    from regard.train.run import build_task

    model, made = load(two / "execute" / "model"), build_task(WORDS)
    batch = made.batch("test", made.sample("test", 7).tolist())
    with torch.no_grad():
        statistics = made.metric.update(model(**batch.inputs), batch, [])
    assert made.metric.compute(statistics) == pytest.approx(left(two, "execute")["test"], abs=1e-9)


DIES = """
import os, sys, time, torch
from distributed_cases import trainer
from regard.train import ProcessLost, init_distributed
def watch(progress):
    if progress.step == 2:
        os._exit(3)
try:
    with init_distributed(timeout=60):
        trainer(watch=watch, steps=10**6, eval_every=10**6).run()
except ProcessLost as error:
    print("LOST", error, file=sys.stderr, flush=True)
    sys.exit(4)
"""


def test_a_process_that_dies_ends_the_others(tmp_path):
    """Fails if they wait for it, or do not say what happened."""
    path = tmp_path / "dies.py"
    path.write_text(f"import sys\nsys.path.insert(0, {str(HERE)!r})\n{DIES}")
    began = time.monotonic()
    done = torchrun(path)
    assert done.returncode != 0 and time.monotonic() - began < 60
    assert (
        "LOST Another process of this run ended or does not respond" in done.stderr
        or "exitcode  : 3" in done.stderr
    )
    assert "dies.py FAILED" in done.stderr


# ----------------------------------------------------------------------------------- in one process
def test_errors_of_lost_processes_are_said_in_words():
    """Fails if a closed connection stays a line of C++, or another error is taken for one."""
    with (
        pytest.raises(ProcessLost, match=r"Another process .* resumes from the last checkpoint"),
        distributed.detect_lost_process(),
    ):
        raise RuntimeError(
            "[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2"
        )
    with pytest.raises(RuntimeError, match="size mismatch"), distributed.detect_lost_process():
        raise RuntimeError("size mismatch")


def test_what_does_not_fit_is_refused():
    """Fails if an unknown way of sharing is taken, or a batch that does not divide."""
    with pytest.raises(ValueError, match="parallel must be one of"):
        parse_settings({"parallel": "dp"})
    with pytest.raises(ValueError, match="needs a folder"):
        trainer(tensorboard=True)
    assert set(strategy.STRATEGIES) == {"ddp", "fsdp"}


def test_layers_that_share_weights_are_not_taken_apart():
    """Fails if a weight of two layers would be sharded twice."""
    blocks = [Block(regard.create("vanilla", dim=8, heads=2), MLP(8)) for _ in range(3)]
    blocks[1].ffn.up.weight = blocks[0].ffn.up.weight
    assert strategy.shardable_layers(nn.Sequential(SequentialStack(blocks))) == [blocks[2]]
    outside = nn.Sequential(SequentialStack(blocks[2:]), nn.Linear(8, 8))
    outside[1].weight = blocks[2].mixer.get_parameter(
        next(n for n, p in blocks[2].mixer.named_parameters() if p.shape == (8, 8))
    )
    assert strategy.shardable_layers(outside) == []


def test_the_parts_of_a_step_add_up_to_its_mean():
    """Fails if a part with few targets counts as much as one with many: compared with all examples
    at once."""
    task, model = Ragged(), Small().double()
    lesson, whole = LossModule(model, task, "float32"), task.batch("train", range(8))
    want = torch.autograd.grad(lesson(whole), model.embed.weight)[0]
    run = trainer(model=model, accumulation_steps=3, max_grad_norm=None)
    run.wrapped, run.task.size = run.loss_module, lambda split: 8
    assert run._backward() == pytest.approx(float(lesson(whole).detach()))
    torch.testing.assert_close(model.embed.weight.grad, want)
    assert TrainSettings(**PLAN).parallel == "ddp"
