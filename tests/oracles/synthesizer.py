"""Synthesizers, logit by logit (Tay et al. 2020, sections 3.2 to 3.6)."""

import torch

from oracles.loop import linear_layer

MIXTURES = (
    ("dense", "vanilla"),
    ("random", "vanilla"),
    ("random", "dense"),
    ("factorised_dense", "factorised_random", "vanilla"),
)
CASES = {
    "synthesizer_dense": [{}],
    "synthesizer_random": [{}, {"learned": False, "seed": 3}],
    "synthesizer_factorised": [
        {},
        {"kind": "random", "rank": 3},
        {"factors": (50, 9)},
        {"kind": "random"},
    ],
    "synthesizer_mixture": [
        {"parts": parts} | ({"rank": 3} if "factorised_random" in parts else {})
        for parts in MIXTURES
    ],
}


def hidden(p, name, x, head, e):
    """relu(W₁ x + b₁), the share of one head."""
    rows = slice(head * e, (head + 1) * e)
    return (p[f"{name}.up.weight"][rows] @ x + p[f"{name}.up.bias"][rows]).clamp(min=0)


def row(p, name, kind, x, head, i, seen, e):
    """How much token i of x (n d) wants of each of the positions in `visible_keys`."""
    if kind == "random":
        return p[f"{name}.table"][head, i, seen]
    if kind == "factorised_random":
        return p[f"{name}.right"][head, seen] @ p[f"{name}.left"][head, i]
    if kind == "vanilla":
        rows = slice(head * e, (head + 1) * e)
        return (
            (x[seen] @ p[f"{name}.k.weight"][rows].T)
            @ (p[f"{name}.q.weight"][rows] @ x[i])
            / e**0.5
        )
    inner = hidden(p, name, x[i], head, e)
    if kind == "dense":
        return p[f"{name}.down.weight"][head, seen] @ inner + p[f"{name}.down.bias"][head, seen]
    first, second = (
        p[f"{name}.{part}.weight"][head] @ inner + p[f"{name}.{part}.bias"][head]
        for part in ("first", "second")
    )
    a = len(first)  # A, tiled, has period a; each number of B, repeated, stays for a places
    return first[[j % a for j in seen]] * second[[j // a for j in seen]]


def synthesize(p, x, kinds, heads, causal, mask):
    """softmax(Σ α_p S_p) V, row by row, over the positions that are real and, causal, not later."""
    b, n, d = x.shape
    e, out = d // heads, []
    shares = p["shares"].exp() / p["shares"].exp().sum() if len(kinds) > 1 else [1.0]
    v = linear_layer(p, "v", x)
    for a in range(b):
        real = [j for j in range(n) if mask is None or mask[a, j]]
        for i in range(n):
            seen = [j for j in real if j <= i or not causal]
            for head in range(heads):
                parts = [
                    row(p, f"parts.{k}", kind, x[a], head, i, seen, e)
                    for k, kind in enumerate(kinds)
                ]
                weights = sum(share * part for share, part in zip(shares, parts, strict=True)).exp()
                mixed = weights @ v[a, seen, head * e : (head + 1) * e]
                out.append(mixed / weights.sum() if seen else mixed)
    return linear_layer(p, "out", torch.stack(out).view_as(x))


def synthesizer_dense(p, x, *, heads, causal, length, mask=None, global_attention_mask=None):
    """Equations 2 and 3."""
    return synthesize(p, x, ["dense"], heads, causal, mask)


def synthesizer_random(
    p, x, *, heads, causal, length, learned=True, seed=0, mask=None, global_attention_mask=None
):
    """Equation 4, learned or fixed."""
    return synthesize(p, x, ["random"], heads, causal, mask)


def synthesizer_factorised(
    p,
    x,
    *,
    heads,
    causal,
    length,
    kind="dense",
    factors=None,
    rank=8,
    mask=None,
    global_attention_mask=None,
):
    """Equations 5 to 7."""
    return synthesize(p, x, [f"factorised_{kind}"], heads, causal, mask)


def synthesizer_mixture(
    p, x, *, heads, causal, length, parts, rank=8, mask=None, global_attention_mask=None
):
    """Section 3.6: the sum inside the softmax."""
    return synthesize(p, x, parts, heads, causal, mask)
