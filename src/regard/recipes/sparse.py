"""Sparse by position: who may look at whom is known before any token is read.

To draw every pattern of this file:

    python -m regard.recipes.sparse

Most are a pattern inside `MultiHead`; Star-Transformer, Longformer, ETC and BP-Transformer have parts of their own.  The
patterns of images are in `regard.recipes.grid`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from math import ceil

from regard.attentions import SoftmaxAttention
from regard.errors import Unsupported, check_choice, check_int
from regard.mixer import Mixer, MultiHead, check_heads
from regard.mixers import ETC, BPTransformer, Longformer, Star
from regard.pattern import (
    Band,
    BlockTable,
    Chunks,
    Global,
    KeyPhase,
    Keys,
    Pattern,
    PerHead,
    Queries,
    RandomBlocks,
)
from regard.prior import Prior, RepeatedKeys
from regard.registry import recipe


def _sparse(
    dim: int,
    heads: int,
    pattern: Pattern,
    causal: bool,
    *,
    prior: Prior | None = None,
    bias: bool = False,
) -> Mixer:
    return MultiHead(dim, heads, SoftmaxAttention(pattern, prior), causal=causal, bias=bias)


@recipe(
    "Lin et al. 2021, a survey",
    arxiv="2106.04554",
    family="sparse",
    formula="softmax over i < g or j < g",
    example_kwargs={"tokens": 3},
)
def global_tokens(dim: int, heads: int, *, tokens: int = 64, causal: bool = False) -> Mixer:
    """The first `tokens` tokens see all and are seen by all; the others see only them."""
    return _sparse(dim, heads, Global(tokens), causal)


@recipe(
    "Luong et al. 2015",
    arxiv="1508.04025",
    family="sparse",
    formula="softmax over |i − j| ≤ w",
    example_kwargs={"window": 3},
)
def local(dim: int, heads: int, *, window: int = 128, causal: bool = False) -> Mixer:
    """A sliding window: each token sees itself and `window` tokens to either side, or before it where causal."""
    return _sparse(dim, heads, Band(window, window), causal)


@recipe(
    "Beltagy et al. 2020",
    arxiv="2004.05150",
    family="sparse",
    formula="softmax over i − j = s t, |t| ≤ w",
    example_kwargs={"window": 2, "step": 3},
)
def dilated(
    dim: int, heads: int, *, window: int = 64, step: int = 4, causal: bool = False
) -> Mixer:
    """A window with gaps: each token sees itself and every `step`-th of its neighbours, `window` of them to either side."""
    return _sparse(dim, heads, Band(window, window, step), causal)


@recipe(
    "Zaheer et al. 2020",
    arxiv="2007.14062",
    family="sparse",
    formula="softmax over the drawn blocks of i's block",
    example_kwargs={"length": 32, "block": 4, "count": 2},
)
def random_blocks(
    dim: int,
    heads: int,
    *,
    length: int,
    block: int = 64,
    count: int = 3,
    seed: int = 0,
    causal: bool = False,
) -> Mixer:
    """Each block of queries sees `count` random blocks of keys, drawn once by `seed`; causal: from those not after it.

    `length` is rounded up to whole blocks.
    """
    return _sparse(dim, heads, _random(length, block, count, seed, causal), causal)


def _random(length: int, block: int, count: int, seed: int, causal: bool) -> Pattern:
    check_int(1, length=length, block=block)
    return RandomBlocks(block, count, ceil(length / block), seed, causal=causal)


@recipe(
    "Parmar et al. 2018",
    arxiv="1802.05751",
    family="sparse",
    formula="softmax over ⌊i/c⌋ = ⌊j/c⌋",
    example_kwargs={"block": 5},
)
def block_local(dim: int, heads: int, *, block: int = 128, causal: bool = False) -> Mixer:
    """The sequence is cut into blocks, and each token sees its own block only."""
    return _sparse(dim, heads, Chunks(block), causal)


def _in_turn(patterns: Sequence[Pattern], dim: int, heads: int) -> Pattern:
    """One of the patterns for each head, over and over."""
    check_heads(dim, heads)
    return PerHead(tuple(islice(cycle(patterns), heads)))


def _factorised(
    near: Pattern, far: Pattern, dim: int, heads: int, split: str, layer: int | None
) -> Pattern:
    """Two patterns, merged into one, or alternating over heads or over layers, as in section 5.2 of Child et al."""
    check_choice("split", split, ("merged", "heads", "layers"))
    if layer is not None and split != "layers":
        raise ValueError(f"layer is for split='layers'; with split={split!r} all layers are alike")
    layer = 0 if layer is None else layer
    check_int(0, layer=layer)
    kinds = {
        "merged": near | far,
        "heads": _in_turn((near, far), dim, heads),
        "layers": (near, far)[layer % 2],
    }
    return kinds[split]


@recipe(
    "Child et al. 2019",
    arxiv="1904.10509",
    family="sparse",
    formula="softmax over |i − j| ≤ l, in turn with i ≡ j (mod l)",
    example_kwargs={"stride": 4},
)
def sparse_strided(
    dim: int,
    heads: int,
    *,
    stride: int = 128,
    split: str = "heads",
    layer: int | None = None,
    causal: bool = False,
) -> Mixer:
    """Sparse Transformer, strided: the `stride` tokens before, and every `stride`-th token.

    split   "heads": heads take turns; "merged": each sees both; "layers": even and odd `layer` take turns
    """
    far = Band(step=stride)
    return _sparse(
        dim, heads, _factorised(Band(stride, stride), far, dim, heads, split, layer), causal
    )


@recipe(
    "Child et al. 2019",
    arxiv="1904.10509",
    family="sparse",
    formula="softmax over ⌊i/l⌋ = ⌊j/l⌋, in turn with j mod l ≥ l − c",
    example_kwargs={"stride": 5, "cells": 2},
)
def sparse_fixed(
    dim: int,
    heads: int,
    *,
    stride: int = 128,
    cells: int = 8,
    split: str = "heads",
    layer: int | None = None,
    causal: bool = False,
) -> Mixer:
    """Sparse Transformer, fixed: the token's own block of `stride`, and the last `cells` tokens of every block.

    split   "heads": heads take turns; "merged": each sees both; "layers": even and odd `layer` take turns
    """
    check_int(1, stride=stride, cells=cells)
    if cells > stride:
        raise ValueError(f"cells must be between 1 and stride, {stride}, not {cells}")
    return _sparse(
        dim,
        heads,
        _factorised(Chunks(stride), KeyPhase(stride, stride - cells), dim, heads, split, layer),
        causal,
    )


@recipe(
    "Guo et al. 2019",
    arxiv="1902.09113",
    family="sparse",
    formula="softmax over h_{i−1}, h_i, h_{i+1}, x_i and the relay, in turn",
    example_kwargs={"cycles": 2},
)
def star(
    dim: int, heads: int, *, cycles: int = 2, shared: bool = False, causal: bool = False
) -> Mixer:
    """Star-Transformer: tokens in a ring around a relay, which are updated in turn, `cycles` times.

    shared   one set of parameters for all rounds; else each round has its own
    """
    return Star(dim, heads, cycles=cycles, shared=shared, causal=causal)


@recipe(
    "Beltagy et al. 2020",
    arxiv="2004.05150",
    family="sparse",
    formula="softmax over |i − j| ≤ w or j marked; all for i marked",
    example_kwargs={"window": 2, "steps": (1, 3)},
)
def longformer(
    dim: int,
    heads: int,
    *,
    window: int | Sequence[int] = 256,
    steps: int | Sequence[int] = 1,
    bias: bool = False,
    causal: bool = False,
) -> Mixer:
    """A window of `window` to either side, and tokens marked by the caller that see all and are seen by all.

    Marked tokens have query, key and value projections of their own.  Give them as `marks`, (b n), for each example its
    own.  The causal form, as in the paper, has a window only.

    window   how many keys to either side: one number for all heads, or one for each
    steps    the dilation, likewise
    bias     whether the projections have one
    """
    check_heads(dim, heads)
    near = zip(_each(heads, window=window), _each(heads, steps=steps), strict=True)
    bands = [Band(reach, reach, step) for reach, step in near]
    local = bands[0] if len(set(bands)) == 1 else PerHead(tuple(bands))
    return Longformer(dim, heads, local, bias=bias, causal=causal)


def _each(heads: int, **given: int | Sequence[int]) -> tuple[int, ...]:
    """One number for each head."""
    ((name, value),) = given.items()
    numbers = tuple(value) if isinstance(value, Sequence) else (value,) * heads
    if len(numbers) != heads:
        raise ValueError(
            f"{name} must be one number or one for each of {heads} heads, not {numbers}"
        )
    return numbers


@recipe(
    "Ainslie et al. 2020",
    arxiv="2004.08483",
    family="sparse",
    formula="softmax of q·(k + a_label) over |i − j| ≤ r, i < g or j < g",
    example_kwargs={"globals": 3, "radius": 2, "clip": 2},
)
def etc(
    dim: int,
    heads: int,
    *,
    globals: int = 64,
    radius: int = 84,
    clip: int = 12,
    segment: int | None = None,
    shared: bool = False,
    masks: Mapping[str, Pattern] | None = None,
    causal: bool = False,
) -> Mixer:
    """Extended Transformer Construction: the first `globals` tokens see all and are seen by all, the others see `radius`
    to either side, and every pair has a label with a learned vector.

    clip      labels of two tokens of a kind tell how far they are apart, up to so many
    segment   the long tokens belong to the global ones, so many to each, and labels tell which; None: to none
    shared    one set of projections for all; else queries and output have one for each kind of token, and keys and values
              one for each pair of kinds
    masks     patterns that cut down the pieces "g2g", "g2l", "l2g" and "l2l", over the positions of all tokens
    """
    if causal:
        raise Unsupported("its global tokens read the whole sequence")
    return ETC(
        dim,
        heads,
        globals=globals,
        radius=radius,
        clip=clip,
        segment=segment,
        shared=shared,
        masks=masks,
    )


@recipe(
    "Zaheer et al. 2020",
    arxiv="2007.14062",
    family="sparse",
    formula="softmax over window ∪ global ∪ random blocks",
    example_kwargs={"length": 48, "block": 4, "globals": None, "random": 2},
)
def bigbird(
    dim: int,
    heads: int,
    *,
    length: int,
    block: int = 64,
    window: int = 3,
    globals: int | None = None,
    random: int = 3,
    seed: int = 0,
    ends: bool = False,
    drawn: Sequence[Sequence[Sequence[int]]] | None = None,
    again: int = 0,
    bias: bool = False,
    causal: bool = False,
) -> Mixer:
    """A window of `window` blocks, `globals` global blocks, and `random` random blocks for each block of queries.

    length    the longest sequence, rounded up to whole blocks
    globals   2 unless given; causal, there can be none: their queries would look at the future
    ends      half of the global blocks are the last of `length`, as in Hugging Face; else all are the first
    drawn     the random blocks, in place of those that `seed` draws: for each head, for each block of queries, block numbers
    again     the first block counts so many times more for all but global queries: what Hugging Face does in evaluation, where
              it draws no random blocks
    bias      whether the projections have one
    """
    if causal and globals:
        raise Unsupported(
            "global tokens look at the whole sequence, so the causal form has none: give globals=0"
        )
    if globals is None:
        globals = 0 if causal else 2
    check_int(0, window=window, globals=globals)
    if window % 2 == 0:
        raise ValueError(
            f"window counts the block itself and as many on either side, so it is odd, not {window}"
        )
    check_int(0, again=again)
    near = Chunks(block, back=window // 2, ahead=window // 2)
    far = (
        _random(length, block, random, seed, causal)
        if drawn is None
        else _drawn(drawn, block, heads)
    )
    last = ceil(length / block) * block
    prior = (
        RepeatedKeys(block, again + 1, last - block * (globals // 2 if ends else 0))
        if again
        else None
    )
    pattern = near | far | (_both_ends(globals, block, last) if ends else Global(globals * block))
    return _sparse(dim, heads, pattern, causal, prior=prior, bias=bias)


def _both_ends(globals: int, block: int, last: int) -> Pattern:
    """As many global blocks at the end of `last_row` tokens as at the beginning."""
    if globals % 2:
        raise ValueError(f"globals are shared by both ends, so their number is even, not {globals}")
    size = globals // 2 * block
    return Global(size) | Queries(last - size, last) | Keys(last - size, last)


def _drawn(rows: Sequence[Sequence[Sequence[int]]], block: int, heads: int) -> Pattern:
    """A table of block numbers for each head."""
    if len(rows) != heads:
        raise ValueError(f"drawn has blocks for {len(rows)} heads, and there are {heads}")
    return PerHead(tuple(BlockTable(block, tuple(tuple(row) for row in head)) for head in rows))


@recipe(
    "Ye et al. 2019",
    arxiv="1911.04070",
    family="sparse",
    formula="softmax of q·(k + a_label) over spans of 1, 2, 4, ... tokens",
    example_kwargs={"near": 2, "clip": 3},
)
def bp_transformer(
    dim: int, heads: int, *, near: int = 4, clip: int = 10, causal: bool = False
) -> Mixer:
    """BP-Transformer: each token sees itself and `near` spans to either side on each level of a binary tree over the
    tokens, fine near and coarse far; causal, spans before it.

    clip   levels from this one on share the vectors that tell where a span stands
    """
    return BPTransformer(dim, heads, near=near, clip=clip, causal=causal)


@recipe(
    "any mix of the above",
    family="sparse",
    formula="softmax over P_h(i, j) for head h",
    example_kwargs={"patterns": (Band(2, 2), Band(2, 2, 4) | Global(1))},
)
def per_head(
    dim: int, heads: int, *, patterns: Sequence[Pattern] | None = None, causal: bool = False
) -> Mixer:
    """A pattern for each head: `patterns`, taken in turn; by default windows that reach twice as far from head to head."""
    check_heads(dim, heads)
    if patterns is None:
        patterns = [Band(16 * 2**i, 16 * 2**i) for i in range(heads)]
    if (
        not isinstance(patterns, Sequence)
        or not patterns
        or not all(isinstance(p, Pattern) for p in patterns)
    ):
        raise ValueError(
            f"patterns must be a list of at least one Pattern, such as [Band(8, 8), Global(2)], not {patterns!r}"
        )
    return _sparse(dim, heads, _in_turn(patterns, dim, heads), causal)


@recipe(
    "Xiao et al. 2023",
    arxiv="2309.17453",
    family="sparse",
    formula="softmax over i − j ≤ w or j < s",
    example_kwargs={"sinks": 2, "window": 3},
)
def sinks(
    dim: int, heads: int, *, sinks: int = 4, window: int = 1020, causal: bool = False
) -> Mixer:
    """Attention sinks: each token sees the first `sinks` tokens, and `window` tokens before it, or to either side where
    not causal."""
    check_int(0, sinks=sinks)
    return _sparse(dim, heads, Band(window, window) | Keys(0, sinks), causal)


if __name__ == "__main__":
    from regard.show import draw_family

    draw_family("C")
