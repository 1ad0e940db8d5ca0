"""Leaves that look their blocks up in a table: drawn at random, or given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.pattern.algebra import Block, Leaf

MOST_BLOCKS = 4096  # of a table, which has that many rows and columns


class _Table(Leaf):
    """Which block of `size` queries sees which block of `size` keys is one entry of a table."""

    size: int

    _tables: ClassVar[Block]  # of each instance, but no part of its value

    def _keep(self, tables: Block) -> None:
        object.__setattr__(self, "_length", self.size * len(tables[0]))
        object.__setattr__(self, "_tables", tables)

    def _allowed(self, q: Tensor, k: Tensor) -> Tensor:
        table = self._tables[0].to(q.device)
        end = len(table) * self.size
        i, j = (at.clamp(0, end - 1) // self.size for at in (q, k))
        return table[i, j] & (q < end) & (k < end)

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        below = self._tables[1].to(q0.device)
        i0, i1, j0, j1 = q0 // self.size, q1 // self.size + 1, k0 // self.size, k1 // self.size + 1
        a, b, c, d = (at.clamp(0, len(below) - 1) for at in (i0, i1, j0, j1))
        hits = below[b, d] - below[a, d] - below[b, c] + below[a, c]
        return hits > 0, hits == (i1 - i0) * (j1 - j0)


def _with_counts(table: Tensor) -> Block:
    """The table, and its two-dimensional running count, for O(1) rectangles."""
    return table, F.pad(table.int().cumsum(0).cumsum(1), (1, 0, 1, 0))


@dataclass(frozen=True, repr=False)
class RandomBlocks(_Table):
    """Each block of `size` queries sees `count` random key blocks, of the first `blocks`, fixed by `seed`.

    With `causal`, block i draws from blocks 0..i only, so that a causal model loses none of its draws to the future.
    """

    size: int
    count: int
    blocks: int
    seed: int = 0
    causal: bool = False

    def __post_init__(self) -> None:
        self._check(size=1, count=0, blocks=1, seed=0)
        if self.seed >= 1 << 63:
            raise ValueError(f"RandomBlocks: seed must be below 2**63, not {self.seed}")
        if self.blocks > MOST_BLOCKS:
            least = -(-self.size * self.blocks // MOST_BLOCKS)
            raise ValueError(
                f"RandomBlocks: blocks must be at most {MOST_BLOCKS}, not {self.blocks}: for so many tokens give block={least} "
                "or more"
            )
        if not isinstance(self.causal, bool):
            raise ValueError(f"RandomBlocks: causal must be True or False, not {self.causal!r}")
        with torch.inference_mode(False):  # the tables are kept, and must serve training too
            self._keep(_random_tables(self.count, self.blocks, self.seed, self.causal))


@lru_cache(8)
def _random_tables(count: int, blocks: int, seed: int, causal: bool) -> Block:
    """Which blocks were drawn (blocks blocks), and their running count."""
    chance = torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(seed), device="cpu")
    if causal:
        chance = chance.tril() - torch.ones_like(chance).triu(1)
    drawn = torch.zeros_like(chance, dtype=torch.bool)
    drawn.scatter_(1, chance.topk(min(count, blocks), dim=1).indices, True)
    return _with_counts(drawn.tril() if causal else drawn)


@dataclass(frozen=True, repr=False)
class BlockTable(_Table):
    """Block i of `size` queries sees the key blocks that row i of `table` names: a plan that was drawn elsewhere.

    >>> BlockTable(2, ((0, 2), (1,), (0, 1, 2))).keys_per_query(6).tolist()
    [4, 4, 2, 2, 6, 6]
    """

    size: int
    table: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        self._check(size=1)
        rows = self.table
        if (
            not isinstance(rows, Sequence)
            or not rows
            or not all(isinstance(row, Sequence) for row in rows)
        ):
            raise ValueError(
                f"BlockTable: table must name the key blocks of each query block, not {rows!r}"
            )
        if len(rows) > MOST_BLOCKS:
            raise ValueError(
                f"BlockTable: table must have at most {MOST_BLOCKS} rows, not {len(rows)}: take larger blocks"
            )
        object.__setattr__(self, "table", tuple(tuple(row) for row in rows))
        for block in (block for row in rows for block in row):
            if isinstance(block, bool) or not isinstance(block, int) or not 0 <= block < len(rows):
                raise ValueError(
                    f"BlockTable: table has {len(rows)} blocks, and {block!r} is none of them"
                )
        with torch.inference_mode(False):
            named = torch.zeros(
                len(rows), len(rows), dtype=torch.bool, device="cpu"
            )  # even where all else is built on meta
            for i, row in enumerate(rows):
                named[i, list(row)] = True
            self._keep(_with_counts(named))
