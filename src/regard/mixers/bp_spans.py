"""Which spans of a binary tree each token looks at, as tiles of tokens that share a list of spans."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.layout import LRUCache

NONE = 1 << 60  # fills up a row of nodes: greater than any, so that the row stays sorted
TILE = 64  # tokens that share a list: near spans are common to most of them, far ones to all


_plans = LRUCache(128 << 20)


class SpanPlan(NamedTuple):
    """Tiles of tokens and their nodes.

    nodes   (g m) numbers of nodes, those of a tile each once; filled up with 0
    place   (g s m) which of its places a node takes for a token, -1 = not seen
    labels  of the places
    """

    nodes: Tensor
    place: Tensor
    labels: Tensor


def span_plan(
    start: int, n: int, near: int, clip: int, causal: bool, offsets: tuple[int, ...]
) -> SpanPlan:
    """For tokens start .. start + n - 1; node i of a level has the number i + offsets[level].  Kept for the next call."""
    key = (start, n, near, clip, causal, offsets)
    found = _plans.get(key)
    if found is None:
        with torch.inference_mode(False):  # what is kept must serve training too
            found = _tiled(*visible_nodes(*key))
        _plans.add(key, found, sum(t.nbytes for t in found))
    assert isinstance(found, SpanPlan)
    return found


def _tiled(at: Tensor, labels: list[int]) -> SpanPlan:
    """The nodes (n K) of each token as one list for each tile."""
    n = len(at)
    size = min(TILE, n)
    tiles = F.pad(at, (0, 0, 0, -n % size), value=-1).unflatten(0, (-1, size))
    nodes = _each_once(tiles.flatten(1))
    none = (nodes < 0) | (nodes == NONE)
    column = torch.searchsorted(nodes, tiles.flatten(1)).view_as(tiles)
    place = torch.full((*tiles.shape[:2], nodes.shape[1]), -1, dtype=torch.int32)
    place.scatter_(2, column, torch.arange(len(labels), dtype=torch.int32).expand_as(tiles))
    return SpanPlan(
        nodes.masked_fill(none, 0), place.masked_fill(none[:, None], -1), torch.tensor(labels)
    )


def _each_once(numbers: Tensor) -> Tensor:
    """The numbers of each row, ascending, each once."""
    order = numbers.sort(1).values
    again = F.pad(order[:, 1:] == order[:, :-1], (1, 0), value=False)
    order = order.masked_fill(again, NONE).sort(1).values
    return order[:, : int((order < NONE).sum(1).max())].contiguous()


def visible_nodes(
    start: int, n: int, near: int, clip: int, causal: bool, offsets: tuple[int, ...]
) -> tuple[Tensor, list[int]]:
    """(n K): the nodes that each token looks at, itself first, -1 = none; and the labels of the K places.

    On each level the next `near` spans to either side, so far as the sequence goes.  Where a span would begin within what
    is seen already, its half is taken, which is of the level below.
    """
    at, end = torch.arange(start, start + n), start + n
    found, labels = [at + offsets[0]], [0]
    where = torch.tensor([*offsets, 0])  # the last is for tokens that have seen all
    left, right = at, at + 1  # where the spans seen so far begin and end
    for step in range((end.bit_length() + 1) * near):
        if not (bool((left > 0).any()) or (not causal and bool((right < end).any()))):
            break
        level, place = divmod(step, near)
        label = 1 + (min(level, clip) * near + place) * (1 if causal else 2)
        size, own = _aligned(left, level)
        found.append(
            torch.where(left > 0, ((left - size) >> own) + where[own.clamp(max=len(offsets))], -1)
        )
        labels.append(label)
        left = (left - size).clamp(min=0)
        if not causal:
            size, own = _aligned(right, level)
            found.append(
                torch.where(right < end, (right >> own) + where[own.clamp(max=len(offsets))], -1)
            )
            labels.append(label + 1)
            right = (right + size).clamp(max=end)
    return torch.stack(found, 1), labels


def _aligned(edge: Tensor, level: int) -> tuple[Tensor, Tensor]:
    """The size and the level of the span that begins or ends at an edge."""
    own = level - (edge % (1 << level) != 0).long()
    return torch.ones_like(edge) << own, own
