"""Attention inside a graph that PyTorch records: for `torch.compile`, and for `torch.export`.

Which executor is the fastest depends on sizes and on the machine, and a layout is made for one length.  A graph knows
neither.  So what is exported is dense: the mask is computed from the positions by the pattern itself, for any length.  What
is compiled is dense where dense is what would run, and else one opaque operator, which picks when it runs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attend import sdpa
from regard.attend.call import Call, make_call
from regard.attend.choose import BACKENDS, SMALL, choose
from regard.pattern import Causal, Full, Pattern

_DENSE = (Full(), Causal())
_patterns: list[Pattern] = []  # by number: an operator takes numbers and tensors only
_numbers: dict[Pattern, int] = {}


def is_dense(call: Call) -> bool:
    """Whether dense attention is what would run, as far as that can be told without a layout."""
    return call.pattern in _DENSE or call.q.shape[2] < SMALL or call.k.shape[2] < SMALL


def is_opaque(call: Call) -> bool:
    """Whether the operator can run it: it has no backward pass, and takes no prior."""
    return not call.grad() and call.prior is None and isinstance(call.k_at, int)


def dense(call: Call) -> Tensor:
    """Dense attention for any sizes, which need not be known yet.

    A query that sees nothing gives zero here as well: what a softmax over nothing is, runtimes do not agree upon.
    """
    causal = bool(sdpa.plainly_causal(call))  # of sizes that are not known yet it is a question to the graph
    keep = None if causal or (call.pattern == _DENSE[0] and call.mask is None) else call.keep()
    mask = keep
    if call.prior is not None:
        q, k = call.positions()
        mask = call.prior(q[:, None], k[None, :], call.q, call.k).to(call.q.dtype)
        mask = mask if keep is None else torch.where(keep, mask, -torch.inf)
    y = F.scaled_dot_product_attention(call.q, call.k, call.v, mask, 0.0, causal, scale=call.scale)
    return y if keep is None else y.masked_fill(~keep.any(-1, keepdim=True), 0)


def opaque(call: Call) -> Tensor:
    """The whole call as one operator of the graph."""
    assert isinstance(call.k_at, int)
    number = _number(call.pattern)
    return _attend(call.q, call.k, call.v, call.mask, call.marks, number, call.scale, call.q_at, call.k_at)


def _number(pattern: Pattern) -> int:
    if pattern not in _numbers:
        _numbers[pattern] = len(_patterns)
        _patterns.append(pattern)
    return _numbers[pattern]


_number._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler.assume_constant_result, which loads the compiler


@torch.library.custom_op("regard::attend", mutates_args=())
def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, marks: Tensor | None, number: int, scale: float, q_at: int, k_at: int
) -> Tensor:
    call = make_call(q, k, v, pattern=_patterns[number], prior=None, mask=mask, marks=marks, scale=scale, q_at=q_at, k_at=k_at)
    return BACKENDS[choose(call).backend].run(call).contiguous()


@_attend.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, marks: Tensor | None, number: int, scale: float, q_at: int, k_at: int
) -> Tensor:
    return q.new_empty((*q.shape[:3], v.shape[3]))
