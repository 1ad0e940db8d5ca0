"""Which keys of other processes the queries of this process see; only those are sent."""

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

TILES_AT_ONCE = 512  # evaluated exactly in one step: 2 MiB of booleans
CACHED_PLANS = 64  # one for each pattern and partition of a sequence


def visible_keys(pattern: Pattern, queries: tuple[int, int], keys: tuple[int, int]) -> Tensor:
    """Which keys any of the queries may attend to: (m), or (h, m) if heads differ. Exact.

    Args:
        queries: First position and end of the queries.
        keys: First position and end of the keys.
    """
    if pattern.heads:
        return torch.stack([visible_keys(part, queries, keys) for part in pattern.parts])
    q, k = (_position_tiles(*bounds) for bounds in (queries, keys))
    if not len(q) or not len(k):
        return torch.zeros(keys[1] - keys[0], dtype=torch.bool)
    partial, full = classify_tiles(pattern, q, k)
    visible = full.any(0)[:, None].repeat(1, k.shape[1])
    for tiles in (partial & ~full.any(0)).nonzero().split(TILES_AT_ONCE):
        tiles = tiles[~visible[tiles[:, 1]].all(1)]  # earlier steps may have settled some
        rows, columns = q[tiles[:, 0]], k[tiles[:, 1]]
        allowed = pattern.allows(rows[:, :, None], columns[:, None, :]) & (rows >= 0)[:, :, None]
        counts = torch.zeros(visible.shape, dtype=torch.int)
        visible |= counts.index_add_(0, tiles[:, 1], allowed.any(1).int()) > 0
    return visible.flatten()[: keys[1] - keys[0]]


def _position_tiles(first: int, end: int) -> Tensor:
    tiles = position_tiles(end - first)
    return torch.where(tiles < 0, -1, tiles + first)


@dataclass(frozen=True)
class HeldKeys:
    """The keys of one process that this process holds: its own, or those that some head sees.

    Attributes:
        heads: Number of key heads.
        positions: (m), ascending.
        slots: (s), the index in (h * m) of each row that is sent; a head gets only keys it sees.
    """

    heads: int
    positions: Tensor
    slots: Tensor

    def scatter(self, rows: Tensor) -> Tensor:
        """Received rows (b, s, w) -> (b, h, m, w), zero where a head does not see a key."""
        if not self.complete:
            empty = rows.new_zeros(rows.shape[0], self.heads * len(self.positions), rows.shape[2])
            rows = empty.index_copy_(1, self.slots.to(rows.device), rows)
        return rows.unflatten(1, (self.heads, len(self.positions)))

    @cached_property
    def complete(self) -> bool:
        """Whether every head sees every key, so that rows need not be moved."""
        return len(self.slots) == self.heads * len(self.positions)

    def gather(self, x: Tensor) -> Tensor:
        """The inverse of `scatter`: x (b, h, m, w) -> (b, s, w)."""
        rows = x.flatten(1, 2)
        return rows if self.complete else rows.index_select(1, self.slots.to(x.device))


@dataclass(frozen=True)
class ExchangePlan:
    """What this process sends to each process and receives from it, by rank.

    Attributes:
        q_start: Position of the first query.
        send: (s), the indices in (h * n) of the own rows that each process gets; none for itself.
        held: The keys that are held of each process.
    """

    pattern: Pattern
    q_start: int
    rank: int
    send: tuple[Tensor, ...]
    held: tuple[HeldKeys, ...]

    @cached_property
    def send_counts(self) -> tuple[int, ...]:
        """Number of rows sent to each process."""
        return tuple(map(len, self.send))

    @cached_property
    def receive_counts(self) -> tuple[int, ...]:
        """Number of rows received from each process."""
        return tuple(0 if r == self.rank else len(keys.slots) for r, keys in enumerate(self.held))

    @cached_property
    def positions(self) -> Tensor:
        """The positions (m) of all held keys, ascending."""
        return torch.cat([keys.positions for keys in self.held])

    @cached_property
    def positions_by_rank(self) -> tuple[CallPositions, ...]:
        """Positions for attending to the keys of a single process."""
        return tuple(call_positions(self.pattern, self.q_start, k.positions) for k in self.held)

    @cached_property
    def all_positions(self) -> CallPositions:
        """Positions for attending to all held keys."""
        return call_positions(self.pattern, self.q_start, self.positions)

    def collect(self, x: Tensor, call: ShardedCall) -> Tensor:
        """Own rows x (b, h, n, w) -> (b, h, m, w) of all held keys."""
        b, _, _, w = x.shape
        indices = torch.cat(self.send).to(x.device)
        sent = x.flatten(1, 2).index_select(1, indices).transpose(0, 1)  # by process, then batch
        sizes = ([n * b * w for n in side] for side in (self.send_counts, self.receive_counts))
        send_sizes, receive_sizes = sizes
        received = exchange(sent.flatten(), send_sizes, receive_sizes, call.group)
        received = received.view(-1, b, w).transpose(0, 1)
        rows = received.split(self.receive_counts, 1)
        parts = [x if r == self.rank else k.scatter(rows[r]) for r, k in enumerate(self.held)]
        return torch.cat(parts, 2)


