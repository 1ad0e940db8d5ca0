"""The leaves of the algebra: sparse attention patterns of the literature, one small class each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.pattern.algebra import MAX_POSITION, Block, Leaf, Pattern


def window_block(starts: Block, ends: Block, k0: Tensor, k1: Tensor) -> Block:
    """(some, every) of keys k0..k1 for windows [start, end) given for the first and the last query,
    which never move back.
    """
    return (k1 >= starts[0]) & (k0 < ends[1]), (k0 >= starts[1]) & (k1 < ends[0])


class _BandLeaf(Leaf):
    """A leaf with `left` and `right`, None = unlimited."""

    left: int | None
    right: int | None

    def _check_sides(self) -> None:
        self._check(**{side: 0 for side in ("left", "right") if getattr(self, side) is not None})

    def _reach(self, step: int = 1) -> tuple[int, int]:
        left, right = (
            MAX_POSITION if side is None else min(side * step, MAX_POSITION)
            for side in (self.left, self.right)
        )
        return left, right


@dataclass(frozen=True, repr=False)
class Band(_BandLeaf):
    """A sliding window: the query's own position, `left` keys before it and `right` keys after it.

    Args:
        left: Keys before the query; None = unlimited.
        right: Keys after the query; None = unlimited.
        step: Only every `step`-th key, so that the window reaches `left * step` back (dilated
            attention).
    """

    left: int | None = None
    right: int | None = None
    step: int = 1

    def __post_init__(self) -> None:
        self._check(step=1)
        self._check_sides()

    def first_visible_key(self, q: int) -> int | None:
        """See `Pattern.first_visible_key`."""
        return max(0, q - self._reach()[0]) if self.step == 1 else None

    def _allows(self, q: Tensor, k: Tensor) -> Tensor:
        left, right = self._reach(self.step)
        gap = q - k
        near = (gap <= left) & (gap >= -right)
        return near if self.step == 1 else near & (gap % self.step == 0)

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        left, right = self._reach(self.step)
        low, high = q0 - k1, q1 - k0  # the smallest and the largest gap in the rectangle
        some = high.clamp(max=left) // self.step * self.step >= low.clamp(min=-right)
        every = (low >= -right) & (high <= left)
        if self.step > 1:  # only rectangles with a single gap can be full
            every = every & (low == high) & (low % self.step == 0)
        return some, every

    def __repr__(self) -> str:
        is_causal = (self.left, self.right, self.step) == (None, 0, 1)
        return "Causal()" if is_causal else super().__repr__()


def Causal() -> Band:
    """Every query sees itself and all earlier positions."""
    return Band(None, 0)


@dataclass(frozen=True, repr=False)
class StridedKeyBand(_BandLeaf):
    """A band over compressed keys: key k stands for position `first + step * k`.

    It is visible to queries from `right` before to `left` after that position.

    Args:
        step: Distance between the positions of consecutive keys.
        first: Position of key 0, >= -1.
        left: How far before the query a key may be; None = unlimited.
        right: How far after the query a key may be; None = unlimited.
    """

    step: int
    first: int = 0
    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        self._check(step=1, first=-1)
        self._check_sides()

    def _allows(self, q: Tensor, k: Tensor) -> Tensor:
        return self._block(q, q, k, k)[1]

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        left, right = self._reach()
        low, high = q0 - self._position(k1), q1 - self._position(k0)
        return (low <= left) & (high >= -right), (high <= left) & (low >= -right)

    def _position(self, k: Tensor) -> Tensor:
        """The position of key k, at most `MAX_POSITION`; the product must not overflow."""
        k = k.clamp(max=MAX_POSITION // self.step + 1)
        return (self.first + self.step * k).clamp(max=MAX_POSITION)


@dataclass(frozen=True, repr=False)
class _Range(Leaf):
    """Positions lo..hi-1 of queries or of keys."""

    lo: int
    hi: int

    _compares_positions = False

    def __post_init__(self) -> None:
        self._check(lo=0, hi=self.lo)

    def _contains(self, first: Tensor, last: Tensor) -> Block:
        some = (last >= self.lo) & (first < self.hi) & (self.lo < self.hi)
        return some, (first >= self.lo) & (last < self.hi)


@dataclass(frozen=True, repr=False)
class Queries(_Range):
    """Queries lo..hi-1 see every key; the other queries see none."""

    def _allows(self, q: Tensor, k: Tensor) -> Tensor:
        return self._contains(q, q)[1]

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        return self._contains(q0, q1)


@dataclass(frozen=True, repr=False)
class Keys(_Range):
    """Keys lo..hi-1 are visible to every query; the other keys to none."""

    def _allows(self, q: Tensor, k: Tensor) -> Tensor:
        return self._contains(k, k)[1]

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        return self._contains(k0, k1)


def Global(first: int) -> Pattern:
    """Global tokens: the first `first` tokens see every token and are seen by every token."""
    return Queries(0, first) | Keys(0, first)


@dataclass(frozen=True, repr=False)
class Chunks(Leaf):
    """The sequence is cut into chunks of `size`; a query sees its own chunk, `back` chunks before
    and `ahead` after it.
    """

    size: int
    back: int = 0
    ahead: int = 0

    def __post_init__(self) -> None:
        self._check(size=1, back=0, ahead=0)

    def first_visible_key(self, q: int) -> int | None:
        """See `Pattern.first_visible_key`."""
        return max(0, (q // self.size - self.back) * self.size)

    def _allows(self, q: Tensor, k: Tensor) -> Tensor:
        gap = q // self.size - k // self.size
        return (gap <= self.back) & (gap >= -self.ahead)

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        low, high = q0 // self.size - k1 // self.size, q1 // self.size - k0 // self.size
        some = (low <= self.back) & (high >= -self.ahead)
        return some, (high <= self.back) & (low >= -self.ahead)


@dataclass(frozen=True, repr=False)
class Blocks(Leaf):
    """The queries are cut into blocks of `size`; each sees its own block, `before` keys before and
    `after` keys after it.

    This is the one-dimensional local attention of the Image Transformer (Parmar et al. 2018, arXiv
    1802.05751).
    """

    size: int
    before: int = 0
    after: int = 0

    def __post_init__(self) -> None:
        self._check(size=1, before=0, after=0)

    def _allows(self, q: Tensor, k: Tensor) -> Tensor:
        return self._block(q, q, k, k)[1]

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        first, last = q0 // self.size * self.size, q1 // self.size * self.size
        before = min(self.before, MAX_POSITION)
        end = min(self.size, MAX_POSITION) + min(self.after, MAX_POSITION)
        return window_block((first - before, last - before), (first + end, last + end), k0, k1)


@dataclass(frozen=True, repr=False)
class KeyPhase(Leaf):
    """Keys whose position modulo `period` is at least `start`.

    These are the summary positions of the Sparse Transformer's fixed pattern (Child et al. 2019,
    arXiv 1904.10509).
    """

    period: int
    start: int

    _compares_positions = False

    def __post_init__(self) -> None:
        self._check(period=1, start=0)
        if self.start >= self.period:
            raise ValueError(
                f"KeyPhase: start must be below period={self.period}, not {self.start}"
            )

    def _allows(self, q: Tensor, k: Tensor) -> Tensor:
        return k % self.period >= self.start

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        count = self._count_before(k1 + 1) - self._count_before(k0)
        return count > 0, count == k1 - k0 + 1

    def _count_before(self, x: Tensor) -> Tensor:
        """The number of visible keys before position x."""
        within = (x % self.period - self.start).clamp(min=0)
        return x // self.period * (self.period - self.start) + within


# ---------------------------------------------------------------------- global attention mask
class _GlobalMaskLeaf(Leaf):
    def _allows(self, q: Tensor, k: Tensor) -> Tensor:
        raise ValueError(
            f"{self!r} depends on the input: pass `global_attention_mask`, a (b n) bool tensor, "
            "to the call"
        )

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        some = torch.ones((), dtype=torch.bool, device=q0.device)
        return some, ~some


@dataclass(frozen=True, repr=False)
class GlobalMaskQueries(_GlobalMaskLeaf):
    """Queries selected by the `global_attention_mask` (b n) of the call see every key."""

    _global_mask_side = "queries"


@dataclass(frozen=True, repr=False)
class GlobalMaskKeys(_GlobalMaskLeaf):
    """Keys selected by the `global_attention_mask` (b n) of the call are visible to every query."""

    _global_mask_side = "keys"


def GlobalMask() -> Pattern:
    """Tokens selected by the `global_attention_mask` of the call see all tokens and are seen by all
    (Longformer).
    """
    return GlobalMaskQueries() | GlobalMaskKeys()
