"""The memory of a training step, predicted and measured: each model in a process of its own.

    python benchmarks/memory.py

Measured is the most memory that the process held in a few steps, less what it held when it had loaded everything and run the
same step with a tiny model.  Beside the tensors that is what kernels need inside, and what the allocator did not give back.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch

from regard.measure.memory import counted_step, step_memory
from regard.measure.model import Sizes, build, on_meta
from regard.registry import get
from regard.show.build import fitted, heads_of

MODELS = [
    ("vanilla", 1024, 4, 256), ("vanilla", 4096, 2, 256), ("local", 2048, 4, 256), ("local", 4096, 2, 256),
    ("linear", 2048, 4, 256), ("linformer", 2048, 4, 256), ("fnet", 2048, 4, 256), ("performer", 2048, 2, 256),
    ("talking_heads", 512, 4, 256),
]  # fmt: skip
VOCAB, BATCH = 2000, 2


def sizes(name: str, length: int, layers: int, dim: int) -> Sizes:
    """Of the model, with four heads where it has any."""
    recipe = get(name)
    return Sizes(recipe, fitted(recipe, length, {"heads": heads_of(recipe, 4)}), dim, layers, VOCAB)


def resident(peak: bool) -> int:
    """Bytes that this process holds, or held at most."""
    wanted = "VmHWM" if peak else "VmRSS"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(wanted))


def train(name: str, length: int, layers: int, dim: int) -> None:
    """Two steps."""
    model = build(sizes(name, length, layers, dim))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(BATCH, length, dtype=torch.long)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=True)
        model.loss(tokens, tokens).backward()
        optimizer.step()


def child(name: str, length: int, layers: int, dim: int) -> None:
    """Print the bytes that the steps took."""
    train(name, 256, 1, 32)
    before = resident(peak=False)
    train(name, length, layers, dim)
    print(resident(peak=True) - before)


def row(name: str, length: int, layers: int, dim: int) -> dict[str, str | int]:
    """Predicted, counted and measured bytes of one model."""
    arguments = [sys.executable, __file__, "--child", json.dumps([name, length, layers, dim])]
    measured = int(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)
    model = build(sizes(name, length, layers, dim))
    counted = counted_step(model, torch.zeros(BATCH, length, dtype=torch.long), torch.optim.AdamW(model.parameters()))
    predicted = step_memory(on_meta(sizes(name, length, layers, dim)), length, batch=BATCH).peak
    return {"name": name, "length": length, "predicted": predicted, "counted": counted, "measured": measured}


def main() -> None:
    """Print a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child is not None:
        return child(*json.loads(chosen.child))
    titles = ("tokens", "predicted MB", "counted MB", "measured MB", "of counted", "of measured")
    print(f"{'model':16}" + "".join(f"{title:>{width}}" for title, width in zip(titles, (7, 14, 12, 13, 12, 13), strict=True)))
    for model in MODELS:
        found = row(*model)
        predicted, counted, measured = (int(found[key]) for key in ("predicted", "counted", "measured"))
        shares = f"{predicted / counted:>12.2f}{predicted / measured:>13.2f}"
        name, tokens = found["name"], found["length"]
        print(f"{name:16}{tokens:>7}{predicted / 1e6:>14.0f}{counted / 1e6:>12.0f}{measured / 1e6:>13.0f}{shares}", flush=True)


if __name__ == "__main__":
    main()
