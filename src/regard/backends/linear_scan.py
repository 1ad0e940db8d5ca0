"""Kernels of linear attention: sums of k_j v_jᵀ over j <= i or over all keys, and their products
with queries.

Two backends compute them: `cpp` in C++, `native/linear.cpp`, which keeps the state of a head in the
CPU cache, and `products`, matrix products of chunks of tokens, on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from struct import Struct
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard import native
from regard.autograd import apply_function, differentiable_vjp, has_batched_gradients
from regard.backends.protocol import Backend, Dispatcher
from regard.errors import Unsupported
from regard.numerics import chunk_length

MIN_KERNEL_TOKENS = 64  # with fewer tokens, the non-causal sums are faster as matrix products

# The structs of linear.cpp, field by field.
_CALL = Struct("7q" + 9 * "P3q")
_GRADS = Struct(9 * "P3q")


class LinearCall(NamedTuple):
    """One call of linear attention, without the division by the normalizer.

    Causal: output Σ_{j <= i} (q_i·k_j) v_j and normalizer Σ_{j <= i} q_i·k_j, with as many keys as
    queries, and the state Σ k_j [v_j, 1]ᵀ. Otherwise the sums run over all keys, and there is no
    state.
    """

    q: Tensor  # features (b h n r)
    k: Tensor  # features (b h m r)
    v: Tensor  # values (b h m f)
    state: Tensor | None  # (b h r f+1), before the first token; zeros if None
    causal: bool
    chunk: int = 64  # tokens per matrix product, where the C++ kernel is not used

    def num_tokens(self) -> int:
        """The number of queries or of keys, whichever is smaller."""
        return min(self.q.shape[2], self.k.shape[2])

    def needs_grad(self) -> bool:
        """Whether a backward pass may follow."""
        tensors = (self.q, self.k, self.v, self.state)
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)

    def signature(self) -> Hashable | None:
        """Everything that the choice of a backend depends on, or None."""
        q, k, v, state = self.q, self.k, self.v, self.state
        if not native.are_plain_tensors(q, k, v, *(() if state is None else (state,))):
            return None
        return (
            q.shape,
            k.shape,
            v.shape,
            q.dtype,
            k.dtype,
            v.dtype,
            q.device,
            None if state is None else (state.shape, state.dtype),
            self.causal,
            self.needs_grad(),
        )

    def zero_state(self) -> Tensor:
        """The state of a stream that has seen no token."""
        return self.q.new_zeros(*self.q.shape[:2], self.q.shape[3], self.v.shape[3] + 1)


LinearResult = tuple[Tensor, Tensor, Tensor | None]
LinearFunction = Callable[[Tensor, Tensor, Tensor, Tensor | None], LinearResult]

# Nominal speeds: the kernel keeps the state of a head in the CPU cache and skips half of the scores
# of a chunk, which makes it two to four times as fast as matrix products.
PRODUCT_MULTIPLY_ADDS_PER_SECOND = 1e10
KERNEL_SPEED = 2.5


def causal_linear_scan(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal linear attention without the division by the normalizer.

    Args:
        q, k: Features (b h n r).
        v: Values (b h n f).
        state: The state before the first token, or None.
        chunk: Tokens per matrix product, where the C++ kernel is not used.

    Returns:
        The output Σ_{j <= i} (q_i·k_j) v_j (b h n f), the normalizer Σ_{j <= i} q_i·k_j (b h n 1),
        and the state after the last token, Σ k_j [v_j, 1]ᵀ (b h r f+1).
    """
    _, run = linear_backends.prepare(LinearCall(q, k, v, state, True, chunk))
    out, normalizer, after = run(q, k, v, state)
    return out, normalizer, after


