"""Which residual schemes train a deep stack without warm-up.

    python benchmarks/depth.py                       the table, about ten minutes on one core
    python benchmarks/depth.py --only admin,post     some rows

A causal stack of 24 layers of softmax attention and feed-forward layers of width 32 learns the next
character of a generated text: 9 of 10 characters follow from the previous one by a fixed
permutation, the others are random. The loss is ln 16 = 2.77 per character at the start and 0.57 at
best. Adam with a constant learning rate.

All weights are initialized with Xavier's normal distribution, as in the papers; torch's default for
linear layers has a third of its variance, and favours post-norm. DeepNorm scales by β. Admin is
initialized on the first batch.

The result is the mean loss of the last 10 of 60 steps: median and worst of the seeds. Results go to
benchmarks/results/depth.json.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard.block import Block
from regard.deep_init import admin_init, deepnorm_init
from regard.ffn import MLP
from regard.norm import LayerNorm, NoNorm
from regard.residual import RESIDUALS, deepnorm_scales, get_residual
from regard.stack import SequentialStack

RESULT = Path(__file__).parent / "results" / "depth.json"
LAYERS, DIM, HEADS, CHARACTERS, LENGTH, BATCH, NOISE = 24, 32, 4, 16, 16, 8, 0.1
STEPS, SEEDS, RATES = 60, 3, (1e-3, 3e-3, 1e-2)
NOTHING = math.log(CHARACTERS)


def text(steps: int, seed: int) -> Tensor:
    """(steps b n+1) characters, of a language that the seed makes."""
    draw = torch.Generator().manual_seed(seed)
    follows = torch.randperm(CHARACTERS, generator=draw)
    found = torch.randint(CHARACTERS, (steps, BATCH, LENGTH + 1), generator=draw)
    noisy = torch.rand(found.shape, generator=draw) < NOISE
    for i in range(1, LENGTH + 1):
        found[..., i] = torch.where(noisy[..., i], found[..., i], follows[found[..., i - 1]])
    return found


class Language(nn.Module):
    """Characters (b n) -> scores of the next (b n characters)."""

    def __init__(self, name: str, layers: int) -> None:
        super().__init__()
        make = get_residual(name, layers)
        self.embed, self.place = (
            nn.Embedding(CHARACTERS, DIM),
            nn.Parameter(0.5 * torch.randn(LENGTH, DIM)),
        )
        self.stack = SequentialStack(
            [Block(attention(), MLP(DIM, 2 * DIM), residual=make) for _ in range(layers)]
        )
        self.norm = LayerNorm(DIM) if RESIDUALS[name].needs_final_norm else NoNorm(DIM)
        self.head = nn.Linear(DIM, CHARACTERS)
        deepnorm_init(self.stack, deepnorm_scales(layers).beta if name == "deepnorm" else 1.0)

    def forward(self, characters: Tensor) -> Tensor:
        return self.head(self.norm(self.stack(self.embed(characters) + self.place)))


def attention() -> regard.Mixer:
    return regard.create("vanilla", dim=DIM, heads=HEADS, causal=True)


def train(name: str, *, rate: float, steps: int, seed: int, layers: int = LAYERS) -> list[float]:
    """The loss of each step."""
    torch.manual_seed(seed)
    model, batches, losses = Language(name, layers), text(steps, seed), []
    if name == "admin":
        admin_init(model, batches[0, :, :-1])
    adam = torch.optim.Adam(model.parameters(), lr=rate)
    for batch in batches:
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    return losses


def row(name: str) -> dict[str, list[float]]:
    """By rate: what each seed loses at the end."""
    found: dict[str, list[float]] = {}
    for rate in RATES:
        runs = [train(name, rate=rate, steps=STEPS, seed=seed) for seed in range(SEEDS)]
        found[f"{rate:g}"] = [round(statistics.mean(losses[-10:]), 3) for losses in runs]
    return found


def main() -> None:
    """Print the rows, and keep them beside those of earlier runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(RESIDUALS), help="names, with commas between")
    names = parser.parse_args().only.split(",")
    torch.set_num_threads(1)
    print(
        f"loss after {STEPS} steps of {LAYERS} layers: median of {SEEDS} seeds (worst), "
        "by learning rate"
    )
    print(f"{'':12}" + "".join(f"{rate:>16g}" for rate in RATES))
    for name in names:
        found = row(name)
        print(
            f"{name:12}"
            + "".join(f"{statistics.median(v):9.2f} ({max(v):.2f})" for v in found.values()),
            flush=True,
        )
        rows = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else {}
        report = {
            "layers": LAYERS,
            "dim": DIM,
            "steps": STEPS,
            "seeds": SEEDS,
            "rows": rows | {name: found},
        }
        RESULT.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
