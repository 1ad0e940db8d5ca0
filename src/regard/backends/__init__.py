"""Exact softmax attention over any pattern.

Several backends compute it; `attend` selects the fastest for each call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from regard.backends import dispatch_cache, traced
from regard.backends.call import FLOAT_DTYPES, AttentionCall, check_mask, make_call
from regard.backends.choose import explain, softmax_backends
from regard.backends.linear_scan import LinearCall, linear_backends
from regard.backends.per_example import resolve_positions
from regard.backends.protocol import Backend, BackendChoice, Candidate, check_is_backend
from regard.backends.sdpa import attend_with_dropout
from regard.errors import Unsupported
from regard.pattern import Full, Pattern, PerSegment, lengths_from_cu_seqlens
from regard.prior import Prior, restart_prior

__all__ = [
    "AttentionCall",
    "Backend",
    "BackendChoice",
    "Candidate",
    "LinearCall",
    "attend",
    "check_mask",
    "explain",
    "linear_backends",
    "register_backend",
    "softmax_backends",
]


_FULL = Full()


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern = Full(),
    prior: Prior | None = None,
    mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    global_attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    q_start: int | Tensor = 0,
    k_positions: int | Tensor = 0,
    dropout: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Exact softmax attention over a pattern: q (b h n e), k (b h m e), v (b h m f) -> (b h n f).

    The number of heads of k and v may be a divisor of that of q (grouped-query attention):
    neighbouring query heads share one, and no backend repeats it in memory. A query that sees no
    key gives zero. Under autocast the inputs are cast to the autocast dtype, as in
    `scaled_dot_product_attention`.

    Args:
        pattern: Which query may attend to which key, by position.
        prior: A bias of the scores, such as `ALiBi(8)`, a cap of the scores, `SoftCap(50.0)`, or
            sinks, `Sinks(8)`. Combine them with `+`.
        mask: Padding mask (b m), True = keep.
        attn_mask: Pair mask (n m), (b n m) or (b h n m), True = keep. Pairs must be allowed by the
            pattern, by `mask` and by `attn_mask`.
        global_attention_mask: (b n), True for the tokens that `GlobalMask` in the pattern refers
            to.
        cu_seqlens: Offsets (s + 1) of s packed sequences, as in FlashAttention: 0, the end of each
            sequence, the last of them n. The batch size is 1. Each sequence attends within itself,
            and its positions start at 0.
        scale: Factor of the scores. Default: 1/sqrt(e), or what a prior with several terms
            requires.
        q_start: Position of the first query, or of the first query of each example (b).
        k_positions: Position of the first key, or the positions of all keys (m). If `q_start`
            differs between examples (b m), with -1 for keys that do not exist.
        dropout: Probability of dropping a weight, as in `scaled_dot_product_attention`: kept
            weights are divided by 1 - dropout. Such calls run on "sdpa", which computes all scores.
        backend: "auto" selects by estimated cost. A name ("reference", "sdpa", "cpp", "sparse",
            "flex", or one from another package) uses that backend or raises `Unsupported`.
    """
    if torch._C._is_any_autocast_enabled():
        q, k, v = _cast_for_autocast(q, k, v)
    if isinstance(q_start, Tensor):
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens sets the positions: omit q_start and k_positions")
        prior = resolve_positions(pattern, prior, q_start, k_positions, q.shape[2])
        pattern, q_start, k_positions = _FULL, 0, 0
    compiling = torch.compiler.is_compiling()
    cacheable = (
        prior is None
        and mask is None
        and attn_mask is None
        and cu_seqlens is None
        and global_attention_mask is None
        and backend == "auto"
        and not dropout
        and not compiling
    )
    if cacheable:
        run = dispatch_cache.lookup(q, k, v, pattern, scale, q_start, k_positions)
        if run is not None:
            return run(q, k, v)
    if cu_seqlens is not None:
        lengths = _check_packed(q, k, cu_seqlens, q_start, k_positions)
        if len(lengths) > 1:
            pattern, prior = PerSegment(pattern, lengths), restart_prior(prior, lengths)
    call = make_call(
        q,
        k,
        v,
        pattern=pattern,
        prior=prior,
        mask=mask,
        attn_mask=attn_mask,
        global_attention_mask=global_attention_mask,
        scale=scale,
        q_start=q_start,
        k_positions=k_positions,
    )
    if dropout:
        if isinstance(dropout, bool) or not (isinstance(dropout, int | float) and 0 <= dropout < 1):
            raise ValueError(f"dropout must be a number in [0, 1), not {dropout!r}")
        if backend not in ("auto", "sdpa"):
            raise Unsupported(f"backend {backend!r} does not drop weights: use 'auto' or 'sdpa'")
        if torch.compiler.is_exporting():
            raise Unsupported("dropout cannot be exported: call eval() first")
        return _drop_outside_graph(call, dropout)
    if compiling:
        return _attend_traced(call, backend)
    chosen, run = _prepare(call, backend)
    if cacheable:
        dispatch_cache.remember(call, chosen, run, pattern, scale)
    return run(call.q, call.k, call.v)


