"""Sinks: logits z_h that join the softmax of each query without a value.

Given the output and the log-sum-exp of attention without sinks,

    lse' = log(exp(lse) + exp(z)),     out' = out exp(lse - lse')

and the backward pass of attention with (out', lse') gives the exact gradients of q, k and v, since
dS = P * (dP - rowsum(dout * out')) with P = exp(S - lse'). The weight of the sink is exp(z - lse')
and its value is zero, so dz = -sum exp(z - lse') rowsum(dout * out').
"""

from __future__ import annotations

import torch
from torch import Tensor


def join_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """out (b h n f) and lse (b h n) of attention without sinks (h) -> the output with them.
    Differentiable.
    """
    weight = (lse - torch.logaddexp(lse, sinks.to(lse)[:, None])).exp()
    return out * weight[..., None].to(out.dtype)


def join_sinks_(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Change out (b h n f) and lse (b h n) in place to those of attention with sinks (h)."""
    both = torch.logaddexp(lse, sinks.detach().to(lse)[:, None])
    out.mul_((lse - both).exp()[..., None])
    lse.copy_(both)


def sinks_grad(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of the sinks (h), given those of the output, grad (b h n f), the output and its
    log-sum-exp (b h n) with sinks.
    """
    weight = (sinks.to(lse)[:, None] - lse).exp()
    return -(weight * (grad * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
