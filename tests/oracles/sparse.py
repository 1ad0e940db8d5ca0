"""Sparse by position: the rule of each paper, pair by pair."""

import math

import torch

from oracles.loop import by_rule, linear_layer, project, softmax_loop

SPLITS = [{"split": split, "layer": layer} for split, layer in (("heads", 0), ("merged", 0), ("layers", 0), ("layers", 1))]
CASES = {
    "global_tokens": [{"tokens": 3}, {"tokens": 70}, {"tokens": 0}],
    "local": [{"window": 3}, {"window": 0}, {"window": 40}],
    "dilated": [{"window": 2, "step": 3}, {"window": 20, "step": 7}],
    "random_blocks": [{"block": 4, "count": 2}, {"block": 16, "count": 1, "seed": 5}],
    "block_local": [{"block": 5}, {"block": 32}, {"block": 1}],
    "sparse_strided": [{"stride": 4, **split} for split in SPLITS] + [{"stride": 10}],
    "sparse_fixed": [{"stride": 5, "cells": 2, **split} for split in SPLITS] + [{"stride": 16, "cells": 1}],
    "longformer": [{"window": 2}, {"window": 2, "steps": (1, 3, 1, 5)}],
    "bigbird": [{"block": 4, "globals": 1, "random": 1}, {"block": 8, "window": 1, "globals": 2, "random": 2, "seed": 3}],
    "image_local_2d": [{"width": 6, "block": (2, 3), "memory": (2, 1)}, {"width": 20, "block": (3, 4), "memory": (1, 2)}],
    "axial": [{"width": 5}, {"width": 10}],
    "per_head": [{"patterns": "as RULES"}, {}],
}
RULES = [lambda i, j: abs(i - j) <= 2, lambda i, j: (abs(i - j) <= 8 and (i - j) % 4 == 0) or i == 0 or j == 0]


def global_tokens(p, x, *, heads, causal, memory=None, mask=None, marks=None, tokens=64):
    """The first tokens see all, and all see them."""

    def see(h, i, j):
        return (i < tokens or j < tokens) and (j <= i or not causal)

    return by_rule(p, x, heads, see, memory=memory, mask=mask)


def local(p, x, *, heads, causal, mask=None, marks=None, window=128):
    """A sliding window."""
    return by_rule(p, x, heads, lambda h, i, j: abs(i - j) <= window and (j <= i or not causal), mask=mask)


def dilated(p, x, *, heads, causal, mask=None, marks=None, window=64, step=4):
    """`window` keys to either side, `step` apart."""

    def see(h, i, j):
        return j in range(i - window * step, i + window * step + 1, step) and (j <= i or not causal)

    return by_rule(p, x, heads, see, mask=mask)


def drawn(count, blocks, seed, causal):
    """For each block of queries the set of its random blocks: the highest of its row of chances, causally of its past."""
    chances = torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    rows = []
    for i, row in enumerate(chances):
        open_to = range(i + 1) if causal else range(blocks)
        rows.append(set(sorted(open_to, key=lambda j, row=row: -row[j])[:count]))
    return rows


def random_blocks(p, x, *, heads, causal, mask=None, marks=None, length, block=64, count=3, seed=0):
    """Zaheer et al. 2020: the random part alone."""
    table = drawn(count, math.ceil(length / block), seed, causal)

    def see(h, i, j):
        return j // block in table[i // block] and (j <= i or not causal)

    return by_rule(p, x, heads, see, mask=mask)


def block_local(p, x, *, heads, causal, mask=None, marks=None, block=128):
    """Each token sees its own block."""

    def see(h, i, j):
        first = i - i % block
        return first <= j < first + block and (j <= i or not causal)

    return by_rule(p, x, heads, see, mask=mask)


def alternate(near, far, split, layer):
    """Child et al. 2019, section 5.2: merged, by turns over layers, or by turns over heads."""
    if split == "merged":
        return lambda h, i, j: near(i, j) or far(i, j)
    if split == "layers":
        return lambda h, i, j: (near, far)[layer % 2](i, j)
    return lambda h, i, j: (near, far)[h % 2](i, j)