def linear_attention_sums(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Linear attention over all keys without the division by the normalizer: q (b h n r), k (b h m
    r), v (b h m f).

    Returns:
        The output Σ_j (q_i·k_j) v_j (b h n f) and the normalizer Σ_j q_i·k_j (b h n 1).
    """
    _, run = linear_backends.prepare(LinearCall(q, k, v, None, False))
    out, normalizer, _ = run(q, k, v, None)
    return out, normalizer


class ProductsBackend(Backend[LinearCall]):
    """Matrix products of chunks of tokens, on any device."""

    name = "products"
    operation = "linear"
    traceable = True

    def refuses(self, call: LinearCall) -> str | None:
        """None: it supports every call."""
        return None

    def cost(self, call: LinearCall) -> float | None:
        """Seconds at a nominal speed, from the number of multiply-adds."""
        return _multiply_adds(call) / PRODUCT_MULTIPLY_ADDS_PER_SECOND

    def prepare(self, call: LinearCall) -> LinearFunction:
        """The sums as products, in chunks if causal."""
        if not call.causal:
            return lambda q, k, v, state: (*_sums_by_products(q, k, v), None)
        chunk = call.chunk

        def run(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None) -> LinearResult:
            if state is None:
                state = LinearCall(q, k, v, None, True).zero_state()
            out, normalizer, s, z = _scan_by_chunks(
                q, k, v, state[..., :-1], state[..., -1:], chunk
            )
            return out, normalizer, torch.cat((s, z), -1)

        return run


class LinearCppBackend(Backend[LinearCall]):
    """The C++ kernels of `native/linear.cpp`."""

    name = "cpp"
    operation = "linear"

    def refuses(self, call: LinearCall) -> str | None:
        """The reason why this backend does not support the call, or None."""
        q, k, v, state = call.q, call.k, call.v, call.state
        if not q.numel() or not v.numel():
            return "there is nothing to compute"
        if q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3] or k.shape[:3] != v.shape[:3]:
            return "it requires q, k and v of the same batch and heads"
        if call.causal and q.shape[2] != k.shape[2]:
            return "it requires as many keys as queries"
        if state is not None and state.shape != (*q.shape[:2], q.shape[3], v.shape[3] + 1):
            return "it requires a state of the same batch and heads"
        if not native.supports(q, k, v, *(() if state is None else (state,))):
            return native.missing_reason() or "it supports plain float32 and float64 CPU tensors"
        return None

    def cost(self, call: LinearCall) -> float | None:
        """Seconds at a nominal speed. None for few tokens without causality: products are
        faster.
        """
        if not call.causal and call.num_tokens() < MIN_KERNEL_TOKENS:
            return None
        return _multiply_adds(call) / PRODUCT_MULTIPLY_ADDS_PER_SECOND / KERNEL_SPEED

    def prepare(self, call: LinearCall) -> LinearFunction:
        """One kernel call."""
        return _scan_by_kernel if call.causal else _sums_by_kernel


def _multiply_adds(call: LinearCall) -> int:
    (b, h, n, r), (m, f) = call.q.shape, call.v.shape[2:]
    return b * h * (n + m) * r * (f + 1) * (3 if call.needs_grad() else 1)


# ---------------------------------------------------------------------- matrix products
def _sums_by_products(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return q @ (k.mT @ v), q @ k.sum(2)[..., None]


def _scan_by_chunks(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, chunk: int
) -> tuple[Tensor, ...]:
    n = q.shape[2]
    contiguous = [t.contiguous() for t in (q, k, v)]  # otherwise every product copies them
    parts = split_chunks(contiguous, chunk_length(chunk, n))
    out, normalizer, s, z = apply_function(_ChunkScan, *parts, s, z)
    return join_chunks(out, n), join_chunks(normalizer, n), s, z


def split_chunks(parts: Sequence[Tensor], size: int) -> list[Tensor]:
    """(b h n r) -> (b h n/size size r), padded with zeros, which contribute nothing to the sums."""
    if torch.compiler.is_exporting():
        return [x[:, :, None] for x in parts]
    fill = -parts[0].shape[2] % size
    return [(F.pad(x, (0, 0, 0, fill)) if fill else x).unflatten(2, (-1, size)) for x in parts]


def join_chunks(x: Tensor, n: int) -> Tensor:
    """The inverse of `split_chunks`, for n tokens."""
    return x.flatten(2, 3)[:, :, :n]


class _ChunkScan(torch.autograd.Function):
    """q and k (b h c t r), v (b h c t f) in c chunks of t tokens, S (b h r f), z (b h r 1) -> out,
    normalizer, new S and z.

    The backward pass saves the inputs only and recomputes scores and states.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        scores = (q @ k.mT).tril_()
        s_before, s = _exclusive_scan(k.mT @ v, s)
        z_before, z = _exclusive_scan(k.sum(3)[..., None], z)
        out = _add_matmul_(scores @ v, q, s_before)
        return out, scores.sum(-1, keepdim=True) + q @ z_before, s, z

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(
        ctx: Any, dout: Tensor, dnorm: Tensor, ds: Tensor, dz: Tensor
    ) -> tuple[Tensor, ...]:
        """The gradients of states accumulate from the last chunk to the first."""
        q, k, v, s, z = ctx.saved_tensors
        scores = (q @ k.mT).tril_()
        s_before, _ = _exclusive_scan(k.mT @ v, s)
        z_before, _ = _exclusive_scan(k.sum(3)[..., None], z)
        ds_after, ds = _exclusive_scan(q.mT @ dout, ds, reverse=True)
        dz_after, dz = _exclusive_scan(q.mT @ dnorm, dz, reverse=True)
        dscores = (dout @ v.mT).add_(dnorm).tril_()
        dq = _add_matmul_(dout @ s_before.mT, dscores, k).addcmul_(dnorm, z_before.mT)
        dk = _add_matmul_(v @ ds_after.mT, dscores.mT, q).add_(dz_after.mT)
        dv = _add_matmul_(scores.mT @ dout, k, ds_after)
        return dq, dk, dv, ds, dz


def _exclusive_scan(x: Tensor, start: Tensor, *, reverse: bool = False) -> tuple[Tensor, Tensor]:
    """start + the sum of x (b h c ...) over the chunks before each chunk (after it, if reverse),
    and over all chunks.

    A loop in place: `cumsum` takes ten times as long on chunks of this size.
    """
    total, chunks = start, range(x.shape[2])
    for i in reversed(chunks) if reverse else chunks:
        part = x[:, :, i]
        total, before = total + part, total
        part.copy_(before)
    return x, total


def _add_matmul_(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """x + a @ b, (b h c ...), in place."""
    x.flatten(0, 2).baddbmm_(a.flatten(0, 2), b.flatten(0, 2))
    return x


# ---------------------------------------------------------------------- C++ kernel
def _scan_by_kernel(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None) -> LinearResult:
    # The normalizer is a separate sum: a column of ones in v would make rows of odd length, which
    # are slower.
    if state is None:
        state = LinearCall(q, k, v, None, True).zero_state()
    s, z = state[..., :-1], state[..., -1:]
    r, f = q.shape[3], v.shape[3]
    rank, width = native.padded_width(r), native.padded_width(f)
    out, normalizer, s, z = apply_function(
        _CausalKernel,
        native.pad_width(q, rank),
        native.pad_width(k, rank),
        native.pad_width(v, width),
        F.pad(s, (0, width - f, 0, rank - r)).contiguous(),
        F.pad(z.mT, (0, rank - r)).contiguous(),
    )
    return out[..., :f], normalizer, torch.cat((s[..., :r, :f], z[..., :r].mT), -1)


def _sums_by_kernel(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None) -> LinearResult:
    f, rank = v.shape[3], native.padded_width(q.shape[3])
    out, normalizer, *_ = apply_function(
        _SumsKernel,
        native.pad_width(q, rank),
        native.pad_width(k, rank),
        native.pad_width(v, native.padded_width(f)),
    )
    return out[..., :f], normalizer, None


class _CausalKernel(torch.autograd.Function):
    """q and k (b h n r), v (b h n f), S (b h r f), z (b h 1 r) -> out (b h n f), normalizer (b h n
    1), new S and z.
    """

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        out, normalizer = native.empty_like(v), q.new_empty(*q.shape[:3], 1)
        results = out, normalizer, torch.empty_like(s), torch.empty_like(z)
        native.run("linear_forward", q.dtype, _pack_call(q, k, v, s, z, results))
        return results

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        if has_batched_gradients(*grads):
            raise Unsupported("causal linear attention takes one gradient at a time, not a batch")
        q, k, v, s, z = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: matrix products have a second derivative
            return differentiable_vjp(_scan_like_kernel, (q, k, v, s, z), grads)
        grads = tuple(x.contiguous() for x in grads)
        results = tuple(native.empty_like(x) for x in (q, k, v, s, z))
        # the kernel recomputes the states
        unused = v, grads[1], torch.empty_like(s), torch.empty_like(z)
        call = _pack_call(q, k, v, s, z, unused)
        packed = _GRADS.pack(*native.pointers_and_strides(*grads, *results))
        native.run("linear_backward", q.dtype, call, packed)
        return results


def _scan_like_kernel(q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    """`_CausalKernel` as matrix products."""
    *results, z = _scan_by_chunks(q, k, v, s, z.mT, 64)
    return *results, z.mT


class _SumsKernel(torch.autograd.Function):
    """q (b h n r), k (b h m r), v (b h m f) -> out (b h n f), normalizer (b h n 1), and Σ k vᵀ and
    Σ k without gradient.
    """

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        b, h, n, r = q.shape
        f = v.shape[3]
        # heads are adjacent in memory, as the output projection needs them
        out = native.advise_huge_pages(v.new_empty(b, n, h, f)).transpose(1, 2)
        s, z = q.new_empty(b, h, r, f), q.new_empty(b, h, 1, r)
        results = out, q.new_empty(b, h, n, 1), s, z
        native.run("linear_all_forward", q.dtype, _pack_call(q, k, v, s, z, results))
        return results

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(*inputs, *output[2:])

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dnorm: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        q, k, v, s, z = ctx.saved_tensors
        if torch.is_grad_enabled() or has_batched_gradients(dout, dnorm):
            return differentiable_vjp(_sums_by_products, (q, k, v), (dout, dnorm))
        dout, dnorm = native.pad_width(dout, v.shape[3]), dnorm.contiguous()
        results = [native.empty_like(x) for x in (q, k, v, s, z)]
        call = _pack_call(q, k, v, s, z, (dout, dnorm, s, z))
        packed = _GRADS.pack(*native.pointers_and_strides(dout, dnorm, s, z, *results))
        native.run("linear_all_backward", q.dtype, call, packed)
        return tuple(results[:3])


def _pack_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    z: Tensor,
    results: tuple[Tensor, Tensor, Tensor, Tensor],
) -> bytes:
    """The struct that the kernel reads: sizes, addresses and strides."""
    out, normalizer, new_s, new_z = results
    tensors = native.pointers_and_strides(q, k, v, out, normalizer, s, z, new_s, new_z)
    sizes = *q.shape[:3], k.shape[2], q.shape[3], v.shape[3]
    return _CALL.pack(*sizes, torch.get_num_threads(), *tensors)


linear_backends: Dispatcher[LinearCall] = Dispatcher(
    "linear", ProductsBackend(), (LinearCppBackend(),)
)
