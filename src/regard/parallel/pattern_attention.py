"""Attention over a pattern: each process receives the keys and values that its queries see."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.attentions import SoftmaxAttention
from regard.attentions.kv_cache import CallPositions, KVCacheAttention
from regard.mixer import MultiHead, merge_heads
from regard.parallel import ring
from regard.parallel.communication import ShardedCall
from regard.parallel.exchange_plan import exchange_plan, is_consecutive


def attend_pattern(mixer: MultiHead, x: Tensor, mask: Tensor | None, call: ShardedCall) -> Tensor:
    """Local tokens x (b, n, d) and mask (b, n) -> (b, n, d).

    Plain softmax attention reads the keys of one process at a time, in a ring. Other attentions
    hold all keys that they see. Gradients of keys and values are sent back and summed.
    """
    attention = mixer.inner
    assert isinstance(attention, KVCacheAttention)
    pattern = attention.causal_pattern if mixer.causal else attention.pattern
    pattern = pattern.resolve_global_mask(False, False)
    q, k, v = mixer.project(x, None, call.start)
    plan = exchange_plan(pattern, call.ends, call.rank, k.shape[1])
    if call.masked:
        own = x.new_ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
        mask_plan = exchange_plan(pattern, call.ends, call.rank, 1)
        mask = mask_plan.collect(own[:, None, :, None], call)[:, 0, :, 0]
    if ring.supports_ring(attention, q, k, v):
        assert isinstance(attention, SoftmaxAttention)
        scale = 1 / math.sqrt(q.shape[3]) if attention.scale is None else attention.scale
        y = ring.ring_attention(q, k, v, plan, call, scale=scale, mask=mask)
        return mixer.out(merge_heads(y))
    k, v = plan.collect(torch.cat((k, v), -1), call).split((k.shape[3], v.shape[3]), -1)
    # attentions that use positions themselves need the true ones
    uses_positions = not isinstance(attention, SoftmaxAttention) or attention.prior is not None
    positions = plan.all_positions
    if uses_positions and not is_consecutive(plan.positions):
        positions = CallPositions(plan.pattern, plan.q_start, plan.positions)
    return mixer.out(merge_heads(attention.attend(q, k, v, positions, mask=mask)))
