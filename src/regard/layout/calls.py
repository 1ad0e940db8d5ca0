"""What there is to do: calls alike as runs, tiles without a rule as groups, and what they cost."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

# Costs beside that of one score in a tall call, for one head of width 64:
GATHER, MERGE, FOLD, CALL = 35, 25, 30, 4000
MASKED = 1.1  # a score to which a mask is added
SHORT = 192  # PyTorch's kernel takes fewer queries than this 32 at a time, and more 64 or 256 at a time,
STEEP = 1.75  # and on several threads its products of 32 rows leave the fast path of the library below it


def weight(queries: int, backward: bool) -> float:
    """What a score costs in a call with so many queries, measured, beside one in a tall call."""
    each = 1 + (40 if backward else 18) / queries
    return each * STEEP if queries < SHORT and torch.get_num_threads() > 1 else each


@dataclass(frozen=True)
class TileRun:
    """`count` calls alike.  Call i: queries q0 + i*step, s of them, and keys k0 + i*step, t of them."""

    count: int
    step: int
    q0: int
    s: int
    k0: int
    t: int
    mask: Tensor | None  # (s t), added to the scores: 0 or -inf; None: all are seen
    blind: bool = False  # some of the queries see nothing here
    fresh: bool = False  # no run before it has touched these queries

    def work(self, backward: bool) -> float:
        """What its scores cost."""
        each = weight(self.s, backward) * (1 if self.mask is None else MASKED)
        return self.count * self.s * self.t * each


@dataclass(frozen=True)
class GatherGroup:
    """Query tiles (g), each with its own key tiles (g w); `write_record` (g w) numbers their masks, 0: none, 1: all."""

    q: Tensor
    k: Tensor
    keep: Tensor | None
    fresh: bool = False


@dataclass(frozen=True)
class LayoutPart:
    """Runs and groups over the tokens in some order; None: as they come."""

    n: int
    m: int
    size: int
    runs: tuple[TileRun, ...]
    groups: tuple[GatherGroup, ...]
    masks: Tensor  # (u size size), by number; 0 is empty, 1 is full
    q_order: Tensor | None = None
    k_order: Tensor | None = None

    def nbytes(self) -> int:
        tensors = [self.masks, self.q_order, self.k_order, *(r.mask for r in self.runs)]
        tensors += [x for g in self.groups for x in (g.q, g.k, g.keep)]
        return sum(x.numel() * x.element_size() for x in tensors if x is not None)

    def scores(self) -> int:
        return sum(r.count * r.s * r.t for r in self.runs) + sum(
            g.k.numel() * self.size**2 for g in self.groups
        )

    def work(self, backward: bool) -> float:
        """In units of one forward score.  The backward pass costs 2.5 of them and adds up the keys' gradients."""
        scores = sum(run.work(backward) for run in self.runs)
        scores += sum(g.k.numel() for g in self.groups) * self.size**2 * weight(self.size, backward)
        gathered = sum((g.q.numel() + 2 * g.k.numel()) * self.size for g in self.groups)
        merged = sum(r.count * r.s for r in self.runs if not r.fresh) + sum(
            g.q.numel() * self.size for g in self.groups
        )
        moved = gathered + (0 if self.q_order is None else 2 * self.n + 2 * self.m)
        folded = sum(r.count * r.t for r in self.runs) if backward else 0
        return (2.5 if backward else 1) * scores + GATHER * moved + MERGE * merged + FOLD * folded

    def calls(self) -> int:
        """A group does about as much beside the kernel as four runs."""
        return len(self.runs) + 4 * len(self.groups)

    def cost(self, backward: bool) -> float:
        return self.work(backward) + CALL * self.calls()


@dataclass(frozen=True)
class Layout:
    """All the work of one pattern on n queries and m keys: every seen pair stands in exactly one call."""

    parts: tuple[LayoutPart, ...]

    def scores(self) -> int:
        """How many scores are computed, for each head: at least the number of seen pairs."""
        return sum(part.scores() for part in self.parts)

    def calls(self) -> int:
        return sum(part.calls() for part in self.parts)

    def work(self, backward: bool = False) -> float:
        return sum(part.work(backward) for part in self.parts)

    def cost(self, backward: bool = False) -> float:
        return sum(part.cost(backward) for part in self.parts)

    def nbytes(self) -> int:
        return sum(part.nbytes() for part in self.parts)


class LRUCache:
    """The least recently used values go first once their bytes exceed `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used, self.lock = limit, 0, Lock()
        self.entries: OrderedDict[Hashable, tuple[object, int]] = OrderedDict()

    def get(self, key: Hashable) -> object | None:
        with self.lock:
            if key not in self.entries:
                return None
            self.entries.move_to_end(key)
            return self.entries[key][0]

    def put(self, key: Hashable, value: object, nbytes: int) -> None:
        with self.lock:
            self.used -= self.entries.pop(key, (None, 0))[1]
            self.entries[key] = value, nbytes
            self.used += nbytes
            while self.used > self.limit and len(self.entries) > 1:
                self.used -= self.entries.popitem(last=False)[1][1]
