"""From a pattern to a list of tiles, 64 queries by 64 keys: the work as the compiled kernel wants it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.layout import in_tiles, number_tiles
from regard.layout.calls import LRUCache
from regard.layout.lattice import Lattice, lattices, orders, table_on
from regard.pattern import Blocks2D, Full, Pattern

SIDE = 64
TURN = 20  # scores that cost as much as what is done once for a query, here and in the dense kernel
STRIP = 32  # queries that are computed together, at most
COARSE = 16  # tiles that are looked at together first, so that a table of all tiles is never made

_tiles = LRUCache(256 << 20)


@dataclass(frozen=True)
class TileCSR:
    """The tiles of one order of the tokens that hold a seen pair, row by row."""

    n: int
    m: int
    first: Tensor  # (rows + 1) int64: where the tiles of each row begin
    column: Tensor  # int32, one for each tile
    mask: Tensor  # int32, one for each tile; 1: all is seen
    masks: Tensor  # (masks 64) int64: for each key, one bit a query
    q_order: Tensor | None = None
    k_order: Tensor | None = None

    def scores(self) -> float:
        """About how many are computed, with what else there is to do: of a tile that is not full, a part is left out."""
        bits = torch.from_numpy(
            np.unpackbits(self.masks.numpy().view(np.uint8), axis=1).sum(1).astype(np.int64)
        )
        queries, keys = (
            _sizes(self.n, STRIP).repeat_interleave(self.first.diff()),
            _sizes(self.m, 1)[self.column.long()],
        )
        area = queries * keys
        return (torch.minimum(bits[self.mask.long()], area) + area).sum().item() / 2 + TURN * self.n

    def nbytes(self) -> int:
        tensors = (self.first, self.column, self.mask, self.masks, self.q_order, self.k_order)
        return sum(x.nbytes for x in tensors if x is not None)


def _sizes(n: int, step: int) -> Tensor:
    """Of each tile, its tokens: they are computed by the `step`."""
    last = (n - 1) % SIDE + 1
    return torch.tensor([SIDE] * ((n - 1) // SIDE) + [-(-last // step) * step])


class TileSet(tuple[TileCSR, ...]):
    """All tiles of a pattern: every seen pair stands in exactly one."""

    made: ctypes.Array[ctypes.c_char] | None = (
        None  # what the kernel is given, made once: it holds addresses
    )

    @cached_property
    def keys(self) -> int:
        """How many are looked at, each as often as a row of tiles does."""
        return SIDE * sum(len(part.column) for part in self)

    def __reduce__(self) -> tuple[type[TileSet], tuple[tuple[TileCSR, ...]]]:
        return TileSet, (tuple(self),)


def build_tiles(pattern: Pattern, n: int, m: int, *, q_start: int = 0, k_start: int = 0) -> TileSet:
    """The work of `pattern` on queries q_at..q_at+n-1 and keys k_at..k_at+m-1, for all heads alike; cached by value."""
    key = (pattern, n, m, q_start, k_start)
    found = _tiles.get(key)
    if found is None:
        with torch.inference_mode(False):  # what is kept must serve training too
            found = _work(pattern, n, m, q_start, k_start)
        _tiles.put(key, found, sum(part.nbytes() for part in found) + 1024)
    assert isinstance(found, TileSet)
    return found


def _work(pattern: Pattern, n: int, m: int, q_start: int, k_start: int) -> TileSet:
    if pattern == Full():
        return TileSet((_whole(n, m),))
    return TileSet(
        _part(term, lattice, n, m, q_start, k_start) for lattice, term in lattices(pattern)
    )


def _whole(n: int, m: int) -> TileCSR:
    """Everything is seen."""
    rows, cols = -(-n // SIDE), -(-m // SIDE)
    first, column = (
        torch.arange(rows + 1) * cols,
        torch.arange(cols, dtype=torch.int32).repeat(rows),
    )
    masks = torch.tensor([[0], [-1]]).repeat(1, SIDE)
    return TileCSR(n, m, first, column, torch.ones(rows * cols, dtype=torch.int32), masks)


def _part(term: Pattern, lattice: Lattice, n: int, m: int, q_start: int, k_start: int) -> TileCSR:
    q_order, k_order = orders(lattice, n, m, q_start, k_start)
    q, k = in_tiles(q_order, SIDE, q_start), in_tiles(k_order, SIDE, k_start)
    coarse_q, coarse_k = (
        in_tiles(q_order, SIDE * COARSE, q_start),
        in_tiles(k_order, SIDE * COARSE, k_start),
    )
    near, _ = table_on(lattice, term, coarse_q, coarse_k)
    known: dict[bytes, int] = {}
    counts, columns, numbers = [], [], []
    for rows, seen in zip(q.split(COARSE), near, strict=True):
        at = seen.repeat_interleave(COARSE)[: len(k)].nonzero()[:, 0]
        ids, masks = number_tiles(term, rows, k[at], *table_on(lattice, term, rows, k[at]))
        words = _words(masks)
        renumber = torch.tensor(
            [known.setdefault(word.numpy().tobytes(), len(known)) for word in words],
            dtype=torch.int32,
        )
        counts.append((ids > 0).sum(1))
        columns.append(at.int().expand(len(rows), -1)[ids > 0])
        numbers.append(renumber[ids[ids > 0].long()])
    first = torch.cat([torch.zeros(1, dtype=torch.long), *counts]).cumsum(0)
    masks = torch.frombuffer(bytearray(b"".join(known)), dtype=torch.int64).view(-1, SIDE)
    reordered = isinstance(lattice, int | Blocks2D)
    return TileCSR(
        len(q_order),
        len(k_order),
        first,
        torch.cat(columns),
        torch.cat(numbers),
        masks,
        q_order if reordered else None,
        None if lattice is None else k_order,
    )


def tiles_from_mask(keep: Tensor, q_order: Tensor | None, k_order: Tensor | None) -> TileCSR:
    """All tiles of keep (n m), which says who of these queries sees whom of these keys."""
    n, m = keep.shape
    rows, cols = -(-n // SIDE), -(-m // SIDE)
    whole = F.pad(keep, (0, cols * SIDE - m, 0, rows * SIDE - n))
    masks = (
        whole.unflatten(0, (rows, SIDE)).unflatten(2, (cols, SIDE)).transpose(1, 2).flatten(0, 1)
    )
    masks = torch.cat([masks.new_zeros(1, SIDE, SIDE), masks.new_ones(1, SIDE, SIDE), masks])
    first, column = (
        torch.arange(rows + 1) * cols,
        torch.arange(cols, dtype=torch.int32).repeat(rows),
    )
    return TileCSR(
        n,
        m,
        first,
        column,
        torch.arange(2, len(masks), dtype=torch.int32),
        _words(masks),
        q_order,
        k_order,
    )


def _words(masks: Tensor) -> Tensor:
    """Masks (u queries keys) as (u keys): one bit a query."""
    packed = np.packbits(masks.numpy().transpose(0, 2, 1), axis=2, bitorder="little")
    return torch.from_numpy(packed.view(np.int64)[:, :, 0])
