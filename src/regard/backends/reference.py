"""The textbook formula over the dense mask: quadratic in memory, supports everything, and serves as
the test oracle.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.backends.call import AttentionCall


def refuses(call: AttentionCall) -> str | None:
    """The reason why this backend does not support the call, or None."""
    return None


def run(call: AttentionCall) -> Tensor:
    """softmax(q kᵀ * scale + prior) v over the visible keys; zero for a query that sees none."""
    scores = call.q @ call.k.transpose(-1, -2) * call.scale
    if call.prior is not None:
        scores = scores + call.prior(*call.position_grid(), call.q, call.k)
    scores = scores.masked_fill(~call.dense_mask().expand(scores.shape), -torch.inf)
    # NaN counts as visible, so that it propagates
    visible = (scores != -torch.inf).any(-1, keepdim=True)
    scores = scores.masked_fill(~visible, 0)
    return (torch.softmax(scores, -1) * visible) @ call.v
