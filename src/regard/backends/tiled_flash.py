"""Exact softmax attention over a layout: only the tiles that hold a seen pair are computed, forward and backward.

PyTorch's fused CPU attention takes any strides, so each `Run` is one call on overlapping views, with no copy.  It also
returns the log-sum-exp of each query, with which partial results merge exactly:

    out = sum_i exp(lse_i - lse) out_i,     lse = log sum_i exp(lse_i)

Its backward takes (out, lse).  Given the *merged* ones, each call yields its exact share of the gradients, because
dS = P * (dP - rowsum(dout * out)) with P = exp(S - lse); the shares are added up.  Nothing of size (n m) is kept: only
q, k, v, out and lse.

A prior that depends on distance alone is the same in every call of a run: one addend (h s t) each, see `addends`.  The
kernel gives no gradient for it, so where one is wanted dS is computed again and summed over the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.autograd import check_first_order
from regard.layout import GatherGroup, Layout, LayoutPart, TileRun

AT_ONCE = (
    1 << 22
)  # numbers in a temporary: calls with more are split, so that it stays in the cache
COPIED = 4  # a result counts so many times, for it is read again at once

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
) -> Tensor:
    """q (x n e), k (x m e), v (x m e) -> (x n e), where x counts heads, or examples and heads.

    `forward` and `backward` lay out the same pattern, each as suits its pass.  bias (m) is added to the scores of each
    key: 0 or -inf, for padding.  addend(q places (s 1), k places (1 t)) -> (h s t) is added to all scores; it may depend on
    the difference of the places only.  A query that sees nothing gives zero.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    ahead = [] if addend is None else addends(forward, addend)
    back = [] if addend is None else ahead if backward is forward else addends(backward, addend)
    out: Tensor = _Sparse.apply(q, k, v, forward, backward, scale, bias, len(ahead), *ahead, *back)  # type: ignore[no-untyped-call]
    return out


def addends(work: Layout, addend: Addend) -> list[Tensor]:
    """What is added in each call of a layout in the order of the tokens, runs before groups: (h s t), or (h g s w*s)."""
    found = []
    for part in work.parts:
        for run in part.runs:
            found.append(
                addend(torch.arange(run.s)[:, None] + run.q0, torch.arange(run.t) + run.k0)
            )
        for group in part.groups:
            inside = torch.arange(part.size)
            q = (group.q[:, None] * part.size + inside)[:, :, None]
            k = (group.k[..., None] * part.size + inside).flatten(1)[:, None]
            found.append(addend(q, k))
    return found


class _Sparse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, forward, backward, scale, bias, ahead, *more):  # type: ignore[no-untyped-def]
        total, first = PartialAttention(q), 0
        for part in forward.parts:
            alone = part is forward.parts[0] and part.q_order is None
            mine = total if alone else PartialAttention(reorder_queries(part, q))
            forward_part(mine, part, q, k, v, scale, bias, more[first:ahead])
            first += len(part.runs) + len(part.groups)
            if not alone:
                total.add(mine, part)
        out = total.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, total.lse, bias, *more[ahead:])
        ctx.layout, ctx.scale, ctx.ahead = backward, scale, ahead
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        check_first_order("sparse", grad)
        q, k, v, out, lse, bias, *more = ctx.saved_tensors
        lse = lse.masked_fill(
            lse == -torch.inf, torch.inf
        )  # a query that sees nothing has no weight anywhere
        wide = accumulator_dtype(q.dtype)
        grads = [torch.zeros(x.shape, dtype=wide) for x in (q, k, v)]
        wanted = any(ctx.needs_input_grad[8 + ctx.ahead :])
        ours = [torch.zeros(x.shape, dtype=wide) if wanted else None for x in more]
        first = 0
        for part in ctx.layout.parts:
            backward_part(
                grads, part, (grad, q, k, v, out, lse), ctx.scale, bias, more[first:], ours[first:]
            )
            first += len(part.runs) + len(part.groups)
        given = [None if x is None else x.to(y.dtype) for x, y in zip(ours, more, strict=True)]
        return *(g.to(q.dtype) for g in grads), *[None] * (5 + ctx.ahead), *given


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class PartialAttention:
    """What has been attended to so far: out (x n e) and its log-sum-exp (x n)."""

    def __init__(self, q: Tensor) -> None:
        wide = accumulator_dtype(q.dtype)
        self.out = torch.zeros(q.shape, dtype=wide)
        self.lse = torch.full(q.shape[:-1], -torch.inf, dtype=wide)

    def add(self, other: PartialAttention, part: LayoutPart) -> None:
        """Merge the result of a part, whose queries may be some only, or in another order."""
        if part.q_order is None:
            _merge(self.out, self.lse, other.out, other.lse, fresh=False)
            return
        out, lse = self.out[:, part.q_order], self.lse[:, part.q_order]
        _merge(out, lse, other.out, other.lse, fresh=False)
        self.out[:, part.q_order], self.lse[:, part.q_order] = out, lse


