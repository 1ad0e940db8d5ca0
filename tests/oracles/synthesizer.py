"""Synthesizers, logit by logit (Tay et al. 2020, sections 3.2 to 3.6)."""

import torch

from oracles.loop import linear_layer

MIXTURES = (("dense", "vanilla"), ("random", "vanilla"), ("random", "dense"), ("factorised_dense", "factorised_random", "vanilla"))
CASES = {
    "synthesizer_dense": [{}],
    "synthesizer_random": [{}, {"learned": False, "seed": 3}],
    "synthesizer_factorised": [{}, {"kind": "random", "rank": 3}, {"factors": (50, 9)}, {"kind": "random"}],
    "synthesizer_mixture": [{"parts": parts, "rank": 3} for parts in MIXTURES],
}


def hidden(p, name, x, head, e):
    """relu(W₁ x + b₁), the share of one head."""
    rows = slice(head * e, (head + 1) * e)
    return (p[f"{name}.up.weight"][rows] @ x + p[f"{name}.up.bias"][rows]).clamp(min=0)


def logit(p, name, kind, x, head, i, j, e):
    """How much token i of x (n d) wants of position j."""
    if kind == "random":
        return p[f"{name}.table"][head, i, j]
    if kind == "factorised_random":
        return p[f"{name}.left"][head, i] @ p[f"{name}.right"][head, j]
    if kind == "vanilla":
        rows = slice(head * e, (head + 1) * e)
        return (p[f"{name}.q.weight"][rows] @ x[i]) @ (p[f"{name}.k.weight"][rows] @ x[j]) / e**0.5
    inner = hidden(p, name, x[i], head, e)
    if kind == "dense":
        return p[f"{name}.down.weight"][head, j] @ inner + p[f"{name}.down.bias"][head, j]
    a = len(p[f"{name}.first.bias"][head])  # A, tiled, has period a; each number of B, repeated, stays for a places
    first = p[f"{name}.first.weight"][head, j % a] @ inner + p[f"{name}.first.bias"][head, j % a]
    second = p[f"{name}.second.weight"][head, j // a] @ inner + p[f"{name}.second.bias"][head, j // a]
    return first * second


def synthesize(p, x, kinds, heads, causal, mask):
    """softmax(Σ α_p S_p) V, row by row, over the positions that are real and, causal, not later."""
    b, n, d = x.shape
    e, out = d // heads, torch.zeros_like(x)
    shares = p["shares"].exp() / p["shares"].exp().sum() if len(kinds) > 1 else [1.0]
    v = linear_layer(p, "v", x)
    for a in range(b):
        for i in range(n):
            seen = [j for j in range(n) if (mask is None or mask[a, j]) and (j <= i or not causal)]
            for head in range(heads) if seen else ():
                scores = sum(
                    share * torch.stack([logit(p, f"parts.{k}", kind, x[a], head, i, j, e) for j in seen])
                    for k, (share, kind) in enumerate(zip(shares, kinds, strict=True))
                )
                part = slice(head * e, (head + 1) * e)
                out[a, i, part] = (scores - scores.max()).softmax(0) @ v[a, seen, part]
    return linear_layer(p, "out", out)


def synthesizer_dense(p, x, *, heads, causal, length, mask=None, marks=None):
    """Equations 2 and 3."""
    return synthesize(p, x, ["dense"], heads, causal, mask)


def synthesizer_random(p, x, *, heads, causal, length, learned=True, seed=0, mask=None, marks=None):
    """Equation 4, learned or fixed."""
    return synthesize(p, x, ["random"], heads, causal, mask)


def synthesizer_factorised(p, x, *, heads, causal, length, kind="dense", factors=None, rank=8, mask=None, marks=None):
    """Equations 5 to 7."""
    return synthesize(p, x, [f"factorised_{kind}"], heads, causal, mask)


def synthesizer_mixture(p, x, *, heads, causal, length, parts, rank=8, mask=None, marks=None):
    """Section 3.6: the sum inside the softmax."""
    return synthesize(p, x, parts, heads, causal, mask)
