"""Attention inside graphs that PyTorch records, for `torch.compile` and `torch.export`.

The fastest backend depends on sizes and on the machine, and a layout is built for one length; a
graph knows neither. Exported graphs are therefore dense: the pattern computes the mask from
positions, for any length. Compiled graphs are dense where the dense backend would run, and
otherwise contain one custom operator that selects the backend when it runs.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

import regard.pattern
from regard.backends import sdpa
from regard.backends.call import AttentionCall, make_call
from regard.backends.choose import BACKENDS, MIN_TOKENS, choose_backend
from regard.pattern import Causal, Full, Pattern

_FULL, _CAUSAL = Full(), Causal()


def is_dense(call: AttentionCall) -> bool:
    """Whether the dense backend would run, as far as that is known without a layout."""
    few = min(call.q.shape[2], call.k.shape[2]) < min(MIN_TOKENS["sparse"])
    return few or call.pattern == _FULL or call.pattern == _CAUSAL


def dense_attention(call: AttentionCall) -> Tensor:
    """Dense attention for any sizes, which may be symbolic.

    A query that sees no key gives zero here as well; runtimes disagree on the softmax of a fully
    masked row.
    """
    if call.prior is None and call.mask is None and call.pattern == _FULL:
        return F.scaled_dot_product_attention(call.q, call.k, call.v, scale=call.scale)
    if sdpa.is_plain_causal(call):
        return F.scaled_dot_product_attention(
            call.q, call.k, call.v, is_causal=True, scale=call.scale
        )
    if call.prior is None:
        mask = keep = call.dense_mask()
    else:
        mask = call.dense_bias()
        keep = mask > -torch.inf  # a prior may hide pairs as well
    y = F.scaled_dot_product_attention(call.q, call.k, call.v, mask, scale=call.scale)
    return y.masked_fill(~keep.any(-1, keepdim=True), 0)


# ---------------------------------------------------------------------- custom operator
def fits_custom_op(call: AttentionCall) -> bool:
    """Whether the custom operator supports the call.

    It has no backward pass, and its pattern must be registered.
    """
    return (
        not call.needs_grad()
        and call.prior is None
        and call.pattern.graph_repr is not None
        and isinstance(call.k_positions, int)
    )


def attend_by_custom_op(call: AttentionCall) -> Tensor:
    """The whole call as one operator of the graph."""
    assert call.pattern.graph_repr is not None
    return _attend_op(
        call.q,
        call.k,
        call.v,
        call.mask,
        call.global_attention_mask,
        call.pattern.graph_repr,
        call.scale,
        call.q_start,
        call.k_start(),
    )


def register_pattern(pattern: Pattern) -> None:
    """Make a pattern usable by the custom operator, before any graph is recorded.

    Operators take tensors, numbers and strings only, so the pattern is passed as its repr, which
    builds it again if all of its leaves are from `regard.pattern`.
    """
    if not torch.compiler.is_compiling() and all(
        type(leaf).__module__.startswith(regard.pattern.__name__) for leaf in pattern.leaves()
    ):
        object.__setattr__(pattern, "graph_repr", repr(pattern))


@lru_cache(4096)
def _pattern_from_repr(text: str) -> Pattern:
    pattern: Pattern = eval(text, dict(vars(regard.pattern)))
    return pattern


@torch.library.custom_op("regard::attend", mutates_args=())
def _attend_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    global_attention_mask: Tensor | None,
    pattern: str,
    scale: float,
    q_start: int,
    k_start: int,
) -> Tensor:
    call = make_call(
        q,
        k,
        v,
        pattern=_pattern_from_repr(pattern),
        mask=mask,
        global_attention_mask=global_attention_mask,
        scale=scale,
        q_start=q_start,
        k_positions=k_start,
    )
    return BACKENDS[choose_backend(call).backend].run(call).contiguous()


@_attend_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    global_attention_mask: Tensor | None,
    pattern: str,
    scale: float,
    q_start: int,
    k_start: int,
) -> Tensor:
    return q.new_empty((*q.shape[:3], v.shape[3]))
