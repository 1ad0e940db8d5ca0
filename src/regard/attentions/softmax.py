"""Softmax attention over a pattern: of the whole, and chunk by chunk with a cache that forgets what no one can see."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from regard.attend import attend, check_backend
from regard.mixer import Attention, Can, check_batch
from regard.pattern import FAR, Causal, Full, Pattern
from regard.prior import Prior

SLACK = 64  # keys are evicted once so many could be


class Cache(NamedTuple):
    """The keys and values that a later query may still see, k (b h m e) and v (b h m f), and where they stand."""

    k: Tensor | None
    v: Tensor | None
    at: Tensor  # (m), ascending
    next: int  # the position of the next token
    check: int  # look for keys to evict once there are so many


class SoftmaxAttention(Attention):
    """softmax(q kᵀ scale + prior) v, over the pairs that the pattern allows; exact, by whichever executor is fastest.

    scale    of the scores, 1/sqrt(e) unless given
    backend  see `regard.attend`
    """

    shares = True

    def __init__(
        self, pattern: Pattern = Full(), prior: Prior | None = None, *, scale: float | None = None, backend: str = "auto"
    ) -> None:
        super().__init__()
        check_backend(backend)
        self.pattern, self.prior, self.scale, self.backend = pattern, prior, scale, backend
        self.past = pattern & Causal()
        self.length, self.heads = pattern.limit, pattern.heads or (None if prior is None else prior.heads)
        self.can = _can(pattern, prior)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Tensor | None = None,
        state: Cache | None = None, marks: Tensor | None = None,
    ) -> tuple[Tensor, Cache | None]:  # fmt: skip
        """See `Attention.attend`; marks (b n)."""
        pattern = self.past if causal else self.pattern
        run = partial(attend, pattern=pattern, prior=self.prior, scale=self.scale, backend=self.backend)
        if state is None:
            return run(q, k, v, mask=mask, marks=marks), None
        if state.k is not None and state.v is not None:
            check_batch(state.k, k)
            k, v = torch.cat((state.k, k), 2), torch.cat((state.v, v), 2)
        end = state.next + q.shape[2]
        at = torch.cat((state.at, torch.arange(state.next, end)))
        out = run(q, k, v, q_at=state.next, k_at=_start(at))
        return out, _kept(k, v, at, end, state.check, pattern)

    def start(self) -> Cache:
        """An empty cache."""
        return Cache(None, None, torch.empty(0, dtype=torch.long), 0, SLACK)

    def extra_repr(self) -> str:
        """Shown by print."""
        return repr(self.pattern)


def _can(pattern: Pattern, prior: Prior | None) -> Can:
    refused = {}
    if pattern.relates or prior is not None:
        refused["cross"] = "it compares positions, and those of two sequences are not comparable"
    if pattern.limit is not None:
        refused["length"] = f"its pattern was drawn for {pattern.limit} positions"
    return Can(takes_marks=pattern.marked, **refused)


def _start(at: Tensor) -> int | Tensor:
    """Keys that stand in a row are told by their first position."""
    first, last = int(at[0]), int(at[-1])
    return first if last - first == len(at) - 1 else at


def _kept(k: Tensor, v: Tensor, at: Tensor, end: int, check: int, pattern: Pattern) -> Cache:
    """The cache without the keys that no query from `end` on may see: the pattern knows."""
    if len(at) < check:
        return Cache(k, v, at, end, check)
    some, _ = pattern.given(False, False).block(torch.tensor(end), torch.tensor(FAR), at, at)
    keep = (some.any(0) if pattern.heads else some).nonzero()[:, 0]
    return Cache(k[:, :, keep], v[:, :, keep], at[keep], end, max(2 * len(keep), len(keep) + SLACK))
