"""From a pattern to work: which tiles to compute, as few regular calls as possible, and never an n x m mask.

The sequence is cut into tiles.  `Pattern.block` says which pairs of tiles are empty, partial or full; partial ones are
evaluated exactly and their masks kept once each.  What remains is a table of tile numbers, in which repetition is looked
for: a `Run` is many calls alike, at a constant step, and needs no copy (a band is one run, global keys are one run); a
`Group` gathers the tiles that follow no rule (random blocks, the edges of a band).

A stepped band or a set of summary keys is dense in another order of the tokens.  Such terms become a `Part` with an order
of its own, in which they are laid out like any band.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from regard.layout.calls import GatherGroup, Layout, LayoutPart, LRUCache, TileRun
from regard.layout.find_runs import Finder
from regard.layout.lattice import Lattice, lattices, orders, table_on
from regard.layout.merge_runs import taller
from regard.pattern import Blocks2D, Pattern, position_tiles

__all__ = [
    "LRUCache",
    "GatherGroup",
    "Layout",
    "LayoutPart",
    "TileRun",
    "build_layout",
    "number_tiles",
]

SIZES = (32, 64, 128)  # tiles that are tried
MOST_TILES = 1 << 20  # in one table; finer tiles than that are not tried
TILES_AT_ONCE = 128

_layouts = LRUCache(256 << 20)


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
    """The work of `pattern` on queries q_at..q_at+n-1 and keys k_at..k_at+m-1, for all heads alike; cached by value.

    `size` fixes the tile; else the cheapest is taken, for the forward or for the backward pass.
    """
    if pattern.heads:
        raise ValueError(
            f"heads that differ are laid out one by one: give one of the {pattern.heads} patterns of {pattern!r}"
        )
    key = (pattern, n, m, q_start, k_start, size, backward, torch.get_num_threads() > 1)
    found = _layouts.get(key)
    if found is None:
        with torch.inference_mode(False):  # what is kept must serve training too
            found = _build(pattern, n, m, q_start, k_start, size, backward)
        _layouts.put(key, found, found.nbytes() + 1024)
    assert isinstance(found, Layout)
    return found


def _build(
    pattern: Pattern,
    n: int,
    m: int,
    q_start: int,
    k_start: int,
    size: int | None,
    backward: bool,
) -> Layout:
    parts: list[LayoutPart] = []
    for lattice, term in lattices(pattern):
        order = orders(lattice, n, m, q_start, k_start)
        sizes = (size,) if size else _sizes(n, m)
        choices = (_part(term, lattice, *order, s, q_start, k_start, backward) for s in sizes)
        parts.append(min(choices, key=lambda part: part.cost(backward)))
    return Layout(tuple(parts))


def _sizes(n: int, m: int) -> tuple[int, ...]:
    """The tiles worth trying: all of them, but one only where tables are large."""
    fine = tuple(s for s in SIZES if -(-n // s) * -(-m // s) <= MOST_TILES) or SIZES[-1:]
    return fine[:1] if n * m > MOST_TILES * SIZES[0] ** 2 else fine


def _part(
    term: Pattern,
    lattice: Lattice,
    q_order: Tensor,
    k_order: Tensor,
    size: int,
    q_start: int,
    k_start: int,
    backward: bool,
) -> LayoutPart:
    q, k = in_tiles(q_order, size, q_start), in_tiles(k_order, size, k_start)
    ids, masks = number_tiles(term, q, k, *table_on(lattice, term, q, k))
    n, m = len(q_order), len(k_order)
    found, groups = Finder(ids.numpy(), masks.numpy(), size, n, m).find()
    runs = taller(found, backward)
    reordered = isinstance(lattice, int | Blocks2D)
    return LayoutPart(
        n,
        m,
        size,
        runs,
        groups,
        masks,
        q_order if reordered else None,
        None if lattice is None else k_order,
    )


def in_tiles(order: Tensor, size: int, at: int) -> Tensor:
    slots = position_tiles(len(order), size)
    return torch.where(slots < 0, -1, order[slots] + at) if len(order) else slots


def number_tiles(
    pattern: Pattern, q: Tensor, k: Tensor, some: Tensor, every: Tensor
) -> tuple[Tensor, Tensor]:
    """A table (r c) of mask numbers, exact (0: nothing is seen, 1: all is), and the masks (u s t), each once.

    A tile that the end of the sequence cuts short is never full.
    """
    whole = (q >= 0).all(1)[:, None] & (k >= 0).all(1)
    ids = (every & whole).int()
    shape = (q.shape[1], k.shape[1])
    known = {
        np.packbits(np.full(shape, fill)).tobytes(): number
        for number, fill in enumerate((False, True))
    }
    for at in (some & (ids == 0)).nonzero().split(TILES_AT_ONCE):
        rows, cols = q[at[:, 0]], k[at[:, 1]]
        keep = pattern.allows(rows[:, :, None], cols[:, None, :])
        real = (rows >= 0)[:, :, None] & (cols >= 0)[:, None, :]
        keep = keep & real
        packed = np.packbits(keep.flatten(1).numpy(), axis=1)
        numbers = [known.setdefault(row.tobytes(), len(known)) for row in packed]
        ids[at[:, 0], at[:, 1]] = torch.tensor(numbers, dtype=torch.int32)
    bits = np.frombuffer(b"".join(known), dtype=np.uint8).reshape(len(known), -1)
    masks = np.unpackbits(bits, axis=1, count=shape[0] * shape[1]).view(bool)
    return ids, torch.from_numpy(masks).unflatten(1, shape)
