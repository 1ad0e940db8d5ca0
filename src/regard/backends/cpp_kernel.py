"""Calls of the C++ kernel over lists of tiles, see `native/attention.cpp`.

PyTorch's fused kernel needs regular calls and is slow on few queries. This kernel processes any
list of tiles, forward and backward, in one call. It saves q, k, v, the output and the log-sum-exp
of each query, nothing of size (n m).
"""

from __future__ import annotations

import ctypes
from struct import Struct
from typing import NamedTuple

import torch
from torch import Tensor

from regard import native
from regard.autograd import check_first_order
from regard.backends.sinks import join_sinks_, sinks_grad
from regard.layout.tiles import TileCSR, TileSet

# The structs of attention.cpp, field by field.
_PART = Struct("2q2Pq4P")
_CALL = Struct("6qd" + 5 * "P3q" + "P" + "P3q" + "qP")
_GRADS = Struct(4 * "P3q")
_NO_TENSOR = (0, 0, 0, 0)

# if each key is read more often than this, k and v are made contiguous first
CONTIGUOUS_KEY_READS = 12


class KernelMasks(NamedTuple):
    """What hides pairs of the tiles, True = keep."""

    keys: Tensor | None = None  # (b m), the padding mask
    pairs: Tensor | None = None  # broadcasts to (b h n m)


def attend_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: TileSet,
    scale: float,
    masks: KernelMasks = KernelMasks(),
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention over tiles: q (b h n e), k (b kv m e), v (b kv m f) -> (b h n f).

    kv divides h: neighbouring query heads share a head of keys and values.

    Args:
        tiles: The visible tiles.
        scale: Factor of the scores.
        masks: What hides pairs of these tiles.
        sinks: Logits (h) that join the softmax.
    """
    assert tiles, "the kernel writes the output only if there is a part"
    f = v.shape[3]
    width = native.padded_width(max(q.shape[3], f))
    if not (q.shape[3] == f == width and q.stride(3) == k.stride(3) == v.stride(3) == 1):
        q, k, v = (native.pad_width(x, width) for x in (q, k, v))
    if tiles.key_reads > CONTIGUOUS_KEY_READS * k.shape[2]:
        k, v = k.contiguous(), v.contiguous()
    if masks.keys is not None or masks.pairs is not None:
        masks = _kernel_layout(masks, q, k)
    grad = q.requires_grad or k.requires_grad or v.requires_grad
    if torch.is_grad_enabled() and (grad or (sinks is not None and sinks.requires_grad)):
        out: Tensor = _CppAttention.apply(q, k, v, sinks, tiles, scale, *masks)  # type: ignore[no-untyped-call]
    else:
        needs_lse = len(tiles) > 1 or sinks is not None
        lse = q.new_empty(*q.shape[:3], 1) if needs_lse else None
        out = _forward(q, k, v, lse, tiles, scale, masks, sinks)
    return out[..., :f] if f < width else out


def _kernel_layout(masks: KernelMasks, q: Tensor, k: Tensor) -> KernelMasks:
    """The masks with the strides that the kernel reads."""
    keys, pairs = masks
    keys = None if keys is None else keys.contiguous()
    if pairs is not None:
        if pairs.stride(3) != 1:
            pairs = pairs.contiguous()
        pairs = pairs.expand(*q.shape[:3], k.shape[2])
    return KernelMasks(keys, pairs)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor | None,
    tiles: TileSet,
    scale: float,
    masks: KernelMasks,
    sinks: Tensor | None,
) -> Tensor:
    """The output; the log-sum-exp of each query is written to `lse`, which a backward pass, a
    second part or sinks need.
    """
    b, h, n, e = q.shape
    # heads are adjacent in memory, as the output projection needs them
    out = native.advise_huge_pages(q.new_empty_strided((b, h, n, e), (n * h * e, e, h * e, 1)))
    native.run("attention_forward", q.dtype, _pack_call(q, k, v, out, lse, tiles, scale, masks))
    if sinks is not None and lse is not None:
        join_sinks_(out, lse[..., 0], sinks)
    return out


class _CppAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, tiles, scale, key_mask, pair_mask):  # type: ignore[no-untyped-def]
        lse, masks = q.new_empty(*q.shape[:3], 1), KernelMasks(key_mask, pair_mask)
        out = _forward(q, k, v, lse, tiles, scale, masks, sinks)
        ctx.save_for_backward(q, k, v, sinks, out, lse, *masks)
        ctx.tiles, ctx.scale = tiles, scale
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        check_first_order("cpp", grad)
        q, k, v, sinks, out, lse, *masks = ctx.saved_tensors
        grad = native.pad_width(grad, q.shape[3])
        # the kernel adds to the gradients of k and v
        results = [
            native.empty_like(q),
            native.empty_like(k).zero_(),
            native.empty_like(v).zero_(),
        ]
        call = _pack_call(q, k, v, out, lse, ctx.tiles, ctx.scale, KernelMasks(*masks))
        grads = _GRADS.pack(*native.pointers_and_strides(grad, *results))
        native.run("attention_backward", q.dtype, call, grads)
        sink_grad = None if sinks is None else sinks_grad(grad, out, lse[..., 0], sinks)
        return *results, sink_grad, None, None, None, None


def _pack_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    tiles: TileSet,
    scale: float,
    masks: KernelMasks,
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
        k.shape[1],
        k.shape[2],
        e,
        torch.get_num_threads(),
        scale,
        *native.pointers_and_strides(q, k, v, out),
        *(_NO_TENSOR if lse is None else native.pointers_and_strides(lse)),
        0 if masks.keys is None else masks.keys.data_ptr(),
        *(_NO_TENSOR if masks.pairs is None else native.pointers_and_strides(masks.pairs)),
        len(tiles),
        ctypes.addressof(parts),
    )


def _pack_part(part: TileCSR) -> bytes:
    orders = (0 if x is None else x.data_ptr() for x in (part.q_order, part.k_order))
    tables = (x.data_ptr() for x in (part.row_starts, part.columns, part.mask_ids, part.masks))
    return _PART.pack(part.n, part.m, *orders, len(part.row_starts) - 1, *tables)
