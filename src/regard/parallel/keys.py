"""Attention over a pattern: each process gets the keys and values that its queries see, and attends as ever."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.attentions import SoftmaxAttention
from regard.attentions.cached import Cached, Place
from regard.mixer import MultiHead, merge
from regard.parallel.needs import Plan, plan
from regard.parallel.wire import Meeting


def over_keys(mixer: MultiHead, x: Tensor, mask: Tensor | None, meeting: Meeting) -> Tensor:
    """x (b n d), mask (b n), both of the tokens here -> (b n d).

    Gradients of keys and values go back to the processes that they came from, and are added up there.
    """
    inner = mixer.inner
    assert isinstance(inner, Cached)
    pattern = (inner.past if mixer.causal else inner.pattern).given(False, False)
    q, k, v = mixer.project(x, None, meeting.at)
    work = plan(pattern, meeting.ends, meeting.rank, k.shape[1])
    k, v = work.bring(torch.cat((k, v), -1), meeting).split((k.shape[3], v.shape[3]), -1)
    if meeting.masked:
        mine = x.new_ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
        mask = plan(pattern, meeting.ends, meeting.rank, 1).bring(mine[:, None, :, None], meeting)[:, 0, :, 0]
    return mixer.out(merge(inner.over(q, k, v, _place(inner, work), mask=mask)))


def _place(inner: Cached, work: Plan) -> Place:
    """Where the queries and the held keys stand.

    Keys with gaps between them would keep the sparse executor away.  So where nothing but the pattern looks at positions, the
    pattern is moved, and the keys stand in a row.
    """
    gaps = len(work.at) > 0 and int(work.at[-1] - work.at[0]) != len(work.at) - 1
    if not gaps:
        return Place(work.pattern, work.first, int(work.at[0]) if len(work.at) else 0)
    if isinstance(inner, SoftmaxAttention) and inner.prior is None:
        return Place(work.moved)
    return Place(work.pattern, work.first, work.at)
