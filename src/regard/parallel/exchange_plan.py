"""Which keys of other processes a slice of the queries sees: asked of the pattern, and only those are sent."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from regard.attentions.kv_cache import CallPositions
from regard.parallel.communication import ShardedCall, exchange
from regard.pattern import Block, Leaf, Pattern, PerHead, classify_tiles, position_tiles

AT_ONCE = 512  # tiles evaluated exactly in one go: 2 MiB of booleans
PLANS = 64  # that are kept: one for each pattern and cut of a sequence

Ends = tuple[int, ...]


def visible_keys(pattern: Pattern, queries: tuple[int, int], keys: tuple[int, int]) -> Tensor:
    """Which of the keys first..end-1 any of the queries first..end-1 may look at: (m), or (h m) where heads differ.  Exact."""
    if pattern.heads:
        return torch.stack([visible_keys(part, queries, keys) for part in pattern.parts])
    q, k = (_tiles(*ends) for ends in (queries, keys))
    if not len(q) or not len(k):
        return torch.zeros(keys[1] - keys[0], dtype=torch.bool)
    some, every = classify_tiles(pattern, q, k)
    found = every.any(0)[:, None].repeat(1, k.shape[1])
    for tiles in (some & ~every.any(0)).nonzero().split(AT_ONCE):
        at = tiles[~found[tiles[:, 1]].all(1)]  # others may have been settled by now
        rows, cols = q[at[:, 0]], k[at[:, 1]]
        keep = (pattern.allows(rows[:, :, None], cols[:, None, :]) & (rows >= 0)[:, :, None]).any(1)
        found |= torch.zeros(found.shape, dtype=torch.int).index_add_(0, at[:, 1], keep.int()) > 0
    return found.flatten()[: keys[1] - keys[0]]


def _tiles(first: int, end: int) -> Tensor:
    slots = position_tiles(end - first)
    return torch.where(slots < 0, -1, slots + first)


@dataclass(frozen=True)
class HeldKeys:
    """The keys of one process that are held here: all of the own ones; of others those that some head sees.

    at      (m) their positions, ascending
    where   (s) at which of (h m), laid flat, stands each row that is sent: a head gets no key that it does not see
    """

    heads: int
    at: Tensor
    where: Tensor

    def placed(self, rows: Tensor) -> Tensor:
        """rows (b s w), as they were sent -> (b h m w); zero where no query of that head looks."""
        if not self.whole:
            rows = rows.new_zeros(
                rows.shape[0], self.heads * len(self.at), rows.shape[2]
            ).index_copy_(1, self.where.to(rows.device), rows)
        return rows.unflatten(1, (self.heads, len(self.at)))

    @cached_property
    def whole(self) -> bool:
        """Whether every head sees each of the keys: then rows are in place as they come."""
        return len(self.where) == self.heads * len(self.at)

    def taken(self, x: Tensor) -> Tensor:
        """The other way: x (b h m w) -> (b s w)."""
        rows = x.flatten(1, 2)
        return rows if self.whole else rows.index_select(1, self.where.to(x.device))


@dataclass(frozen=True)
class ExchangePlan:
    """What this process gives to the others, what it takes from them, and where that then stands; all by rank.

    give     (s) which of the own rows (h n), laid flat, are sent to each process; none to itself
    pieces   what is held of the keys of each
    """

    pattern: Pattern
    first: int  # the position of the first query
    rank: int
    give: tuple[Tensor, ...]
    pieces: tuple[HeldKeys, ...]

    @cached_property
    def sent(self) -> tuple[int, ...]:
        """How many rows each process gets."""
        return tuple(map(len, self.give))

    @cached_property
    def got(self) -> tuple[int, ...]:
        """How many come from each."""
        return tuple(
            0 if r == self.rank else len(piece.where) for r, piece in enumerate(self.pieces)
        )

    @cached_property
    def at(self) -> Tensor:
        """(m) the positions of all keys that are held here, ascending."""
        return torch.cat([piece.at for piece in self.pieces])

    @cached_property
    def places(self) -> tuple[CallPositions, ...]:
        """Where queries and keys stand when one piece alone is looked at."""
        return tuple(call_positions(self.pattern, self.first, piece.at) for piece in self.pieces)

    @cached_property
    def place(self) -> CallPositions:
        """Where they stand when all that is held is looked at."""
        return call_positions(self.pattern, self.first, self.at)

    def bring(self, x: Tensor, meeting: ShardedCall) -> Tensor:
        """x (b h n w), of the own tokens -> (b h m w), of all that are held."""
        b, _, _, w = x.shape
        give = torch.cat(self.give).to(x.device)
        sent = x.flatten(1, 2).index_select(1, give).transpose(0, 1)  # by process, then by example
        give_counts, take_counts = (
            [number * b * w for number in side] for side in (self.sent, self.got)
        )
        got = (
            exchange(sent.flatten(), give_counts, take_counts, meeting.group)
            .view(-1, b, w)
            .transpose(0, 1)
        )
        parts = zip(self.pieces, got.split(self.got, 1), strict=True)
        return torch.cat(
            [x if r == self.rank else piece.placed(rows) for r, (piece, rows) in enumerate(parts)],
            2,
        )


@lru_cache(PLANS)
def exchange_plan(pattern: Pattern, ends: Ends, rank: int, heads: int) -> ExchangePlan:
    """For queries, keys and values that are cut at `ends`, with so many heads of keys; computed here, nobody is asked."""
    with torch.inference_mode(False):  # what is kept must serve training too
        mine, give, pieces = (ends[rank], ends[rank + 1]), [], []
        for other, cut in enumerate(pairwise(ends)):
            own = other == rank
            given = (
                torch.zeros(heads, mine[1] - mine[0])
                if own
                else _by_head(visible_keys(pattern, cut, mine), heads)
            )
            taken = (
                torch.ones(heads, mine[1] - mine[0], dtype=torch.bool)
                if own
                else _by_head(visible_keys(pattern, mine, cut), heads)
            )
            some = torch.ones_like(taken[0]) if own else taken.any(0)
            give.append(given.flatten().nonzero()[:, 0])
            pieces.append(
                HeldKeys(heads, torch.arange(*cut)[some], taken[:, some].flatten().nonzero()[:, 0])
            )
    return ExchangePlan(pattern, ends[rank], rank, tuple(give), tuple(pieces))


def _by_head(table: Tensor, heads: int) -> Tensor:
    """(m) or (h m) -> (heads m): heads of queries that share one of keys want what any of them sees."""
    if table.dim() == 1:
        return table.expand(heads, -1)
    return table.unflatten(0, (heads, -1)).any(1)


# ---------------------------------------------------------------------------------------------- keys with gaps between them
def call_positions(pattern: Pattern, q_start: int, at: Tensor) -> CallPositions:
    """Where queries from q_at on and keys at the positions `at` (m) stand.

    Keys with gaps between them would keep the sparse executor away: there the pattern is moved, and the keys stand in a row.
    """
    if not len(at) or int(at[-1] - at[0]) == len(at) - 1:
        return CallPositions(pattern, q_start, int(at[0]) if len(at) else 0)
    return CallPositions(gather_keys_pattern(pattern, q_start, at))


def gather_keys_pattern(pattern: Pattern, q_start: int, at: Tensor) -> Pattern:
    """The pattern as it looks where query 0 stands at q_at, and the keys at the positions `at` (m), ascending."""
    if pattern.heads:
        return PerHead(tuple(gather_keys_pattern(part, q_start, at) for part in pattern.parts))
    return GatheredKeysPattern(pattern, q_start, at.numpy().tobytes())


@dataclass(frozen=True, repr=False)
class GatheredKeysPattern(Leaf):
    """See `picked`.  Keys ascend, so a rectangle of theirs lies inside one of positions, and what holds there holds here."""

    inner: Pattern
    q_start: int
    at: bytes  # of int64: equal by value, and hashed once

    @cached_property
    def _places(self) -> Tensor:
        with torch.inference_mode(False):
            return torch.from_numpy(np.frombuffer(self.at, dtype=np.int64).copy())

    def _keys(self, k: Tensor) -> Tensor:
        return self._places.to(k.device)[k.clamp(0, len(self._places) - 1)]

    def _allows(self, q: Tensor, k: Tensor) -> Tensor:
        return self.inner._allows(q + self.q_start, self._keys(k))

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        return self.inner._block(
            q0 + self.q_start, q1 + self.q_start, self._keys(k0), self._keys(k1)
        )

    def __repr__(self) -> str:
        return f"Picked({self.inner!r}, {self.q_start}, {len(self._places)} keys)"
