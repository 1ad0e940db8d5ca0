"""Exact softmax attention over any pattern, by the executor that suits the call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from regard import native
from regard.backends import dispatch_cache, traced
from regard.backends.call import FLOATS, AttentionCall, check_mask, make_call
from regard.backends.choose import BACKENDS, BackendChoice, choose_backend, explain
from regard.errors import Unsupported, did_you_mean
from regard.pattern import Full, Pattern
from regard.prior import Prior

__all__ = [
    "BACKENDS",
    "AttentionCall",
    "BackendChoice",
    "attend",
    "check_backend",
    "check_mask",
    "choose_backend",
    "explain",
]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern = Full(),
    prior: Prior | None = None,
    mask: Tensor | None = None,
    global_attention_mask: Tensor | None = None,
    scale: float | None = None,
    q_start: int = 0,
    k_positions: int | Tensor = 0,
    backend: str = "auto",
) -> Tensor:
    """Softmax attention, exactly: q (b h n e), k (b h m e), v (b h m f) -> (b h n f).

    pattern   who may look at whom, by position; heads of k and v may be fewer than those of q, if they divide them
    prior     an addend to the scores
    mask      (b m), True = a real token
    marks     (b n), True = a token that `GlobalMask` in the pattern means
    scale     of the scores, 1/sqrt(e) unless given, or what a prior of several terms asks for
    q_at      the position of the first query; `k_at` that of the first key, or all of them, (m)
    backend   "auto" picks by measured cost; a name of `BACKENDS` runs there, or raises `Unsupported`

    A query that sees nothing gives zero.  Under autocast it computes in the type of that, as PyTorch's own call does.
    """
    if torch._C._is_any_autocast_enabled():
        q, k, v = _autocast(q, k, v)
    compiling = torch.compiler.is_compiling()
    bare = (
        prior is None
        and mask is None
        and global_attention_mask is None
        and backend == "auto"
        and not compiling
    )
    if (
        bare
        and (again := dispatch_cache.get(q, k, v, pattern, scale, q_start, k_positions)) is not None
    ):
        return again(q, k, v)
    call = make_call(
        q,
        k,
        v,
        pattern=pattern,
        prior=prior,
        mask=mask,
        global_attention_mask=global_attention_mask,
        scale=scale,
        q_start=q_start,
        k_positions=k_positions,
    )
    if bare and call.q.numel() and call.v.numel():
        return _first(call, pattern, scale)
    return _traced(call, backend) if compiling else _run(call, backend)


def _first(call: AttentionCall, pattern: Pattern, scale: float | None) -> Tensor:
    """A call of a kind that was not seen before: the choice is remembered."""
    backend = choose_backend(call).backend
    if native.are_plain_tensors(
        call.q, call.k, call.v
    ):  # inside of a transform another is chosen than outside
        dispatch_cache.put(call, backend, pattern, scale)
    return BACKENDS[backend].run(_with_all_heads(call))


def _autocast(*heads: Tensor) -> Sequence[Tensor]:
    """In the type that autocast asks for; PyTorch leaves float64 alone, and so do we.  What is no tensor is told of later."""
    device = heads[0].device.type if isinstance(heads[0], Tensor) else "cpu"
    if not torch.is_autocast_enabled(device):
        return heads
    kind = torch.get_autocast_dtype(device)
    return [x.to(kind) if isinstance(x, Tensor) and x.dtype in FLOATS[:3] else x for x in heads]


def _traced(call: AttentionCall, backend: str) -> Tensor:
    """As a part of a graph, where that is possible."""
    if torch.compiler.is_exporting():
        if backend not in ("auto", "sdpa", "reference"):
            raise Unsupported(
                f"backend {backend!r} cannot be exported: it is planned for one length, and a graph has any"
            )
        return traced.dense(_with_all_heads(call))
    if backend == "auto" and traced.is_dense(call):
        return traced.dense(_with_all_heads(call))
    if backend == "auto" and traced.is_opaque(call):
        return traced.opaque(_with_all_heads(call))
    return _run_apart(call, backend)


def _run(call: AttentionCall, backend: str) -> Tensor:
    call = _with_all_heads(call)
    if call.q.numel() == 0 or call.v.numel() == 0:  # nothing to look at, or nobody who looks
        check_backend(backend)
        return BACKENDS["reference"].run(call)
    if backend == "auto":
        return BACKENDS[choose_backend(call).backend].run(call)
    check_backend(backend)
    refusal = BACKENDS[backend].refuses(call)
    if refusal is not None:
        raise Unsupported(f"backend {backend!r}: {refusal}")
    return BACKENDS[backend].run(call)


# A graph break.  `torch.compiler.disable` would do the same, but loads the compiler at once, which takes longer than all else
# that is imported here.
_run_apart = _disable_dynamo(_run)


def check_backend(backend: str) -> None:
    """Say which there are, if it is none of them."""
    if backend not in (*BACKENDS, "auto"):
        raise ValueError(
            f"no backend {backend!r}: {did_you_mean(str(backend), [*BACKENDS, 'auto'])}"
        )


def _with_all_heads(call: AttentionCall) -> AttentionCall:
    """Give every query head its key head: where there are fewer, neighbours share one."""
    heads, have = call.q.shape[1], call.k.shape[1]
    if heads == have or not have:
        return call
    share = heads // have
    k, v = (x.repeat_interleave(share, 1) for x in (call.k, call.v))
    return call._replace(k=k, v=v)
