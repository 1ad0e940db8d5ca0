"""Helpers for `torch.autograd.Function`s with a hand-written backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import Function, forward_ad

from regard.errors import Unsupported


def apply_function(function: type[Function], *args: Any) -> Any:
    """`function.apply(*args)`, or `function.forward(*args)`, which is cheaper, if no gradient is
    needed. In forward-mode differentiation also the latter, for a function without a `jvp`.
    """
    if forward_ad._current_level >= 0 and function.jvp is Function.jvp:
        return function.forward(*args)
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
        return function.apply(*args)
    return function.forward(*args)


def differentiable_vjp(
    formula: Callable[..., Tensor | tuple[Tensor, ...]], inputs: tuple[Tensor, ...], grads: Any
) -> tuple[Tensor, ...]:
    """Gradients of `inputs` given those of `formula(*inputs)`, computed by autograd so that they
    are differentiable.

    Used by hand-written backward passes for `create_graph=True` and for batches of gradients.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        inputs = tuple(x.view_as(x) for x in inputs)  # the same tensor may be given twice
        wanted = [x for x in inputs if x.requires_grad]
        found = iter(
            torch.autograd.grad(formula(*inputs), wanted, grads, create_graph=create_graph)
        )
    return tuple(next(found) if x.requires_grad else torch.zeros_like(x) for x in inputs)


def has_batched_gradients(*gradients: Tensor) -> bool:
    """Whether gradients are vmapped over a batch (`is_grads_batched`, `vectorize`), which kernels
    cannot process.
    """
    return any(map(is_legacy_batchedtensor, gradients))


def check_first_order(backend: str, gradient: Tensor) -> None:
    """Raise `Unsupported` in a backward pass that supports neither second derivatives nor batches
    of gradients.
    """
    if torch.is_grad_enabled():  # create_graph=True
        raise Unsupported(
            f"backend {backend!r} does not support second derivatives: use backend='reference'"
        )
    if has_batched_gradients(gradient):
        raise Unsupported(
            f"backend {backend!r} takes one gradient at a time, not a batch: "
            "use backend='reference'"
        )