def _merge(out: Tensor, lse: Tensor, new: Tensor, new_lse: Tensor, fresh: bool) -> None:
    """Add a partial result, in place."""
    if fresh:
        out.copy_(new)
        lse.copy_(new_lse)
        return
    both = torch.logaddexp(lse, new_lse)
    known = both > -torch.inf
    old_share, new_share = (
        torch.where(known, (x - both).exp(), 0.0)[..., None] for x in (lse, new_lse)
    )
    out.mul_(old_share).addcmul_(new.to(out.dtype), new_share)
    lse.copy_(both)


# ---------------------------------------------------------------------------------------------- forward
def forward_part(
    total: PartialAttention,
    part: LayoutPart,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bias: Tensor | None,
    more: Sequence[Tensor],
) -> None:
    q, k, v, bias = (
        reorder_queries(part, q),
        _keys(part, k),
        _keys(part, v),
        None if bias is None else _keys(part, bias, 0),
    )
    for i, run in enumerate(part.runs):
        for piece in _split(
            run, q.shape[0] * run.s * max(COPIED * q.shape[-1], 0 if bias is None else run.t)
        ):
            mask = _with(_run_mask(piece, bias, q.dtype), more, i, q)
            views = _window(q, piece, "q"), _window(k, piece, "k"), _window(v, piece, "k")
            out, lse = flash(*views, attn_mask=mask, scale=scale)
            if piece.has_empty_rows or bias is not None or more:
                lse = blinded(lse, mask)
            _merge(
                _window(total.out, piece, "q"),
                _window(total.lse, piece, "q"),
                out,
                lse,
                piece.is_first,
            )
    for i, group in enumerate(part.groups, len(part.runs)):
        _forward_group(total, part, group, q, k, v, scale, bias, more[i : i + 1])


def _forward_group(
    total: PartialAttention,
    part: LayoutPart,
    group: GatherGroup,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bias: Tensor | None,
    more: Sequence[Tensor],
) -> None:
    for g, rows in _split_group(group, q.shape[0] * part.size * q.shape[-1]):
        mask = _with(_group_mask(part, g, bias, q.dtype), [x[:, rows] for x in more], 0, q)
        views = (
            _take(q, g.q[:, None], part.size),
            _take(k, g.k, part.size),
            _take(v, g.k, part.size),
        )
        new, new_lse = flash(*views, attn_mask=mask, scale=scale)
        new_lse = blinded(new_lse, mask)
        out, lse = (
            _take(total.out, g.q[:, None], part.size),
            _take(total.lse[..., None], g.q[:, None], part.size)[..., 0],
        )
        _merge(out, lse, new, new_lse, g.is_first)
        _put(total.out, g.q, out)
        _put(total.lse[..., None], g.q, lse[..., None])


