"""Calls that were checked before: what to run for tensors of the same kind.

A fused call on 64 tokens takes less than a tenth of a millisecond, and checking what was given a good part of that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard import native
from regard.backends import cpp, sdpa
from regard.backends.call import AttentionCall
from regard.pattern import Pattern

Run = Callable[[Tensor, Tensor, Tensor], Tensor]


class _Tiles(partial[Tensor]):
    """By the kernel, which must be asked each time whether it may."""


MOST = 256  # kinds of calls that are remembered
LARGEST = (
    1 << 20
)  # bytes of a mask or of tiles that are: of longer calls the checks are no part worth saving

_entries: dict[tuple[Any, ...], Run] = {}


def get(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: object,
    scale: float | None,
    q_start: int,
    k_positions: int | Tensor,
) -> Run | None:
    """What to run for a call that was seen before; None: it must be checked."""
    try:
        if q_start == 0 and type(k_positions) is int and k_positions == 0:
            found = _entries.get(_key(q, k, v, pattern, scale))
            return (
                None if type(found) is _Tiles and not native.are_plain_tensors(q, k, v) else found
            )
    except (
        AttributeError,
        TypeError,
    ):  # something is not what it should be: the checks will say what
        pass
    return None


def put(call: AttentionCall, backend: str, pattern: Pattern, scale: float | None) -> None:
    """Remember a call that passed all checks and needs nothing done before or after."""
    q, k, v = call.q, call.k, call.v
    straight = q.shape[1] == k.shape[1] and q.shape[3] == v.shape[3]
    if not straight or call.q_start or not isinstance(call.k_positions, int) or call.k_positions:
        return
    ways: dict[str, Callable[[AttentionCall], Run | None]] = {"sdpa": _dense, "cpp": _compiled}
    run = ways[backend](call) if backend in ways else None
    if run is None:
        return
    if len(_entries) >= MOST:
        _entries.clear()
    _entries[_key(q, k, v, pattern, scale)] = run


def _dense(call: AttentionCall) -> Run | None:
    causal = sdpa.plainly_causal(call)
    mask = None if causal else sdpa.mask_of(call)
    if mask is not None and (type(mask) is not Tensor or mask.nbytes > LARGEST):
        return None
    if mask is None and not causal and call.scale == 1 / math.sqrt(call.q.shape[3]):
        return (
            F.scaled_dot_product_attention
        )  # as it is: arguments that it does not need take as long as looking it up
    return partial(
        F.scaled_dot_product_attention, attn_mask=mask, is_causal=causal, scale=call.scale
    )


def _compiled(call: AttentionCall) -> Run | None:
    if call.pattern.heads:
        return None
    work = cpp.work_of(call)
    if sum(part.nbytes() for part in work) > LARGEST:
        return None
    return _Tiles(cpp.attend_tiles, work=work, scale=call.scale)


def _key(q: Tensor, k: Tensor, v: Tensor, pattern: object, scale: float | None) -> tuple[Any, ...]:
    """All that a choice depends on; whether there will be a backward pass is part of it."""
    grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    places = q.device, k.device, v.device
    return (
        q.shape,
        k.shape,
        v.shape,
        q.dtype,
        k.dtype,
        v.dtype,
        places,
        pattern,
        scale,
        grad,
        torch.get_num_threads(),
    )
