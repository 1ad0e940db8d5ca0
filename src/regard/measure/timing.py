"""What a model really takes here: FLOPs counted, bytes kept, seconds of a step; only where it fits."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from regard.measure.accelerators import processor_seconds
from regard.measure.cost import cost
from regard.measure.count import FlopCounter, keeping
from regard.measure.memory import count_step_bytes, step_memory
from regard.measure.model import build_on_meta, example_batch, training_loss
from regard.models import Model, ModelConfig, build

MOST_FLOPS = 2 * 10**12  # of a step: some minutes at worst
SHARE = 0.5  # of the memory of this machine


@dataclass(frozen=True)
class MeasuredStep:
    """Of one training step: FLOPs that were done, bytes that were kept and that were alive at most, and seconds."""

    forward: float
    backward: float
    saved: int
    peak: int
    seconds: float


def refusal_reason(config: ModelConfig, length: int, batch: int) -> str | None:
    """Why a model is not to be run here; None: it may be."""
    model = build_on_meta(config)
    found, memory = cost(model, length, batch=batch), step_memory(model, length, batch=batch)
    here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if memory.peak > SHARE * here:
        return f"it needs {memory.peak / 1e9:,.1f} GB, and more than half of the {here / 1e9:,.1f} GB here is not taken"
    if found.forward + found.backward > MOST_FLOPS:
        return f"it needs {found.forward + found.backward:.2g} FLOPs a step, and more than {MOST_FLOPS:.0e} are not run"
    return None


def measure_step(config: ModelConfig, length: int, batch: int) -> MeasuredStep:
    """Build it, and run a few steps."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(config)
    given = example_batch(config, length, batch)
    fastest = step_seconds(model, given)
    with keeping(model) as kept, FlopCounter() as ahead:
        found = training_loss(model, given)
    with FlopCounter() as back:
        found.backward()
    del found
    peak = count_step_bytes(model, given, torch.optim.AdamW(model.parameters()))
    return MeasuredStep(ahead.total, back.total, kept.bytes, peak, fastest)


def step_seconds(model: Model, given: tuple[torch.Tensor, ...], *, rounds: int = 3) -> float:
    """The fastest of some training steps with AdamW, after one to warm up."""
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        training_loss(model, given).backward()
        optimizer.step()

    return min([processor_seconds(step) for _ in range(rounds + 1)][1:])
