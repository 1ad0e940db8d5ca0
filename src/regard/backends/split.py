"""Calls taken apart: heads with patterns of their own, and what the marks of an example add."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from regard.backends.call import AttentionCall
from regard.pattern import Not, Pattern


def by_head(call: AttentionCall, run: Callable[[AttentionCall], Tensor]) -> Tensor:
    """Heads with the same pattern share a call."""
    alike: dict[Pattern, list[int]] = defaultdict(list)
    for head, pattern in enumerate(call.pattern.parts):
        alike[pattern].append(head)
    parts = [
        (heads, run(call.with_heads(_slice(heads), pattern))) for pattern, heads in alike.items()
    ]
    order = torch.tensor([head for heads, _ in parts for head in heads])
    return torch.cat([part for _, part in parts], 1)[:, torch.argsort(order)]


def _slice(heads: list[int]) -> slice | list[int]:
    """A slice is a view; a list is a copy."""
    regular = heads == list(range(heads[0], heads[-1] + 1))
    return slice(heads[0], heads[-1] + 1) if regular else heads


def grows(pattern: Pattern) -> bool:
    """Whether marking a token can only add pairs."""
    if isinstance(pattern, Not):
        return not pattern.needs_global_mask
    return all(grows(part) for part in pattern.parts)


class Picked(NamedTuple):
    """Some queries, or all, with some keys, or all: keep (queries keys)."""

    keep: Tensor
    q_order: Tensor | None
    k_order: Tensor | None


def added(call: AttentionCall, global_attention_mask: Tensor) -> tuple[Picked, Picked]:
    """What marks (n) add to the pattern without them: marked keys for the other queries, and all keys for the marked ones."""
    at = global_attention_mask.nonzero()[:, 0]
    plain = call.pattern.resolve_global_mask(False, False)
    q, k = (x.unsqueeze(1 - i) for i, x in enumerate(call.positions()))
    for_others = (call.pattern.resolve_global_mask(False, True) & ~plain).allows(
        q, k[:, at]
    ) & ~global_attention_mask[:, None]
    both, query = (
        call.pattern.resolve_global_mask(True, key).allows(q[at], k) for key in (True, False)
    )
    for_marked = torch.where(global_attention_mask, both, query) & ~plain.allows(q[at], k)
    return Picked(for_others, None, at), Picked(for_marked, at, None)
