"""Only the tiles that hold a seen pair: heads with patterns of their own, padding and marks, on top of the fused calls."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.backends import token_groups
from regard.backends.call import AttentionCall
from regard.backends.split import Picked, added, by_head, grows
from regard.backends.tiled_flash import attend_layout as fused
from regard.backends.token_groups import TokenGroups
from regard.layout import Layout, LayoutPart, TileRun, build_layout
from regard.pattern import Pattern


def refuses(call: AttentionCall) -> str | None:
    """Why it cannot do this; None: it can."""
    if call.q.device.type != "cpu":
        return f"its kernels run on the CPU, not on {call.q.device.type}"
    if isinstance(call.k_positions, Tensor):
        return "the keys do not stand in a row"
    if call.prior is not None and (call.global_attention_mask is not None or call.pattern.heads):
        return "a prior together with marks, or with a pattern for each head, is not laid out"
    if call.global_attention_mask is not None and not grows(call.pattern):
        return "marks under ~ take pairs away, and only added ones are laid out"
    return None


def run(call: AttentionCall) -> Tensor:
    """Attention over the layout of the pattern."""
    if call.pattern.heads:
        return by_head(call, run)
    if call.prior is not None and not _regular(call):
        work = build_layout(
            call.pattern,
            call.q.shape[2],
            call.k.shape[2],
            q_start=call.q_start,
            k_start=_start(call),
        )
        indexed = (group for part in work.parts for group in expand(part))
        return token_groups.attend(
            call.q,
            call.k,
            call.v,
            indexed,
            scale=call.scale,
            mask=call.mask,
            prior=call.prior,
            q_start=call.q_start,
            k_start=_start(call),
        )
    q, k, v, width = _one_width(call)
    return _fused(call, q, k, v)[..., :width]


def _regular(call: AttentionCall) -> bool:
    """Whether the prior depends on distance alone, and no part of the pattern is laid out in an order of its own."""
    if call.prior is None or not call.prior.relative:
        return False
    return all(
        part.q_order is None and part.k_order is None
        for work in _layouts(call, call.pattern)
        for part in work.parts
    )


def _fused(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Examples without padding or marks share a call; others have each their own."""
    addend = None if call.prior is None else partial(_addend, call)
    if (
        call.mask is None
        and call.global_attention_mask is None
        and all(_mergeable(x) for x in (q, k, v))
    ):
        ahead, back = _layouts(call, call.pattern)
        flat = fused(
            q.flatten(0, 1),
            k.flatten(0, 1),
            v.flatten(0, 1),
            ahead,
            back,
            scale=call.scale,
            addend=addend,
        )
        return flat.unflatten(0, q.shape[:2])
    examples = []
    for i in range(q.shape[0]):
        bias = None if call.mask is None or call.mask[i].all() else _bias(call.mask[i], q.dtype)
        marked = call.global_attention_mask is not None and bool(
            call.global_attention_mask[i].any()
        )
        work = (
            _marked(call, call.global_attention_mask[i])  # type: ignore[index]
            if marked
            else _layouts(call, call.pattern.resolve_global_mask(False, False))
        )
        examples.append(fused(q[i], k[i], v[i], *work, scale=call.scale, bias=bias, addend=addend))
    return torch.stack(examples)


def _addend(call: AttentionCall, q: Tensor, k: Tensor) -> Tensor:
    """The prior for places q (... s 1) and k (... 1 t) of this call: (h ... s t)."""
    assert call.prior is not None
    return call.prior(q + call.q_start, k + _start(call), call.q, call.k).expand(
        call.q.shape[1], *[-1] * q.dim()
    )


def _start(call: AttentionCall) -> int:
    assert isinstance(call.k_positions, int)
    return call.k_positions


def _layouts(call: AttentionCall, pattern: Pattern) -> tuple[Layout, Layout]:
    """For the forward pass and for the backward pass, where there may be one."""
    n, m = call.q.shape[2], call.k.shape[2]
    forward = build_layout(pattern, n, m, q_start=call.q_start, k_start=_start(call))
    if not call.grad():
        return forward, forward
    return forward, build_layout(
        pattern, n, m, q_start=call.q_start, k_start=_start(call), backward=True
    )


def _marked(call: AttentionCall, global_attention_mask: Tensor) -> tuple[Layout, Layout]:
    """The pattern without marks, then what the marks add."""
    more = [_part(picked) for picked in added(call, global_attention_mask)]
    forward, backward = (
        Layout((*work.parts, *more))
        for work in _layouts(call, call.pattern.resolve_global_mask(False, False))
    )
    return forward, backward


def _part(picked: Picked) -> LayoutPart:
    """One call for all of it."""
    keep, q_order, k_order = picked
    n, m = keep.shape
    run = TileRun(
        1, 0, 0, n, 0, m, torch.zeros(n, m).masked_fill_(~keep, -torch.inf), has_empty_rows=True
    )
    return LayoutPart(n, m, n, (run,), (), torch.empty(0), q_order, k_order)


def expand(part: LayoutPart) -> Iterator[TokenGroups]:
    """The calls of a part as groups of token numbers."""
    for run in part.runs:
        first = torch.arange(run.count)[:, None] * run.step
        keep = None if run.mask is None else run.mask == 0
        q, k = first + run.q0 + torch.arange(run.s), first + run.k0 + torch.arange(run.t)
        yield TokenGroups(
            _numbers(q, part.n, part.q_order), _numbers(k, part.m, part.k_order), keep
        )
    for group in part.groups:
        inside = torch.arange(part.size)
        q = group.q[:, None] * part.size + inside
        k = (group.k[..., None] * part.size + inside).flatten(1)
        keep = None
        if group.mask_ids is not None:
            keep = (
                part.masks[group.mask_ids.flatten()]
                .unflatten(0, group.k.shape)
                .transpose(1, 2)
                .flatten(2)
            )
        yield TokenGroups(
            _numbers(q, part.n, part.q_order), _numbers(k, part.m, part.k_order), keep
        )


def _numbers(at: Tensor, n: int, order: Tensor | None) -> Tensor:
    """Places in the part's order -> token numbers, -1 past the end."""
    return torch.where(at < n, at if order is None else order[at.clamp(max=n - 1)], -1)


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -torch.inf)


def _mergeable(x: Tensor) -> bool:
    """Whether (b h n e) can be seen as (b*h n e) without a copy."""
    return x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)


def _one_width(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor, int]:
    """The fused kernels want one width for all: fill up with zeros, which change no score and no value."""
    e, f = call.q.shape[3], call.v.shape[3]
    if e == f:
        return call.q, call.k, call.v, f
    wide = max(e, f)
    return *(F.pad(x, (0, wide - x.shape[3])) for x in (call.q, call.k, call.v)), f  # type: ignore[return-value]
