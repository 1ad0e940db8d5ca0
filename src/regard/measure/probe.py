"""How hard a stack is to train, before it is trained: the probes of Liu et al. 2020 (arXiv 2004.08249).

Gradients may be uneven over the layers, which Adam evens out; what it cannot mend is a stack whose output changes the more,
the deeper it is, when each of its weights changes a little.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from regard.block import Block
from regard.deep_init import evaluation_mode
from regard.errors import Unsupported, check_int, check_positive

Perturbation = Mapping[str, Tensor]  # what is added to each parameter, by its name


class SublayerGradient(NamedTuple):
    """The norm of the gradient of all weights of one sub-layer: of block `layer`, its "mixer", "cross" or "ffn"."""

    layer: int
    part: str
    norm: float


def gradient_norms(model: nn.Module, loss: Tensor) -> list[SublayerGradient]:
    """|∂ loss / ∂ W| of each sub-layer of the blocks in a model, from the first to the last.

    The gradients that parameters hold are left as they are.  Frozen parameters count as 0.
    """
    parts = list(_sub_layers(model))
    if not parts:
        raise Unsupported(
            "there is no Block with weights inside, so there are no sub-layers to tell apart"
        )
    weights = list({p: None for _, _, part in parts for p in part.parameters() if p.requires_grad})
    found = dict(
        zip(
            weights,
            torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True),
            strict=True,
        )
    )
    norms = []
    for layer, name, part in parts:
        squares = [
            grad.double().square().sum()
            for p in part.parameters()
            if (grad := found.get(p)) is not None
        ]
        norms.append(SublayerGradient(layer, name, sum(squares, torch.zeros(())).sqrt().item()))
    return norms


def _sub_layers(model: nn.Module) -> Iterator[tuple[int, str, nn.Module]]:
    """Those that have weights, in order."""
    blocks = [part for part in model.modules() if isinstance(part, Block)]
    for layer, block in enumerate(blocks):
        for name, part in (("mixer", block.mixer), ("cross", block.cross), ("ffn", block.ffn)):
            if part is not None and next(part.parameters(), None) is not None:
                yield layer, name, part


# ---------------------------------------------------------------------------------------------- amplification
def amplification(model: nn.Module, moves: Perturbation, *batch: Tensor, **named: Tensor) -> float:
    """E |F(x, W) − F(x, W + δ)|²: how much each number of the output changes when the weights move by δ.

    F(x, W) is model(*batch, **named), in evaluation; where a `mask` (b n) is among them, real tokens count alone.  The weights
    are not touched.  The paper finds O(N) for N sub-layers of post-norm, and O(log N) for pre-norm and Admin.
    Outputs must have one scale to be comparable: put the norm that an `unfinished` residual wants behind the stack, as by
    nn.Sequential(stack, LayerNorm(dim)).
    """
    weights = dict(model.named_parameters())
    unknown = set(moves) - set(weights)
    if unknown:
        raise ValueError(f"the model has no parameters {sorted(unknown)}")
    with evaluation_mode(model), torch.no_grad():
        shifted = {name: weights[name] + move for name, move in moves.items()}
        change = functional_call(model, shifted, batch, named) - model(*batch, **named)
    real = named.get("mask")
    return (change if real is None else change[real]).double().square().mean().item()


def random_perturbation(model: nn.Module, size: float, *, seed: int = 0) -> Perturbation:
    """δ ~ N(0, size²) for every weight."""
    check_positive("size", size)
    check_int(0, seed=seed)
    draw = torch.Generator().manual_seed(seed)
    return {
        name: (size * torch.randn(p.shape, generator=draw, dtype=torch.float64)).to(p)
        for name, p in model.named_parameters()
    }


def adam_first_step(model: nn.Module, loss: Tensor, rate: float) -> Perturbation:
    """δ = −rate · sign(∂ loss / ∂ W): the first step of Adam without warm-up."""
    check_positive("rate", rate)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()), retain_graph=True, allow_unused=True)
    return {
        name: -rate * grad.sign()
        for name, grad in zip(named, found, strict=True)
        if grad is not None
    }