@lru_cache(CACHED_PLANS)
def exchange_plan(pattern: Pattern, ends: tuple[int, ...], rank: int, heads: int) -> ExchangePlan:
    """The plan for a sequence that is cut at `ends`, with `heads` key heads.

    Every process computes it by itself, without communication.
    """
    with torch.inference_mode(False):  # cached tensors are also used in training
        own, send, held = (ends[rank], ends[rank + 1]), [], []
        for other, bounds in enumerate(pairwise(ends)):
            if other == rank:
                needed = torch.zeros(heads, own[1] - own[0], dtype=torch.bool)
                wanted, some = ~needed, ~needed[0]
            else:
                needed = _by_key_head(visible_keys(pattern, bounds, own), heads)
                wanted = _by_key_head(visible_keys(pattern, own, bounds), heads)
                some = wanted.any(0)
            send.append(needed.flatten().nonzero()[:, 0])
            slots = wanted[:, some].flatten().nonzero()[:, 0]
            held.append(HeldKeys(heads, torch.arange(*bounds)[some], slots))
    return ExchangePlan(pattern, ends[rank], rank, tuple(send), tuple(held))


def _by_key_head(visible: Tensor, heads: int) -> Tensor:
    """(m) or (h, m) -> (heads, m): a key head serves all its query heads."""
    if visible.dim() == 1:
        return visible.expand(heads, -1)
    return visible.unflatten(0, (heads, -1)).any(1)


# ----------------------------------------------------------------------- keys with gaps in between
def call_positions(pattern: Pattern, q_start: int, positions: Tensor) -> CallPositions:
    """Positions of a call with queries from q_start on, and keys at `positions` (m).

    Keys with gaps get consecutive positions and a pattern that is moved accordingly, because the
    sparse backend needs consecutive keys.
    """
    if is_consecutive(positions):
        k_start = int(positions[0]) if len(positions) else 0
        return CallPositions(pattern, q_start, k_start)
    return CallPositions(gather_keys_pattern(pattern, q_start, positions))


def is_consecutive(positions: Tensor) -> bool:
    """Whether ascending positions have no gaps."""
    return not len(positions) or int(positions[-1] - positions[0]) == len(positions) - 1


def gather_keys_pattern(pattern: Pattern, q_start: int, positions: Tensor) -> Pattern:
    """The pattern of queries from q_start on, over the keys at `positions` (m), ascending."""
    if pattern.heads:
        parts = (gather_keys_pattern(part, q_start, positions) for part in pattern.parts)
        return PerHead(tuple(parts))
    return GatheredKeysPattern(pattern, q_start, positions.numpy().tobytes())


@dataclass(frozen=True, repr=False)
class GatheredKeysPattern(Leaf):
    """See `gather_keys_pattern`.

    Positions ascend, so a range of keys lies within a range of positions, and what holds for all
    pairs of the latter also holds here.
    """

    inner: Pattern
    q_start: int
    position_bytes: bytes  # int64: hashable, and compared by value

    @cached_property
    def _positions(self) -> Tensor:
        with torch.inference_mode(False):
            return torch.from_numpy(np.frombuffer(self.position_bytes, dtype=np.int64).copy())

    def _key_positions(self, k: Tensor) -> Tensor:
        return self._positions.to(k.device)[k.clamp(0, len(self._positions) - 1)]

    def _allows(self, q: Tensor, k: Tensor) -> Tensor:
        return self.inner._allows(q + self.q_start, self._key_positions(k))

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        keys = self._key_positions(k0), self._key_positions(k1)
        return self.inner._block(q0 + self.q_start, q1 + self.q_start, *keys)

    def __repr__(self) -> str:
        return f"GatheredKeysPattern({self.inner!r}, {self.q_start}, {len(self._positions)} keys)"
