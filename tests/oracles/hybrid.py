"""Attention combined with other layers."""

import math

import torch

from oracles.loop import by_rule, linear_layer, project

CASES = {
    "all_attention": [{"count": 3}, {}, {"count": 2, "window": 4}],
    "lite": [{}, {"kernel": 4}, {"kernel": 5, "near": 2, "heads": 2, "dynamic": True}],
}


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
    """Sukhbaatar et al. 2019, equations 9 to 11: one softmax over tokens and persistent vectors, in
    each head.
    """
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


def lite(
    p,
    x,
    *,
    heads,
    causal,
    kernel=7,
    near=None,
    dynamic=False,
    mask=None,
    global_attention_mask=None,
):
    """Wu et al. 2020, figure 3: two branches, of which one attends and one convolves."""
    far = x.shape[2] - (x.shape[2] // 2 if near is None else near)
    one, two = (
        {k.removeprefix(f"branches.{i}."): t for k, t in p.items() if f"es.{i}." in k}
        for i in (0, 1)
    )
    attended = by_rule(one, x[..., :far], heads, lambda h, i, j: not causal or j <= i, mask=mask)
    return torch.cat(
        (attended, _convolved(two, x[..., far:], heads, causal, kernel, dynamic, mask)), 2
    )


def _convolved(p, x, heads, causal, kernel, dynamic, mask):
    b, n, d = x.shape
    up = linear_layer(p, "up", x)
    z, out = up[..., :d] / (1 + torch.exp(-up[..., d:])), torch.zeros_like(x)
    for a in range(b):
        for i in range(n):
            for c in range(d):
                head = c * heads // d
                logits = (p["taps.weight"] @ z[a, i] if dynamic else p["taps.weight"])[
                    head * kernel :
                ][:kernel]
                for j, weight in enumerate(logits.exp() / logits.exp().sum()):
                    at = i + j + 1 - (kernel if causal else math.ceil((kernel + 1) / 2))
                    if 0 <= at < n and (mask is None or mask[a, at]):
                        out[a, i, c] = out[a, i, c] + weight * z[a, at, c]
    return linear_layer(p, "out", out)
