"""Attention over a pattern: each process gets the keys and values that its queries see, and no others."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.attentions import SoftmaxAttention
from regard.attentions.kv_cache import CallPositions, KVCacheAttention
from regard.mixer import MultiHead, merge_heads
from regard.parallel import ring
from regard.parallel.communication import ShardedCall
from regard.parallel.exchange_plan import ExchangePlan, exchange_plan


def over_keys(mixer: MultiHead, x: Tensor, mask: Tensor | None, meeting: ShardedCall) -> Tensor:
    """x (b n d), mask (b n), both of the tokens here -> (b n d).

    Plain softmax attention takes the keys of one process at a time; what cannot be merged from parts holds all that it sees.
    Gradients of keys and values go back to the processes that they came from, and are added up there.
    """
    inner = mixer.inner
    assert isinstance(inner, KVCacheAttention)
    pattern = (inner.causal_pattern if mixer.causal else inner.pattern).resolve_global_mask(
        False, False
    )
    q, k, v = mixer.project(x, None, meeting.at)
    work = exchange_plan(pattern, meeting.ends, meeting.rank, k.shape[1])
    if meeting.masked:  # one byte for each key: all at once
        mine = x.new_ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
        mask = exchange_plan(pattern, meeting.ends, meeting.rank, 1).bring(
            mine[:, None, :, None], meeting
        )[:, 0, :, 0]
    if ring.goes_round(inner, q, k, v):
        assert isinstance(inner, SoftmaxAttention)
        scale = 1 / math.sqrt(q.shape[3]) if inner.scale is None else inner.scale
        return mixer.out(merge_heads(ring.attend(q, k, v, work, meeting, scale=scale, mask=mask)))
    k, v = work.bring(torch.cat((k, v), -1), meeting).split((k.shape[3], v.shape[3]), -1)
    return mixer.out(merge_heads(inner.attend(q, k, v, _place(inner, work), mask=mask)))


def _place(inner: KVCacheAttention, work: ExchangePlan) -> CallPositions:
    """Where the queries and the held keys stand: by their true positions, unless nothing but the pattern looks at those."""
    if isinstance(inner, SoftmaxAttention) and inner.prior is None:
        return work.place
    row = len(work.at) == 0 or int(work.at[-1] - work.at[0]) == len(work.at) - 1
    return work.place if row else CallPositions(work.pattern, work.first, work.at)