def sparse_strided(p, x, *, heads, causal, mask=None, marks=None, stride=128, split="heads", layer=0):
    """Child et al. 2019: A1 = {max(0, i - l) .. i}, A2 = {j: (i - j) mod l = 0}; both ways where not causal."""

    def near(i, j):
        return max(0, i - stride) <= j <= i + stride

    see = alternate(near, lambda i, j: (i - j) % stride == 0, split, layer)
    return by_rule(p, x, heads, lambda h, i, j: see(h, i, j) and (j <= i or not causal), mask=mask)


def sparse_fixed(p, x, *, heads, causal, mask=None, marks=None, stride=128, cells=8, split="heads", layer=0):
    """Child et al. 2019: A1 = {j: floor(j/l) = floor(i/l)}, A2 = {j: j mod l in the last c}."""

    def summary(i, j):
        return j % stride in range(stride - cells, stride)

    see = alternate(lambda i, j: i // stride == j // stride, summary, split, layer)
    return by_rule(p, x, heads, lambda h, i, j: see(h, i, j) and (j <= i or not causal), mask=mask)


def longformer(p, x, *, heads, causal, mask=None, marks=None, window=256, steps=1):
    """Beltagy et al. 2020, section 3: a dilated window and the marked tokens; for marked tokens all, by Qg, Kg and Vg.

    There are two sets of projections to queries, keys and values, and one output projection.
    """
    steps = (steps,) * heads if isinstance(steps, int) else steps
    marked = [[False] * x.shape[1]] * x.shape[0] if marks is None else marks.tolist()

    def near(a, h, i, j):
        in_window = abs(i - j) <= window * steps[h] and (i - j) % steps[h] == 0
        return j <= i and in_window if causal else in_window or marked[a][j]

    y = softmax_loop(*project(p, x, None, heads, "local."), near, mask=mask)
    if marks is not None:
        z = softmax_loop(*project(p, x, None, heads, "everywhere."), lambda a, h, i, j: marked[a][i], mask=mask)
        rows = zip(y.flatten(0, 1), z.flatten(0, 1), marks.flatten().tolist(), strict=True)
        y = torch.stack([far if mark else near for near, far, mark in rows]).reshape(y.shape)
    return linear_layer(p, "local.out", y)


def bigbird(
    p, x, *, heads, causal, mask=None, marks=None, length, block=64, window=3, globals=2, random=3, seed=0
):  # fmt: skip
    """Zaheer et al. 2020, section 3: blocks of a window, of the beginning (both ways), and drawn at random."""
    table = drawn(random, math.ceil(length / block), seed, causal)

    def see(h, i, j):
        i_block, j_block = i // block, j // block
        near = abs(i_block - j_block) <= (window - 1) // 2
        return (near or min(i_block, j_block) < globals or j_block in table[i_block]) and (j <= i or not causal)

    return by_rule(p, x, heads, see, mask=mask)


def image_local_2d(p, x, *, heads, causal, mask=None, marks=None, width, block=(8, 8), memory=(8, 8)):
    """Parmar et al. 2018, section 3.3: the memory block is the query block and a margin; below it only where not causal."""

    def see(h, i, j):
        (row, col), (k_row, k_col) = divmod(i, width), divmod(j, width)
        top, left = row - row % block[0], col - col % block[1]
        rows = range(top - memory[0], top + block[0] + (0 if causal else memory[0]))
        cols = range(left - memory[1], left + block[1] + memory[1])
        return k_row in rows and k_col in cols and (j <= i or not causal)

    return by_rule(p, x, heads, see, mask=mask)


def axial(p, x, *, heads, causal, mask=None, marks=None, width):
    """Ho et al. 2019: the row and the column."""

    def see(h, i, j):
        same = divmod(i, width)[0] == divmod(j, width)[0] or divmod(i, width)[1] == divmod(j, width)[1]
        return same and (j <= i or not causal)

    return by_rule(p, x, heads, see, mask=mask)


def per_head(p, x, *, heads, causal, mask=None, marks=None, patterns=None):
    """RULES[h](i, j), taken in turn; else windows of 16, 32, 64 ..."""
    rules = RULES if patterns else [lambda i, j, h=h: abs(i - j) <= 16 * 2**h for h in range(heads)]
    return by_rule(p, x, heads, lambda h, i, j: rules[h % len(rules)](i, j) and (j <= i or not causal), mask=mask)
