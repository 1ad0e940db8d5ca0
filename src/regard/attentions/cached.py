"""Attention over a pattern that streams: the whole at once, or chunk by chunk with a cache that forgets what no one can see."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.mixer import Attention, Can, check_batch
from regard.pattern import FAR, Pattern

SLACK = 64  # keys are evicted once so many could be

RELATES = "it compares positions, and those of two sequences are not comparable"


class Cache(NamedTuple):
    """The keys and values that a later query may still see, k (b h m e) and v (b h m f), and where they stand."""

    k: Tensor | None
    v: Tensor | None
    at: NDArray[np.int64]  # (m), ascending; the same for all examples, so no tensor
    next: int  # the position of the next token
    check: int  # look for keys to evict once there are so many


class Place(NamedTuple):
    """Where a call stands: the pattern that holds for it, the first query, and the first key or all of them."""

    pattern: Pattern
    q_at: int = 0
    k_at: int | Tensor = 0


class Cached(Attention):
    """A subclass writes `over`, once; `pattern` tells who may look at whom, and so which keys a stream keeps."""

    pattern: Pattern
    past: Pattern  # the pattern where causal: made beside it, for a graph that is compiled makes none

    @abstractmethod
    def over(
        self, q: Tensor, k: Tensor, v: Tensor, place: Place, *, mask: Tensor | None = None, marks: Tensor | None = None
    ) -> Tensor:
        """q (b h n e), k (b h m e), v (b h m f), mask (b m), marks (b n) -> (b h n f)."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Tensor | None = None,
        state: Cache | None = None, marks: Tensor | None = None,
    ) -> tuple[Tensor, Cache | None]:  # fmt: skip
        """See `Attention.attend`; marks (b n)."""
        pattern = self.past if causal else self.pattern
        if state is None:
            return self.over(q, k, v, Place(pattern), mask=mask, marks=marks), None
        if state.k is not None and state.v is not None:
            check_batch(state.k, k)
            k, v = torch.cat((state.k, k), 2), torch.cat((state.v, v), 2)
        end = state.next + q.shape[2]
        at = np.concatenate((state.at, np.arange(state.next, end)))
        out = self.over(q, k, v, Place(pattern, state.next, _start(at)))
        return out, _kept(k, v, at, end, state.check, pattern)

    def start(self) -> Cache:
        """An empty cache."""
        return Cache(None, None, np.empty(0, dtype=np.int64), 0, SLACK)

    def extra_repr(self) -> str:
        """Shown by print."""
        return repr(self.pattern)


def can_over(pattern: Pattern, *, relates: bool = False) -> Can:
    """What attention over a pattern can do; `relates`: something beside the pattern compares positions too."""
    refused = {}
    if pattern.relates or relates:
        refused["cross"] = RELATES
    if pattern.limit is not None:
        refused["length"] = f"its pattern was drawn for {pattern.limit} positions"
    return Can(takes_marks=pattern.marked, **refused)


def _start(at: NDArray[np.int64]) -> int | Tensor:
    """Keys that stand in a row are told by their first position; where there are none, by any."""
    if not len(at):
        return 0
    first, last = int(at[0]), int(at[-1])
    return first if last - first == len(at) - 1 else torch.from_numpy(at)


def _kept(k: Tensor, v: Tensor, at: NDArray[np.int64], end: int, check: int, pattern: Pattern) -> Cache:
    """The cache without the keys that no query from `end` on may see: the pattern knows."""
    if len(at) < check:
        return Cache(k, v, at, end, check)
    places = torch.from_numpy(at)
    some, _ = pattern.given(False, False).block(torch.tensor(end), torch.tensor(FAR), places, places)
    keep = (some.any(0) if pattern.heads else some).nonzero()[:, 0]
    return Cache(k[:, :, keep], v[:, :, keep], at[keep.numpy()], end, max(2 * len(keep), len(keep) + SLACK))
