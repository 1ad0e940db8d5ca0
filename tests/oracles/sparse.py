"""Sparse by position: the rule of each paper, pair by pair."""

import math

import torch

from oracles.loop import by_rule, linear_layer, project, softmax_loop

SPLITS = [
    {"split": "heads"},
    {"split": "merged"},
    {"split": "layers", "layer": 0},
    {"split": "layers", "layer": 1},
]
CASES = {
    "global_tokens": [{"tokens": 3}, {"tokens": 70}, {"tokens": 0}],
    "local": [{"window": 3}, {"window": 0}, {"window": 40}],
    "dilated": [{"window": 2, "dilation": 3}, {"window": 20, "dilation": 7}],
    "random_blocks": [{"block": 4, "count": 2}, {"block": 16, "count": 1, "seed": 5}],
    "block_local": [{"block": 5}, {"block": 32}, {"block": 1}],
    "sparse_strided": [{"stride": 4, **split} for split in SPLITS] + [{"stride": 10}],
    "sparse_fixed": [{"stride": 5, "cells": 2, **split} for split in SPLITS]
    + [{"stride": 16, "cells": 1}],
    "star": [{"cycles": 2}, {"cycles": 3, "shared": True}, {"cycles": 1}],
    "longformer": [
        {"window": 2},
        {"window": 2, "dilation": (1, 3, 1, 5)},
        {"window": (0, 1, 5, 2), "dilation": 2, "bias": True},
    ],
    "etc": [
        {"globals": 3, "radius": 2, "clip": 2},
        {"globals": 2, "radius": 5, "clip": 3, "segment": 7, "shared": True},
        {"globals": 0, "radius": 3, "clip": 0},
        {"globals": 70, "radius": 1, "segment": 4},
    ],
    "bigbird": [
        {"block": 4, "globals": 1, "random": 1},
        {"block": 8, "window": 1, "globals": 2, "random": 2, "seed": 3},
    ],
    "bp_transformer": [
        {"near": 2, "clip": 3},
        {"near": 1, "clip": 10},
        {"near": 3, "clip": 1},
        {"near": 40},
    ],
    "per_head": [{"patterns": "as RULES"}, {}],
    "sinks": [{"sinks": 2, "window": 3}, {"sinks": 0, "window": 5}, {"sinks": 4}],
}
RULES = [
    lambda i, j: abs(i - j) <= 2,
    lambda i, j: (abs(i - j) <= 8 and (i - j) % 4 == 0) or i == 0 or j == 0,
]


def global_tokens(
    p, x, *, heads, causal, context=None, mask=None, global_attention_mask=None, tokens=64
):
    """The first tokens see all, and all see them."""

    def see(h, i, j):
        return (i < tokens or j < tokens) and (j <= i or not causal)

    return by_rule(p, x, heads, see, context=context, mask=mask)


def local(p, x, *, heads, causal, mask=None, global_attention_mask=None, window=128):
    """A sliding window."""
    return by_rule(
        p, x, heads, lambda h, i, j: abs(i - j) <= window and (j <= i or not causal), mask=mask
    )


def dilated(p, x, *, heads, causal, mask=None, global_attention_mask=None, window=64, dilation=4):
    """`window` keys on each side, `dilation` apart."""

    def see(h, i, j):
        return j in range(i - window * dilation, i + window * dilation + 1, dilation) and (
            j <= i or not causal
        )

    return by_rule(p, x, heads, see, mask=mask)


def drawn(count, blocks, seed, causal):
    """For each block of queries the set of its random blocks: the highest of its row of chances,
    causally of its past.
    """
    chances = torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    rows = []
    for i, row in enumerate(chances):
        open_to = range(i + 1) if causal else range(blocks)
        rows.append(set(sorted(open_to, key=lambda j, row=row: -row[j])[:count]))
    return rows


def random_blocks(
    p, x, *, heads, causal, mask=None, global_attention_mask=None, length, block=64, count=3, seed=0
):
    """Zaheer et al. 2020: the random part alone."""
    table = drawn(count, math.ceil(length / block), seed, causal)

    def see(h, i, j):
        return j // block in table[i // block] and (j <= i or not causal)

    return by_rule(p, x, heads, see, mask=mask)


def block_local(p, x, *, heads, causal, mask=None, global_attention_mask=None, block=128):
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


def sparse_strided(
    p,
    x,
    *,
    heads,
    causal,
    mask=None,
    global_attention_mask=None,
    stride=128,
    split="heads",
    layer=0,
):
    """Child et al. 2019: A1 = {max(0, i - l) .. i}, A2 = {j: (i - j) mod l = 0}; both ways where
    not causal.
    """

    def near(i, j):
        return max(0, i - stride) <= j <= i + stride

    see = alternate(near, lambda i, j: (i - j) % stride == 0, split, layer)
    return by_rule(p, x, heads, lambda h, i, j: see(h, i, j) and (j <= i or not causal), mask=mask)


