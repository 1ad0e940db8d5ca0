"""Attention inside a graph that PyTorch records: for `torch.compile`, and for `torch.export`.

Which executor is the fastest depends on sizes and on the machine, and a layout is made for one length.  A graph knows
neither.  So what is exported is dense: the mask is computed from the positions by the pattern itself, for any length.  What
is compiled is dense where dense is what would run, and else one opaque operator, which picks when it runs.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

import regard.pattern
from regard.backends import sdpa
from regard.backends.call import AttentionCall, make_call
from regard.backends.choose import BACKENDS, LEAST, choose_backend
from regard.pattern import Causal, Full, Pattern

_FULL, _CAUSAL = Full(), Causal()


def is_dense(call: AttentionCall) -> bool:
    """Whether dense attention is what would run, as far as that can be told without a layout."""
    return (
        call.pattern == _FULL
        or call.pattern == _CAUSAL
        or min(call.q.shape[2], call.k.shape[2]) < min(LEAST["sparse"])
    )


def is_opaque(call: AttentionCall) -> bool:
    """Whether the operator can run it: it has no backward pass, takes no prior, and must be told the pattern in words."""
    return (
        not call.grad()
        and call.prior is None
        and call.pattern.graph_repr is not None
        and isinstance(call.k_positions, int)
    )


def dense(call: AttentionCall) -> Tensor:
    """Dense attention for any sizes, which need not be known yet.

    A query that sees nothing gives zero here as well: what a softmax over nothing is, runtimes do not agree upon.
    """
    if call.prior is None and call.mask is None and call.pattern == _FULL:
        return F.scaled_dot_product_attention(call.q, call.k, call.v, scale=call.scale)
    if sdpa.plainly_causal(call):
        return F.scaled_dot_product_attention(
            call.q, call.k, call.v, is_causal=True, scale=call.scale
        )
    mask = keep = call.keep()
    if call.prior is not None:
        q, k = call.positions()
        mask = torch.where(keep, call.prior(q[:, None], k[None, :], call.q, call.k), -torch.inf).to(
            call.q.dtype
        )
        keep = mask > -torch.inf  # a prior may hide what the pattern shows
    y = F.scaled_dot_product_attention(call.q, call.k, call.v, mask, scale=call.scale)
    return y.masked_fill(~keep.any(-1, keepdim=True), 0)


def opaque(call: AttentionCall) -> Tensor:
    """The whole call as one operator of the graph."""
    assert isinstance(call.k_positions, int)
    assert call.pattern.graph_repr is not None
    return _attend(
        call.q,
        call.k,
        call.v,
        call.mask,
        call.global_attention_mask,
        call.pattern.graph_repr,
        call.scale,
        call.q_start,
        call.k_positions,
    )


def register_pattern(pattern: Pattern) -> None:
    """Write a pattern down beside itself, before any graph is recorded: an operator takes words and tensors only.

    What a pattern prints builds it again, if all its leaves are ours.
    """
    if not torch.compiler.is_compiling() and all(
        type(leaf).__module__.startswith(regard.pattern.__name__) for leaf in pattern.leaves()
    ):
        object.__setattr__(pattern, "graph_repr", repr(pattern))


@lru_cache(4096)
def _spelled(text: str) -> Pattern:
    found: Pattern = eval(text, dict(vars(regard.pattern)))
    return found


@torch.library.custom_op("regard::attend", mutates_args=())
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    global_attention_mask: Tensor | None,
    text: str,
    scale: float,
    q_start: int,
    k_positions: int,
) -> Tensor:
    call = make_call(
        q,
        k,
        v,
        pattern=_spelled(text),
        prior=None,
        mask=mask,
        global_attention_mask=global_attention_mask,
        scale=scale,
        q_start=q_start,
        k_positions=k_positions,
    )
    return BACKENDS[choose_backend(call).backend].run(call).contiguous()


@_attend.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    global_attention_mask: Tensor | None,
    text: str,
    scale: float,
    q_start: int,
    k_positions: int,
) -> Tensor:
    return q.new_empty((*q.shape[:3], v.shape[3]))
