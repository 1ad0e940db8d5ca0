"""Normalisation: (b n d) -> (b n d), and a mask that tells which tokens are real.

Those that are left out count as zeros, so that NaN in padding reaches neither other tokens nor the gradient of a weight.
float16 and bfloat16 are computed in float32.  `NORMS` has all kinds by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from regard.errors import check_int, check_positive, did_you_mean
from regard.numerics import at_least_float32, zero_padding_tokens


class Norm(nn.Module, ABC):
    """x (b n d), mask (b n), True = a real token -> (b n d)."""

    eps: float  # added where it divides, by those that have it
    pooled: bool = False  # has statistics of many tokens: chunks are the whole in evaluation, but not in training

    def __init__(self, dim: int, eps: float | None = None) -> None:
        super().__init__()
        check_int(1, dim=dim)
        if eps is not None:
            check_positive("eps", eps)
            self.eps = eps
        self.dim = dim

    @abstractmethod
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor: ...


# ---------------------------------------------------------------------------------------------- each token by itself
class LayerNorm(Norm):
    """(x − mean) / √(variance + ε) · gain + bias, over the width of each token (Ba et al. 2016, arXiv 1607.06450)."""

    def __init__(self, dim: int, *, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__(dim, eps)
        self.gain = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if bias else None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `Norm`."""
        return F.layer_norm(
            zero_padding_tokens(x, mask), (self.dim,), self.gain, self.bias, self.eps
        )


class RMSNorm(Norm):
    """x / √(mean of x² + ε) · gain, over the width of each token (Zhang & Sennrich 2019, arXiv 1910.07467)."""

    def __init__(self, dim: int, *, eps: float = 1e-6) -> None:
        super().__init__(dim, eps)
        self.gain = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `Norm`."""
        wide = zero_padding_tokens(at_least_float32(x), mask)
        return (wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.gain).to(
            x.dtype
        )


class ScaleNorm(Norm):
    """g x / ‖x‖, with one learned number g, √d at first (Nguyen & Salazar 2019, arXiv 1910.05895).

    Tokens shorter than `eps` are divided by `eps`.
    """

    def __init__(self, dim: int, *, eps: float = 1e-5) -> None:
        super().__init__(dim, eps)
        self.gain = nn.Parameter(torch.tensor(float(dim)).sqrt())

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `Norm`."""
        return (
            self.gain
            * F.normalize(zero_padding_tokens(at_least_float32(x), mask), dim=-1, eps=self.eps)
        ).to(x.dtype)


class GroupNorm(Norm):
    """Layer norm over each of `peer_groups` equal parts of a token's width, then gain and bias (Wu & He 2018, arXiv 1803.08494).

    Statistics are of one token, not of all places as in images: so it is causal, and padding is no matter.
    """

    def __init__(self, dim: int, *, groups: int = 4, eps: float = 1e-5) -> None:
        super().__init__(dim, eps)
        check_int(1, groups=groups)
        if dim % groups:
            fit = max(g for g in range(1, groups) if dim % g == 0)
            raise ValueError(f"groups must divide dim {dim}, and {groups} does not; {fit} does")
        self.groups = groups
        self.gain, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `Norm`."""
        parts = zero_padding_tokens(at_least_float32(x), mask).unflatten(-1, (self.groups, -1))
        return (
            F.layer_norm(parts, parts.shape[-1:], eps=self.eps).flatten(-2) * self.gain + self.bias
        ).to(x.dtype)


class NoNorm(Norm):
    """x as it is."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `Norm`."""
        return zero_padding_tokens(x, mask)


