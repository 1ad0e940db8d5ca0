"""Around attention."""

import math

import torch

from oracles.loop import by_rule, linear_layer

CASES = {"lite": [{}, {"kernel": 4}, {"kernel": 5, "near": 2, "heads": 2, "dynamic": True}]}


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
