"""Sums along the sequence, Σ k_j v_jᵀ over j <= i or over all, and what queries find in them: linear attention.

On a CPU by a kernel of our own, `native/linear.cpp`, which keeps the state of a head in the cache; elsewhere by products of
chunks.  Those are of 64 by 64 numbers, which the libraries below PyTorch are slow at, and each goes through memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard import native
from regard.autograd import apply_function, differentiable_vjp, has_batched_gradients
from regard.errors import Unsupported
from regard.numerics import chunk_length

LEAST = 64  # tokens: for fewer, where all keys count, products do

_CALL = Struct("7q" + 9 * "P3q")  # the structures of the kernel, field by field
_GRADS = Struct(9 * "P3q")


def causal_linear_scan(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ_{j <= i} (q_i·k_j) v_j (b h n f), Σ_{j <= i} q_i·k_j beside it (b h n 1), and the state Σ k (v 1)ᵀ (b h r f+1).

    A 1 beside each value would do the same, but makes rows of odd length, which are slower than a sum of their own.
    """
    state = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3] + 1) if state is None else state
    alike = (
        q.shape == k.shape
        and q.shape[:3] == v.shape[:3]
        and state.shape == (*q.shape[:2], q.shape[3], v.shape[3] + 1)
    )
    by_kernel = native.supports(q, k, v, state) and alike and q.numel() > 0 and v.numel() > 0
    out, count, *after = (_by_kernel if by_kernel else _by_products)(
        q, k, v, state[..., :-1], state[..., -1:], chunk
    )
    return out, count, torch.cat(after, -1)


