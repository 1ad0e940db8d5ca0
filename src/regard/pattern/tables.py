"""Leaves that look up pairs of blocks in a table, which is random or given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import check_int
from regard.pattern.algebra import MAX_POSITION, Block, Leaf

MAX_BLOCKS = 4096  # rows and columns of a table
MAX_SEED = (1 << 63) - 1


class _Table(Leaf):
    """Block i of `size` queries sees block j of `size` keys if `table[i, j]`."""

    size: int

    _tables: ClassVar[tuple[Tensor, Tensor]]  # of each instance, but not one of its fields

    def _set_tables(self, tables: tuple[Tensor, Tensor]) -> None:
        object.__setattr__(self, "_length", self.size * len(tables[0]))
        object.__setattr__(self, "_tables", tables)

    def _allows(self, q: Tensor, k: Tensor) -> Tensor:
        table = self._tables[0].to(q.device)
        end = min(len(table) * self.size, MAX_POSITION)
        i, j = (at.clamp(0, end - 1) // self.size for at in (q, k))
        return table[i, j] & (q < end) & (k < end)

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        counts = self._tables[1].to(q0.device)
        i0, i1, j0, j1 = q0 // self.size, q1 // self.size + 1, k0 // self.size, k1 // self.size + 1
        a, b, c, d = (at.clamp(0, len(counts) - 1) for at in (i0, i1, j0, j1))
        hits = counts[b, d] - counts[a, d] - counts[b, c] + counts[a, c]
        return hits > 0, hits == (i1 - i0) * (j1 - j0)


def _with_counts(table: Tensor) -> tuple[Tensor, Tensor]:
    """The table and its two-dimensional cumulative sum, which counts any rectangle in O(1)."""
    return table, F.pad(table.int().cumsum(0).cumsum(1), (1, 0, 1, 0))


@dataclass(frozen=True, repr=False)
class RandomBlocks(_Table):
    """Each block of queries sees a few random blocks of keys (BigBird).

    Defined for `size * blocks` positions.

    Args:
        size: Tokens of a block.
        count: Key blocks that each query block sees.
        blocks: Number of blocks.
        seed: Seed of the draw. The global generator is not used.
        causal: Query block i draws from key blocks 0..i only, so that a causal model loses none of
            its draws.
    """

    size: int
    count: int
    blocks: int
    seed: int = 0
    causal: bool = False

    def __post_init__(self) -> None:
        self._check(size=1, count=0, blocks=1)
        check_int(0, MAX_SEED, **{"RandomBlocks: seed": self.seed})
        if self.blocks > MAX_BLOCKS:
            least = -(-self.size * self.blocks // MAX_BLOCKS)
            raise ValueError(
                f"RandomBlocks: blocks must be at most {MAX_BLOCKS}, not {self.blocks}: "
                f"for this length use blocks of at least block={least} tokens"
            )
        if not isinstance(self.causal, bool):
            raise ValueError(f"RandomBlocks: causal must be True or False, not {self.causal!r}")
        with torch.inference_mode(False):  # the tables are cached and must be usable in training
            self._set_tables(_random_tables(self.count, self.blocks, self.seed, self.causal))


@lru_cache(8)
def _random_tables(count: int, blocks: int, seed: int, causal: bool) -> tuple[Tensor, Tensor]:
    """`count` random blocks per row (blocks blocks), and their counts."""
    generator = torch.Generator().manual_seed(seed)
    chance = torch.rand(blocks, blocks, generator=generator, device="cpu")
    if causal:
        chance = chance.tril() - torch.ones_like(chance).triu(1)
    table = torch.zeros_like(chance, dtype=torch.bool)
    table.scatter_(1, chance.topk(min(count, blocks), dim=1).indices, True)
    return _with_counts(table.tril() if causal else table)


@dataclass(frozen=True, repr=False)
class BlockTable(_Table):
    """Block i of `size` queries sees the key blocks listed in `table[i]`.

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
                f"BlockTable: table must list the key blocks of each query block, not {rows!r}"
            )
        if len(rows) > MAX_BLOCKS:
            raise ValueError(
                f"BlockTable: table must have at most {MAX_BLOCKS} rows, not {len(rows)}: "
                "use larger blocks"
            )
        object.__setattr__(self, "table", tuple(tuple(row) for row in rows))
        for block in (block for row in rows for block in row):
            if isinstance(block, bool) or not isinstance(block, int) or not 0 <= block < len(rows):
                raise ValueError(
                    f"BlockTable: entries of table must be integers from 0 to {len(rows) - 1}, "
                    f"not {block!r}"
                )
        with torch.inference_mode(False):
            # on the CPU even if the default device is another one
            table = torch.zeros(len(rows), len(rows), dtype=torch.bool, device="cpu")
            for i, row in enumerate(rows):
                table[i, list(row)] = True
            self._set_tables(_with_counts(table))
