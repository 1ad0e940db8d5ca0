"""Differentiable sorting of blocks: every position gets a mixture of blocks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.autograd import apply_function, differentiable_vjp
from regard.errors import check_int, check_positive
from regard.numerics import at_least_float32


class BlockSort(nn.Module):
    """Block summaries (b s d) -> S (b h s s): how much of block j is at position i after sorting
    (Tay et al. 2020, arXiv 2002.11296).

        S = Sinkhorn((R + noise) / temperature),  R_i = relu(W₂ relu(W₁ x_i + b₁) + b₂)

    Gumbel noise is added in training mode only, from `seed` and the number of draws so far.

    Args:
        dim: Model width d.
        heads: Number of heads.
        blocks: Maximum number of blocks.
        iterations: Iterations of Sinkhorn balancing.
        temperature: Temperature of S.
        seed: Seed of the noise.
        causal: Whether only earlier blocks are sorted to a position.
    """

    drawn: Tensor

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        blocks: int,
        iterations: int = 5,
        temperature: float = 0.75,
        seed: int = 0,
        causal: bool = False,
    ) -> None:
        super().__init__()
        check_int(1, dim=dim, heads=heads, blocks=blocks)
        check_int(0, iterations=iterations, seed=seed)
        check_positive("temperature", temperature)
        self.heads, self.blocks, self.iterations, self.causal = heads, blocks, iterations, causal
        self.temperature, self.seed = float(temperature), seed
        self.up, self.down = nn.Linear(dim, dim), nn.Linear(dim, heads * blocks)
        self.register_buffer("drawn", torch.zeros((), dtype=torch.long))

    def forward(self, summaries: Tensor, real: Tensor) -> Tensor:
        """S for block summaries (b s d). Blocks that are not `real` (b s) are not sorted."""
        return self.log_weights(summaries, real).exp()

    def log_weights(self, summaries: Tensor, real: Tensor) -> Tensor:
        """log S, at `lowest_log` where S is zero by definition. Small S underflow, log S do not."""
        hidden = _linear(self.up, at_least_float32(summaries)).relu()
        logits = _linear(self.down, at_least_float32(hidden)).relu()
        logits = at_least_float32(logits).unflatten(-1, (self.heads, -1))
        logits = logits[..., : summaries.shape[1]].transpose(1, 2)
        if self.training:
            logits = logits + self._gumbel_noise(logits)
        keep = (real[:, None, :, None] & real[:, None, None, :]).expand(-1, self.heads, -1, -1)
        keep = keep.tril(-1) if self.causal else keep
        return log_sinkhorn(logits / self.temperature, keep, self.iterations, causal=self.causal)

    def _gumbel_noise(self, logits: Tensor) -> Tensor:
        """-log(-log u), from its own generator, so that it changes no other random numbers."""
        generator = torch.Generator().manual_seed(self.seed + int(self.drawn))
        self.drawn += 1
        u = torch.rand(logits.shape, generator=generator, dtype=torch.float64)
        return -(-u.clamp(1e-12, 1 - 1e-12).log()).log().to(logits)


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """The layer in the dtype of x: sums of many tokens do not fit into 16 bits."""
    return F.linear(x, layer.weight.to(x.dtype), layer.bias.to(x.dtype))


def sinkhorn(logits: Tensor, keep: Tensor, iterations: int, *, causal: bool = False) -> Tensor:
    """Sinkhorn balancing: (... s s) -> approximately doubly stochastic, zero where not `keep`.

    Divides rows, then columns by their sums, repeatedly. If causal, the sum of a column runs over
    the rows so far, so that no row depends on a later one.
    """
    return log_sinkhorn(logits, keep, iterations, causal=causal).exp()


def log_sinkhorn(logits: Tensor, keep: Tensor, iterations: int, *, causal: bool = False) -> Tensor:
    """The logarithm of `sinkhorn`, `lowest_log` where not `keep`."""
    low = lowest_log(logits.dtype)

    def subtract(sums: Tensor) -> Tensor:
        return torch.where(keep, logits - sums, logits)

    for _ in range(iterations):
        logits = subtract(logits.masked_fill(~keep, low).logsumexp(-1, keepdim=True))
        columns = logits.masked_fill(~keep, low)
        if not causal:
            sums = columns.logsumexp(-2, keepdim=True)
        elif torch.compiler.is_compiling():
            sums = columns.logcumsumexp(-2)
        else:
            sums = apply_function(_LogCumSumExp, columns)
        logits = subtract(sums)
    return logits.masked_fill(~keep, low)


def lowest_log(dtype: torch.dtype) -> float:
    """Stands for log 0, finite so that gradients are finite."""
    return torch.finfo(dtype).min / 4


class _LogCumSumExp(torch.autograd.Function):
    """`torch.logcumsumexp` along the second to last axis, with second derivatives. PyTorch's are
    NaN where a gradient is zero.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.logcumsumexp(-2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)
        ctx.save_for_forward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            return (_share_of_sums(x, y) * grad[..., :, None, :]).sum(-3)
        return differentiable_vjp(lambda x: x.logcumsumexp(-2), (x,), grad)[0]

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return (_share_of_sums(x, y) * tangent[..., None, :, :]).sum(-2)


def _share_of_sums(x: Tensor, y: Tensor) -> Tensor:
    """exp(x_j − y_i) for j <= i, else zero: x and y (... s c) -> (... s s c)."""
    later = torch.ones(2 * x.shape[-2:-1], dtype=torch.bool, device=x.device).triu(1)
    exponent = x[..., None, :, :] - y[..., :, None, :]
    return exponent.masked_fill(later[..., None], -torch.inf).exp()
