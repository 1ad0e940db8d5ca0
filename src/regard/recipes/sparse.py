"""Sparse by position: who may look at whom is known before any token is read.

To draw every pattern of this file:

    python -m regard.recipes.sparse

Each recipe is a pattern inside `MultiHead`; only Longformer has parts of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from math import ceil

from regard.attentions import SoftmaxAttention
from regard.errors import Unsupported, check_whole
from regard.mixer import Mixer, MultiHead, check_heads
from regard.mixers import Longformer
from regard.pattern import Axial, Band, Blocks2D, Chunks, Global, KeyPhase, Pattern, PerHead, RandomBlocks
from regard.registry import recipe


def _sparse(dim: int, heads: int, pattern: Pattern, causal: bool) -> Mixer:
    return MultiHead(dim, heads, SoftmaxAttention(pattern), causal=causal)


@recipe("Lin et al. 2021, a survey", arxiv="2106.04554", row="C1", formula="softmax over i < g or j < g", small={"tokens": 3})
def global_tokens(dim: int, heads: int, *, tokens: int = 64, causal: bool = False) -> Mixer:
    """The first `tokens` tokens see all and are seen by all; the others see only them."""
    return _sparse(dim, heads, Global(tokens), causal)


@recipe("Luong et al. 2015", arxiv="1508.04025", row="C2", formula="softmax over |i − j| ≤ w", small={"window": 3})
def local(dim: int, heads: int, *, window: int = 128, causal: bool = False) -> Mixer:
    """A sliding window: each token sees itself and `window` tokens to either side, or before it where causal."""
    return _sparse(dim, heads, Band(window, window), causal)


@recipe(
    "Beltagy et al. 2020", arxiv="2004.05150", row="C3", formula="softmax over i − j = s t, |t| ≤ w",
    small={"window": 2, "step": 3},
)  # fmt: skip
def dilated(dim: int, heads: int, *, window: int = 64, step: int = 4, causal: bool = False) -> Mixer:
    """A window with gaps: each token sees itself and every `step`-th of its neighbours, `window` of them to either side."""
    return _sparse(dim, heads, Band(window, window, step), causal)


@recipe(
    "Zaheer et al. 2020", arxiv="2007.14062", row="C4", formula="softmax over the drawn blocks of i's block",
    small={"length": 32, "block": 4, "count": 2},
)  # fmt: skip
def random_blocks(
    dim: int, heads: int, *, length: int, block: int = 64, count: int = 3, seed: int = 0, causal: bool = False
) -> Mixer:
    """Each block of queries sees `count` random blocks of keys, drawn once by `seed`; causal: from those not after it.

    `length` is rounded up to whole blocks.
    """
    return _sparse(dim, heads, _random(length, block, count, seed, causal), causal)


def _random(length: int, block: int, count: int, seed: int, causal: bool) -> Pattern:
    check_whole(1, length=length, block=block)
    return RandomBlocks(block, count, ceil(length / block), seed, past=causal)


@recipe(
    "Parmar et al. 2018", arxiv="1802.05751", row="C5", formula="softmax over ⌊i/c⌋ = ⌊j/c⌋", small={"block": 5},
)  # fmt: skip
def block_local(dim: int, heads: int, *, block: int = 128, causal: bool = False) -> Mixer:
    """The sequence is cut into blocks, and each token sees its own block only."""
    return _sparse(dim, heads, Chunks(block), causal)


def _in_turn(patterns: Sequence[Pattern], dim: int, heads: int) -> Pattern:
    """One of the patterns for each head, over and over."""
    check_heads(dim, heads)
    return PerHead(tuple(islice(cycle(patterns), heads)))


def _factorised(near: Pattern, far: Pattern, dim: int, heads: int, split: str, layer: int) -> Pattern:
    """Two patterns, merged into one, or alternating over heads or over layers, as in section 5.2 of Child et al."""
    check_whole(0, layer=layer)
    kinds = {"merged": near | far, "heads": _in_turn((near, far), dim, heads), "layers": (near, far)[layer % 2]}
    if split not in kinds:
        raise ValueError(f"split must be one of {', '.join(map(repr, kinds))}, not {split!r}")
    return kinds[split]


@recipe(
    "Child et al. 2019", arxiv="1904.10509", row="C6", formula="softmax over |i − j| ≤ l, in turn with i ≡ j (mod l)",
    small={"stride": 4},
)  # fmt: skip
def sparse_strided(
    dim: int, heads: int, *, stride: int = 128, split: str = "heads", layer: int = 0, causal: bool = False
) -> Mixer:
    """Sparse Transformer, strided: the `stride` tokens before, and every `stride`-th token.

    split   "heads": heads take turns; "merged": each sees both; "layers": even and odd `layer` take turns
    """
    far = Band(step=stride)
    return _sparse(dim, heads, _factorised(Band(stride, stride), far, dim, heads, split, layer), causal)


@recipe(
    "Child et al. 2019", arxiv="1904.10509", row="C6", formula="softmax over ⌊i/l⌋ = ⌊j/l⌋, in turn with j mod l ≥ l − c",
    small={"stride": 5, "cells": 2},
)  # fmt: skip
def sparse_fixed(
    dim: int, heads: int, *, stride: int = 128, cells: int = 8, split: str = "heads", layer: int = 0, causal: bool = False
) -> Mixer:
    """Sparse Transformer, fixed: the token's own block of `stride`, and the last `cells` tokens of every block.

    split   "heads": heads take turns; "merged": each sees both; "layers": even and odd `layer` take turns
    """
    check_whole(1, stride=stride, cells=cells)
    if cells > stride:
        raise ValueError(f"cells must be between 1 and stride, {stride}, not {cells}")
    return _sparse(dim, heads, _factorised(Chunks(stride), KeyPhase(stride, stride - cells), dim, heads, split, layer), causal)


@recipe(
    "Beltagy et al. 2020", arxiv="2004.05150", row="C8", formula="softmax over |i − j| ≤ w or j marked; all for i marked",
    small={"window": 2, "steps": (1, 3)},
)  # fmt: skip
def longformer(dim: int, heads: int, *, window: int = 256, steps: int | Sequence[int] = 1, causal: bool = False) -> Mixer:
    """A window of `window` to either side, and tokens marked by the caller that see all and are seen by all.

    Marked tokens have query, key and value projections of their own.  Give them as `marks`, (b n), for each example its
    own.  The causal form, as in the paper, has a window only.

    steps   the dilation: one for all, or one for each head
    """
    check_heads(dim, heads)
    near = tuple(steps) if isinstance(steps, Sequence) else (steps,) * heads
    if len(near) != heads:
        raise ValueError(f"steps must be one number or one for each of {heads} heads, not {near}")
    bands = [Band(window, window, step) for step in near]
    return Longformer(dim, heads, bands[0] if len(set(bands)) == 1 else PerHead(tuple(bands)), causal=causal)


@recipe(
    "Zaheer et al. 2020", arxiv="2007.14062", row="C10", formula="softmax over window ∪ global ∪ random blocks",
    small={"length": 48, "block": 4, "globals": None, "random": 2},
)  # fmt: skip
def bigbird(
    dim: int, heads: int, *, length: int, block: int = 64, window: int = 3, globals: int | None = None, random: int = 3,
    seed: int = 0, causal: bool = False,
) -> Mixer:  # fmt: skip
    """A window of `window` blocks, `globals` global blocks, and `random` random blocks for each block of queries.

    length    the longest sequence, rounded up to whole blocks
    globals   2 unless given; causal, there can be none: their queries would look at the future
    """
    if causal and globals:
        raise Unsupported("global tokens look at the whole sequence, so the causal form has none: give globals=0")
    if globals is None:
        globals = 0 if causal else 2
    check_whole(0, window=window, globals=globals)
    if window % 2 == 0:
        raise ValueError(f"window counts the block itself and as many on either side, so it is odd, not {window}")
    near = Chunks(block, back=window // 2, ahead=window // 2)
    far = _random(length, block, random, seed, causal)
    return _sparse(dim, heads, near | Global(globals * block) | far, causal)


@recipe(
    "Parmar et al. 2018", arxiv="1802.05751", row="C12", formula="softmax over the memory block of i's query block",
    small={"width": 6, "block": (2, 3), "memory": (2, 1)},
)  # fmt: skip
def image_local_2d(
    dim: int, heads: int, *, width: int, block: tuple[int, int] = (8, 8), memory: tuple[int, int] = (8, 8),
    causal: bool = False,
) -> Mixer:  # fmt: skip
    """Image Transformer in two dimensions: query blocks on a grid, each with a memory block around it.

    Tokens are pixels in raster order, `width` to a row.  The memory is the query block, extended by memory[0] rows above
    and memory[1] columns to either side; not causal, by as many rows below as well.
    """
    for name, pair in (("block", block), ("memory", memory)):
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise ValueError(f"{name} must be two numbers, rows and columns, not {pair!r}")
    (rows, cols), (up, aside) = block, memory
    pattern = Blocks2D(width, rows, cols, up=up, left=aside, right=aside, down=0 if causal else up)
    return _sparse(dim, heads, pattern, causal)


@recipe(
    "Ho et al. 2019", arxiv="1912.12180", row="C13", formula="softmax over i's row ∪ i's column", small={"width": 5},
)  # fmt: skip
def axial(dim: int, heads: int, *, width: int, causal: bool = False) -> Mixer:
    """Rows and columns: on a grid in raster order, `width` to a row, each token sees its row and its column."""
    return _sparse(dim, heads, Axial(width), causal)


@recipe(
    "any mix of the above", row="C14", formula="softmax over P_h(i, j) for head h",
    small={"patterns": (Band(2, 2), Band(2, 2, 4) | Global(1))},
)  # fmt: skip
def per_head(dim: int, heads: int, *, patterns: Sequence[Pattern] | None = None, causal: bool = False) -> Mixer:
    """A pattern for each head: `patterns`, taken in turn; by default windows that reach twice as far from head to head."""
    check_heads(dim, heads)
    if patterns is None:
        patterns = [Band(16 * 2**i, 16 * 2**i) for i in range(heads)]
    if not isinstance(patterns, Sequence) or not patterns or not all(isinstance(p, Pattern) for p in patterns):
        raise ValueError(f"patterns must be a list of at least one Pattern, such as [Band(8, 8), Global(2)], not {patterns!r}")
    return _sparse(dim, heads, _in_turn(patterns, dim, heads), causal)


if __name__ == "__main__":
    from regard.show import draw_family

    draw_family("C")
