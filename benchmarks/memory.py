"""Peak memory of a training step, predicted and measured, each model in its own process.

    python benchmarks/memory.py

"Measured" is the peak resident memory of the process over a few steps, less what it had after the
same steps of a tiny model. Beyond the tensors it includes the workspace of kernels and memory that
the allocator did not return. "Returned" is the same with an allocator that returns every freed
block.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from regard.measure.memory import count_step_bytes, step_memory
from regard.measure.model import build_on_meta, example_batch, simple_config, training_loss
from regard.models import ModelConfig, build
from regard.registry import get_recipe
from regard.show.build import fill_length_arguments

MODELS = [
    ("vanilla", 1024, 4, 256),
    ("vanilla", 4096, 2, 256),
    ("local", 2048, 4, 256),
    ("local", 4096, 2, 256),
    ("linear", 2048, 4, 256),
    ("linformer", 2048, 4, 256),
    ("fnet", 2048, 4, 256),
    ("performer", 2048, 2, 256),
    ("talking_heads", 512, 4, 256),
]
VOCAB, BATCH = 2000, 2
# glibc maps blocks above this size by themselves and returns them when they are freed; by default
# it raises the limit up
# to 32 MB, and freed blocks stay in its heap
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def sizes(name: str, length: int, layers: int, dim: int) -> ModelConfig:
    """Configuration of a model with four heads, if the recipe has heads."""
    recipe = get_recipe(name)
    return simple_config(
        recipe,
        fill_length_arguments(recipe, length, {"heads": recipe.default_heads(4)}),
        dim=dim,
        layers=layers,
        vocab_size=VOCAB,
    )


def resident(peak: bool) -> int:
    """Resident memory of this process in bytes, or its peak."""
    wanted = "VmHWM" if peak else "VmRSS"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(wanted))


def train(name: str, length: int, layers: int, dim: int) -> None:
    """Two steps."""
    config = sizes(name, length, layers, dim)
    model, given = build(config), example_batch(config, length, BATCH)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad(set_to_none=True)
        training_loss(model, given).backward()
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
    config = sizes(name, length, layers, dim)
    model = build(config)
    counted = count_step_bytes(
        model, example_batch(config, length, BATCH), torch.optim.AdamW(model.parameters())
    )
    predicted = step_memory(build_on_meta(config), length, batch=BATCH)
    found = {
        "predicted": predicted.peak_bytes,
        "process": predicted.process_bytes,
        "counted": counted,
        "returned": grown(arguments, RETURNED),
        "measured": grown(arguments, {}),
    }
    return {"name": name, "length": length, "layers": layers, **found}


def grown(arguments: list[str], more: dict[str, str]) -> int:
    """Bytes that a child process took, with more variables in its environment."""
    done = subprocess.run(
        arguments, check=True, capture_output=True, text=True, env={**os.environ, **more}
    )
    return int(done.stdout)


def main() -> None:
    """Print a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child is not None:
        return child(*json.loads(chosen.child))
    titles = (
        "model",
        "layers",
        "tokens",
        "predicted MB",
        "counted MB",
        "returned MB",
        "predicted / returned",
        "predicted process MB",
        "measured MB",
        "predicted / measured",
    )
    print(f"| {' | '.join(titles)} |")
    print("| --- " * len(titles) + "|")
    for model in MODELS:
        found = row(*model)
        mega = {
            key: f"{int(found[key]) / 1e6:.0f}"
            for key in ("predicted", "counted", "returned", "process", "measured")
        }
        tensors, process = (
            f"{int(found[a]) / int(found[b]):.2f}"
            for a, b in (("predicted", "returned"), ("process", "measured"))
        )
        cells = [
            mega["predicted"],
            mega["counted"],
            mega["returned"],
            tensors,
            mega["process"],
            mega["measured"],
            process,
        ]
        print(
            "| "
            + " | ".join(map(str, [found["name"], found["layers"], found["length"], *cells]))
            + " |",
            flush=True,
        )


if __name__ == "__main__":
    main()
