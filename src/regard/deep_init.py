"""Initialisation of deep stacks: Admin's profiling, DeepNorm's scaled weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from regard.block import Block
from regard.errors import Unsupported, check_positive
from regard.mixer import Mixer
from regard.residual import Admin


def admin_init(model: nn.Module, *args: Tensor, **kwargs: Tensor) -> list[float]:
    """Initialise ω of all `Admin` residuals from a batch (Liu et al. 2020, arXiv 2004.08249).

    Calls model(*args, **kwargs) once, in evaluation mode and without gradients. With x_{i−1} the
    input of sub-layer f_i,

        ω_1 = 1,    ω_{i+1} = √(Var[ω_i x_{i−1}] + Var[f_i(x_{i−1})])

    over all values of real tokens. If x is normalised, Var[ω_i x_{i−1}] = ω_i², so ω² sums the
    variances of the previous branches. Initialise encoder and decoder separately: each starts at 1.

    Returns:
        The values of ω, in the order of the sub-layers.
    """
    residuals = [module for module in model.modules() if isinstance(module, Admin)]
    if not residuals:
        raise Unsupported("the model has no Admin residual to initialise")
    values: dict[Admin, float] = {}
    following = 1.0

    def profile(residual: Admin, x: Tensor, y: Tensor, mask: Tensor | None) -> None:
        nonlocal following
        if residual in values:
            raise Unsupported(
                "an Admin residual runs twice in a pass, and one ω cannot fit two depths"
            )
        # Set before use, as in the authors' code: later sub-layers see the scaled stream.
        residual.omega.fill_(following)
        values[residual] = following
        x, y = ((t if mask is None else t[mask]).double() for t in (residual.omega * x, y))
        following = (x.var(correction=0) + y.var(correction=0)).sqrt().item()
        if not 0 < following < float("inf"):
            raise ValueError(
                f"the standard deviation of this batch is {following}: "
                "admin_init needs real tokens that differ"
            )

    before = [residual.omega.clone() for residual in residuals]
    with evaluation_mode(model), torch.no_grad():
        try:
            for residual in residuals:
                residual.profiler = profile
            model(*args, **kwargs)
            missed = len(residuals) - len(values)
            if missed:
                raise ValueError(
                    f"{missed} of {len(residuals)} Admin residuals did not run on this batch"
                )
        except Exception:
            for residual, omega in zip(residuals, before, strict=True):
                residual.omega.copy_(omega)
            raise
        finally:
            for residual in residuals:
                residual.profiler = None
    return list(values.values())


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and restore the mode of each module at exit."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@torch.no_grad()
def deepnorm_init(model: nn.Module, beta: float) -> None:
    """Initialise weights for DeepNorm (Wang et al. 2022, arXiv 2203.00555), Xavier normal:

        W ~ N(0, gain² · 2 / (rows + columns)),

    with gain β in feed-forward layers and value and output projections, and gain 1 in query and key
    projections; their biases become zero. Uses torch's global generator. In mixers, these are the
    linear layers named q, k, v and out; other parameters stay unchanged, and a mixer without v or
    out is refused.
    """
    check_positive("beta", beta)
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    if not blocks:
        raise Unsupported("the model has no Block to initialise")
    mixers = [
        mixer for block in blocks for mixer in (block.mixer, block.cross) if mixer is not None
    ]
    for mixer in mixers:
        if not _projections(mixer, "v", "out"):
            raise Unsupported(
                f"{mixer.name} does not support deepnorm: "
                "it has no value or output projection that β could scale"
            )
    for mixer in mixers:
        _xavier_normal(_projections(mixer, "q", "k"), 1.0)
        _xavier_normal(_projections(mixer, "v", "out"), beta)
    for block in blocks:
        if block.ffn is not None:
            _xavier_normal(block.ffn.modules(), beta)


def _projections(mixer: Mixer, *names: str) -> list[nn.Linear]:
    """Linear layers of a mixer with these names."""
    return [
        module
        for name, module in mixer.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in names
    ]


def _xavier_normal(modules: Iterable[nn.Module], gain: float) -> None:
    """Initialise matrices, also several in one parameter, and zero the biases of linear layers."""
    for module in modules:
        for weight in module.parameters(recurse=False):
            if weight.dim() > 1:
                weight.normal_(0, gain * (2 / sum(weight.shape[-2:])) ** 0.5)
            elif isinstance(module, nn.Linear):
                weight.zero_()
