"""Normalisation layers (b, n, d) -> (b, n, d), with a mask for padding. `NORMS` lists all by name.

Padding counts as zeros, so that NaN in padding reaches neither other tokens nor the gradient of a
weight. float16 and bfloat16 are computed in float32.
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
    """Base class: normalises x (b, n, d), with mask (b, n), True = keep.

    Args:
        eps: Added to the denominator, by norms that have one.
    """

    eps: float
    # Statistics over many tokens: in training, chunks differ from the whole sequence.
    uses_batch_statistics: bool = False

    def __init__(self, dim: int, eps: float | None = None) -> None:
        super().__init__()
        check_int(1, dim=dim)
        if eps is not None:
            check_positive("eps", eps)
            self.eps = eps
        self.dim = dim

    @abstractmethod
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor: ...


# ---------------------------------------------------------------------------------------- per token
class LayerNorm(Norm):
    """(x − mean) / √(variance + ε) · weight + bias, over the width of each token (Ba et al. 2016,
    arXiv 1607.06450)."""

    def __init__(self, dim: int, *, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__(dim, eps)
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if bias else None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `Norm`."""
        x = zero_padding_tokens(x, mask)
        return F.layer_norm(x, (self.dim,), self.weight, self.bias, self.eps)


class RMSNorm(Norm):
    """x / √(mean of x² + ε) · weight, over the width of each token (Zhang & Sennrich 2019,
    arXiv 1910.07467)."""

    def __init__(self, dim: int, *, eps: float = 1e-6) -> None:
        super().__init__(dim, eps)
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `Norm`."""
        y = zero_padding_tokens(at_least_float32(x), mask)
        scale = (y.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (y * scale * self.weight).to(x.dtype)


class ScaleNorm(Norm):
    """g x / ‖x‖, with a learned scalar g, initially √d (Nguyen & Salazar 2019, arXiv 1910.05895).

    Tokens shorter than `eps` are divided by `eps`.
    """

    def __init__(self, dim: int, *, eps: float = 1e-5) -> None:
        super().__init__(dim, eps)
        self.weight = nn.Parameter(torch.tensor(float(dim)).sqrt())

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `Norm`."""
        y = zero_padding_tokens(at_least_float32(x), mask)
        return (self.weight * F.normalize(y, dim=-1, eps=self.eps)).to(x.dtype)


class GroupNorm(Norm):
    """Layer norm over each of `groups` equal parts of a token's width, then weight and bias
    (Wu & He 2018, arXiv 1803.08494).

    Statistics are per token, not over all positions as for images: it is causal, and padding has no
    influence.
    """

    def __init__(self, dim: int, *, groups: int = 4, eps: float = 1e-5) -> None:
        super().__init__(dim, eps)
        check_int(1, groups=groups)
        if dim % groups:
            nearest = max(g for g in range(1, groups) if dim % g == 0)
            raise ValueError(f"groups must divide dim {dim}, not {groups}: try groups={nearest}")
        self.groups = groups
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `Norm`."""
        y = zero_padding_tokens(at_least_float32(x), mask).unflatten(-1, (self.groups, -1))
        y = F.layer_norm(y, y.shape[-1:], eps=self.eps).flatten(-2)
        return (y * self.weight + self.bias).to(x.dtype)


class NoNorm(Norm):
    """Identity."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `Norm`."""
        return zero_padding_tokens(x, mask)


