"""What a training step costs on this machine: FLOPs and bytes counted, seconds measured."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from regard.environment import total_memory
from regard.measure.accelerators import processor_seconds
from regard.measure.cost import cost
from regard.measure.count import FlopCounter, record_saved_activations
from regard.measure.memory import count_step_bytes, step_memory
from regard.measure.model import build_on_meta, example_batch, training_loss
from regard.models import ModelConfig, build

MAX_STEP_FLOPS = 2 * 10**12  # a few minutes at worst
MAX_MEMORY_SHARE = 0.5  # of the physical memory
ROUNDS = 3


@dataclass(frozen=True)
class MeasuredStep:
    """FLOPs, bytes saved by autograd, peak bytes and processor seconds of one training step."""

    forward_flops: float
    backward_flops: float
    activation_bytes: int
    peak_bytes: int
    seconds: float


def refusal_reason(config: ModelConfig, length: int, batch: int) -> str | None:
    """Why a model is too large to run here, or None."""
    model = build_on_meta(config)
    total = cost(model, length, batch=batch)
    peak = step_memory(model, length, batch=batch).peak_bytes
    available = total_memory()
    if peak > MAX_MEMORY_SHARE * available:
        return (
            f"the model needs {peak / 1e9:,.1f} GB, "
            f"more than half of the {available / 1e9:,.1f} GB of this machine"
        )
    flops = total.forward_flops + total.backward_flops
    if flops > MAX_STEP_FLOPS:
        return f"a step needs {flops:.2g} FLOPs, more than the limit of {MAX_STEP_FLOPS:.0e}"
    return None


def measure_step(config: ModelConfig, length: int, batch: int) -> MeasuredStep:
    """Build a model, and measure training steps with AdamW.

    The time is the fastest of three, after a warm-up.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(config)
    inputs = example_batch(config, length, batch)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        training_loss(model, inputs).backward()
        optimizer.step()

    step()
    fastest = min(processor_seconds(step) for _ in range(ROUNDS))
    with record_saved_activations(model) as saved, FlopCounter() as forward:
        loss = training_loss(model, inputs)
    with FlopCounter() as backward:
        loss.backward()
    del loss
    peak = count_step_bytes(model, inputs, torch.optim.AdamW(model.parameters()))
    return MeasuredStep(forward.total, backward.total, saved.bytes, peak, fastest)
