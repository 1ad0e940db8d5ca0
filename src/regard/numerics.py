"""What several mechanisms share: a softmax that may see nothing, precision, and the bounds of a stream."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import Function

from regard.errors import Unsupported


def masked_softmax(scores: Tensor, keep: Tensor | None) -> Tensor:
    """softmax of scores (... m) over the places that `write_record` allows; where it allows none, all weights are zero."""
    if keep is None:
        return torch.softmax(scores, -1)
    lowest = torch.finfo(scores.dtype).min  # not −∞: a row of nothing else would be NaN
    return torch.softmax(scores.masked_fill(~keep, lowest), -1) * keep.any(-1, keepdim=True)


def zero_padding_tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    """x (... n d) with zeros where mask (... n) leaves tokens out: NaN would survive a weight of zero."""
    return x if mask is None else x.masked_fill(~mask[..., None], 0)


def attention_mask(
    n: int, m: int, *, causal: bool, mask: Tensor | None, device: torch.device
) -> Tensor | None:
    """Which of m keys each of the n last queries may see, (b 1 n m) or (n m); None: all of them."""
    past = torch.ones(n, m, dtype=torch.bool, device=device).tril(m - n) if causal else None
    if mask is None:
        return past
    real = mask[:, None, None, :]
    return real if past is None else real & past


def chunk_length(size: int, n: int) -> int:
    """How many of n tokens to take at once: `size` at most.  In a graph for any length all, for it has no loop over chunks."""
    return n if torch.compiler.is_exporting() else min(size, n)


def stable_argsort(x: Tensor) -> Tensor:
    """Where to take from so that whole numbers x (... n) >= 0 are sorted, equal ones as they stood."""
    if torch.compiler.is_exporting():  # no two are equal then: ONNX has no stable sort
        n = x.shape[-1]
        return (x.long() * n + torch.arange(n, device=x.device)).argsort(-1)
    return x.argsort(dim=-1, stable=True)


def cumulative_max(x: Tensor) -> Tensor:
    """The largest of x (... n) up to each place."""
    if torch.compiler.is_exporting():  # each against all: ONNX has no such sum
        n = x.shape[-1]
        later = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
        return torch.where(later, x.amin(-1, keepdim=True)[..., None], x[..., None, :]).amax(-1)
    return x.cummax(-1).values


def check_stream_length(length: int | None, end: int) -> None:
    """A stream may not grow longer than what was built."""
    if length is not None and end > length:
        raise ValueError(
            f"the stream is {end} tokens long now, and this was built for at most {length}"
        )


def at_least_float32(x: Tensor) -> Tensor:
    """float16 and bfloat16 as float32: for exponentials, transforms and long sums."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def apply_function(function: type[Function], *given: Any) -> Any:
    """A function with a backward pass of its own; without what autograd costs where no gradient is asked for."""
    asked = torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in given
    )
    return function.apply(*given) if asked else function.forward(*given)


def differentiable_vjp(
    formula: Callable[..., Tensor | tuple[Tensor, ...]], inputs: tuple[Tensor, ...], given: Any
) -> tuple[Tensor, ...]:
    """The gradients of inputs, given those of what the formula makes of them, as something that has gradients itself.

    For create_graph=True, where a function `apply_function` is asked for the derivative of its backward pass, which it has not, and
    for many gradients at once.
    """
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        inputs = tuple(x.view_as(x) for x in inputs)  # one of them may be made of another, or be it
        wanted = [x for x in inputs if x.requires_grad]
        found = iter(torch.autograd.grad(formula(*inputs), wanted, given, create_graph=again))
    return tuple(next(found) if x.requires_grad else torch.zeros_like(x) for x in inputs)


def has_batched_gradients(*gradients: Tensor) -> bool:
    """Whether they are many at once (`is_grads_batched`, `vectorize`), which a kernel cannot take."""
    return any(map(is_legacy_batchedtensor, gradients))


def check_first_order(executor: str, gradient: Tensor) -> None:
    """What a backward pass by hand cannot do, it must not pretend to."""
    if torch.is_grad_enabled():  # create_graph=True
        raise Unsupported(
            f"the {executor} executor has no second derivative: use backend='reference'"
        )
    if has_batched_gradients(gradient):
        raise Unsupported(
            f"the {executor} executor takes one gradient at a time, not a batch of them: use backend='reference'"
        )


def token_matmul(weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """weight (n m), x (b m c), bias (n) -> weight x + bias, (b n c): one product, where `@` turns x and the result round."""
    b, m, c = x.shape
    flat = x.transpose(0, 1).reshape(m, b * c)
    y = weight @ flat if bias is None else torch.addmm(bias[:, None], weight, flat)
    return y.view(weight.shape[0], b, c).transpose(0, 1)


def slice_dim(x: Tensor, axis: int, first: int, end: int) -> Tensor:
    """Places `first` to `end` - 1 along an axis.  All of them is x itself: a cut costs a copy in the backward pass."""
    if torch.compiler.is_exporting():  # a slice is a graph of its own where it takes all
        return x.index_select(axis, torch.arange(first, end, device=x.device))
    return x if (first, end) == (0, x.shape[axis]) else x.narrow(axis, first, end - first)


def disable_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Autocast may not round what stands inside.  No context where none is needed: it costs as much as a small product."""
    device = x.device.type  # "meta" and others know no autocast
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else nullcontext()


def check_single_head(name: str, heads: int) -> None:
    """What has no heads takes none."""
    if heads != 1:
        raise ValueError(f"{name} has no heads: give heads=1 or leave it out, not {heads}")
