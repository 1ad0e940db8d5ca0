"""Splitting calls: by heads with different patterns, and into the pairs that a
`global_attention_mask` adds.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from regard.backends.call import AttentionCall
from regard.pattern import Not, Pattern


def run_by_head(call: AttentionCall, *, run: Callable[[AttentionCall], Tensor]) -> Tensor:
    """Run one call for each distinct pattern of a `PerHead` pattern.

    In grouped-query attention, each head of keys of such a call is shared by the same number of its
    query heads; where a pattern does not allow this, there are several calls.
    """
    group = call.group_size()
    sharing = Counter((head // group, p) for head, p in enumerate(call.pattern.parts))
    calls: dict[tuple[Pattern, int], list[int]] = defaultdict(list)
    for head, pattern in enumerate(call.pattern.parts):
        calls[pattern, sharing[head // group, pattern]].append(head)
    outputs = []
    for (pattern, _), heads in calls.items():
        index = _index(heads)
        kv_index = _index(list(dict.fromkeys(head // group for head in heads)))
        q, k, v = call.q[:, index], call.k[:, kv_index], call.v[:, kv_index]
        attn_mask, sinks = call.attn_mask, call.sinks
        if attn_mask is not None and attn_mask.shape[1] > 1:
            attn_mask = attn_mask[:, index]
        own = call._replace(q=q, k=k, v=v, pattern=pattern, attn_mask=attn_mask)
        outputs.append(run(own._replace(sinks=None if sinks is None else sinks[index])))
    order = torch.tensor([head for heads in calls.values() for head in heads])
    return torch.cat(outputs, 1)[:, torch.argsort(order)]


def _index(heads: list[int]) -> list[int] | slice:
    """Heads in ascending order as a slice, which needs no copy, if their distances are equal."""
    step = heads[1] - heads[0] if len(heads) > 1 else 1
    whole = slice(heads[0], heads[-1] + 1, step)
    return whole if heads == list(range(heads[0], heads[-1] + 1, step)) else heads


def only_adds_pairs(pattern: Pattern) -> bool:
    """Whether a `global_attention_mask` can only make more pairs visible, never fewer."""
    if isinstance(pattern, Not):
        return not pattern.needs_global_mask
    return all(only_adds_pairs(part) for part in pattern.parts)


class MaskSubset(NamedTuple):
    """A mask keep (queries keys) over queries `q_order` and keys `k_order`; None = all."""

    keep: Tensor
    q_order: Tensor | None
    k_order: Tensor | None


def global_mask_pairs(call: AttentionCall, is_global: Tensor) -> tuple[MaskSubset, MaskSubset]:
    """The pairs that global tokens, is_global (n), add: their keys for the other queries, and all
    keys for their queries.
    """
    at = is_global.nonzero()[:, 0]
    q, k = call.position_grid()
    resolve = call.pattern.resolve_global_mask
    local = resolve(False, False)
    for_others = (resolve(False, True) & ~local).allows(q, k[:, at]) & ~is_global[:, None]
    to_global, to_others = (resolve(True, key).allows(q[at], k) for key in (True, False))
    for_global = torch.where(is_global, to_global, to_others) & ~local.allows(q[at], k)
    return MaskSubset(for_others, None, at), MaskSubset(for_global, at, None)
