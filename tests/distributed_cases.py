"""Training runs for `test_parallel.py`: the same in one process and in two.

As a program, `torchrun --nproc-per-node 2 distributed_cases.py FOLDER`, it runs all cases and
leaves what came of each in FOLDER.
"""

import os
import signal
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import regard
from regard.block import Block
from regard.ffn import MLP, ExpertBank, MixtureOfExperts, Router
from regard.models import IGNORE_INDEX, ModuleSpec, cross_entropy_loss
from regard.residual import PreNorm, ReZero
from regard.stack import ReversibleStack, SequentialStack, SharedStack, build_sublayers
from regard.tasks.base import TokenTask, token_example
from regard.tasks.metrics import Bits
from regard.tasks.rendering import RenderedText
from regard.train import Diverged, Interrupted, Trainer, TrainSettings, init_distributed
from regard.train.run import RunSpec, run_training

PLAN = {
    "steps": 6,
    "batch_size": 8,
    "eval_every": 3,
    "eval_examples": 9,
    "save_every": 3,
    "warmup_steps": 2,
    "lr": 1e-2,
}
CASES = {
    "ddp": {"max_grad_norm": 0.5, "ema_decay": 0.9},
    "parts": {"accumulation_steps": 3, "max_grad_norm": None},
    "fsdp": {"parallel": "fsdp", "max_grad_norm": 0.5, "ema_decay": 0.9},
    "fsdp-parts": {"parallel": "fsdp", "accumulation_steps": 2},
}
STACKS = {
    "reversible": lambda blocks: ReversibleStack(
        [half for block in blocks for half in build_sublayers(block.mixer, block.ffn)]
    ),
    "shared": lambda blocks: SharedStack(blocks, 3),
    "twice": lambda blocks: SequentialStack([blocks[1], *blocks]),
}
EXPERTS = {
    "experts-ddp": {"ema_decay": 0.9, "max_grad_norm": 0.5, "schedule": "constant"},
    "experts-fsdp": {"parallel": "fsdp", "max_grad_norm": 0.5, "schedule": "constant"},
}
WORDS = RunSpec(
    task=ModuleSpec(name="copy", arguments={"length": 9, "symbols": 4}),
    dim=8,
    heads=2,
    layers=2,
    dropout=0.1,
    threads=1,
    settings=TrainSettings(
        steps=6,
        batch_size=4,
        eval_every=3,
        eval_examples=7,
        save_every=2,
        ema_decay=0.9,
        parallel="fsdp",
        tensorboard=False,
    ),
)


class Ragged(TokenTask):
    """Examples of many lengths, with few targets or many, and some with none."""

    output, causal = "token", True

    def __init__(self):
        super().__init__(vocab_size=7, classes=7, length=9)
        self.metrics = (Bits(),)

    def size(self, split):
        return 40

    def example(self, split, index):
        random = np.random.default_rng([len(split), index])
        tokens = torch.from_numpy(random.integers(1, 7, 2 + index % 8))
        target = torch.where(
            torch.from_numpy(random.random(len(tokens)) < (index % 3) / 2),
            tokens.roll(1),
            IGNORE_INDEX,
        )
        return token_example(tokens, target)

    def render(self, example, prediction=None):
        return RenderedText(str(example))

    def loss(self, output, batch, *, label_smoothing=0.0):
        return cross_entropy_loss(output, batch.targets["labels"])  # in float64, if they are


