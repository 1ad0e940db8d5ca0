"""Attention inside graphs that PyTorch records, for `torch.compile` and `torch.export`.

The fastest backend depends on sizes and on the machine, and a layout is built for one length; a
graph knows neither. Exported graphs are therefore dense: the pattern computes the mask from
positions, for any length. Compiled graphs are dense where the dense backend would run, and
otherwise contain one custom operator that selects the backend when it runs.
"""

from __future__ import annotations

import hashlib

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.backends.call import AttentionCall, make_call
from regard.backends.choose import softmax_backends
from regard.backends.reference import attend_by_formula
from regard.backends.sparse import SparseBackend
from regard.pattern import Causal, Full, Pattern

_FULL, _CAUSAL = Full(), Causal()


def is_dense(call: AttentionCall) -> bool:
    """Whether the dense backend would run, as far as that is known without a layout."""
    few = call.num_tokens() < min(SparseBackend.min_tokens)
    return few or call.pattern == _FULL or call.pattern == _CAUSAL


def dense_attention(call: AttentionCall) -> Tensor:
    """Dense attention for any sizes, which may be symbolic.

    A query that sees no key gives zero here as well; runtimes disagree on the softmax of a fully
    masked row.
    """
    if call.sinks is not None:
        return attend_by_formula(call)
    grouped = call.group_size() > 1
    has_mask = call.mask is not None or call.attn_mask is not None
    if call.prior is None and not has_mask and call.pattern == _FULL:
        return F.scaled_dot_product_attention(
            call.q, call.k, call.v, scale=call.scale, enable_gqa=grouped
        )
    if call.is_plain_causal():
        return F.scaled_dot_product_attention(
            call.q, call.k, call.v, is_causal=True, scale=call.scale, enable_gqa=grouped
        )
    if call.prior is None:
        mask = keep = call.dense_mask()
    else:
        mask = call.dense_bias()
        keep = mask > -torch.inf  # a prior may hide pairs as well
    y = F.scaled_dot_product_attention(
        call.q, call.k, call.v, mask, scale=call.scale, enable_gqa=grouped
    )
    return y.masked_fill(~keep.any(-1, keepdim=True), 0)


# ---------------------------------------------------------------------- custom operator
def fits_custom_op(call: AttentionCall) -> bool:
    """Whether the custom operator supports the call.

    It has no backward pass, and its pattern must be interned.
    """
    return (
        not call.needs_grad()
        and call.prior is None
        and call.sinks is None
        and call.pattern.graph_id is not None
        and isinstance(call.k_positions, int)
    )


def attend_by_custom_op(call: AttentionCall) -> Tensor:
    """The whole call as one operator of the graph."""
    assert call.pattern.graph_id is not None
    return _attend_op(
        call.q,
        call.k,
        call.v,
        call.mask,
        call.attn_mask,
        call.global_attention_mask,
        call.pattern.graph_id,
        call.scale,
        call.q_start,
        call.k_start(),
    )


_interned: dict[str, Pattern] = {}


def intern_pattern(pattern: Pattern) -> None:
    """Give a pattern the id by which graphs refer to it, before any graph is recorded.

    Operators take tensors, numbers and strings only. The id is a digest of the repr and the types
    of the leaves, so that it is the same in every process: a graph from a compiler cache means the
    same pattern, or one that is not known, but never another one.
    """
    if torch.compiler.is_compiling():
        return
    types = [f"{type(leaf).__module__}.{type(leaf).__qualname__}" for leaf in pattern.leaves()]
    text = "\n".join([repr(pattern), *types])
    for attempt in range(len(_interned) + 1):  # two patterns with one repr get different ids
        name = hashlib.sha256(f"{text}\n{attempt}".encode()).hexdigest()[:16]
        if _interned.setdefault(name, pattern) == pattern:
            object.__setattr__(pattern, "graph_id", name)
            return


def _find_pattern(graph_id: str) -> Pattern:
    if graph_id not in _interned:
        raise ValueError(
            f"This graph refers to a pattern {graph_id} that does not exist in this process: build "
            "the module that was compiled before you run the graph."
        )
    return _interned[graph_id]


@torch.library.custom_op("regard::attend", mutates_args=())
def _attend_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    attn_mask: Tensor | None,
    global_attention_mask: Tensor | None,
    graph_id: str,
    scale: float,
    q_start: int,
    k_start: int,
) -> Tensor:
    call = make_call(
        q,
        k,
        v,
        pattern=_find_pattern(graph_id),
        mask=mask,
        attn_mask=attn_mask,
        global_attention_mask=global_attention_mask,
        scale=scale,
        q_start=q_start,
        k_positions=k_start,
    )
    _, run = softmax_backends.prepare(call)
    out: Tensor = run(call.q, call.k, call.v)
    return out.contiguous()


@_attend_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    attn_mask: Tensor | None,
    global_attention_mask: Tensor | None,
    graph_id: str,
    scale: float,
    q_start: int,
    k_start: int,
) -> Tensor:
    return q.new_empty((*q.shape[:3], v.shape[3]))