# -------------------------------------------------------------------------------------- over tokens
class BatchNorm(Norm):
    """(x − mean) / √(variance + ε) · weight + bias, each channel over all real tokens of the batch
    (Ioffe & Szegedy 2015, arXiv 1502.03167).

    In training a token depends on all others, including later ones and other examples. Evaluation
    uses running statistics, and tokens are independent. Processes do not synchronise statistics.

    Args:
        momentum: running = (1 − momentum) · running + momentum · batch, with the unbiased variance.
            Batches of fewer than two real tokens have no variance and change nothing.
    """

    uses_batch_statistics = True
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, dim: int, *, momentum: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__(dim, eps)
        check_fraction("momentum", momentum)
        self.momentum = momentum
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))
        self.register_buffer("running_mean", torch.zeros(dim))
        self.register_buffer("running_var", torch.ones(dim))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `Norm`."""
        y = zero_padding_tokens(at_least_float32(x), mask)
        mean, var = self.running_mean, self.running_var
        if self.training:
            mean = masked_mean(y, mask)
            var = masked_mean((y - mean).square(), mask)
            self._update_running_statistics(mean, var, count_tokens(y, mask))
        return ((y - mean) * (var + self.eps).rsqrt() * self.weight + self.bias).to(x.dtype)

    @torch.no_grad()
    def _update_running_statistics(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        dtype = self.running_mean.dtype
        step = (self.momentum * (count > 1)).to(dtype)
        self.running_mean.lerp_(mean.to(dtype), step)
        unbiased = var * count / (count - 1).clamp(min=1)
        self.running_var.lerp_(unbiased.to(dtype), step)


class PowerNorm(Norm):
    """x̂ = x / ψ, y = weight · x̂ + bias, where ψ² is a running mean of x² over real tokens; no mean
    is subtracted (Shen et al. 2020, arXiv 2003.07845: PN, algorithm 2).

    Step t divides by ψ of step t − 1, then ψ² ← α ψ² + (1 − α) mean(x²). Since ψ is not a function
    of this batch, the paper approximates the gradient with a running ν (with g for ∂L/∂x̂):

        ∂L/∂x = (g − ν x̂) / ψ,    then    ν ← ν (1 − (1 − α) mean(x̂²)) + (1 − α) mean(g x̂)

    Evaluation divides by the last ψ. Every forward and backward pass of training changes the
    statistics, so do not use it in layers that run twice in a step, as under activation
    checkpointing. Processes do not synchronise statistics.

    Args:
        alpha: Decay of the running statistics.
        warmup: Number of training steps that divide by the batch's own quadratic mean, with its
            exact gradient (PN-V).
    """

    uses_batch_statistics = True
    running_square: Tensor
    nu: Tensor
    steps: Tensor

    def __init__(self, dim: int, *, alpha: float = 0.9, warmup: int = 0, eps: float = 1e-5) -> None:
        super().__init__(dim, eps)
        check_fraction("alpha", alpha)
        check_int(0, warmup=warmup)
        self.alpha, self.warmup = alpha, warmup
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))
        self.register_buffer("running_square", torch.ones(dim))
        self.register_buffer("nu", torch.zeros(dim))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `Norm`."""
        y = zero_padding_tokens(at_least_float32(x), mask)
        if self.training:
            y = self._normalize_training(y, mask)
        else:
            y = y / (self.running_square + self.eps).sqrt()
        return (y * self.weight + self.bias).to(x.dtype)

    def _normalize_training(self, x: Tensor, mask: Tensor | None) -> Tensor:
        square = masked_mean(x.square(), mask)
        warming_up = self.warmup > 0 and int(self.steps) < self.warmup
        psi = ((square if warming_up else self.running_square.to(x.dtype)) + self.eps).sqrt()
        with torch.no_grad():
            dtype = self.running_square.dtype
            step = (1 - self.alpha) * (count_tokens(x, mask) > 0)
            self.running_square.lerp_(square.to(dtype), step.to(dtype))
            self.steps += 1
        if warming_up:
            return x / psi
        return _PowerNormFunction.apply(x, psi, mask, self.nu, self.alpha)  # type: ignore[no-untyped-call]


class _PowerNormFunction(torch.autograd.Function):
    """x / ψ, with the approximate gradient of `PowerNorm`, which updates ν in place."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, psi: Tensor, mask: Tensor | None, nu: Tensor, alpha: float
    ) -> Tensor:
        y = x / psi
        ctx.save_for_backward(y, psi)
        ctx.mask, ctx.nu, ctx.alpha = mask, nu, alpha
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, psi = ctx.saved_tensors
        nu = ctx.nu.to(y.dtype, copy=True)  # of the last step: the buffer is updated below
        power = masked_mean(y * y, ctx.mask)
        correlation = masked_mean(zero_padding_tokens(grad, ctx.mask) * y, ctx.mask)
        ctx.nu.copy_(nu * (1 - (1 - ctx.alpha) * power) + (1 - ctx.alpha) * correlation)
        return (grad - nu * y) / psi, None, None, None, None


def count_tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    """Number of real tokens, a scalar of the dtype of x."""
    return x.new_tensor(x.shape[0] * x.shape[1]) if mask is None else mask.sum().to(x.dtype)


def masked_mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """Mean of x (b, n, d) over real tokens, (d); zero if there are none."""
    return zero_padding_tokens(x, mask).sum((0, 1)) / count_tokens(x, mask).clamp(min=1)


def check_fraction(name: str, value: object) -> None:
    """Check for a number between 0 and 1, exclusive."""
    check_positive(name, value)
    if not float(value) < 1:  # type: ignore[arg-type]
        raise ValueError(f"{name} must be below 1, not {value!r}")


NORMS: Mapping[str, type[Norm]] = {
    "layer": LayerNorm,
    "rms": RMSNorm,
    "scale": ScaleNorm,
    "batch": BatchNorm,
    "group": GroupNorm,
    "power": PowerNorm,
    "none": NoNorm,
}


def get_norm(name: str) -> type[Norm]:
    """Norm class of that name: `get_norm("rms")(64)`."""
    if name not in NORMS:
        raise ValueError(f"no norm {name!r}: {did_you_mean(str(name), NORMS)}")
    return NORMS[name]
