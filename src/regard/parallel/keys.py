"""Attention over a pattern: each process gets the keys and values that its queries see, and no others."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.attentions import SoftmaxAttention
from regard.attentions.cached import Cached, Place
from regard.mixer import MultiHead, merge
from regard.parallel import ring
from regard.parallel.needs import Plan, plan
from regard.parallel.wire import Meeting


def over_keys(mixer: MultiHead, x: Tensor, mask: Tensor | None, meeting: Meeting) -> Tensor:
    """x (b n d), mask (b n), both of the tokens here -> (b n d).

    Plain softmax attention takes the keys of one process at a time; what cannot be merged from parts holds all that it sees.
    Gradients of keys and values go back to the processes that they came from, and are added up there.
    """
    inner = mixer.inner
    assert isinstance(inner, Cached)
    pattern = (inner.past if mixer.causal else inner.pattern).given(False, False)
    q, k, v = mixer.project(x, None, meeting.at)
    work = plan(pattern, meeting.ends, meeting.rank, k.shape[1])
    if meeting.masked:  # one byte for each key: all at once
        mine = x.new_ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
        mask = plan(pattern, meeting.ends, meeting.rank, 1).bring(mine[:, None, :, None], meeting)[:, 0, :, 0]
    if ring.goes_round(inner, q, k, v):
        assert isinstance(inner, SoftmaxAttention)
        scale = 1 / math.sqrt(q.shape[3]) if inner.scale is None else inner.scale
        return mixer.out(merge(ring.attend(q, k, v, work, meeting, scale=scale, mask=mask)))
    k, v = work.bring(torch.cat((k, v), -1), meeting).split((k.shape[3], v.shape[3]), -1)
    return mixer.out(merge(inner.over(q, k, v, _place(inner, work), mask=mask)))


def _place(inner: Cached, work: Plan) -> Place:
    """Where the queries and the held keys stand: by their true positions, unless nothing but the pattern looks at those."""
    if isinstance(inner, SoftmaxAttention) and inner.prior is None:
        return work.place
    row = len(work.at) == 0 or int(work.at[-1] - work.at[0]) == len(work.at) - 1
    return work.place if row else Place(work.pattern, work.first, work.at)
