"""Attention patterns: which query may attend to which key, as a small algebra over positions.

A pattern is an immutable expression over token positions, built from leaves with `|`, `&` and `~`:

    >>> Band(2, 2) | Global(1)
    Band(2, 2) | Queries(0, 1) | Keys(0, 1)

It answers two questions. Dense masks, block layouts, cache eviction and plots all follow from them.

    allows(q, k)               may query position q attend to key position k?   exact, elementwise
    block(q0, q1, k0, k1)      for the rectangle [q0, q1] x [k0, k1]:           conservative, O(1)
    each
                               `some`:  there may be an allowed pair,
                               `every`: all pairs are certainly allowed.

`some` and `every` classify a rectangle as empty, partial or full. The operators compose them, so no
n x m matrix is ever built. Positions are absolute and start at 0. True means "may attend".
"""

from regard.pattern.algebra import (
    MAX_POSITION,
    MAX_START,
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
    StridedKeyBand,
)
from regard.pattern.segments import PerSegment, Restarted, Segments, lengths_from_cu_seqlens
from regard.pattern.tables import BlockTable, RandomBlocks

__all__ = [
    "MAX_POSITION",
    "MAX_START",
    "And",
    "Axial",
    "Band",
    "Block",
    "BlockTable",
    "Blocks",
    "Blocks2D",
    "Causal",
    "Chunks",
    "Full",
    "Global",
    "GlobalMask",
    "GlobalMaskKeys",
    "GlobalMaskQueries",
    "KeyPhase",
    "Keys",
    "Leaf",
    "Near2D",
    "Neighbourhood",
    "Not",
    "Nothing",
    "Or",
    "Pattern",
    "PerHead",
    "PerSegment",
    "Queries",
    "RandomBlocks",
    "Restarted",
    "Segments",
    "StridedKeyBand",
    "block_order",
    "classify_tiles",
    "lengths_from_cu_seqlens",
    "position_tiles",
    "tile_extent",
]
