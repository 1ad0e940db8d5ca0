"""Exact softmax attention over a layout: only visible tiles are computed, forward and backward.

PyTorch's fused CPU attention accepts any strides, so each `TileRun` is one call on overlapping
views, without copies. It also returns the log-sum-exp of each query, with which partial results are
merged exactly:

    out = sum_i exp(lse_i - lse) out_i,     lse = log sum_i exp(lse_i)

Its backward pass takes (out, lse). Given the merged ones, each call yields its exact share of the
gradients, because dS = P * (dP - rowsum(dout * out)) with P = exp(S - lse); the shares are summed.
Only q, k, v, out and lse are saved, nothing of size (n m).

A prior that depends on the distance alone is the same in all calls of a run: one addend (h s t),
see `layout_addends`. The kernel gives no gradient for it; if one is needed, dS is recomputed and
summed over the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.autograd import check_first_order
from regard.backends.sinks import join_sinks_, sinks_grad
from regard.layout import GatherGroup, Layout, LayoutPart, TileRun
from regard.numerics import additive_mask

# elements of a temporary: larger calls are split, so that it stays in the CPU cache
MAX_TEMPORARY = 1 << 22
OUTPUT_WEIGHT = 4  # an output counts as this many temporaries, because it is read again at once

Addend = Callable[[Tensor, Tensor], Tensor]

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_layout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    forward: Layout,
    backward: Layout,
    *,
    scale: float,
    bias: Tensor | None = None,
    addend: Addend | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q (x n e), k (x m e), v (x m e) -> (x n e), where x counts heads, or examples and heads.

    Args:
        forward, backward: Layouts of the same pattern for each of the passes.
        scale: Factor of the scores.
        bias: Added to the scores of each key (m): 0 or -inf, for padding.
        addend: addend(query indices (s 1), key indices (1 t)) -> (h s t), added to the scores. It
            may depend on the difference of the indices only.
        sinks: Logits (x) that join the softmax without a value.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    ahead = [] if addend is None else layout_addends(forward, addend)
    back = ahead
    if addend is not None and backward is not forward:
        back = layout_addends(backward, addend)
    out: Tensor = _TiledFlash.apply(  # type: ignore[no-untyped-call]
        q, k, v, sinks, forward, backward, scale, bias, len(ahead), *ahead, *back
    )
    return out


def layout_addends(layout: Layout, addend: Addend) -> list[Tensor]:
    """The addend of each run, (h s t), and each group, (h g s w*s), of a layout in the natural
    token order.
    """
    found = []
    for part in layout.parts:
        for run in part.runs:
            q, k = torch.arange(run.s)[:, None] + run.q0, torch.arange(run.t) + run.k0
            found.append(addend(q, k))
        for group in part.groups:
            inside = torch.arange(part.size)
            q = (group.q[:, None] * part.size + inside)[:, :, None]
            k = (group.k[..., None] * part.size + inside).flatten(1)[:, None]
            found.append(addend(q, k))
    return found


class _TiledFlash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, forward, backward, scale, bias, ahead, *addends):  # type: ignore[no-untyped-def]
        total, first = PartialAttention(q), 0
        for part in forward.parts:
            in_place = part is forward.parts[0] and part.q_order is None
            result = total if in_place else PartialAttention(reorder_queries(part, q))
            forward_part(result, part, q, k, v, scale, bias, addends[first:ahead])
            first += len(part.runs) + len(part.groups)
            if not in_place:
                total.add(result, part)
        if sinks is not None:
            join_sinks_(total.out[None], total.lse[None], sinks)
        out = total.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, total.lse, bias, *addends[ahead:])
        ctx.layout, ctx.scale, ctx.ahead = backward, scale, ahead
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        check_first_order("sparse", grad)
        q, k, v, sinks, out, lse, bias, *addends = ctx.saved_tensors
        # a query that sees nothing has zero weights
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        dtype = accumulator_dtype(q.dtype)
        grads = [torch.zeros(x.shape, dtype=dtype) for x in (q, k, v)]
        needs_addends = any(ctx.needs_input_grad[9 + ctx.ahead :])
        sums = [torch.zeros(x.shape, dtype=dtype) if needs_addends else None for x in addends]
        saved, first = (grad, q, k, v, out, lse), 0
        for part in ctx.layout.parts:
            backward_part(grads, part, saved, ctx.scale, bias, addends[first:], sums[first:])
            first += len(part.runs) + len(part.groups)
        addend_grads = [
            None if s is None else s.to(x.dtype) for s, x in zip(sums, addends, strict=True)
        ]
        sink_grad = None if sinks is None else sinks_grad(grad[None], out[None], lse[None], sinks)
        grads = [g.to(q.dtype) for g in grads]
        return *grads, sink_grad, *[None] * (5 + ctx.ahead), *addend_grads


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partial results are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class PartialAttention:
    """The attention output over the keys so far, out (x n e), and its log-sum-exp (x n)."""

    def __init__(self, q: Tensor) -> None:
        dtype = accumulator_dtype(q.dtype)
        self.out = torch.zeros(q.shape, dtype=dtype)
        self.lse = torch.full(q.shape[:-1], -torch.inf, dtype=dtype)

    def add(self, other: PartialAttention, part: LayoutPart) -> None:
        """Merge the result of a part, whose queries may be a subset or in another order."""
        if part.q_order is None:
            _merge(self.out, self.lse, other.out, other.lse)
            return
        out, lse = self.out[:, part.q_order], self.lse[:, part.q_order]
        _merge(out, lse, other.out, other.lse)
        self.out[:, part.q_order], self.lse[:, part.q_order] = out, lse


def _merge(out: Tensor, lse: Tensor, new: Tensor, new_lse: Tensor) -> None:
    """Merge a partial result in place."""
    both = torch.logaddexp(lse, new_lse)
    visible = both > -torch.inf
    old_weight, new_weight = (
        torch.where(visible, (x - both).exp(), 0.0)[..., None] for x in (lse, new_lse)
    )
    out.mul_(old_weight).addcmul_(new.to(out.dtype), new_weight)
    lse.copy_(both)


def forward_part(
    total: PartialAttention,
    part: LayoutPart,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bias: Tensor | None,
    addends: Sequence[Tensor],
) -> None:
    """Attend to a part of a layout and merge the result into `total`, whose queries are in the
    order of the part.
    """
    q, k, v = reorder_queries(part, q), _reorder_keys(part, k), _reorder_keys(part, v)
    bias = None if bias is None else _reorder_keys(part, bias, 0)
    heads, width = q.shape[0], q.shape[-1]
    for index, call in _calls(
        part,
        lambda run: heads * run.s * max(OUTPUT_WEIGHT * width, 0 if bias is None else run.t),
        heads * part.size * width,
    ):
        mask = _add_addend(call.mask(bias, q.dtype), call, addends, index, q)
        new, new_lse = flash(
            call.queries(q), call.keys(k), call.keys(v), attn_mask=mask, scale=scale
        )
        if call.has_empty_rows or bias is not None or addends:
            new_lse = mask_empty_rows(new_lse, mask)
        out, lse = call.queries(total.out), call.queries(total.lse)
        if call.is_first:
            out.copy_(new)
            lse.copy_(new_lse)
        else:
            _merge(out, lse, new, new_lse)
        call.store_queries(total.out, out)
        call.store_queries(total.lse, lse)


def backward_part(
    grads: list[Tensor],
    part: LayoutPart,
    saved: tuple[Tensor, ...],
    scale: float,
    bias: Tensor | None,
    addends: Sequence[Tensor],
    addend_grads: Sequence[Tensor | None],
) -> None:
    """Add the gradients of a part to `grads` (of q, k and v) and to those of the addends.

    `saved` is the gradient of the output, q, k, v, the output and its log-sum-exp.
    """
    grad, q, k, v, out, lse = saved
    grad, q, out, lse = (reorder_queries(part, x) for x in (grad, q, out, lse))
    k, v = _reorder_keys(part, k), _reorder_keys(part, v)
    bias = None if bias is None else _reorder_keys(part, bias, 0)
    orders = (part.q_order, part.k_order, part.k_order)
    dq, dk, dv = (
        total if order is None else torch.zeros(x.shape, dtype=total.dtype)
        for x, total, order in zip((q, k, v), grads, orders, strict=True)
    )
    heads, width = q.shape[0], q.shape[-1]
    has_mask = bias is not None or len(addends) > 0
    for index, call in _calls(
        part,
        lambda run: heads * max(run.t * width, run.s * run.t if has_mask else 0),
        heads * part.size * width,
    ):
        mask = _add_addend(call.mask(bias, q.dtype), call, addends, index, q)
        cgrad, cq, cout, clse = (call.queries(x) for x in (grad, q, out, lse))
        ck, cv = call.keys(k), call.keys(v)
        new_dq, new_dk, new_dv = flash_backward(
            cgrad.contiguous(), cq, ck, cv, cout, clse, 0.0, False, attn_mask=mask, scale=scale
        )
        call.add_to_queries(dq, new_dq)
        call.add_to_keys(dk, new_dk)
        call.add_to_keys(dv, new_dv)
        addend_grad = addend_grads[index] if addends else None
        if addend_grad is not None and mask is not None:
            target = call.select_addend(addend_grad)
            p = (cq @ ck.transpose(-1, -2) * scale + mask - clse.to(q.dtype)[..., None]).exp()
            ds = p * (cgrad @ cv.transpose(-1, -2) - (cgrad * cout).sum(-1, keepdim=True))
            target += ds.unflatten(0, (-1, target.shape[0])).sum(0).sum_to_size(target.shape)
    for x, total, order in zip((dq, dk, dv), grads, orders, strict=True):
        if order is not None:
            total[:, order] += x


def _add_addend(
    mask: Tensor | None, call: _Call, addends: Sequence[Tensor], index: int, q: Tensor
) -> Tensor | None:
    """The mask plus the addend of the call, repeated for all examples: (x 1 s t) or (x g s t)."""
    if not addends:
        return mask
    addend = call.select_addend(addends[index]).to(q.dtype)
    addend = addend.repeat(q.shape[0] // addend.shape[0], 1, 1, 1)
    return addend if mask is None else addend + mask


def mask_empty_rows(lse: Tensor, mask: Tensor | None) -> Tensor:
    """The log-sum-exp with -inf for fully masked rows, for which the fused kernel returns 0."""
    return lse if mask is None else lse.masked_fill((mask == -torch.inf).all(-1), -torch.inf)


def reorder_queries(part: LayoutPart, x: Tensor) -> Tensor:
    """x (x n ...) in the query order of the part."""
    return x if part.q_order is None else x[:, part.q_order]


def _reorder_keys(part: LayoutPart, x: Tensor, dim: int = 1) -> Tensor:
    return x if part.k_order is None else x.index_select(dim, part.k_order)


# ---------------------------------------------------------------------- calls
class _RunCall(NamedTuple):
    """Some or all calls of a run.

    Tensors are accessed as views, which overlap if the step is small.
    """

    run: TileRun

    @property
    def is_first(self) -> bool:
        return self.run.is_first

    @property
    def has_empty_rows(self) -> bool:
        return self.run.has_empty_rows

    def _view(self, x: Tensor, start: int, length: int) -> Tensor:
        """x (x n ...) -> (x count length ...)."""
        shape = (x.shape[0], self.run.count, length, *x.shape[2:])
        stride = (x.stride(0), self.run.step * x.stride(1), *x.stride()[1:])
        return x.as_strided(shape, stride, x.storage_offset() + start * x.stride(1))

    def queries(self, x: Tensor) -> Tensor:
        return self._view(x, self.run.q0, self.run.s)

    def keys(self, x: Tensor) -> Tensor:
        return self._view(x, self.run.k0, self.run.t)

    def store_queries(self, total: Tensor, new: Tensor) -> None:
        """Nothing to do: `queries` is a view."""

    def add_to_queries(self, total: Tensor, grad: Tensor) -> None:
        self.queries(total).add_(grad)

    def add_to_keys(self, total: Tensor, grad: Tensor) -> None:
        """Add gradients (x count t e) of overlapping windows, in slices of `step` keys, which do
        not overlap.
        """
        width = self.run.step or self.run.t
        for start in range(0, self.run.t, width):
            part = grad[:, :, start : start + width]
            self._view(total, self.run.k0 + start, part.shape[2]).add_(part)

    def mask(self, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """The additive mask (1 1 s t), or (1 count s t) with a bias."""
        mask = None if self.run.mask is None else self.run.mask.to(dtype)
        if bias is None:
            return None if mask is None else mask[None, None]
        padding = self.keys(bias[None])[:, :, None]
        return padding.expand(-1, -1, self.run.s, -1) if mask is None else padding + mask

    def select_addend(self, addend: Tensor) -> Tensor:
        """addend (h s t) -> (h 1 s t)."""
        return addend[:, None]


class _GroupCall(NamedTuple):
    """Some or all rows of a group. Tiles are gathered and scattered by index."""

    group: GatherGroup
    part: LayoutPart
    rows: slice

    @property
    def is_first(self) -> bool:
        return self.group.is_first

    @property
    def has_empty_rows(self) -> bool:
        return True  # tiles may be padded

    def _take(self, x: Tensor, index: Tensor) -> Tensor:
        """Tiles of x (x n ...) by index (g w) -> (x g w*size ...)."""
        return self._tiles(x)[:, index].flatten(2, 3)

    def _tiles(self, x: Tensor) -> Tensor:
        """x (x n ...) -> (x tiles size ...), the last tile padded with zeros."""
        missing = -x.shape[1] % self.part.size
        if missing:
            x = F.pad(x, (*(0, 0) * (x.dim() - 2), 0, missing))
        return x.unflatten(1, (-1, self.part.size))

    def queries(self, x: Tensor) -> Tensor:
        return self._take(x, self.group.q[self.rows, None])

    def keys(self, x: Tensor) -> Tensor:
        return self._take(x, self.group.k[self.rows])

    def store_queries(self, total: Tensor, new: Tensor) -> None:
        """Write tiles (x g size ...) back into total (x n ...)."""
        index, size, n = self.group.q[self.rows], self.part.size, total.shape[1]
        if n % size == 0:
            total.unflatten(1, (-1, size))[:, index] = new
            return
        for at, tile in zip(index.tolist(), new.unbind(1), strict=True):
            end = min((at + 1) * size, n)
            total[:, at * size : end] = tile[:, : end - at * size]

    def add_to_queries(self, total: Tensor, grad: Tensor) -> None:
        self._add(total, grad, self.group.q[self.rows])

    def add_to_keys(self, total: Tensor, grad: Tensor) -> None:
        self._add(total, grad, self.group.k[self.rows])

    def _add(self, total: Tensor, grad: Tensor, index: Tensor) -> None:
        """Add tiles, grad (x g w*size e) by index (g w), to total (x n e).

        A tile may occur many times.
        """
        tiles = grad.unflatten(2, (-1, self.part.size)).flatten(1, 2).to(total.dtype)
        if total.shape[1] % self.part.size == 0:
            total.unflatten(1, (-1, self.part.size)).index_add_(1, index.flatten(), tiles)
        else:
            padded = torch.zeros(self._tiles(total).shape, dtype=total.dtype)
            padded.index_add_(1, index.flatten(), tiles)
            total += padded.flatten(1, 2)[:, : total.shape[1]]

    def mask(self, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """The additive mask (1 g size w*size)."""
        mask = None
        if self.group.mask_ids is not None:
            mask = additive_mask(self.part.group_mask(self.group.mask_ids[self.rows]), dtype)[None]
        if bias is None:
            return mask
        padding = self.keys(bias[None])[:, :, None]
        return padding.expand(-1, -1, self.part.size, -1) if mask is None else padding + mask

    def select_addend(self, addend: Tensor) -> Tensor:
        """addend (h g s t) -> the rows of this call."""
        return addend[:, self.rows]


_Call = _RunCall | _GroupCall


def _calls(
    part: LayoutPart, run_elements: Callable[[TileRun], int], tile_elements: int
) -> Iterator[tuple[int, _Call]]:
    """The calls of a part with their index, split so that temporaries stay below MAX_TEMPORARY.

    Args:
        run_elements: Elements of the temporary for one call of a run.
        tile_elements: Elements of the temporary for one key tile of a group.
    """
    for index, run in enumerate(part.runs):
        most = max(1, MAX_TEMPORARY // max(run_elements(run), 1))
        if run.count <= most:
            yield index, _RunCall(run)
            continue
        for i in range(0, run.count, most):
            count, shift = min(most, run.count - i), i * run.step
            yield index, _RunCall(replace(run, count=count, q0=run.q0 + shift, k0=run.k0 + shift))
    for index, group in enumerate(part.groups, len(part.runs)):
        most = max(1, MAX_TEMPORARY // max(tile_elements * group.k.shape[1], 1))
        for start in range(0, len(group.q), most):
            yield index, _GroupCall(group, part, slice(start, start + most))
