"""Dense calls that were checked before: what to hand to PyTorch for tensors of the same kind.

A fused call on 64 tokens takes less than a tenth of a millisecond, and checking what was given a good part of that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.attend import sdpa
from regard.attend.call import Call
from regard.pattern import Pattern

MOST = 256  # kinds of calls that are remembered
LARGEST = 1 << 20  # bytes of a mask that is: of longer calls the checks are no part worth saving

_ready: dict[tuple[Any, ...], tuple[Tensor | None, float, bool]] = {}


def get(
    q: Tensor, k: Tensor, v: Tensor, pattern: object, scale: float | None, q_at: int, k_at: int | Tensor
) -> tuple[Tensor | None, float, bool] | None:
    """Mask, dropout and is_causal of a call that was seen before; None: it must be checked."""
    try:
        if q_at == 0 and type(k_at) is int and k_at == 0:
            return _ready.get(_key(q, k, v, pattern, scale))
    except (AttributeError, TypeError):  # something is not what it should be: the checks will say what
        pass
    return None


def put(call: Call, pattern: Pattern, scale: float | None) -> None:
    """Remember a call that passed all checks and needs nothing done before or after the fused one."""
    q, k, v = call.q, call.k, call.v
    straight = q.shape[1] == k.shape[1] and q.shape[3] == v.shape[3]
    if not straight or call.q_at or not isinstance(call.k_at, int) or call.k_at:
        return
    causal = sdpa.plainly_causal(call)
    mask = None if causal else sdpa.mask_of(call)
    if mask is not None and (type(mask) is not Tensor or mask.nbytes > LARGEST):
        return
    if len(_ready) >= MOST:
        _ready.clear()
    _ready[_key(q, k, v, pattern, scale)] = (mask, 0.0, causal)


def _key(q: Tensor, k: Tensor, v: Tensor, pattern: object, scale: float | None) -> tuple[Any, ...]:
    """All that a choice depends on; whether there will be a backward pass is part of it."""
    grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, pattern, scale, grad, torch.get_num_threads()
