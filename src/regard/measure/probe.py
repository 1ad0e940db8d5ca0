"""How hard a deep stack is to train, before it is trained (Liu et al. 2020, arXiv 2004.08249).

Adam compensates for gradients that differ between layers. It does not compensate for amplification:
a deep stack whose output changes much when each weight changes a little.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from regard.block import Block
from regard.deep_init import evaluation_mode
from regard.errors import Unsupported, check_int, check_positive

Perturbation = Mapping[str, Tensor]  # parameter name -> what is added to it


class SublayerGradient(NamedTuple):
    """Gradient norm of one sub-layer: the "mixer", "cross" or "ffn" of block number `layer`."""

    layer: int
    part: str
    norm: float


def gradient_norms(model: nn.Module, loss: Tensor) -> list[SublayerGradient]:
    """Gradient norm of the loss for each sub-layer of the blocks in a model, in order.

    `.grad` of the parameters is not touched. Frozen parameters count as 0.
    """
    blocks = [part for part in model.modules() if isinstance(part, Block)]
    parts = [
        (layer, name, part)
        for layer, block in enumerate(blocks)
        for name, part in (("mixer", block.mixer), ("cross", block.cross), ("ffn", block.ffn))
        if part is not None and next(part.parameters(), None) is not None
    ]
    if not parts:
        raise Unsupported(
            "The model has no Block with weights, so there are no sub-layers to compare."
        )
    weights = list({p: None for _, _, part in parts for p in part.parameters() if p.requires_grad})
    gradients = torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)
    squares = {
        p: gradient.double().square().sum()
        for p, gradient in zip(weights, gradients, strict=True)
        if gradient is not None
    }
    return [
        SublayerGradient(
            layer,
            name,
            sum((squares[p] for p in part.parameters() if p in squares), torch.zeros(()))
            .sqrt()
            .item(),
        )
        for layer, name, part in parts
    ]


def amplification(
    model: nn.Module, perturbation: Perturbation, *args: Tensor, **kwargs: Tensor
) -> float:
    """Mean squared change of the output, E |F(x, W) − F(x, W + δ)|², for a perturbation δ of the
    weights.

    The paper finds O(N) for N post-norm sub-layers, and O(log N) for pre-norm and Admin.

    Args:
        model: Called in evaluation mode; its weights are not changed. Models are comparable only if
            their outputs have the same scale: end a pre-norm stack with a norm,
            nn.Sequential(stack, LayerNorm(dim)).
        perturbation: Added to the parameters, by name.
        args: Inputs of the model.
        kwargs: Inputs by name. With `mask` (b n), only tokens where it is True count.
    """
    weights = dict(model.named_parameters())
    unknown = set(perturbation) - set(weights)
    if unknown:
        raise ValueError(f"The model has no parameters {sorted(unknown)}.")
    with evaluation_mode(model), torch.no_grad():
        shifted = {name: weights[name] + delta for name, delta in perturbation.items()}
        change = functional_call(model, shifted, args, kwargs) - model(*args, **kwargs)
    mask = kwargs.get("mask")
    return (change if mask is None else change[mask]).double().square().mean().item()


def random_perturbation(model: nn.Module, std: float, *, seed: int = 0) -> Perturbation:
    """δ ~ N(0, std²) for every weight."""
    check_positive("std", std)
    check_int(0, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (std * torch.randn(p.shape, generator=generator, dtype=torch.float64)).to(p)
        for name, p in model.named_parameters()
    }


def adam_first_step(model: nn.Module, loss: Tensor, lr: float) -> Perturbation:
    """δ = −lr · sign(∂ loss / ∂ W): the first step of Adam without warm-up."""
    check_positive("lr", lr)
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(
        loss, list(weights.values()), retain_graph=True, allow_unused=True
    )
    return {
        name: -lr * gradient.sign()
        for name, gradient in zip(weights, gradients, strict=True)
        if gradient is not None
    }