def _with(mask: Tensor | None, more: Sequence[Tensor], i: int, q: Tensor) -> Tensor | None:
    """The mask with the i-th addend, (h s t) or (h g s t), for each example and head: (x 1 s t) or (x g s t)."""
    if not more:
        return mask
    each = more[i].to(q.dtype)
    each = each if each.dim() == 4 else each[:, None]
    each = each.repeat(q.shape[0] // each.shape[0], 1, 1, 1)
    return each if mask is None else each + mask


# ---------------------------------------------------------------------------------------------- backward
def backward_part(
    grads: list[Tensor],
    part: LayoutPart,
    saved: tuple[Tensor, ...],
    scale: float,
    bias: Tensor | None,
    more: Sequence[Tensor],
    ours: Sequence[Tensor | None],
) -> None:
    grad, q, k, v, out, lse = saved
    grad, q, out, lse = (reorder_queries(part, x) for x in (grad, q, out, lse))
    k, v, bias = _keys(part, k), _keys(part, v), None if bias is None else _keys(part, bias, 0)
    orders = (part.q_order, part.k_order, part.k_order)
    dq, dk, dv = (
        total if order is None else torch.zeros(x.shape, dtype=total.dtype)
        for x, total, order in zip((q, k, v), grads, orders, strict=True)
    )
    for i, run in enumerate(part.runs):
        for piece in _split(
            run,
            q.shape[0]
            * max(run.t * q.shape[-1], 0 if bias is None and not more else run.s * run.t),
        ):
            mask = _with(_run_mask(piece, bias, q.dtype), more, i, q)
            at_q = [_window(x, piece, "q") for x in (grad, q, out, lse)]
            at_k = [_window(x, piece, "k") for x in (k, v)]
            dqs, dks, dvs = _backward_call(at_q, at_k, mask, scale, ours[i] if more else None)
            _window(dq, piece, "q").add_(dqs)
            _fold(dk, piece, dks)
            _fold(dv, piece, dvs)
    for i, group in enumerate(part.groups, len(part.runs)):
        for g, rows in _split_group(group, q.shape[0] * part.size * q.shape[-1]):
            mask = _with(
                _group_mask(part, g, bias, q.dtype), [x[:, rows] for x in more[i : i + 1]], 0, q
            )
            at_q = [_take(x, g.q[:, None], part.size) for x in (grad, q, out, lse[..., None])]
            at_q[3] = at_q[3][..., 0]
            at_k = [_take(x, g.k, part.size) for x in (k, v)]
            mine = ours[i] if more else None
            dqs, dks, dvs = _backward_call(
                at_q, at_k, mask, scale, None if mine is None else mine[:, rows]
            )
            _add(dq, g.q[:, None], dqs, part.size)
            _add(dk, g.k, dks, part.size)
            _add(dv, g.k, dvs, part.size)
    for x, total, order in zip((dq, dk, dv), grads, orders, strict=True):
        if order is not None:
            total[:, order] += x


def _backward_call(
    at_q: list[Tensor], at_k: list[Tensor], mask: Tensor | None, scale: float, ours: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The shares of dq, dk and dv; that of the addend is added to `ours`, (h s t) or (h g s t), where it is wanted."""
    grad, q, out, lse = at_q
    k, v = at_k
    dq, dk, dv = flash_backward(
        grad.contiguous(), q, k, v, out, lse, 0.0, False, attn_mask=mask, scale=scale
    )
    if ours is not None and mask is not None:
        weights = (q @ k.transpose(-1, -2) * scale + mask - lse.to(q.dtype)[..., None]).exp()
        ds = weights * (grad @ v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True))
        by_head = ds.unflatten(0, (-1, ours.shape[0])).sum(0)
        ours += by_head.sum(1) if ours.dim() == 3 else by_head
    return dq, dk, dv


def _fold(total: Tensor, run: TileRun, grad: Tensor) -> None:
    """Add the gradients (x count t e) of overlapping windows: slices of `step` of each window do not overlap."""
    width = run.step or run.t
    for start in range(0, run.t, width):
        piece = replace(run, k0=run.k0 + start, t=min(width, run.t - start))
        _window(total, piece, "k").add_(grad[:, :, start : start + width])


# ---------------------------------------------------------------------------------------------- views and tiles
def reorder_queries(part: LayoutPart, x: Tensor) -> Tensor:
    return x if part.q_order is None else x[:, part.q_order]


def _keys(part: LayoutPart, x: Tensor, dim: int = 1) -> Tensor:
    return x if part.k_order is None else x.index_select(dim, part.k_order)


def _split(run: TileRun, each: int) -> list[TileRun]:
    """The run in pieces, so that a temporary of `each` numbers a call stays below AT_ONCE."""
    most = max(1, AT_ONCE // max(each, 1))
    if run.count <= most:
        return [run]
    return [
        replace(
            run, count=min(most, run.count - i), q0=run.q0 + i * run.step, k0=run.k0 + i * run.step
        )
        for i in range(0, run.count, most)
    ]


def _window(x: Tensor, run: TileRun, side: str) -> Tensor:
    """x (h n ...) -> (h count s ...) of queries or (h count t ...) of keys: views, overlapping where the step is small."""
    start, length = (run.q0, run.s) if side == "q" else (run.k0, run.t)
    shape = (x.shape[0], run.count, length, *x.shape[2:])
    stride = (x.stride(0), run.step * x.stride(1), *x.stride()[1:])
    return x.as_strided(shape, stride, x.storage_offset() + start * x.stride(1))


def _run_mask(run: TileRun, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """What is added to the scores: (1 1 s t), or with a bias (1 count s t)."""
    kept = None if run.mask is None else run.mask.to(dtype)
    if bias is None:
        return None if kept is None else kept[None, None]
    padding = _window(bias[None], run, "k")[:, :, None]
    return padding.expand(-1, -1, run.s, -1) if kept is None else padding + kept


def _group_mask(
    part: LayoutPart, group: GatherGroup, bias: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """The same for a group: (1 g size w*size)."""
    g, w = group.k.shape
    kept = None
    if group.mask_ids is not None:
        tiles = part.masks[group.mask_ids.flatten()].unflatten(0, (g, w)).transpose(1, 2).flatten(2)
        kept = _additive(tiles, dtype)[None]
    if bias is None:
        return kept
    padding = _take(bias[None, :, None], group.k, part.size)[:, :, None, :, 0]
    return padding.expand(-1, -1, part.size, -1) if kept is None else padding + kept


def _additive(keep: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(keep.shape, dtype=dtype).masked_fill_(~keep, -torch.inf)


def blinded(lse: Tensor, mask: Tensor | None) -> Tensor:
    """The fused kernel gives a row that sees nothing a log-sum-exp of 0: make it -inf."""
    if mask is None:
        return lse
    return lse.masked_fill((mask == -torch.inf).all(-1), -torch.inf)


def _split_group(group: GatherGroup, each: int) -> Iterator[tuple[GatherGroup, slice]]:
    """The group in pieces, and which of its rows they are."""
    most = max(1, AT_ONCE // max(each * group.k.shape[1], 1))
    for start in range(0, len(group.q), most):
        rows = slice(start, start + most)
        yield (
            GatherGroup(
                group.q[rows],
                group.k[rows],
                None if group.mask_ids is None else group.mask_ids[rows],
                group.is_first,
            ),
            rows,
        )


def _tiles(x: Tensor, size: int) -> Tensor:
    """x (h n e) -> (h tiles size e), the last tile filled up with zeros."""
    missing = -x.shape[1] % size
    return (F.pad(x, (0, 0, 0, missing)) if missing else x).unflatten(1, (-1, size))


def _take(x: Tensor, index: Tensor, size: int) -> Tensor:
    """Tiles of x (h n e) by number, index (g w) -> (h g w*size e)."""
    return _tiles(x, size)[:, index].flatten(2, 3)


def _put(x: Tensor, index: Tensor, new: Tensor) -> None:
    """Write tiles (h g size e) back into x (h n e)."""
    size = new.shape[2]
    if x.shape[1] % size == 0:
        x.unflatten(1, (-1, size))[:, index] = new
        return
    for at, tile in zip(index.tolist(), new.unbind(1), strict=True):
        end = min((at + 1) * size, x.shape[1])
        x[:, at * size : end] = tile[:, : end - at * size]


def _add(x: Tensor, index: Tensor, new: Tensor, size: int) -> None:
    """Add tiles, new (h g w*size e) by number (g w), to x (h n e); a tile may occur many times."""
    tiles = new.unflatten(2, (-1, size)).flatten(1, 2).to(x.dtype)
    if x.shape[1] % size == 0:
        x.unflatten(1, (-1, size)).index_add_(1, index.flatten(), tiles)
    else:
        total = torch.zeros(_tiles(x, size).shape, dtype=x.dtype).index_add_(
            1, index.flatten(), tiles
        )
        x += total.flatten(1, 2)[:, : x.shape[1]]
