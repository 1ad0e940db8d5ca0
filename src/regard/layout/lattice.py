"""Orders of the tokens in which a pattern is dense: by phase for a stepped band, by patch for an image."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, product
from math import lcm

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
)

PATCH = 8  # an image is cut into patches of at least so many rows and columns
LEAST_WIDTH = 16  # narrower images are left in raster order
TERMS = 32  # an expression with more alternatives than this is not taken apart

Lattice = (
    int | KeyPhase | Blocks2D | None
)  # a step that queries and keys share; keys at some phase; an image; none


def lattices(pattern: Pattern) -> list[tuple[Lattice, Pattern]]:
    """The pattern as disjoint terms, each with the lattice on which it is dense."""
    if not any(_lattice(leaf) for leaf in pattern.leaves()):
        return [(None, pattern)]
    terms = list(islice(_terms(pattern), TERMS + 1))
    if len(terms) > TERMS:
        return [(None, pattern)]
    by_lattice: dict[Lattice, Pattern] = {None: Nothing()}
    for term in terms:
        lattice = _lattice(term)
        by_lattice[lattice] = by_lattice.get(lattice, Nothing()) | term
    before, result = Nothing(), []
    for lattice, term in by_lattice.items():
        if term != Nothing():
            result.append((lattice, term & ~before))
        before = before | term
    return result


def _terms(pattern: Pattern) -> Iterator[Pattern]:
    """Alternatives whose union it is: `&` distributed over `|`."""
    if isinstance(pattern, Or):
        for part in pattern.parts:
            yield from _terms(part)
    elif isinstance(pattern, And):
        for choice in product(*(tuple(islice(_terms(part), TERMS + 1)) for part in pattern.parts)):
            term: Pattern = Full()
            for factor in choice:
                term = term & factor
            yield term
    else:
        yield pattern


def _lattice(term: Pattern) -> Lattice:
    factors = term.parts if isinstance(term, And) else (term,)
    steps = [f.step for f in factors if isinstance(f, Band) and f.step > 1]
    if steps:
        return min(
            lcm(*steps), MAX_POSITION
        )  # beyond every position all steps are alike: a token meets only itself
    phases = (f for f in factors if isinstance(f, KeyPhase) and 2 * f.start >= f.period > 1)
    images = (
        f for f in factors if isinstance(f, Blocks2D) and f.width > LEAST_WIDTH and not f.by_block
    )
    return next(phases, None) or next(images, None)


def _on_lattice(term: Pattern, lattice: Lattice) -> Pattern:
    """The same truth for pairs on the lattice, in leaves whose blocks are tight there."""

    def relax(leaf: Pattern) -> Pattern:
        if isinstance(lattice, int) and isinstance(leaf, Band) and lattice % leaf.step == 0:
            left, right = (
                None if side is None else side * leaf.step for side in (leaf.left, leaf.right)
            )
            return Band(left, right)
        return Full() if leaf == lattice else leaf

    return term if lattice is None else term.map_leaves(relax)


def orders(lattice: Lattice, n: int, m: int, q_start: int, k_start: int) -> tuple[Tensor, Tensor]:
    """The queries and the keys of a lattice, in the order in which it is dense."""
    q, k = torch.arange(n), torch.arange(m)
    if isinstance(lattice, int):
        return torch.argsort((q + q_start) % lattice, stable=True), torch.argsort(
            (k + k_start) % lattice, stable=True
        )
    if isinstance(lattice, Blocks2D):
        return _by_patch(lattice, q + q_start), _by_patch(lattice, k + k_start)
    if lattice is not None:
        k = k[(k + k_start) % lattice.period >= lattice.start]
    return q, k


def _by_patch(image: Blocks2D, x: Tensor) -> Tensor:
    """Cells of one patch after each other: patches are query blocks, or several of them where those are small."""
    rows, cols = (size * -(-PATCH // size) for size in (image.rows, image.cols))
    across = -(-(image.width + image.cut_cols) // cols)
    row, col = (
        (x // image.width + image.cut_rows) // rows,
        (x % image.width + image.cut_cols) // cols,
    )
    patch = row * across + col
    return torch.argsort(patch, stable=True)


def table_on(lattice: Lattice, term: Pattern, q: Tensor, k: Tensor) -> Block:
    """(some, every), each (r c), for tiles q (r s) and k (c t) in the order of the lattice; -1 = no token."""
    some, every = classify_tiles(_on_lattice(term, lattice), q, k)
    if lattice is None or isinstance(lattice, KeyPhase):
        return some, every
    mine, whole = (
        lattice.classify_patches(q, k)
        if isinstance(lattice, Blocks2D)
        else _same_phase(q, k, lattice)
    )
    return some & mine, every & whole


def _same_phase(q: Tensor, k: Tensor, step: int) -> Block:
    """(some, every) for "query and key agree modulo step", by tiles."""
    (q0, q1), (k0, k1) = (_extent(x, step) for x in (q, k))
    some = (q0[:, None] <= k1) & (k0 <= q1[:, None])
    return some, (q0 == q1)[:, None] & (k0 == k1) & (q0[:, None] == k0)


def _extent(x: Tensor, step: int) -> Block:
    """The first and the last phase in each tile."""
    phase = x % step
    return torch.where(x < 0, step, phase).amin(1), torch.where(x < 0, -1, phase).amax(1)
