"""The leaves of the algebra: the sparse patterns of the literature, one small class each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.pattern.algebra import MAX_POSITION, Block, Leaf, Pattern


@dataclass(frozen=True, repr=False)
class Band(Leaf):
    """Keys from `left` behind to `right` ahead of the query, besides itself, every `step`-th one; None = unlimited."""

    left: int | None = None
    right: int | None = None
    step: int = 1

    def __post_init__(self) -> None:
        self._check(
            step=1, **{side: 0 for side in ("left", "right") if getattr(self, side) is not None}
        )

    def _reach(self) -> tuple[int, int]:
        return tuple(
            MAX_POSITION if side is None else min(side * self.step, MAX_POSITION)
            for side in (self.left, self.right)
        )  # type: ignore[return-value]

    def first_visible_key(self, q: int) -> int | None:
        """See `Pattern`."""
        return max(0, q - self._reach()[0]) if self.step == 1 else None

    def _allowed(self, q: Tensor, k: Tensor) -> Tensor:
        left, right = self._reach()
        gap = q - k
        near = (gap <= left) & (gap >= -right)
        return near if self.step == 1 else near & (gap % self.step == 0)

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        left, right = self._reach()
        low, high = q0 - k1, q1 - k0  # the smallest and the largest gap in the rectangle
        some = high.clamp(max=left) // self.step * self.step >= low.clamp(min=-right)
        # with a step, only single pairs and single gaps can be full
        regular = (low == high) & (low % self.step == 0) if self.step > 1 else True
        return some, (low >= -right) & (high <= left) & regular

    def __repr__(self) -> str:
        return (
            "Causal()" if (self.left, self.right, self.step) == (None, 0, 1) else super().__repr__()
        )


def Causal() -> Band:
    """Every query sees itself and what came before."""
    return Band(None, 0)


@dataclass(frozen=True, repr=False)
class Queries(Leaf):
    """Queries lo..hi-1 see everything; the others nothing."""

    lo: int
    hi: int

    _compares_positions = False

    def __post_init__(self) -> None:
        self._check(lo=0, hi=self.lo)

    def _allowed(self, q: Tensor, k: Tensor) -> Tensor:
        return (q >= self.lo) & (q < self.hi)

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        return _range(self, q0, q1)


@dataclass(frozen=True, repr=False)
class Keys(Leaf):
    """Keys lo..hi-1 are seen by everyone; the others by nobody."""

    lo: int
    hi: int

    _compares_positions = False

    def __post_init__(self) -> None:
        self._check(lo=0, hi=self.lo)

    def _allowed(self, q: Tensor, k: Tensor) -> Tensor:
        return (k >= self.lo) & (k < self.hi)

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        return _range(self, k0, k1)


def _range(leaf: Queries | Keys, first: Tensor, last: Tensor) -> Block:
    some = (last >= leaf.lo) & (first < leaf.hi) & (leaf.lo < leaf.hi)
    return some, (first >= leaf.lo) & (last < leaf.hi)


def Global(first: int) -> Pattern:
    """The first tokens see all and are seen by all."""
    return Queries(0, first) | Keys(0, first)


@dataclass(frozen=True, repr=False)
class Chunks(Leaf):
    """The sequence cut into chunks of `size`: a query sees its own, `back` chunks behind and `ahead` in front."""

    size: int
    back: int = 0
    ahead: int = 0

    def __post_init__(self) -> None:
        self._check(size=1, back=0, ahead=0)

    def first_visible_key(self, q: int) -> int | None:
        """See `Pattern`."""
        return max(0, (q // self.size - self.back) * self.size)

    def _allowed(self, q: Tensor, k: Tensor) -> Tensor:
        gap = q // self.size - k // self.size
        return (gap <= self.back) & (gap >= -self.ahead)

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        low, high = q0 // self.size - k1 // self.size, q1 // self.size - k0 // self.size
        return (low <= self.back) & (high >= -self.ahead), (high <= self.back) & (
            low >= -self.ahead
        )


@dataclass(frozen=True, repr=False)
class Blocks(Leaf):
    """The sequence cut into blocks of `size` queries: each sees its own block, `before` keys in front of it and `after`
    behind it (Image Transformer's memory block in one dimension)."""

    size: int
    before: int = 0
    after: int = 0

    def __post_init__(self) -> None:
        self._check(size=1, before=0, after=0)

    def _allowed(self, q: Tensor, k: Tensor) -> Tensor:
        return self._block(q, q, k, k)[1]

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        first, last = q0 // self.size * self.size, q1 // self.size * self.size
        before, end = (
            min(self.before, MAX_POSITION),
            min(self.size, MAX_POSITION) + min(self.after, MAX_POSITION),
        )
        return (k1 >= first - before) & (k0 < last + end), (k0 >= last - before) & (
            k1 < first + end
        )


@dataclass(frozen=True, repr=False)
class KeyPhase(Leaf):
    """Keys whose position modulo `period` is at least `start` (the summary cells of Sparse Transformer's fixed form)."""

    period: int
    start: int

    _compares_positions = False

    def __post_init__(self) -> None:
        self._check(period=1, start=0)
        if self.start >= self.period:
            raise ValueError(
                f"KeyPhase: start must be below period, {self.period}, not {self.start}"
            )

    def _allowed(self, q: Tensor, k: Tensor) -> Tensor:
        return k % self.period >= self.start

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        count = self._below(k1 + 1) - self._below(k0)
        return count > 0, count == k1 - k0 + 1

    def _below(self, x: Tensor) -> Tensor:
        """How many such keys stand before position x."""
        return x // self.period * (self.period - self.start) + (x % self.period - self.start).clamp(
            min=0
        )


# ---------------------------------------------------------------------------------------------- marks and heads
class _GlobalMaskLeaf(Leaf):
    def _allowed(self, q: Tensor, k: Tensor) -> Tensor:
        raise ValueError(
            f"{self!r} is known only at run time: give `marks`, a (b n) bool tensor, to the call"
        )

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        some = torch.ones((), dtype=torch.bool, device=q0.device)
        return some, ~some


@dataclass(frozen=True, repr=False)
class GlobalMaskQueries(_GlobalMaskLeaf):
    """Queries marked at run time, by a (b n) bool tensor, see everything."""

    _marks = "queries"


@dataclass(frozen=True, repr=False)
class GlobalMaskKeys(_GlobalMaskLeaf):
    """Keys marked at run time, by a (b n) bool tensor, are seen by everyone."""

    _marks = "keys"


def GlobalMask() -> Pattern:
    """Tokens marked at run time, for each example its own, see all and are seen by all (Longformer's globals)."""
    return GlobalMaskQueries() | GlobalMaskKeys()