def register_backend(backend: Backend[Any]) -> None:
    """Add a backend to those that `regard.attend` or linear attention choose from.

    Packages do this with an entry point of the group "regard.backends" instead.
    """
    check_is_backend(backend)
    dispatchers = {"softmax": softmax_backends, "linear": linear_backends}
    dispatchers[backend.operation].register(backend)  # type: ignore[attr-defined]


def _check_packed(
    q: Tensor, k: Tensor, cu_seqlens: Tensor, q_start: int, k_positions: int | Tensor
) -> tuple[int, ...]:
    """The lengths of packed sequences. Raises unless q and k are those of one row of them."""
    if q.dim() != 4 or k.dim() != 4 or q.shape[0] != 1 or q.shape[2] != k.shape[2]:
        raise ValueError(
            "cu_seqlens needs self-attention with batch size 1, all sequences in one row: q and k "
            f"of shape (1 h n e), not {tuple(q.shape)} and {tuple(k.shape)}"
        )
    if isinstance(k_positions, Tensor) or k_positions or q_start:
        raise ValueError("cu_seqlens sets the positions: omit q_start and k_positions")
    return lengths_from_cu_seqlens(cu_seqlens, q.shape[2])


def _cast_for_autocast(*tensors: Tensor) -> Sequence[Tensor]:
    """Tensors in the autocast dtype, except float64, as in PyTorch.

    Invalid arguments are reported later.
    """
    device = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    castable = FLOAT_DTYPES[:3]
    return [x.to(dtype) if isinstance(x, Tensor) and x.dtype in castable else x for x in tensors]


def _prepare(
    call: AttentionCall, backend: str
) -> tuple[Backend[AttentionCall], Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """The backend of a call and its function."""
    if not call.q.numel() or not call.v.numel():
        softmax_backends.check_name(backend)
        backend = "reference"  # nothing to plan; the result has the right shape and graph
    return softmax_backends.prepare(call, backend)


def _run(call: AttentionCall, backend: str) -> Tensor:
    _, run = _prepare(call, backend)
    return run(call.q, call.k, call.v)


# A graph break. `torch.compiler.disable` does the same but imports the compiler, which takes longer
# than all other imports.
_run_outside_graph = _disable_dynamo(_run)
_drop_outside_graph = _disable_dynamo(attend_with_dropout)


def _attend_traced(call: AttentionCall, backend: str) -> Tensor:
    """The call inside a graph that is being compiled or exported."""
    if torch.compiler.is_exporting():
        if backend not in ("auto", "sdpa", "reference"):
            raise Unsupported(
                f"backend {backend!r} cannot be exported: its plan depends on the length, "
                "and an exported graph accepts any length. Use 'auto', 'sdpa' or 'reference'."
            )
        return traced.dense_attention(call)
    if backend == "auto" and traced.is_dense(call):
        return traced.dense_attention(call)
    if backend == "auto" and traced.fits_custom_op(call):
        return traced.attend_by_custom_op(call)
    return _run_outside_graph(call, backend)
