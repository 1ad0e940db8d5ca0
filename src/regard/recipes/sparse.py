"""Sparse by position: softmax attention over a pattern that does not depend on the tokens.

Most recipes are softmax attention over a pattern. Patterns for images are in `regard.recipes.grid`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from math import ceil

from regard.attentions import SoftmaxAttention
from regard.errors import Unsupported, check_choice, check_int
from regard.mixer import Attention, Mixer, check_heads
from regard.mixers import ETC, BPTransformer, Longformer, Star
from regard.pattern import Band, Chunks, Global, KeyPhase, Keys, Pattern, PerHead, RandomBlocks
from regard.registry import recipe


@recipe(
    "Lin et al. 2021, a survey",
    arxiv="2106.04554",
    family="sparse",
    formula="softmax over i < g or j < g",
    example_kwargs={"tokens": 3},
)
def global_tokens(heads: int, head_dim: int, *, tokens: int = 64) -> Attention:
    """Global tokens: the first `tokens` tokens attend to all and are visible to all; the others see
    only them.

    Args:
        tokens: Number of global tokens.
    """
    return SoftmaxAttention(Global(tokens))


@recipe(
    "Luong et al. 2015",
    arxiv="1508.04025",
    family="sparse",
    formula="softmax over |i − j| ≤ w",
    example_kwargs={"window": 3},
)
def local(heads: int, head_dim: int, *, window: int = 128) -> Attention:
    """Sliding window: each token attends to itself and to `window` tokens on each side.

    Args:
        window: Tokens on each side (±window), so 2 · window + 1 keys per query; if causal,
            window + 1.
    """
    return SoftmaxAttention(Band(window, window))


@recipe(
    "Beltagy et al. 2020",
    arxiv="2004.05150",
    family="sparse",
    formula="softmax over i − j = s t, |t| ≤ w",
    example_kwargs={"window": 2, "dilation": 3},
)
def dilated(heads: int, head_dim: int, *, window: int = 64, dilation: int = 4) -> Attention:
    """Dilated sliding window: `window` keys on each side, `dilation` tokens apart.

    Args:
        window: Keys on each side (±window); they reach window · dilation tokens.
        dilation: Distance between two neighbouring keys.
    """
    check_int(1, dilation=dilation)
    return SoftmaxAttention(Band(window, window, dilation))


@recipe(
    "Zaheer et al. 2020",
    arxiv="2007.14062",
    family="sparse",
    formula="softmax over the drawn blocks of i's block",
    example_kwargs={"length": 32, "block": 4, "count": 2},
)
def random_blocks(
    heads: int,
    head_dim: int,
    *,
    length: int,
    block: int = 64,
    count: int = 3,
    seed: int = 0,
    causal: bool = False,
) -> Attention:
    """Random blocks: each block of queries attends to `count` random blocks of keys, drawn once.

    Args:
        length: Maximum length, rounded up to whole blocks.
        block: Block size.
        count: Random key blocks for each query block. If causal, they are drawn from the blocks up
            to it.
        seed: Seed of the draw.
    """
    pattern = _random_pattern(length, block, count, seed, causal)
    return SoftmaxAttention(pattern)


def _random_pattern(length: int, block: int, count: int, seed: int, causal: bool) -> Pattern:
    check_int(1, length=length, block=block)
    return RandomBlocks(block, count, ceil(length / block), seed, causal=causal)


@recipe(
    "Parmar et al. 2018",
    arxiv="1802.05751",
    family="sparse",
    formula="softmax over ⌊i/c⌋ = ⌊j/c⌋",
    example_kwargs={"block": 5},
)
def block_local(heads: int, head_dim: int, *, block: int = 128) -> Attention:
    """Block-local attention: each token attends to the tokens of its own block.

    Args:
        block: Block size.
    """
    return SoftmaxAttention(Chunks(block))


def _repeat_over_heads(patterns: Sequence[Pattern], heads: int) -> Pattern:
    """One pattern per head, repeating the list as often as needed."""
    return PerHead(tuple(islice(cycle(patterns), heads)))


def _factorise(near: Pattern, far: Pattern, heads: int, split: str, layer: int | None) -> Pattern:
    """Combine two patterns in one of the three ways of Child et al. 2019, section 5.2."""
    check_choice("split", split, ("merged", "heads", "layers"))
    if layer is not None and split != "layers":
        raise ValueError(f"layer is only used with split='layers', not with split={split!r}")
    if split == "merged":
        return near | far
    if split == "heads":
        return _repeat_over_heads((near, far), heads)
    layer = 0 if layer is None else layer
    check_int(0, layer=layer)
    return (near, far)[layer % 2]


@recipe(
    "Child et al. 2019",
    arxiv="1904.10509",
    family="sparse",
    formula="softmax over |i − j| ≤ l, in turn with i ≡ j (mod l)",
    example_kwargs={"stride": 4},
)
def sparse_strided(
    heads: int, head_dim: int, *, stride: int = 128, split: str = "heads", layer: int | None = None
) -> Attention:
    """Sparse Transformer, strided: the nearest `stride` tokens, and every `stride`-th token.

    Args:
        stride: Size of the window (±stride) and distance of the far keys.
        split: "heads" alternates the two patterns over heads, "layers" over layers, "merged" takes
            their union.
        layer: Layer number, for split="layers". Even layers have the window.
    """
    pattern = _factorise(Band(stride, stride), Band(step=stride), heads, split, layer)
    return SoftmaxAttention(pattern)


@recipe(
    "Child et al. 2019",
    arxiv="1904.10509",
    family="sparse",
    formula="softmax over ⌊i/l⌋ = ⌊j/l⌋, in turn with j mod l ≥ l − c",
    example_kwargs={"stride": 5, "cells": 2},
)
def sparse_fixed(
    heads: int,
    head_dim: int,
    *,
    stride: int = 128,
    cells: int = 8,
    split: str = "heads",
    layer: int | None = None,
) -> Attention:
    """Sparse Transformer, fixed: the token's own block, and the last `cells` tokens of every block.

    Args:
        stride: Block size.
        cells: Summary tokens at the end of each block.
        split: "heads" alternates the two patterns over heads, "layers" over layers, "merged" takes
            their union.
        layer: Layer number, for split="layers". Even layers have the own block.
    """
    check_int(1, stride=stride, cells=cells)
    if cells > stride:
        raise ValueError(f"cells must be between 1 and stride={stride}, not {cells}")
    summaries = KeyPhase(stride, stride - cells)
    pattern = _factorise(Chunks(stride), summaries, heads, split, layer)
    return SoftmaxAttention(pattern)


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
    """Star-Transformer: a ring of tokens around a relay node, updated in turn.

    Args:
        cycles: Number of updates.
        shared: Use one set of parameters for all updates.
    """
    return Star(dim, heads, cycles=cycles, shared=shared, causal=causal)


@recipe(
    "Beltagy et al. 2020",
    arxiv="2004.05150",
    family="sparse",
    formula="softmax over |i − j| ≤ w or j global; over all j for global i",
    example_kwargs={"window": 2, "dilation": (1, 3)},
)
def longformer(
    dim: int,
    heads: int,
    *,
    window: int | Sequence[int] = 256,
    dilation: int | Sequence[int] = 1,
    bias: bool = False,
    causal: bool = False,
) -> Mixer:
    """Longformer: a sliding window, and global tokens that attend to all and are visible to all.

    The caller chooses the global tokens of each example: `mixer(x, global_attention_mask=...)`,
    (b n). They have their own query, key and value projections. As in the paper, the causal form
    has the window only.

    Args:
        window: Tokens on each side (±window), one number or one per head.
        dilation: Distance between two neighbouring keys, one number or one per head.
        bias: Add a bias to the projections.
    """
    check_heads(dim, heads)
    windows = _one_per_head("window", window, heads)
    dilations = _one_per_head("dilation", dilation, heads)
    for step in dilations:
        check_int(1, dilation=step)
    bands = [Band(w, w, step) for w, step in zip(windows, dilations, strict=True)]
    pattern = bands[0] if len(set(bands)) == 1 else PerHead(tuple(bands))
    return Longformer(dim, heads, pattern, bias=bias, causal=causal)


def _one_per_head(name: str, value: int | Sequence[int], heads: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, Sequence) else (value,) * heads
    if len(values) != heads:
        raise ValueError(
            f"{name} must be one number or one for each of {heads} heads, not {values}"
        )
    return values


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
    """Extended Transformer Construction: global tokens, a sliding window, and a learned vector for
    the relation of each query and key.

    Args:
        globals: Number of global tokens, the first ones. They attend to all tokens and are visible
            to all.
        radius: Window of the other tokens, on each side (±radius).
        clip: Largest relative distance that has a label of its own.
        segment: Long tokens per global token; labels then tell which belong together. Default: none
            do.
        shared: Use the same projections for global and long tokens.
        masks: Patterns that restrict the pieces "g2g", "g2l", "l2g" and "l2l".
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
    heads: int,
    head_dim: int,
    *,
    length: int,
    block: int = 64,
    window: int = 3,
    globals: int | None = None,
    random: int = 3,
    seed: int = 0,
    causal: bool = False,
) -> Attention:
    """BigBird: a window of blocks, global blocks, and random blocks for each block of queries.

    Args:
        length: Maximum length, rounded up to whole blocks.
        block: Block size.
        window: Width of the window in blocks, odd: the query's own block and (window − 1) / 2 on
            each side.
        globals: Number of global blocks, the first ones. Default: 2, or 0 if causal, where there
            can be none.
        random: Random key blocks for each query block.
        seed: Seed of the draw.
    """
    if causal and globals:
        raise Unsupported(
            "global tokens attend to the whole sequence. Use globals=0 with causal=True"
        )
    if globals is None:
        globals = 0 if causal else 2
    check_int(0, window=window, globals=globals)
    if window % 2 == 0:
        raise ValueError(f"window must be odd (own block, and as many on each side), not {window}")
    near = Chunks(block, back=window // 2, ahead=window // 2)
    pattern = near | _random_pattern(length, block, random, seed, causal) | Global(globals * block)
    return SoftmaxAttention(pattern)


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
    """BP-Transformer: a binary tree over the tokens; each token attends to short spans nearby and
    long spans far away.

    Args:
        near: Spans on each side (±near), on each level of the tree.
        clip: Levels from this one on share their position vectors.
    """
    return BPTransformer(dim, heads, near=near, clip=clip, causal=causal)


@recipe(
    "any combination",
    family="sparse",
    formula="softmax over P_h(i, j) for head h",
    example_kwargs={"patterns": (Band(2, 2), Band(2, 2, 4) | Global(1))},
)
def per_head(heads: int, head_dim: int, *, patterns: Sequence[Pattern] | None = None) -> Attention:
    """A pattern of its own for each head.

    Args:
        patterns: Patterns, repeated over the heads. Default: sliding windows of ±16, ±32, ±64, ...
            tokens.
    """
    if patterns is None:
        patterns = [Band(16 * 2**i, 16 * 2**i) for i in range(heads)]
    is_list = isinstance(patterns, Sequence) and len(patterns) > 0
    if not is_list or not all(isinstance(pattern, Pattern) for pattern in patterns):
        raise ValueError(
            "patterns must be a list of at least one Pattern, such as [Band(8, 8), Global(2)], "
            f"not {patterns!r}"
        )
    pattern = _repeat_over_heads(patterns, heads)
    return SoftmaxAttention(pattern)


@recipe(
    "Xiao et al. 2023",
    arxiv="2309.17453",
    family="sparse",
    formula="softmax over i − j ≤ w or j < s",
    example_kwargs={"sinks": 2, "window": 3},
)
def sinks(heads: int, head_dim: int, *, sinks: int = 4, window: int = 1020) -> Attention:
    """Attention sinks: a sliding window, and the first `sinks` tokens.

    Args:
        sinks: Number of first tokens that stay visible.
        window: Tokens on each side (±window); if causal, tokens before.
    """
    check_int(0, sinks=sinks)
    pattern = Band(window, window) | Keys(0, sinks)
    return SoftmaxAttention(pattern)
