"""The oracle: the textbook formula over the dense mask.  Quadratic in memory; gives everything that a call can need."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.backends.call import AttentionCall


def refuses(call: AttentionCall) -> str | None:
    """Why it cannot do this; None: it can."""
    return None


def run(call: AttentionCall) -> Tensor:
    """softmax(q kᵀ * scale + prior), over the keys that are kept, times v; zero for a query that sees nothing."""
    scores = call.q @ call.k.transpose(-1, -2) * call.scale
    if call.prior is not None:
        q, k = call.positions()
        scores = scores + call.prior(q[:, None], k[None, :], call.q, call.k)
    scores = scores.masked_fill(~call.keep().expand(scores.shape), -torch.inf)
    seen = (scores != -torch.inf).any(-1, keepdim=True)  # what is not a number is seen, and shows
    scores = scores.masked_fill(~seen, 0)
    return (torch.softmax(scores, -1) * seen) @ call.v
