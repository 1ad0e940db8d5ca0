"""Which query may look at which key: a small algebra over positions.

A pattern is an immutable expression over token positions, built from leaves with `|`, `&` and `~`:

    >>> Band(2, 2) | Global(1)
    Band(2, 2) | Queries(0, 1) | Keys(0, 1)

It answers two questions, and everything else (dense masks, block layouts, cache eviction, pictures) follows:

    allowed(q, k)              does query position q see key position k?        exact, elementwise
    block(q0, q1, k0, k1)      for the rectangle [q0, q1] x [k0, k1]:           sound, O(1) for each
                               `some`:  a seen pair may exist,
                               `every`: all pairs are surely seen.

`some` and `every` are the two ends of a three-valued truth (empty, partial, full), so the operators compose them and no
n x n matrix is ever built.  Positions are absolute and count from 0; True means "may look".
"""

from regard.pattern.algebra import (
    MAX_POSITION,
    And,
    Block,
    Full,
    Leaf,
    Not,
    Nothing,
    Or,
    Pattern,
    PerHead,
    classify_tiles,
    position_tiles,
    tile_extent,
)
from regard.pattern.grid import Axial, Blocks2D, Near2D, Neighbourhood, block_order
from regard.pattern.leaves import (
    Band,
    Blocks,
    Causal,
    Chunks,
    Global,
    GlobalMask,
    GlobalMaskKeys,
    GlobalMaskQueries,
    KeyPhase,
    Keys,
    Queries,
)
from regard.pattern.spaced import StridedKeyBand
from regard.pattern.tables import BlockTable, RandomBlocks

__all__ = [
    "MAX_POSITION",
    "And",
    "Axial",
    "Band",
    "Block",
    "Blocks",
    "Blocks2D",
    "BlockTable",
    "Causal",
    "Chunks",
    "Full",
    "Global",
    "KeyPhase",
    "Keys",
    "Leaf",
    "GlobalMask",
    "GlobalMaskKeys",
    "GlobalMaskQueries",
    "Near2D",
    "Neighbourhood",
    "Not",
    "Nothing",
    "Or",
    "Pattern",
    "PerHead",
    "Queries",
    "RandomBlocks",
    "StridedKeyBand",
    "block_order",
    "tile_extent",
    "classify_tiles",
    "position_tiles",
]
