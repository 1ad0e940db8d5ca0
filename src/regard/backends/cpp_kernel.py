"""Calls of the C++ kernel over lists of tiles, see `native/attention.cpp`.

PyTorch's fused kernel needs regular calls and is slow on few queries. This kernel processes any
list of tiles, forward and backward, in one call. It saves q, k, v, the output and the log-sum-exp
of each query, nothing of size (n m).
"""

from __future__ import annotations

import ctypes
from struct import Struct

import torch
from torch import Tensor

from regard import native
from regard.autograd import check_first_order
from regard.layout.tiles import TileCSR, TileSet

# The structs of attention.cpp, field by field.
_PART = Struct("2q2Pq4P")
_CALL = Struct("5qd" + 5 * "P3q" + "PqP")
_GRADS = Struct(4 * "P3q")
_NO_TENSOR = (0, 0, 0, 0)

# if each key is read more often than this, k and v are made contiguous first
CONTIGUOUS_KEY_READS = 12


def attend_tiles(
    q: Tensor, k: Tensor, v: Tensor, tiles: TileSet, scale: float, mask: Tensor | None = None
) -> Tensor:
    """Attention over tiles: q (b h n e), k (b h m e), v (b h m f) -> (b h n f); mask (b m)."""
    assert tiles, "the kernel writes the output only if there is a part"
    f = v.shape[3]
    width = native.padded_width(max(q.shape[3], f))
    if not (q.shape[3] == f == width and q.stride(3) == k.stride(3) == v.stride(3) == 1):
        q, k, v = (native.pad_width(x, width) for x in (q, k, v))
    if tiles.key_reads > CONTIGUOUS_KEY_READS * k.shape[2]:
        k, v = k.contiguous(), v.contiguous()
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        out: Tensor = _CppAttention.apply(q, k, v, tiles, scale, mask)  # type: ignore[no-untyped-call]
    else:
        lse = q.new_empty(*q.shape[:3], 1) if len(tiles) > 1 else None
        out = _forward(q, k, v, lse, tiles, scale, mask)
    return out[..., :f] if f < width else out


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor | None,
    tiles: TileSet,
    scale: float,
    mask: Tensor | None,
) -> Tensor:
    """The output; the log-sum-exp of each query is written to `lse`, which a backward pass or a
    second part needs.
    """
    b, h, n, e = q.shape
    # heads are adjacent in memory, as the output projection needs them
    out = native.advise_huge_pages(q.new_empty_strided((b, h, n, e), (n * h * e, e, h * e, 1)))
    mask = None if mask is None else mask.contiguous()
    native.run("attention_forward", q.dtype, _pack_call(q, k, v, out, lse, tiles, scale, mask))
    return out


class _CppAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, tiles, scale, mask):  # type: ignore[no-untyped-def]
        lse = q.new_empty(*q.shape[:3], 1)
        out = _forward(q, k, v, lse, tiles, scale, mask)
        ctx.save_for_backward(q, k, v, out, lse, mask)
        ctx.tiles, ctx.scale = tiles, scale
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        check_first_order("cpp", grad)
        q, k, v, out, lse, mask = ctx.saved_tensors
        mask = None if mask is None else mask.contiguous()
        grad = native.pad_width(grad, q.shape[3])
        # the kernel adds to the gradients of k and v
        results = [
            native.empty_like(q),
            native.empty_like(k).zero_(),
            native.empty_like(v).zero_(),
        ]
        call = _pack_call(q, k, v, out, lse, ctx.tiles, ctx.scale, mask)
        grads = _GRADS.pack(*native.pointers_and_strides(grad, *results))
        native.run("attention_backward", q.dtype, call, grads)
        return *results, None, None, None


def _pack_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    tiles: TileSet,
    scale: float,
    mask: Tensor | None,
) -> bytes:
    """The struct that the kernel reads. It holds addresses, so the tensors must outlive it."""
    b, h, _, e = q.shape
    parts = tiles.kernel_struct
    if parts is None:
        parts = ctypes.create_string_buffer(b"".join(map(_pack_part, tiles)))
        tiles.kernel_struct = parts
    return _CALL.pack(
        b,
        h,
        k.shape[2],
        e,
        torch.get_num_threads(),
        scale,
        *native.pointers_and_strides(q, k, v, out),
        *(_NO_TENSOR if lse is None else native.pointers_and_strides(lse)),
        0 if mask is None else mask.data_ptr(),
        len(tiles),
        ctypes.addressof(parts),
    )


def _pack_part(part: TileCSR) -> bytes:
    orders = (0 if x is None else x.data_ptr() for x in (part.q_order, part.k_order))
    tables = (x.data_ptr() for x in (part.row_starts, part.columns, part.mask_ids, part.masks))
    return _PART.pack(part.n, part.m, *orders, len(part.row_starts) - 1, *tables)