class Small(nn.Module):
    """Two blocks with tied ends, a weight that is one number, one that only a cost knows of, and
    one that nobody asks."""

    def __init__(self, dim=8, dropout=0.0, experts=False, stack=SequentialStack):
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(7, dim)
        mixers = [regard.create("vanilla", dim=dim, heads=2, causal=True) for _ in range(2)]
        bank = (
            MixtureOfExperts(
                ExpertBank(partial(MLP, dim, 6), 4),
                Router(dim, 4),
                top_k=2,
                capacity=None,
                balance_loss_weight=0,
            )
            if experts
            else MLP(dim)
        )
        blocks = [
            Block(mixers[0], MLP(dim), residual=ReZero, dropout=dropout),
            Block(mixers[1], bank, residual=PreNorm),
        ]
        with torch.no_grad():
            for name, p in blocks[0].named_parameters():
                p.fill_(0.5) if name.endswith("scale") else None
        self.layers = stack(blocks)
        self.hidden = nn.Parameter(torch.zeros(3))
        self.idle = nn.Parameter(torch.ones(4, 2))
        self.register_buffer("flags", torch.tensor([True, False]))

    def forward(self, x, mask=None):
        real = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
        x = self.layers(self.embed(x), mask=mask)
        regard.record_aux("hidden", lambda: (self.hidden - 1).square().sum(), is_loss=True)
        regard.record_aux(
            "size", lambda: 0.1 * (x.square().mean(-1) * real).sum() / real.sum(), is_loss=True
        )
        return F.linear(x, self.embed.weight)


def trainer(folder=None, *, model=None, watch=lambda progress: None, **given):
    model = Small().double() if model is None else model
    return Trainer(model, Ragged(), TrainSettings(**PLAN | given), folder=folder, on_step=watch)


def outcome(run):
    """What two runs are compared by."""
    result = run.run()
    found = {
        "weights": run.strategy.full_state(),
        "numbers": [result.loss, result.best, result.test],
        "tokens": result.tokens,
    }
    found["curve"], found["parameters"] = [row["valid"] for row in result.curve], result.parameters
    found["best"] = run.best.to_files(run.strategy)["best_model"]
    if run.ema is not None:
        found["average"] = {
            run.strategy.full_name(name): run.strategy.full_tensor(run.ema.weights[name], p)
            for name, p in run.model.named_parameters()
        }
    return found


# --------------------------------------------------------------------------------- in two processes
def keep(folder, name, value, rank):
    torch.save(value, folder / f"{name}-{rank}.pt")


def mishaps(folder, rank):
    """What ends a run early, in one of the processes only."""

    def poison(progress):  # the first process alone calls it
        if progress.step == 4:
            with torch.no_grad():
                run.model.hidden.fill_(float("nan"))

    run = trainer(folder / "nan", watch=poison)
    try:
        run.run()
    except Diverged as error:
        keep(folder, "nan", str(error), rank)

    def stop(progress):
        if progress.step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    for kind in ("ddp", "fsdp"):
        dropped = partial(trainer, parallel=kind, ema_decay=0.9)
        try:
            dropped(folder / f"stop-{kind}", model=Small(dropout=0.3), watch=stop).run()
        except Interrupted as error:
            keep(folder, f"stop-{kind}", str(error), rank)
        found = outcome(dropped(folder / f"stop-{kind}", model=Small(dropout=0.3)))
        whole = dropped(model=Small(dropout=0.3))
        keep(folder, f"rest-{kind}", (found, outcome(whole), torch.initial_seed()), rank)


def main():
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    with init_distributed(timeout=120):
        rank = torch.distributed.get_rank()
        for name, given in CASES.items():
            keep(folder, name, outcome(trainer(**given)), rank)
        for name, given in EXPERTS.items():
            model = Small(experts=True).double()
            model.layers.layers[1].ffn.shard()
            keep(
                folder,
                name,
                outcome(trainer(folder / name, model=model, **given | {"steps": 3})),
                rank,
            )
        for kind in ("ddp", "fsdp"):
            for name, stack in STACKS.items():
                run = trainer(
                    model=Small(stack=stack).double(), parallel=kind, steps=3, accumulation_steps=2
                )
                keep(folder, f"{name}-{kind}", outcome(run), rank)
            more = {"ema_decay": 0.9, "schedule": "constant", "parallel": kind}
            keep(folder, f"from-one-{kind}", outcome(trainer(folder / f"one-{kind}", **more)), rank)
            outcome(trainer(folder / f"two-{kind}", **more | {"steps": 3}))
        mishaps(folder, rank)
        keep(folder, "execute", run_training(WORDS, folder / "execute"), rank)


if __name__ == "__main__":
    main()
