"""Spans of a binary tree that each token attends to, as tiles of tokens that share spans."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._compile import _disable_dynamo

from regard.layout import LRUCache

NO_NODE = 1 << 60  # padding of a row of nodes: larger than all, so that the row stays sorted
TILE = 64  # tokens that share a list of nodes: they have far spans and most near ones in common


_plans: LRUCache[SpanPlan] = LRUCache(128 << 20)


class SpanPlan(NamedTuple):
    """Tiles of tokens and the nodes that they see.

    Attributes:
        nodes: (g m), the distinct nodes of each tile, padded with 0.
        place: (g s m), index into `labels` of each node for each token, -1 = not visible.
        labels: Label of each place.
    """

    nodes: Tensor
    place: Tensor
    labels: Tensor


@_disable_dynamo  # a table of integers, made once per length
def span_plan(
    start: int, n: int, near: int, clip: int, causal: bool, offsets: tuple[int, ...]
) -> SpanPlan:
    """Plan for tokens start .. start + n - 1, cached.

    Node i of a level has the number i + offsets[level].
    """
    key = (start, n, near, clip, causal, offsets)
    found = _plans.get(key)
    if found is None:
        with torch.inference_mode(False):  # a cached plan is used in training too
            found = _group_by_tile(*visible_nodes(*key))
        _plans.add(key, found, sum(t.nbytes for t in found))
    return found


def _group_by_tile(at: Tensor, labels: list[int]) -> SpanPlan:
    """Merge the nodes (n K) of each token into one list per tile."""
    n = len(at)
    size = min(TILE, n)
    tiles = F.pad(at, (0, 0, 0, -n % size), value=-1).unflatten(0, (-1, size))
    nodes = _distinct(tiles.flatten(1))
    none = (nodes < 0) | (nodes == NO_NODE)
    column = torch.searchsorted(nodes, tiles.flatten(1)).view_as(tiles)
    place = torch.full((*tiles.shape[:2], nodes.shape[1]), -1, dtype=torch.int32)
    place.scatter_(2, column, torch.arange(len(labels), dtype=torch.int32).expand_as(tiles))
    return SpanPlan(
        nodes.masked_fill(none, 0), place.masked_fill(none[:, None], -1), torch.tensor(labels)
    )


def _distinct(numbers: Tensor) -> Tensor:
    """Distinct numbers of each row, ascending."""
    order = numbers.sort(1).values
    again = F.pad(order[:, 1:] == order[:, :-1], (1, 0), value=False)
    order = order.masked_fill(again, NO_NODE).sort(1).values
    return order[:, : int((order < NO_NODE).sum(1).max())].contiguous()


def visible_nodes(
    start: int, n: int, near: int, clip: int, causal: bool, offsets: tuple[int, ...]
) -> tuple[Tensor, list[int]]:
    """Nodes (n K) that each token attends to, itself first, -1 = none; and the K labels.

    On each level these are the next `near` spans on each side. If a span would overlap with the
    spans before, its half on the level below is taken instead.
    """
    at, end = torch.arange(start, start + n), start + n
    found, labels = [at + offsets[0]], [0]
    where = torch.tensor([*offsets, 0])  # the last is for tokens that already see everything
    left, right = at, at + 1  # begin and end of the spans so far
    for step in range((end.bit_length() + 1) * near):
        if not (bool((left > 0).any()) or (not causal and bool((right < end).any()))):
            break
        level, place = divmod(step, near)
        label = 1 + (min(level, clip) * near + place) * (1 if causal else 2)
        size, own = _span_at(left, level)
        found.append(
            torch.where(left > 0, ((left - size) >> own) + where[own.clamp(max=len(offsets))], -1)
        )
        labels.append(label)
        left = (left - size).clamp(min=0)
        if not causal:
            size, own = _span_at(right, level)
            found.append(
                torch.where(right < end, (right >> own) + where[own.clamp(max=len(offsets))], -1)
            )
            labels.append(label + 1)
            right = (right + size).clamp(max=end)
    return torch.stack(found, 1), labels


def _span_at(edge: Tensor, level: int) -> tuple[Tensor, Tensor]:
    """Size and level of the span that begins or ends at an edge."""
    own = level - (edge % (1 << level) != 0).long()
    return torch.ones_like(edge) << own, own
