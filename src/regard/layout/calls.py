"""The kernel calls of a layout, runs and groups, with their estimated costs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from threading import Lock
from typing import Generic, TypeVar

import torch
from torch import Tensor

V = TypeVar("V")

# Measured costs for one head of width 64, in units of one score in a call with many queries:
CALL_COST = 4000  # one call of PyTorch's kernel
GATHER_COST = 35  # gathering one token
MERGE_COST = 25  # merging the partial result of one query
FOLD_COST = 30  # adding the gradient of one key to those of overlapping windows
MASK_FACTOR = 1.1  # a score to which a mask is added
BACKWARD_FACTOR = 2.5  # a score in the backward pass
# PyTorch's kernel processes fewer queries than this 32 at a time, more 64 or 256 at a time
SHORT_CALL = 192
# a score in a short call on several threads: 32 rows miss the fast path of the BLAS
SHORT_CALL_FACTOR = 1.75
GROUP_CALLS = 4  # a group costs as much besides the kernel as this many runs


def score_cost(queries: int, backward: bool) -> float:
    """The cost of a score in a call with this many queries."""
    cost = 1 + (40 if backward else 18) / queries
    return (
        cost * SHORT_CALL_FACTOR if queries < SHORT_CALL and torch.get_num_threads() > 1 else cost
    )


@dataclass(frozen=True)
class TileRun:
    """`count` equal calls; call i: s queries from q0 + i * step, t keys from k0 + i * step."""

    count: int
    step: int
    q0: int
    s: int
    k0: int
    t: int
    mask: Tensor | None  # (s t), 0 or -inf, added to the scores; None if all pairs are visible
    has_empty_rows: bool = False  # some queries see nothing in this run
    is_first: bool = False  # no earlier run contains these queries

    def work(self, backward: bool) -> float:
        """The cost of its scores."""
        factor = 1 if self.mask is None else MASK_FACTOR
        return self.count * self.s * self.t * score_cost(self.s, backward) * factor


@dataclass(frozen=True)
class GatherGroup:
    """Query tiles q (g), each with its own key tiles k (g w).

    `mask_ids` (g w) are indices into the masks of the part.
    """

    q: Tensor
    k: Tensor
    mask_ids: Tensor | None  # 0: nothing is visible, 1: everything is; None if all are 1
    is_first: bool = False  # no earlier call contains these queries


@dataclass(frozen=True)
class LayoutPart:
    """Runs and groups over the tokens in some order."""

    n: int
    m: int
    size: int
    runs: tuple[TileRun, ...]
    groups: tuple[GatherGroup, ...]
    masks: Tensor  # (u size size); 0 is empty, 1 is full
    q_order: Tensor | None = None  # (n), or None for the natural order
    k_order: Tensor | None = None  # (m), or None for the natural order

    def nbytes(self) -> int:
        """The size of its tensors."""
        tensors = [self.masks, self.q_order, self.k_order, *(r.mask for r in self.runs)]
        tensors += [x for g in self.groups for x in (g.q, g.k, g.mask_ids)]
        return sum(x.nbytes for x in tensors if x is not None)

    def group_mask(self, mask_ids: Tensor) -> Tensor:
        """The masks of a group, mask_ids (g w) -> (g size w*size)."""
        return (
            self.masks[mask_ids.flatten()].unflatten(0, mask_ids.shape).transpose(1, 2).flatten(2)
        )

    def scores(self) -> int:
        """The number of scores that are computed."""
        in_runs = sum(r.count * r.s * r.t for r in self.runs)
        return in_runs + sum(g.k.numel() * self.size**2 for g in self.groups)

    def work(self, backward: bool) -> float:
        """The cost of everything but the calls themselves."""
        tiles = sum(g.k.numel() for g in self.groups)
        query_tiles = sum(g.q.numel() for g in self.groups)
        scores = sum(run.work(backward) for run in self.runs)
        scores += tiles * self.size**2 * score_cost(self.size, backward)
        gathered = (query_tiles + 2 * tiles) * self.size
        gathered += 0 if self.q_order is None else 2 * self.n + 2 * self.m
        merged = sum(r.count * r.s for r in self.runs if not r.is_first) + query_tiles * self.size
        total = GATHER_COST * gathered + MERGE_COST * merged
        if not backward:
            return total + scores
        return total + BACKWARD_FACTOR * scores + FOLD_COST * sum(r.count * r.t for r in self.runs)

    def calls(self) -> int:
        """The number of kernel calls, weighted by their overhead."""
        return len(self.runs) + GROUP_CALLS * len(self.groups)

    def cost(self, backward: bool) -> float:
        """The total cost."""
        return self.work(backward) + CALL_COST * self.calls()


@dataclass(frozen=True)
class Layout:
    """All calls for a pattern on n queries and m keys.

    Every visible pair is in exactly one call.
    """

    parts: tuple[LayoutPart, ...]

    def scores(self) -> int:
        """The number of scores that are computed per head; at least the number of visible pairs."""
        return sum(part.scores() for part in self.parts)

    def calls(self) -> int:
        """The number of kernel calls, weighted by their overhead."""
        return sum(part.calls() for part in self.parts)

    def work(self, backward: bool = False) -> float:
        """The cost of everything but the calls themselves, in scores."""
        return sum(part.work(backward) for part in self.parts)

    def cost(self, backward: bool = False) -> float:
        """The total cost, in scores."""
        return sum(part.cost(backward) for part in self.parts)

    def nbytes(self) -> int:
        """The size of its tensors."""
        return sum(part.nbytes() for part in self.parts)


class LRUCache(Generic[V]):
    """A thread-safe cache that evicts the least recently used values once their total size exceeds
    `max_bytes`.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.used, self.lock = max_bytes, 0, Lock()
        self.entries: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()

    def get(self, key: Hashable) -> V | None:
        """The value, or None."""
        with self.lock:
            if key not in self.entries:
                return None
            self.entries.move_to_end(key)
            return self.entries[key][0]

    def add(self, key: Hashable, value: V, nbytes: int) -> None:
        """Add a value. The latest value stays even if it is larger than the cache."""
        with self.lock:
            if key in self.entries:
                self.used -= self.entries.pop(key)[1]
            self.entries[key] = value, nbytes
            self.used += nbytes
            while self.used > self.max_bytes and len(self.entries) > 1:
                self.used -= self.entries.popitem(last=False)[1][1]
