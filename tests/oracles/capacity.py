"""Vectors that every token sees beside the others."""

import torch

from oracles.loop import linear_layer, project

CASES = {"all_attention": [{"count": 3}, {}, {"count": 2, "window": 4}]}


def all_attention(
    p,
    x,
    *,
    heads,
    causal,
    context=None,
    mask=None,
    global_attention_mask=None,
    count=None,
    window=None,
):
    """Sukhbaatar et al. 2019, equations 9 to 11: one softmax over tokens and persistent vectors, in each head."""
    q, k, v = project(p, x, context, heads)
    (b, n, _, e), m, rows = q.shape, k.shape[1], []
    more_k, more_v = p["inner.keys"] * e**0.5, p["inner.values"] * p["inner.values"].shape[1] ** 0.5
    for a in range(b):
        for i in range(n):
            for h in range(heads):
                seen = [
                    j
                    for j in range(m)
                    if (mask is None or mask[a, j])
                    and (j <= i or not causal)
                    and (window is None or abs(i - j) <= window)
                ]
                keys, values = (
                    torch.cat((k[a, seen, h], more_k[h])),
                    torch.cat((v[a, seen, h], more_v[h])),
                )
                scores = keys @ q[a, i, h] / e**0.5
                weights = (scores - scores.max()).exp()
                rows.append(weights @ values / weights.sum())
    return linear_layer(p, "out", torch.stack(rows).reshape(b, n, heads * e))
