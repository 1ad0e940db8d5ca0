"""Remembers the function that runs calls of a given shape, so that repeated small calls skip the
checks.

A fused call on 64 tokens takes less than 0.1 ms, and checking its arguments a good part of that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard import native
from regard.backends.call import AttentionCall
from regard.backends.choose import softmax_backends
from regard.backends.protocol import Backend
from regard.pattern import Pattern

AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]

MAX_ENTRIES = 256
# Entries hold masks or tiles, one megabyte at most for this many pairs. In longer calls the checks
# do not matter.
MAX_PAIRS = 1 << 18


class _Entry(NamedTuple):
    run: AttentionFunction
    traceable: bool  # otherwise it accepts plain tensors only


_entries: dict[tuple[Any, ...], _Entry] = {}


def lookup(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: object,
    scale: float | None,
    q_start: int,
    k_positions: int | Tensor,
) -> AttentionFunction | None:
    """The function that runs this call, or None if there is no entry."""
    try:
        if q_start == 0 and type(k_positions) is int and k_positions == 0:
            found = _entries.get(_key(q, k, v, pattern, scale))
            if found is not None and (
                native.are_plain_tensors(q, k, v)
                or (found.traceable and not native.inside_transform())
            ):
                return found.run
    except (AttributeError, TypeError):  # an invalid argument, which `make_call` will report
        pass
    return None


def remember(
    call: AttentionCall,
    backend: Backend[AttentionCall],
    run: AttentionFunction,
    pattern: Pattern,
    scale: float | None,
) -> None:
    """Add an entry for calls of these shapes, if they are short enough to profit from it."""
    q, k, v = call.q, call.k, call.v
    at_start = call.q_start == 0 and isinstance(call.k_positions, int) and call.k_positions == 0
    if not at_start or q.shape[2] * k.shape[2] > MAX_PAIRS:
        return
    if not native.are_plain_tensors(q, k, v):  # inside a transform the choice is another one
        return
    if len(_entries) >= MAX_ENTRIES:
        _entries.clear()
    _entries[_key(q, k, v, pattern, scale)] = _Entry(run, backend.traceable)


def _key(q: Tensor, k: Tensor, v: Tensor, pattern: object, scale: float | None) -> tuple[Any, ...]:
    """Everything on which the choice depends, including whether a backward pass follows."""
    return (
        q.shape,
        k.shape,
        v.shape,
        q.dtype,
        k.dtype,
        v.dtype,
        q.device,
        k.device,
        v.device,
        pattern,
        scale,
        torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
        torch.get_num_threads(),
        softmax_backends.version,
    )
