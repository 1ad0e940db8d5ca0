"""From a pattern to a list of kernel calls: few, regular, and without ever building an n x m mask.

The sequence is cut into tiles. `Pattern.block` classifies pairs of tiles as empty, partial or full;
partial tiles are evaluated exactly, and equal masks are stored once. In the resulting table of
tiles we look for repetition: a `TileRun` is a series of equal calls at a constant step on views,
without copies (a band is one run, global keys are one run). A `GatherGroup` gathers irregular tiles
(random blocks, the edges of a band).

A dilated band or a set of summary keys is dense in another order of the tokens. Such terms of the
pattern become a `LayoutPart` with its own token order, in which they are laid out like any band.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.layout.calls import GatherGroup, Layout, LayoutPart, LRUCache, TileRun
from regard.layout.find_runs import RunFinder
from regard.layout.lattice import (
    Lattice,
    number_tiles,
    split_by_lattice,
    stored_orders,
    tile_order,
    token_orders,
)
from regard.layout.merge_runs import merge_runs
from regard.pattern import Pattern

__all__ = ["GatherGroup", "LRUCache", "Layout", "LayoutPart", "TileRun", "build_layout"]

TILE_SIZES = (32, 64, 128)  # the cheapest is used
MAX_TILES = 1 << 20  # entries of a tile table; smaller tiles are not tried

_layouts: LRUCache[Layout] = LRUCache(256 << 20)


def build_layout(
    pattern: Pattern,
    n: int,
    m: int,
    *,
    q_start: int = 0,
    k_start: int = 0,
    size: int | None = None,
    backward: bool = False,
) -> Layout:
    """The kernel calls for `pattern` on n queries and m keys, for all heads alike. Cached by value.

    Args:
        pattern: A pattern without `PerHead`.
        n, m: Number of queries and keys.
        q_start, k_start: Positions of the first query and the first key.
        size: Tile size. By default the cheapest is chosen.
        backward: Whether to optimise for the backward pass instead of the forward pass.
    """
    if pattern.heads:
        raise ValueError(
            f"a layout is for one head: pass one of the {pattern.heads} patterns of {pattern!r}"
        )
    # the costs of calls depend on whether there are several threads
    key = (pattern, n, m, q_start, k_start, size, backward, torch.get_num_threads() > 1)
    found = _layouts.get(key)
    if found is not None:
        return found
    sizes: tuple[int, ...] = (size,) if size else ()
    if not sizes:
        sizes = (
            tuple(s for s in TILE_SIZES if -(-n // s) * -(-m // s) <= MAX_TILES) or TILE_SIZES[-1:]
        )
        if n * m > MAX_TILES * TILE_SIZES[0] ** 2:  # tables are large: build one only
            sizes = sizes[:1]
    parts = []
    with torch.inference_mode(False):  # cached tensors must be usable in training
        for lattice, term in split_by_lattice(pattern):
            orders = token_orders(lattice, n, m, q_start, k_start)
            choices = [
                _build_part(term, lattice, *orders, s, q_start, k_start, backward) for s in sizes
            ]
            parts.append(min(choices, key=lambda part: part.cost(backward)))
    layout = Layout(tuple(parts))
    _layouts.add(key, layout, layout.nbytes() + 1024)
    return layout


def _build_part(
    term: Pattern,
    lattice: Lattice,
    q_order: Tensor,
    k_order: Tensor,
    size: int,
    q_start: int,
    k_start: int,
    backward: bool,
) -> LayoutPart:
    n, m = len(q_order), len(k_order)
    q, k = tile_order(q_order, size, q_start), tile_order(k_order, size, k_start)
    ids, masks = number_tiles(term, q, k, lattice)
    runs, groups = RunFinder(ids.numpy(), masks.numpy(), size, n, m).find()
    orders = stored_orders(lattice, q_order, k_order)
    return LayoutPart(n, m, size, merge_runs(runs, backward), groups, masks, *orders)
