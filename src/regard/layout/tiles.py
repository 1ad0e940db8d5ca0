"""From a pattern to lists of tiles of 64 queries by 64 keys: the input of the C++ kernel."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.layout.calls import LRUCache
from regard.layout.lattice import (
    Lattice,
    classify_on_lattice,
    number_tiles,
    split_by_lattice,
    stored_orders,
    tile_order,
    token_orders,
)
from regard.pattern import Full, Pattern

TILE = 64
STRIP = 32  # queries that the kernel computes together, at most
COARSE = 16  # tiles that are classified together first, so that a table of all tiles is never built
# cost of the work that is done once per query, in scores; here and in PyTorch's kernel
QUERY_OVERHEAD = 20

_tiles: LRUCache[TileSet] = LRUCache(256 << 20)


@dataclass(frozen=True)
class TileCSR:
    """The non-empty tiles for one order of the tokens, in compressed sparse row format."""

    n: int
    m: int
    row_starts: Tensor  # (rows + 1) int64: where the tiles of each row begin in the next two
    columns: Tensor  # (tiles) int32
    mask_ids: Tensor  # (tiles) int32; 1 is a full tile
    masks: Tensor  # (u 64) int64: for each key, one bit per query
    q_order: Tensor | None = None
    k_order: Tensor | None = None

    def scores(self) -> float:
        """The approximate cost in scores. The kernel skips a part of each tile that is not full."""
        bits = np.unpackbits(self.masks.numpy().view(np.uint8), axis=1).sum(1).astype(np.int64)
        visible = torch.from_numpy(bits)[self.mask_ids.long()]
        queries = _tile_lengths(self.n, STRIP).repeat_interleave(self.row_starts.diff())
        area = queries * _tile_lengths(self.m, 1)[self.columns.long()]
        return (torch.minimum(visible, area) + area).sum().item() / 2 + QUERY_OVERHEAD * self.n

    def nbytes(self) -> int:
        """The size of its tensors."""
        tensors = (
            self.row_starts,
            self.columns,
            self.mask_ids,
            self.masks,
            self.q_order,
            self.k_order,
        )
        return sum(x.nbytes for x in tensors if x is not None)


def _tile_lengths(n: int, multiple: int) -> Tensor:
    """The number of tokens of each tile, rounded up to a multiple."""
    last = (n - 1) % TILE + 1
    return torch.tensor([TILE] * ((n - 1) // TILE) + [-(-last // multiple) * multiple])


class TileSet(tuple[TileCSR, ...]):
    """All tiles of a pattern. Every visible pair is in exactly one of them."""

    # built at the first call; holds addresses
    kernel_struct: ctypes.Array[ctypes.c_char] | None = None

    @cached_property
    def key_reads(self) -> int:
        """How many keys are read, counting each once per row of tiles."""
        return TILE * sum(len(part.columns) for part in self)

    def __reduce__(self) -> tuple[type[TileSet], tuple[tuple[TileCSR, ...]]]:
        return TileSet, (tuple(self),)  # without the addresses


def build_tiles(pattern: Pattern, n: int, m: int, *, q_start: int = 0, k_start: int = 0) -> TileSet:
    """The tiles of `pattern` on n queries and m keys, for all heads alike. Cached by value.

    Args:
        pattern: A pattern without `PerHead`.
        n, m: Number of queries and keys.
        q_start, k_start: Positions of the first query and the first key.
    """
    key = (pattern, n, m, q_start, k_start)
    found = _tiles.get(key)
    if found is None:
        with torch.inference_mode(False):  # cached tensors must be usable in training
            found = _build(pattern, n, m, q_start, k_start)
        _tiles.add(key, found, sum(part.nbytes() for part in found) + 1024)
    return found


def _build(pattern: Pattern, n: int, m: int, q_start: int, k_start: int) -> TileSet:
    if pattern == Full():
        row_starts, columns = _all_tiles(n, m)
        masks = torch.tensor([[0], [-1]]).repeat(1, TILE)
        return TileSet([TileCSR(n, m, row_starts, columns, torch.ones_like(columns), masks)])
    return TileSet(
        _build_term(term, lattice, n, m, q_start, k_start)
        for lattice, term in split_by_lattice(pattern)
    )


def _build_term(
    term: Pattern, lattice: Lattice, n: int, m: int, q_start: int, k_start: int
) -> TileCSR:
    q_order, k_order = token_orders(lattice, n, m, q_start, k_start)
    q, k = tile_order(q_order, TILE, q_start), tile_order(k_order, TILE, k_start)
    coarse_q = tile_order(q_order, TILE * COARSE, q_start)
    coarse_k = tile_order(k_order, TILE * COARSE, k_start)
    near, _ = classify_on_lattice(lattice, term, coarse_q, coarse_k)
    known: dict[bytes, int] = {}
    counts, columns, mask_ids = [], [], []
    for rows, visible in zip(q.split(COARSE), near, strict=True):
        at = visible.repeat_interleave(COARSE)[: len(k)].nonzero()[:, 0]
        ids, masks = number_tiles(term, rows, k[at], lattice)
        packed = [word.numpy().tobytes() for word in _pack_masks(masks)]
        renumber = torch.tensor(
            [known.setdefault(word, len(known)) for word in packed], dtype=torch.int32
        )
        counts.append((ids > 0).sum(1))
        columns.append(at.int().expand(len(rows), -1)[ids > 0])
        mask_ids.append(renumber[ids[ids > 0].long()])
    return TileCSR(
        len(q_order),
        len(k_order),
        torch.cat([torch.zeros(1, dtype=torch.long), *counts]).cumsum(0),
        torch.cat(columns),
        torch.cat(mask_ids),
        torch.frombuffer(bytearray(b"".join(known)), dtype=torch.int64).view(-1, TILE),
        *stored_orders(lattice, q_order, k_order),
    )


def tiles_from_mask(keep: Tensor, q_order: Tensor | None, k_order: Tensor | None) -> TileCSR:
    """All tiles of a mask keep (n m) over queries `q_order` and keys `k_order`; None = all."""
    n, m = keep.shape
    row_starts, columns = _all_tiles(n, m)
    padded = F.pad(keep, (0, -m % TILE, 0, -n % TILE))
    masks = padded.unflatten(0, (-1, TILE)).unflatten(2, (-1, TILE)).transpose(1, 2).flatten(0, 1)
    masks = torch.cat([masks.new_zeros(1, TILE, TILE), masks.new_ones(1, TILE, TILE), masks])
    mask_ids = torch.arange(2, len(masks), dtype=torch.int32)
    return TileCSR(n, m, row_starts, columns, mask_ids, _pack_masks(masks), q_order, k_order)


def _all_tiles(n: int, m: int) -> tuple[Tensor, Tensor]:
    """`row_starts` and `columns` of all tiles of n queries and m keys."""
    rows, cols = -(-n // TILE), -(-m // TILE)
    return torch.arange(rows + 1) * cols, torch.arange(cols, dtype=torch.int32).repeat(rows)


def _pack_masks(masks: Tensor) -> Tensor:
    """Masks (u queries keys) as int64 (u keys), one bit per query."""
    packed = np.packbits(masks.numpy().transpose(0, 2, 1), axis=2, bitorder="little")
    return torch.from_numpy(packed.view(np.int64)[:, :, 0])
