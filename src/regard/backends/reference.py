"""The backend `reference`: the textbook formula over the dense mask. It is quadratic in memory,
supports everything, and serves as the test oracle.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from regard.backends.call import AttentionCall, as_function
from regard.backends.protocol import Backend


class ReferenceBackend(Backend[AttentionCall]):
    """softmax(q kᵀ * scale + prior) v over the visible keys; zero for a query that sees none."""

    name = "reference"
    traceable = True

    def refuses(self, call: AttentionCall) -> str | None:
        """None: it supports every call."""
        return None

    def cost(self, call: AttentionCall) -> float | None:
        """None: it runs only by name."""
        return None

    def prepare(self, call: AttentionCall) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """The formula."""
        return as_function(call, attend_by_formula)


def attend_by_formula(call: AttentionCall) -> Tensor:
    """softmax(q kᵀ * scale + prior) v over the visible keys and the sink, which has no value; zero
    for a query that sees none.
    """
    (b, h, n, e), (kv, m) = call.q.shape, call.k.shape[1:3]
    rows = call.group_size() * n  # of all query heads that share a head of keys
    scores = call.q.reshape(b, kv, rows, e) @ call.k.transpose(-1, -2) * call.scale
    scores = scores.reshape(b, h, n, m)
    if call.prior is not None:
        scores = scores + call.prior(*call.position_grid(), call.q, call.k)
    scores = scores.masked_fill(~call.dense_mask().expand(scores.shape), -torch.inf)
    if call.sinks is not None:
        sinks = call.sinks.to(scores)[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat((scores, sinks), -1), -1)[..., :-1]
    else:
        # NaN counts as visible, so that it propagates
        visible = (scores != -torch.inf).any(-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(~visible, 0), -1) * visible
    weights = weights.to(call.v.dtype)  # a prior may compute in a wider one
    return (weights.reshape(b, kv, rows, m) @ call.v).reshape(b, h, n, call.v.shape[3])
