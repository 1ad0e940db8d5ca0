"""The leaves of the algebra: the sparse patterns of the literature, one small class each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from regard.pattern.algebra import FAR, Block, Leaf, Pattern, hull

MOST_BLOCKS = 4096  # that random blocks are drawn from: the table of draws has that many rows and columns
Box = tuple[Tensor, Tensor, Tensor, Tensor]  # first and last row, first and last column


@dataclass(frozen=True, repr=False)
class Band(Leaf):
    """Keys from `left` behind to `right` ahead of the query, besides itself, every `step`-th one; None = unlimited."""

    left: int | None = None
    right: int | None = None
    step: int = 1

    def __post_init__(self) -> None:
        self._check(step=1, **{side: 0 for side in ("left", "right") if getattr(self, side) is not None})

    def _reach(self) -> tuple[int, int]:
        return tuple(FAR if side is None else min(side * self.step, FAR) for side in (self.left, self.right))  # type: ignore[return-value]

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
        return "Causal()" if (self.left, self.right, self.step) == (None, 0, 1) else super().__repr__()


def Causal() -> Band:
    """Every query sees itself and what came before."""
    return Band(None, 0)


@dataclass(frozen=True, repr=False)
class Queries(Leaf):
    """Queries lo..hi-1 see everything; the others nothing."""

    lo: int
    hi: int

    _relates = False

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

    _relates = False

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

    def _allowed(self, q: Tensor, k: Tensor) -> Tensor:
        gap = q // self.size - k // self.size
        return (gap <= self.back) & (gap >= -self.ahead)

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        low, high = q0 // self.size - k1 // self.size, q1 // self.size - k0 // self.size
        return (low <= self.back) & (high >= -self.ahead), (high <= self.back) & (low >= -self.ahead)


@dataclass(frozen=True, repr=False)
class KeyPhase(Leaf):
    """Keys whose position modulo `period` is at least `start` (the summary cells of Sparse Transformer's fixed form)."""

    period: int
    start: int

    _relates = False

    def __post_init__(self) -> None:
        self._check(period=1, start=0)
        if self.start >= self.period:
            raise ValueError(f"KeyPhase: start must be below period, {self.period}, not {self.start}")

    def _allowed(self, q: Tensor, k: Tensor) -> Tensor:
        return k % self.period >= self.start

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        count = self._below(k1 + 1) - self._below(k0)
        return count > 0, count == k1 - k0 + 1

    def _below(self, x: Tensor) -> Tensor:
        """How many such keys stand before position x."""
        return x // self.period * (self.period - self.start) + (x % self.period - self.start).clamp(min=0)


@dataclass(frozen=True, repr=False)
class RandomBlocks(Leaf):
    """Each block of `size` queries sees `count` random key blocks, of the first `blocks`, fixed by `seed`.

    With `past`, block i draws from blocks 0..i only, so that a causal model loses none of its draws to the future.
    """

    size: int
    count: int
    blocks: int
    seed: int = 0
    past: bool = False

    _tables: ClassVar[Block]  # of each instance, but no part of its value

    def __post_init__(self) -> None:
        self._check(size=1, count=0, blocks=1, seed=0)
        if self.seed >= 1 << 63:
            raise ValueError(f"RandomBlocks: seed must be below 2**63, not {self.seed}")
        if self.blocks > MOST_BLOCKS:
            raise ValueError(f"RandomBlocks: blocks must be at most {MOST_BLOCKS}, not {self.blocks}: take larger ones")
        if not isinstance(self.past, bool):
            raise ValueError(f"RandomBlocks: past must be True or False, not {self.past!r}")
        object.__setattr__(self, "_limit", self.size * self.blocks)
        with torch.inference_mode(False):  # the tables are kept, and must serve training too
            tables = _random_tables(self.count, self.blocks, self.seed, self.past)
        object.__setattr__(self, "_tables", tables)

    def _allowed(self, q: Tensor, k: Tensor) -> Tensor:
        table, _ = self._tables
        i, j = (at.clamp(0, self.blocks * self.size - 1) // self.size for at in (q, k))
        return table[i, j] & (q < self.blocks * self.size) & (k < self.blocks * self.size)

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        _, below = self._tables
        i0, i1, j0, j1 = q0 // self.size, q1 // self.size + 1, k0 // self.size, k1 // self.size + 1
        a, b, c, d = (at.clamp(0, self.blocks) for at in (i0, i1, j0, j1))
        hits = below[b, d] - below[a, d] - below[b, c] + below[a, c]
        return hits > 0, hits == (i1 - i0) * (j1 - j0)


@lru_cache(8)
def _random_tables(count: int, blocks: int, seed: int, past: bool) -> tuple[Tensor, Tensor]:
    """Which blocks were drawn (blocks blocks), and their two-dimensional running count, for O(1) rectangles."""
    chance = torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(seed), device="cpu")
    if past:
        chance = chance.tril() - torch.ones_like(chance).triu(1)
    drawn = torch.zeros_like(chance, dtype=torch.bool)
    drawn.scatter_(1, chance.topk(min(count, blocks), dim=1).indices, True)
    if past:
        drawn = drawn.tril()
    return drawn, torch.nn.functional.pad(drawn.int().cumsum(0).cumsum(1), (1, 0, 1, 0))


@dataclass(frozen=True, repr=False)
class Blocks2D(Leaf):
    """On an image of `width` columns in raster order: query blocks of `rows` x `cols` cells, each of which sees its own
    block, extended `up`, `left`, `right` and `down` by so many cells (Image Transformer's memory block)."""

    width: int
    rows: int
    cols: int
    up: int = 0
    left: int = 0
    right: int = 0
    down: int = 0

    def __post_init__(self) -> None:
        self._check(width=1, rows=1, cols=1, up=0, left=0, right=0, down=0)

    def _allowed(self, q: Tensor, k: Tensor) -> Tensor:
        w, k_y, k_x = self.width, k // self.width, k % self.width
        y, x = q // w // self.rows * self.rows, q % w // self.cols * self.cols  # the corner of the query's block
        inside_y = (k_y >= y - self.up) & (k_y < y + self.rows + self.down)
        return inside_y & (k_x >= x - self.left) & (k_x < x + self.cols + self.right)

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        return self._boxes(self._box(q0, q1), self._box(k0, k1))

    def patches(self, q: Tensor, k: Tensor) -> Block:
        """(some, every), each (r c), for tiles q (r s) and k (c t) that hold patches of the image; -1 = no cell."""
        y0, y1, x0, x1 = (side[:, None] for side in self._around(q))
        return self._boxes((y0, y1, x0, x1), self._around(k))

    def _boxes(self, q: Box, k: Box) -> Block:
        """Whether query cells in rows y0..y1, columns x0..x1 see key cells in rows v0..v1, columns u0..u1."""
        (y0, y1, x0, x1), (v0, v1, u0, u1) = q, k
        y0, y1 = y0 // self.rows * self.rows, y1 // self.rows * self.rows
        x0, x1 = x0 // self.cols * self.cols, x1 // self.cols * self.cols
        below, after = self.rows + self.down, self.cols + self.right
        some = (v1 >= y0 - self.up) & (v0 < y1 + below) & (u1 >= x0 - self.left) & (u0 < x1 + after)
        every = (v0 >= y1 - self.up) & (v1 < y0 + below) & (u0 >= x1 - self.left) & (u1 < x0 + after)
        return some, every

    def _around(self, cells: Tensor) -> Box:
        y0, y1 = hull(torch.where(cells < 0, -1, cells // self.width))
        x0, x1 = hull(torch.where(cells < 0, -1, cells % self.width))
        return y0, y1, x0, x1

    def _box(self, first: Tensor, last: Tensor) -> Box:
        """Rows y0..y1 and columns x0..x1 around the positions first..last."""
        w = self.width
        y0, y1 = first // w, last // w
        return y0, y1, torch.where(y0 == y1, first % w, 0), torch.where(y0 == y1, last % w, w - 1)


def Near2D(width: int, rows: int, cols: int) -> Blocks2D:
    """On an image of `width` columns in raster order: keys at most `rows` above or below and `cols` to either side."""
    return Blocks2D(width, 1, 1, up=rows, left=cols, right=cols, down=rows)


def Axial(width: int) -> Pattern:
    """On an image of `width` columns in raster order: the query's row and its column."""
    return Chunks(width) | Band(step=width)


# ---------------------------------------------------------------------------------------------- marks and heads
class _MarkedLeaf(Leaf):
    def _allowed(self, q: Tensor, k: Tensor) -> Tensor:
        raise ValueError(f"{self!r} is known only at run time: give `marks`, a (b n) bool tensor, to the call")

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        return torch.ones((), dtype=torch.bool), torch.zeros((), dtype=torch.bool)


@dataclass(frozen=True, repr=False)
class MarkedQueries(_MarkedLeaf):
    """Queries marked at run time, by a (b n) bool tensor, see everything."""

    _marks = "queries"


@dataclass(frozen=True, repr=False)
class MarkedKeys(_MarkedLeaf):
    """Keys marked at run time, by a (b n) bool tensor, are seen by everyone."""

    _marks = "keys"


def Marked() -> Pattern:
    """Tokens marked at run time, for each example its own, see all and are seen by all (Longformer's globals)."""
    return MarkedQueries() | MarkedKeys()
