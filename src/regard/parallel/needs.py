"""Which keys of other processes a slice of the queries sees: asked of the pattern, and only those are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.parallel.wire import Meeting, exchange
from regard.pattern import Block, Leaf, Pattern, PerHead, tile_table, tiled

AT_ONCE = 512  # tiles evaluated exactly in one go: 2 MiB of booleans
PLANS = 64  # that are kept: one for each pattern and cut of a sequence

Ends = tuple[int, ...]


def seen(pattern: Pattern, queries: tuple[int, int], keys: tuple[int, int]) -> Tensor:
    """Which of the keys first..end-1 any of the queries first..end-1 may look at: (m), or (h m) where heads differ.  Exact."""
    if pattern.heads:
        return torch.stack([seen(part, queries, keys) for part in pattern.parts])
    q, k = (_tiles(*ends) for ends in (queries, keys))
    if not len(q) or not len(k):
        return torch.zeros(keys[1] - keys[0], dtype=torch.bool)
    some, every = tile_table(pattern, q, k)
    found = every.any(0)[:, None].repeat(1, k.shape[1])
    for tiles in (some & ~every.any(0)).nonzero().split(AT_ONCE):
        at = tiles[~found[tiles[:, 1]].all(1)]  # others may have been settled by now
        rows, cols = q[at[:, 0]], k[at[:, 1]]
        keep = (pattern.allowed(rows[:, :, None], cols[:, None, :]) & (rows >= 0)[:, :, None]).any(1)
        found |= torch.zeros(found.shape, dtype=torch.int).index_add_(0, at[:, 1], keep.int()) > 0
    return found.flatten()[: keys[1] - keys[0]]


def _tiles(first: int, end: int) -> Tensor:
    slots = tiled(end - first)
    return torch.where(slots < 0, -1, slots + first)


@dataclass(frozen=True)
class Plan:
    """What this process gives to the others, what it takes from them, and where that then stands.

    give    (s) which of its own rows (h n), laid flat, are sent: for each process in turn
    sent    how many of them each process gets; `got` how many come from each
    order   (h m) in which row among (own, got, nothing) each held key is found
    at      (m) the positions of the keys that are held here, ascending: the own ones, and all that some head sees
    """

    pattern: Pattern
    first: int  # the position of the first query
    give: Tensor
    sent: tuple[int, ...]
    got: tuple[int, ...]
    order: Tensor
    at: Tensor

    def bring(self, x: Tensor, meeting: Meeting) -> Tensor:
        """x (b h n w), of the own tokens -> (b h m w), of all that are held; zero where no query of that head looks."""
        b, h, _, w = x.shape
        own = x.flatten(1, 2)
        sent = own.index_select(1, self.give.to(x.device)).transpose(0, 1)  # by process, then by example
        give, take = ([number * b * w for number in side] for side in (self.sent, self.got))
        got = exchange(sent.flatten(), give, take, meeting.group).view(-1, b, w).transpose(0, 1)
        rows = F.pad(torch.cat((own, got), 1), (0, 0, 0, 1))
        return rows.index_select(1, self.order.to(x.device)).unflatten(1, (h, -1))

    @cached_property
    def moved(self) -> Pattern:
        """The pattern for queries from 0 on, and the held keys as if they stood in a row."""
        return picked(self.pattern, self.first, self.at)


@lru_cache(PLANS)
def plan(pattern: Pattern, ends: Ends, rank: int, heads: int) -> Plan:
    """For queries, keys and values that are cut at `ends`, with so many heads of keys; computed here, nobody is asked."""
    with torch.inference_mode(False):  # what is kept must serve training too
        cuts = list(pairwise(ends))
        others = [r for r in range(len(cuts)) if r != rank]
        given = [_by_head(seen(pattern, cuts[r], cuts[rank]), heads) for r in others]
        taken = [_by_head(seen(pattern, cuts[rank], cuts[r]), heads) for r in others]
        sent, got = ([int(table.sum()) for table in side] for side in (given, taken))
        give = torch.cat([table.flatten().nonzero()[:, 0] for table in given]) if others else torch.empty(0, dtype=torch.long)
        order, at = _held(taken, cuts, rank, heads)
    return Plan(pattern, ends[rank], give, _with_none(sent, rank), _with_none(got, rank), order, at)


def _by_head(table: Tensor, heads: int) -> Tensor:
    """(m) or (h m) -> (heads m): heads of queries that share one of keys want what any of them sees."""
    if table.dim() == 1:
        return table.expand(heads, -1)
    return table.unflatten(0, (heads, -1)).any(1)


def _with_none(numbers: Sequence[int], rank: int) -> tuple[int, ...]:
    """With a 0 for this process itself."""
    return *numbers[:rank], 0, *numbers[rank:]


def _held(taken: list[Tensor], cuts: list[tuple[int, int]], rank: int, heads: int) -> tuple[Tensor, Tensor]:
    """See `Plan`: order and at."""
    n, came = cuts[rank][1] - cuts[rank][0], sum(int(table.sum()) for table in taken)
    nothing, next_row = heads * n + came, heads * n
    orders, places = [], []
    for r, (first, end) in enumerate(cuts):
        if r == rank:
            orders.append(torch.arange(heads * n).view(heads, n))
            places.append(torch.arange(first, end))
            continue
        table = taken[r - (r > rank)]
        rows = torch.full(table.shape, nothing)
        count = int(table.sum())
        rows[table] = torch.arange(next_row, next_row + count)
        next_row += count
        some = table.any(0)
        orders.append(rows[:, some])
        places.append(torch.arange(first, end)[some])
    return torch.cat(orders, 1).flatten(), torch.cat(places)


# ---------------------------------------------------------------------------------------------- keys with gaps between them
def picked(pattern: Pattern, q_at: int, at: Tensor) -> Pattern:
    """The pattern as it looks where query 0 stands at q_at, and the keys at the positions `at` (m), ascending."""
    if pattern.heads:
        return PerHead(tuple(picked(part, q_at, at) for part in pattern.parts))
    return Picked(pattern, q_at, at.numpy().tobytes())


@dataclass(frozen=True, repr=False)
class Picked(Leaf):
    """See `picked`.  Keys ascend, so a rectangle of theirs lies inside one of positions, and what holds there holds here."""

    inner: Pattern
    q_at: int
    at: bytes  # of int64: equal by value, and hashed once

    @cached_property
    def _places(self) -> Tensor:
        with torch.inference_mode(False):
            return torch.from_numpy(np.frombuffer(self.at, dtype=np.int64).copy())

    def _keys(self, k: Tensor) -> Tensor:
        return self._places.to(k.device)[k.clamp(0, len(self._places) - 1)]

    def _allowed(self, q: Tensor, k: Tensor) -> Tensor:
        return self.inner._allowed(q + self.q_at, self._keys(k))

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        return self.inner._block(q0 + self.q_at, q1 + self.q_at, self._keys(k0), self._keys(k1))

    def __repr__(self) -> str:
        return f"Picked({self.inner!r}, {self.q_at}, {len(self._places)} keys)"