# ---------------------------------------------------------------------------------------------- many tokens together
class BatchNorm(Norm):
    """(x − mean) / √(variance + ε) · gain + bias, each of the d numbers over all real tokens of the batch (Ioffe & Szegedy
    2015, arXiv 1502.03167).

    In training a token depends on all others, later ones and other examples too.  In evaluation the running statistics are
    used, and it depends on none.  Each process has its own statistics: nothing is synchronised.

    momentum   running = (1 − momentum) · running + momentum · batch; the variance that is kept is the unbiased one.
               A batch of fewer than two real tokens has no variance, and changes nothing
    """

    pooled = True
    mean: Tensor
    variance: Tensor

    def __init__(self, dim: int, *, momentum: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__(dim, eps)
        check_share("momentum", momentum)
        self.momentum = momentum
        self.gain, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("variance", torch.ones(dim))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `Norm`."""
        wide = zero_padding_tokens(at_least_float32(x), mask)
        mean, variance = self._moments(wide, mask) if self.training else (self.mean, self.variance)
        return ((wide - mean) * (variance + self.eps).rsqrt() * self.gain + self.bias).to(x.dtype)

    def _moments(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of this batch; the running ones go on."""
        count = count_tokens(x, mask)
        mean = masked_mean(x, mask)
        variance = masked_mean((x - mean).square(), mask)
        with torch.no_grad():
            step = self.momentum * (count > 1)
            self.mean.lerp_(mean.to(self.mean.dtype), step.to(self.mean.dtype))
            unbiased = variance * count / (count - 1).clamp(min=1)
            self.variance.lerp_(unbiased.to(self.variance.dtype), step.to(self.variance.dtype))
        return mean, variance


class PowerNorm(Norm):
    """x̂ = x / ψ, y = gain · x̂ + bias, where ψ² is a running mean of x² over real tokens, and no mean is subtracted (Shen et
    al. 2020, arXiv 2003.07845: PN, algorithm 2).

    Step t divides by ψ of step t − 1, then ψ² ← α ψ² + (1 − α) mean(x²).  Since ψ is no function of this batch, the paper
    replaces the gradient by an approximate one, with a running ν (written g for ∂L/∂x̂):

        ∂L/∂x = (g − ν x̂) / ψ,    then    ν ← ν (1 − (1 − α) mean(x̂²)) + (1 − α) mean(g x̂)

    Evaluation divides by the last ψ.  Statistics change in every forward and backward of training: not for layers that run
    twice in a step, as under activation checkpointing.  Each process has its own: nothing is synchronised.

    alpha    how much of the running statistics stays
    warmup   so many steps of training divide by the batch's own quadratic mean, with its exact gradient (PN-V)
    """

    pooled = True
    square: Tensor
    nu: Tensor
    steps: Tensor

    def __init__(self, dim: int, *, alpha: float = 0.9, warmup: int = 0, eps: float = 1e-5) -> None:
        super().__init__(dim, eps)
        check_share("alpha", alpha)
        check_int(0, warmup=warmup)
        self.alpha, self.warmup = alpha, warmup
        self.gain, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))
        self.register_buffer("square", torch.ones(dim))
        self.register_buffer("nu", torch.zeros(dim))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `Norm`."""
        wide = zero_padding_tokens(at_least_float32(x), mask)
        unit = self._train(wide, mask) if self.training else wide / (self.square + self.eps).sqrt()
        return (unit * self.gain + self.bias).to(x.dtype)

    def _train(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """x̂ of a step of training; ψ² goes on."""
        square = masked_mean(x.square(), mask)
        early = self.warmup > 0 and int(self.steps) < self.warmup
        root = ((square if early else self.square.to(x.dtype)) + self.eps).sqrt()
        with torch.no_grad():
            step = (1 - self.alpha) * (count_tokens(x, mask) > 0)
            self.square.lerp_(square.to(self.square.dtype), step.to(self.square.dtype))
            self.steps += 1
        return x / root if early else _Approximate.apply(x, root, mask, self.nu, self.alpha)  # type: ignore[no-untyped-call]


class _Approximate(torch.autograd.Function):
    """x / ψ, with the backward of `PowerNorm`, which changes ν in place."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, root: Tensor, mask: Tensor | None, nu: Tensor, alpha: float
    ) -> Tensor:
        unit = x / root
        ctx.save_for_backward(unit, root)
        ctx.mask, ctx.nu, ctx.alpha = mask, nu, alpha
        return unit

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        unit, root = ctx.saved_tensors
        nu = ctx.nu.to(unit.dtype, copy=True)  # of the step before: the buffer goes on below
        power, along = (
            masked_mean(t * unit, ctx.mask) for t in (unit, zero_padding_tokens(grad, ctx.mask))
        )
        ctx.nu.copy_(nu * (1 - (1 - ctx.alpha) * power) + (1 - ctx.alpha) * along)
        return (grad - nu * unit) / root, None, None, None, None


def count_tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    """How many tokens are real, as a scalar."""
    return x.new_tensor(x.shape[0] * x.shape[1]) if mask is None else mask.sum().to(x.dtype)


def masked_mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """x (b n d) -> (d): the mean over real tokens; zero where there is none."""
    return zero_padding_tokens(x, mask).sum((0, 1)) / count_tokens(x, mask).clamp(min=1)


def check_share(name: str, value: object) -> None:
    """The value must be a number between 0 and 1, neither of them."""
    check_positive(name, value)
    if not float(value) < 1:  # type: ignore[arg-type]
        raise ValueError(f"{name} must be below 1, not {value!r}")


NORMS: Mapping[str, type[Norm]] = {
    "layer": LayerNorm,
    "rms": RMSNorm,
    "l2": ScaleNorm,
    "batch": BatchNorm,
    "group": GroupNorm,
    "power": PowerNorm,
    "none": NoNorm,
}


def get_norm(name: str) -> type[Norm]:
    """The kind of this name, to be built from a width: get_norm("rms")(64)."""
    if name not in NORMS:
        raise ValueError(f"no norm {name!r}: {did_you_mean(str(name), NORMS)}")
    return NORMS[name]
