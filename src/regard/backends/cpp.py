"""The tiles that hold a seen pair, by a kernel of our own: see `native/attention.cpp`.

PyTorch's fused call wants regular work, and is slow where it has few queries; this takes any list of tiles, forward and
backward, in one call.  Nothing of size (n m) is kept: only q, k, v, out and the log-sum-exp of each query.
"""

from __future__ import annotations

import ctypes
from struct import Struct

import torch
from torch import Tensor

from regard import native
from regard.autograd import check_first_order
from regard.backends.call import AttentionCall
from regard.backends.split import added, by_head, grows
from regard.layout.tiles import TileCSR, TileSet, build_tiles, tiles_from_mask

_PART = Struct("2q2Pq4P")  # the structures of the kernel, field by field
_CALL = Struct("5qd" + 5 * "P3q" + "PqP")
_GRADS = Struct(4 * "P3q")
NOWHERE = (0, 0, 0, 0)  # instead of the rows of a tensor
OFTEN = 12  # times that a key is looked at, from which on a copy of all without gaps pays


def refuses(call: AttentionCall) -> str | None:
    """Why it cannot do this; None: it can."""
    if call.q.device.type != "cpu":
        return f"it runs on the CPU, not on {call.q.device.type}"
    if call.q.dtype not in native.DTYPE_NAMES:
        return f"it computes in float32 or float64, not in {call.q.dtype}"
    if isinstance(call.k_positions, Tensor):
        return "the keys do not stand in a row"
    if call.prior is not None:
        return "it knows no priors"
    if call.global_attention_mask is not None and not grows(call.pattern):
        return "marks under ~ take pairs away, and only added ones are laid out"
    if not native.supports(call.q, call.k, call.v):
        return (
            native.missing_reason()
            or "these are no plain tensors: it cannot be traced or transformed"
        )
    return None


def run(call: AttentionCall) -> Tensor:
    """Attention over the tiles of the pattern."""
    if call.pattern.heads:
        return by_head(call, run)
    work = work_of(call)
    if call.global_attention_mask is None:
        return attend_tiles(call.q, call.k, call.v, work, call.scale, call.mask)
    examples = []
    for i, global_attention_mask in enumerate(call.global_attention_mask):
        q, k, v = (x[i : i + 1] for x in (call.q, call.k, call.v))
        mask = None if call.mask is None else call.mask[i : i + 1]
        more = [tiles_from_mask(*one) for one in added(call, global_attention_mask)]
        examples.append(attend_tiles(q, k, v, TileSet((*work, *more)), call.scale, mask))
    return torch.cat(examples)


def work_of(call: AttentionCall) -> TileSet:
    """The tiles of the pattern, without what marks add."""
    assert isinstance(call.k_positions, int)
    plain = (
        call.pattern
        if call.global_attention_mask is None
        else call.pattern.resolve_global_mask(False, False)
    )
    return build_tiles(
        plain, call.q.shape[2], call.k.shape[2], q_start=call.q_start, k_start=call.k_positions
    )


def attend_tiles(
    q: Tensor, k: Tensor, v: Tensor, work: TileSet, scale: float, mask: Tensor | None = None
) -> Tensor:
    """Attention over these tiles: q (b h n e), k (b h m e), v (b h m f) -> (b h n f); mask (b m)."""
    assert work, "a call without a part computes nothing"
    f = v.shape[3]
    wide = native.padded_width(max(q.shape[3], f))
    if not (q.shape[3] == f == wide and q.stride(3) == k.stride(3) == v.stride(3) == 1):
        q, k, v = (native.pad_width(x, wide) for x in (q, k, v))
    if work.key_reads > OFTEN * k.shape[2]:
        k, v = k.contiguous(), v.contiguous()
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        out: Tensor = _Compiled.apply(q, k, v, work, scale, mask)  # type: ignore[no-untyped-call]
    else:
        lse = q.new_empty(*q.shape[:3], 1) if len(work) > 1 else None
        out = _forward(q, k, v, lse, work, scale, mask)
    return out[..., :f] if f < wide else out


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor | None,
    work: TileSet,
    scale: float,
    mask: Tensor | None,
) -> Tensor:
    """The result; the log-sum-exp of each query goes to `lse`, where a backward pass or a second part needs it."""
    b, h, n, e = q.shape
    out = native.advise_huge_pages(
        q.new_empty_strided((b, h, n, e), (n * h * e, e, h * e, 1))
    )  # as the projection after it wants it
    mask = None if mask is None else mask.contiguous()
    native.run("forward", q.dtype, _call(q, k, v, out, lse, work, scale, mask))
    return out


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, work, scale, mask):  # type: ignore[no-untyped-def]
        lse = q.new_empty(*q.shape[:3], 1)
        out = _forward(q, k, v, lse, work, scale, mask)
        ctx.save_for_backward(q, k, v, out, lse, mask)
        ctx.work, ctx.scale = work, scale
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        check_first_order("cpp", grad)
        q, k, v, out, lse, mask = ctx.saved_tensors
        mask = None if mask is None else mask.contiguous()
        grad = native.pad_width(grad, q.shape[3])
        ours = [
            native.empty_like(q),
            native.empty_like(k).zero_(),
            native.empty_like(v).zero_(),
        ]  # keys are added to
        grads = _GRADS.pack(*native.pointers_and_strides(grad, *ours))
        native.run("backward", q.dtype, _call(q, k, v, out, lse, ctx.work, ctx.scale, mask), grads)
        return *ours, None, None, None


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    work: TileSet,
    scale: float,
    mask: Tensor | None,
) -> bytes:
    """What the kernel reads: addresses, so the tensors must outlive it."""
    b, h, _, e = q.shape
    made = work.kernel_struct or work.__dict__.setdefault(
        "kernel_struct", ctypes.create_string_buffer(b"".join(map(_part, work)))
    )
    real = 0 if mask is None else mask.data_ptr()
    parts, norm = (
        ctypes.addressof(made),
        NOWHERE if lse is None else native.pointers_and_strides(lse),
    )
    return _CALL.pack(
        b,
        h,
        k.shape[2],
        e,
        torch.get_num_threads(),
        scale,
        *native.pointers_and_strides(q, k, v, out),
        *norm,
        real,
        len(work),
        parts,
    )


def _part(part: TileCSR) -> bytes:
    orders = (0 if x is None else x.data_ptr() for x in (part.q_order, part.k_order))
    tables = (x.data_ptr() for x in (part.row_starts, part.columns, part.mask_ids, part.masks))
    return _PART.pack(part.n, part.m, *orders, len(part.row_starts) - 1, *tables)