def sparse_fixed(
    p,
    x,
    *,
    heads,
    causal,
    mask=None,
    global_attention_mask=None,
    stride=128,
    cells=8,
    split="heads",
    layer=0,
):
    """Child et al. 2019: A1 = {j: floor(j/l) = floor(i/l)}, A2 = {j: j mod l in the last c}."""

    def summary(i, j):
        return j % stride in range(stride - cells, stride)

    see = alternate(lambda i, j: i // stride == j // stride, summary, split, layer)
    return by_rule(p, x, heads, lambda h, i, j: see(h, i, j) and (j <= i or not causal), mask=mask)


def attention(p, name, node, context, heads):
    """MultiAtt of one node (d) over its context (m d), then relu and layer norm."""
    q, k, v = (
        linear_layer(p, f"{name}.{part}", t)
        for part, t in (("q", node), ("k", context), ("v", context))
    )
    q, k, v = (t.unflatten(-1, (heads, -1)) for t in (q, k, v))
    weights = torch.stack(
        [torch.softmax(k[:, h] @ q[h] / q.shape[-1] ** 0.5, 0) for h in range(heads)]
    )
    y = linear_layer(
        p, f"{name}.out", torch.cat([weights[h] @ v[:, h] for h in range(heads)])
    ).clamp(min=0)
    y = (y - y.mean()) / (y.var(unbiased=False) + 1e-5).sqrt()
    return y * p[f"{name}.norm.weight"] + p[f"{name}.norm.bias"]


def star(
    p, x, *, heads, causal=False, mask=None, global_attention_mask=None, cycles=2, shared=False
):
    """Guo et al. 2019, algorithm 1, on the tokens that are there: h_i over [h_{i-1}; h_i; h_{i+1};
    e_i; s], s over [s; H].
    """
    out = torch.zeros_like(x)
    for a in range(x.shape[0]):
        real = [i for i in range(x.shape[1]) if mask is None or bool(mask[a, i])]
        e = x[a, real]
        h, s, n = e, e.mean(0), len(real)
        for t in range(cycles):
            at = 0 if shared else t
            context = [torch.stack((h[i - 1], h[i], h[(i + 1) % n], e[i], s)) for i in range(n)]
            h = torch.stack(
                [attention(p, f"satellites.{at}", h[i], context[i], heads) for i in range(n)]
            )
            if t < cycles - 1:
                s = attention(p, f"relays.{at}", s, torch.cat((s[None], h)), heads)
        out[a, real] = h
    return out


def longformer(
    p,
    x,
    *,
    heads,
    causal,
    mask=None,
    global_attention_mask=None,
    window=256,
    dilation=1,
    bias=False,
):
    """Beltagy et al. 2020, section 3: a dilated window and the marked tokens; for marked tokens
    all, by Qg, Kg and Vg.

    There are two sets of projections to queries, keys and values, and one output projection.
    """
    steps, window = (
        (each,) * heads if isinstance(each, int) else each for each in (dilation, window)
    )
    marked = (
        [[False] * x.shape[1]] * x.shape[0]
        if global_attention_mask is None
        else global_attention_mask.tolist()
    )

    def near(a, h, i, j):
        in_window = abs(i - j) <= window[h] * steps[h] and (i - j) % steps[h] == 0
        return j <= i and in_window if causal else in_window or marked[a][j]

    y = softmax_loop(*project(p, x, None, heads, "local."), near, mask=mask)
    if global_attention_mask is not None:
        z = softmax_loop(
            *project(p, x, None, heads, "global_heads."), lambda a, h, i, j: marked[a][i], mask=mask
        )
        rows = zip(
            y.flatten(0, 1), z.flatten(0, 1), global_attention_mask.flatten().tolist(), strict=True
        )
        y = torch.stack([far if mark else near for near, far, mark in rows]).reshape(y.shape)
    return linear_layer(p, "local.out", y)


def etc(
    p,
    x,
    *,
    heads,
    causal=False,
    mask=None,
    global_attention_mask=None,
    globals=64,
    radius=84,
    clip=12,
    segment=None,
    shared=False,
):
    """Ainslie et al. 2020: softmax of q·(k + a) / √e, with a for the label of the pair; g2g, g2l
    and l2g see all.
    """
    b, n, d = x.shape
    e, out = d // heads, torch.zeros_like(x)
    for a, i in [(a, i) for a in range(b) for i in range(n)]:
        side = (
            "all" if i < globals else "long"
        )  # whose softmax it is: a projection for each kind of query, and of key
        seen = [j for j in range(n) if min(i, j) < globals or abs(i - j) <= radius]
        seen = [j for j in seen if mask is None or bool(mask[a, j])]
        q = linear_layer(p, "long.q" if shared else f"{side}.q", x[a, i]).view(heads, e)
        kind = {
            j: "" if shared or not globals else ".first" if j < globals else ".rest" for j in seen
        }
        name = "long" if shared else side
        y = torch.zeros(heads, e, dtype=x.dtype)
        if seen:
            k, v = (
                [linear_layer(p, f"{name}.{w}{kind[j]}", x[a, j]).view(heads, e) for j in seen]
                for w in "kv"
            )
            k, v = torch.stack(k), torch.stack(v)
            labels = [etc_label(i, j, globals, clip, segment) for j in seen]
            scores = (
                torch.einsum(
                    "he,mhe->hm", q, k + p[f"{side}.inner.prior.vectors"][:, labels].transpose(0, 1)
                )
                / e**0.5
            )
            y = torch.einsum("hm,mhe->he", torch.softmax(scores, -1), v)
        out[a, i] = linear_layer(p, f"{name}.out", y.flatten())
    return out


def etc_label(i, j, globals, clip, segment):
    """How far apart, clipped, for two of a kind; else whether the long token is of the global one's
    segment.
    """
    if (i < globals) == (j < globals):
        return max(-clip, min(clip, j - i)) + clip
    one, long = min(i, j), max(i, j) - globals
    return 2 * clip + 1 + (segment is not None and long // segment != one)


def bigbird(
    p,
    x,
    *,
    heads,
    causal,
    mask=None,
    global_attention_mask=None,
    length,
    block=64,
    window=3,
    globals=2,
    random=3,
    seed=0,
):
    """Zaheer et al. 2020, section 3: blocks of a window, of the beginning (both ways), and drawn at
    random.
    """
    table = drawn(random, math.ceil(length / block), seed, causal)

    def see(h, i, j):
        i_block, j_block = i // block, j // block
        near = abs(i_block - j_block) <= (window - 1) // 2
        return (near or min(i_block, j_block) < globals or j_block in table[i_block]) and (
            j <= i or not causal
        )

    return by_rule(p, x, heads, see, mask=mask)


def tree_nodes(i, n, near, causal):
    """(level, number, label level, place, side) of the nodes that token i sees: pointers that climb
    the tree, and a child in place of a parent that was entered halfway.
    """
    found, left, right, left_child, right_child = [], i - 1, i + 1, False, False
    for level in range(n.bit_length() + 1):
        for place in range(near):
            for side, at, child in ((0, left - place, left_child), (1, right + place, right_child)):
                node = (level - 1, 2 * at + side) if child and place == 0 else (level, at)
                if node[1] >= 0 and at >= 0 and node[1] << node[0] < n and not (causal and side):
                    found.append((*node, level, place, side))
        left, right = left - near, right + near
        left_child, right_child = left % 2 == 0, right % 2 == 1
        left, right = left // 2, right // 2
    return found


def bp_transformer(p, x, *, heads, causal, mask=None, global_attention_mask=None, near=4, clip=10):
    """Ye et al. 2019: a span is W_O of the mean of its values; a token looks at itself and the
    spans of `tree_nodes`.
    """
    b, n, d = x.shape
    out, sides = torch.zeros_like(x), 1 if causal else 2
    for a in range(b):
        real = [i for i in range(n) if mask is None or bool(mask[a, i])]
        for i in real:
            nodes, labels = [x[a, i]], [0]
            for level, number, at, place, side in tree_nodes(i, n, near, causal):
                leaves = [j for j in real if j >> level == number]
                mean = linear_layer(p, "v", x[a, leaves]).sum(0) / max(len(leaves), 1)
                if leaves:
                    nodes.append(x[a, leaves[0]] if level == 0 else linear_layer(p, "out", mean))
                    labels.append(1 + (min(at, clip) * near + place) * sides + side)
            q, k, v = (
                linear_layer(p, name, torch.stack(nodes)).unflatten(-1, (heads, -1))
                for name in "qkv"
            )
            scores = torch.einsum("he,mhe->hm", q[0], k) + q[0] @ p["labels"][labels].T
            y = torch.softmax(scores / (d // heads) ** 0.5, -1)
            out[a, i] = linear_layer(p, "out", torch.einsum("hm,mhe->he", y, v).flatten())
    return out


def sinks(p, x, *, heads, causal, mask=None, global_attention_mask=None, sinks=4, window=1020):
    """Xiao et al. 2023: the first tokens, and a window."""
    return by_rule(
        p,
        x,
        heads,
        lambda h, i, j: (j < sinks or abs(i - j) <= window) and (j <= i or not causal),
        mask=mask,
    )


def per_head(p, x, *, heads, causal, mask=None, global_attention_mask=None, patterns=None):
    """RULES[h](i, j), taken in turn; else windows of 16, 32, 64 ..."""
    rules = RULES if patterns else [lambda i, j, h=h: abs(i - j) <= 16 * 2**h for h in range(heads)]
    return by_rule(
        p,
        x,
        heads,
        lambda h, i, j: rules[h % len(rules)](i, j) and (j <= i or not causal),
        mask=mask,
    )