def linear_attention_sums(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_j (q_i·k_j) v_j (b h n f) and Σ_j q_i·k_j (b h n 1), over all keys: q (b h n r), k (b h m r), v (b h m f)."""
    alike = q.shape[:2] == k.shape[:2] and q.shape[3] == k.shape[3] and k.shape[:3] == v.shape[:3]
    if not (
        alike
        and native.supports(q, k, v)
        and min(q.shape[2], k.shape[2]) >= LEAST
        and q.numel()
        and v.numel()
    ):
        return _all_by_products(q, k, v)
    f, rank = v.shape[3], native.padded_width(q.shape[3])
    out, count, *_ = apply_function(
        _AllKernel,
        native.pad_width(q, rank),
        native.pad_width(k, rank),
        native.pad_width(v, native.padded_width(f)),
    )
    return out[..., :f], count


def _all_by_products(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return q @ (k.mT @ v), q @ k.sum(2)[..., None]


def _by_products(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, chunk: int
) -> tuple[Tensor, ...]:
    n = q.shape[2]
    parts = split_chunks(
        [t.contiguous() for t in (q, k, v)], chunk_length(chunk, n)
    )  # else each product copies them anew
    out, count, s, z = apply_function(_AddCounted, *parts, s, z)
    return join_chunks(out, n), join_chunks(count, n), s, z


def _by_kernel(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, chunk: int
) -> tuple[Tensor, ...]:
    r, f = q.shape[3], v.shape[3]
    rank, width = native.padded_width(r), native.padded_width(f)
    q, k, v = native.pad_width(q, rank), native.pad_width(k, rank), native.pad_width(v, width)
    s, z = (
        F.pad(s, (0, width - f, 0, rank - r)).contiguous(),
        F.pad(z.mT, (0, rank - r)).contiguous(),
    )
    out, count, s, z = apply_function(_Kernel, q, k, v, s, z)
    return out[..., :f], count, s[..., :r, :f], z[..., :r].mT


def _in_chunks_of_64(q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    """What `_Kernel` computes, with z as it takes and gives it."""
    *found, z = _by_products(q, k, v, s, z.mT, 64)
    return *found, z.mT


class _AddCounted(torch.autograd.Function):
    """q and k (b h c t r), v (b h c t f) in c chunks of t tokens, S (b h r f), z (b h r 1) -> out, count, and S and z after.

    By hand, since it needs nothing for its backward pass but what it is given: scores and states are computed again.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        scores = (q @ k.mT).tril_()
        (before, s), (below, z) = _running(k.mT @ v, s), _running(k.sum(3)[..., None], z)
        return _plus_(scores @ v, q, before), scores.sum(-1, keepdim=True) + q @ below, s, z

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, out: Tensor, count: Tensor, s: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        """Given those of out, count, S and z.  Those of a state are of all later chunks, and are summed up from behind."""
        q, k, v, first, least = ctx.saved_tensors
        scores = (q @ k.mT).tril_()
        before, below = _running(k.mT @ v, first)[0], _running(k.sum(3)[..., None], least)[0]
        (after, ds), (above, dz) = (
            _running(q.mT @ out, s, back=True),
            _running(q.mT @ count, z, back=True),
        )
        dscores = (out @ v.mT).add_(count).tril_()
        dq = _plus_(out @ before.mT, dscores, k).addcmul_(count, below.mT)
        dk = _plus_(v @ after.mT, dscores.mT, q).add_(above.mT)
        dv = _plus_(scores.mT @ out, k, after)
        return dq, dk, dv, ds, dz


def _running(each: Tensor, first: Tensor, *, back: bool = False) -> tuple[Tensor, Tensor]:
    """first + Σ each (b h c ...), over the chunks before each one, or with `back` over those after it; and over all.

    In a loop and in place: over chunks of this size `cumsum` takes ten times as long.
    """
    now, chunks = first, range(each.shape[2])
    for i in reversed(chunks) if back else chunks:
        part = each[:, :, i]
        now, before = now + part, now
        part.copy_(before)
    return each, now


def _plus_(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """x + a @ b, (b h c ...), in place."""
    x.flatten(0, 2).baddbmm_(a.flatten(0, 2), b.flatten(0, 2))
    return x


class _Kernel(torch.autograd.Function):
    """q and k (b h n r), v (b h n f), S (b h r f), z (b h 1 r) -> out (b h n f), count (b h n 1), and S and z after."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        out, count = native.empty_like(v), q.new_empty(*q.shape[:3], 1)
        results = out, count, torch.empty_like(s), torch.empty_like(z)
        native.run("linear_forward", q.dtype, _call(q, k, v, s, z, results))
        return results

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, ...]:
        if has_batched_gradients(*given):
            raise Unsupported(
                "causal linear attention takes one gradient at a time, not a batch of them"
            )
        if torch.is_grad_enabled():  # create_graph=True: the products have a second derivative
            return differentiable_vjp(_in_chunks_of_64, ctx.saved_tensors, given)
        q, k, v, s, z = ctx.saved_tensors
        given = tuple(x.contiguous() for x in given)
        asked = tuple(native.empty_like(x) for x in (q, k, v, s, z))
        spare = (
            v,
            given[1],
            torch.empty_like(s),
            torch.empty_like(z),
        )  # the states after the last token, once more
        native.run(
            "linear_backward",
            q.dtype,
            _call(q, k, v, s, z, spare),
            _GRADS.pack(*native.pointers_and_strides(*given, *asked)),
        )
        return asked


class _AllKernel(torch.autograd.Function):
    """q (b h n r), k (b h m r), v (b h m f) -> out (b h n f), count (b h n 1), and Σ k vᵀ and Σ k, which have no gradient."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        b, h, n, r = q.shape
        out = native.advise_huge_pages(v.new_empty(b, n, h, v.shape[3])).transpose(
            1, 2
        )  # as the projection after it wants it
        results = (
            out,
            q.new_empty(b, h, n, 1),
            q.new_empty(b, h, r, v.shape[3]),
            q.new_empty(b, h, 1, r),
        )
        native.run("linear_all_forward", q.dtype, _call(q, k, v, *results[2:], results))
        return results

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(*inputs, *output[2:])

    @staticmethod
    def backward(ctx: Any, out: Tensor, count: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        q, k, v, s, z = ctx.saved_tensors
        if torch.is_grad_enabled() or has_batched_gradients(out, count):
            return differentiable_vjp(_all_by_products, (q, k, v), (out, count))
        out, count = native.pad_width(out, v.shape[3]), count.contiguous()
        asked = [native.empty_like(x) for x in (q, k, v, s, z)]
        call = _call(q, k, v, s, z, (out, count, s, z))
        native.run(
            "linear_all_backward",
            q.dtype,
            call,
            _GRADS.pack(*native.pointers_and_strides(out, count, s, z, *asked)),
        )
        return tuple(asked[:3])


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    z: Tensor,
    results: tuple[Tensor, Tensor, Tensor, Tensor],
) -> bytes:
    out, count, after, total = results
    rows = native.pointers_and_strides(q, k, v, out, count, s, z, after, total)
    return _CALL.pack(
        *q.shape[:3], k.shape[2], q.shape[3], v.shape[3], torch.get_num_threads(), *rows
    )


def split_chunks(parts: Sequence[Tensor], size: int) -> list[Tensor]:
    """(b h n r) -> (b h n/size size r), filled up with zeros, which write nothing and take nothing away."""
    if torch.compiler.is_exporting():
        return [x[:, :, None] for x in parts]
    fill = -parts[0].shape[2] % size
    return [(F.pad(x, (0, 0, 0, fill)) if fill else x).unflatten(2, (-1, size)) for x in parts]


def join_chunks(x: Tensor, n: int) -> Tensor:
    """The chunks in a row again, without what they were filled up with."""
    return x.flatten(2, 3)[:, :, :n]
