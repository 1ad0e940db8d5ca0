"""Token orders in which a pattern is dense, and the tiles of a pattern in such an order.

A band with a step is dense if tokens are sorted by their position modulo the step, a pattern over
an image if they are sorted by patch. We call the property that defines the order the *lattice* of a
term.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, product
from math import lcm

import numpy as np
import torch
from torch import Tensor

from regard.pattern import (
    MAX_POSITION,
    And,
    Band,
    Block,
    Blocks2D,
    Full,
    KeyPhase,
    Nothing,
    Or,
    Pattern,
    classify_tiles,
    position_tiles,
)

MIN_PATCH = 8  # images are cut into patches of at least this many rows and columns
MIN_IMAGE_WIDTH = 16  # images up to this width stay in raster order
MAX_TERMS = 32  # expressions with more alternatives are not split
TILES_AT_ONCE = 128  # partial tiles that are evaluated in one batch

# The step of a band, the visible phase of the keys, the geometry of an image, or None for the
# natural order.
Lattice = int | KeyPhase | Blocks2D | None


def split_by_lattice(pattern: Pattern) -> list[tuple[Lattice, Pattern]]:
    """The pattern as disjoint terms, each with the lattice on which it is dense."""
    if not any(_find_lattice(leaf) for leaf in pattern.leaves()):
        return [(None, pattern)]
    terms = list(islice(_alternatives(pattern), MAX_TERMS + 1))
    if len(terms) > MAX_TERMS:
        return [(None, pattern)]
    by_lattice: dict[Lattice, Pattern] = {None: Nothing()}
    for term in terms:
        lattice = _find_lattice(term)
        by_lattice[lattice] = by_lattice.get(lattice, Nothing()) | term
    before, result = Nothing(), []
    for lattice, term in by_lattice.items():
        if term != Nothing():
            result.append((lattice, term & ~before))
        before = before | term
    return result


def _alternatives(pattern: Pattern) -> Iterator[Pattern]:
    """Terms without `|` whose union is the pattern: `&` distributed over `|`."""
    if isinstance(pattern, Or):
        for part in pattern.parts:
            yield from _alternatives(part)
    elif isinstance(pattern, And):
        factors = (tuple(islice(_alternatives(part), MAX_TERMS + 1)) for part in pattern.parts)
        for choice in product(*factors):
            term: Pattern = Full()
            for factor in choice:
                term = term & factor
            yield term
    else:
        yield pattern


def _find_lattice(term: Pattern) -> Lattice:
    factors = term.parts if isinstance(term, And) else (term,)
    steps = [f.step for f in factors if isinstance(f, Band) and f.step > 1]
    if steps:
        return min(lcm(*steps), MAX_POSITION)
    for f in factors:
        if isinstance(f, KeyPhase) and 2 * f.start >= f.period > 1:
            return f
    for f in factors:
        if isinstance(f, Blocks2D) and f.width > MIN_IMAGE_WIDTH and not f.by_block:
            return f
    return None


def token_orders(
    lattice: Lattice, n: int, m: int, q_start: int, k_start: int
) -> tuple[Tensor, Tensor]:
    """The queries and the keys of a lattice in the order in which it is dense, as indices into
    0..n-1 and 0..m-1.
    """
    q, k = torch.arange(n), torch.arange(m)
    if isinstance(lattice, int):
        q, k = ((x + start) % lattice for x, start in ((q, q_start), (k, k_start)))
        return torch.argsort(q, stable=True), torch.argsort(k, stable=True)
    if isinstance(lattice, Blocks2D):
        return _patch_order(lattice, q + q_start), _patch_order(lattice, k + k_start)
    if isinstance(lattice, KeyPhase):
        k = k[(k + k_start) % lattice.period >= lattice.start]
    return q, k


def stored_orders(
    lattice: Lattice, q_order: Tensor, k_order: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """The orders of `token_orders`, None for a natural order."""
    reorders_queries = isinstance(lattice, int | Blocks2D)
    return q_order if reorders_queries else None, None if lattice is None else k_order


def _patch_order(image: Blocks2D, x: Tensor) -> Tensor:
    """Sort cells by patch: a patch is a block of the pattern, or several if blocks are small."""
    rows, cols = (size * -(-MIN_PATCH // size) for size in (image.rows, image.cols))
    across = -(-(image.width + image.cut_cols) // cols)
    row, col = (
        (x // image.width + image.cut_rows) // rows,
        (x % image.width + image.cut_cols) // cols,
    )
    return torch.argsort(row * across + col, stable=True)


# ---------------------------------------------------------------------- tiles
def tile_order(order: Tensor, size: int, start: int) -> Tensor:
    """The positions of tokens in the given order, in tiles (tiles size); -1 = no token."""
    slots = position_tiles(len(order), size)
    return torch.where(slots < 0, -1, order[slots] + start) if len(order) else slots


def classify_on_lattice(lattice: Lattice, term: Pattern, q: Tensor, k: Tensor) -> Block:
    """(some, every), each (r c), for tiles q (r s) and k (c t) in the order of the lattice; -1 = no
    token.
    """

    def relax(leaf: Pattern) -> Pattern:
        """A leaf that allows the same pairs on the lattice and has tighter blocks there."""
        if isinstance(lattice, int) and isinstance(leaf, Band) and lattice % leaf.step == 0:
            left, right = (None if x is None else x * leaf.step for x in (leaf.left, leaf.right))
            return Band(left, right)
        return Full() if leaf == lattice else leaf

    some, every = classify_tiles(term if lattice is None else term.map_leaves(relax), q, k)
    if lattice is None or isinstance(lattice, KeyPhase):
        return some, every
    if isinstance(lattice, Blocks2D):
        on_lattice = lattice.classify_patches(q, k)
    else:
        on_lattice = _same_phase(q, k, lattice)
    return some & on_lattice[0], every & on_lattice[1]


def _same_phase(q: Tensor, k: Tensor, step: int) -> Block:
    """(some, every) of "query and key are congruent modulo step", by tiles."""

    def phases(x: Tensor) -> tuple[Tensor, Tensor]:
        """The first and the last phase of each tile."""
        phase = x % step
        return torch.where(x < 0, step, phase).amin(1), torch.where(x < 0, -1, phase).amax(1)

    (q0, q1), (k0, k1) = phases(q), phases(k)
    some = (q0[:, None] <= k1) & (k0 <= q1[:, None])
    return some, (q0 == q1)[:, None] & (k0 == k1) & (q0[:, None] == k0)


def number_tiles(
    pattern: Pattern, q: Tensor, k: Tensor, lattice: Lattice = None
) -> tuple[Tensor, Tensor]:
    """Exact masks of all tiles: mask ids (r c) for tiles q (r s) and k (c t), and the distinct
    masks (u s t).

    Id 0 is an empty tile, id 1 a full one. A tile that the end of the sequence cuts short is never
    full.
    """
    some, every = classify_on_lattice(lattice, pattern, q, k)
    whole = (q >= 0).all(1)[:, None] & (k >= 0).all(1)
    ids = (every & whole).int()
    shape = (q.shape[1], k.shape[1])
    known = {np.packbits(np.full(shape, fill)).tobytes(): int(fill) for fill in (False, True)}
    for at in (some & (ids == 0)).nonzero().split(TILES_AT_ONCE):
        rows, cols = q[at[:, 0]], k[at[:, 1]]
        keep = pattern.allows(rows[:, :, None], cols[:, None, :])
        keep = keep & (rows >= 0)[:, :, None] & (cols >= 0)[:, None, :]
        packed = np.packbits(keep.flatten(1).numpy(), axis=1)
        numbers = [known.setdefault(row.tobytes(), len(known)) for row in packed]
        ids[at[:, 0], at[:, 1]] = torch.tensor(numbers, dtype=torch.int32)
    bits = np.frombuffer(b"".join(known), dtype=np.uint8).reshape(len(known), -1)
    masks = np.unpackbits(bits, axis=1, count=shape[0] * shape[1]).view(bool)
    return ids, torch.from_numpy(masks).unflatten(1, shape)
