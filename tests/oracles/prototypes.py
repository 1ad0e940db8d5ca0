"""Fewer queries: clusters, the few that stand out, and means of neighbours."""

import math

import torch

from oracles.compressed import real_keys, rows, soft
from oracles.loop import linear_layer, project

CASES = {
    "clustered": [
        {"clusters": 4, "bits": 9},
        {"clusters": 30, "bits": 20, "iterations": 3, "seed": 4},
    ],
    "clustered_improved": [
        {"clusters": 4, "bits": 9, "top": 3},
        {"clusters": 7, "bits": 12, "top": 60, "iterations": 2},
    ],
    "prob_sparse": [{"factor": 2}, {"factor": 5, "seed": 3}],
    "funnel": [{}, {"cls": True}, {"stride": 3}, {"stride": 4, "cls": True}],
}


def members(q, numbers, planes, clusters, iterations):
    """Vyas et al. 2020, section 3.2: the cluster of each query (n e), by Lloyd's algorithm in
    Hamming space.
    """
    bits = [[1 if value >= 0 else -1 for value in row] for row in (q.detach() @ planes.T).tolist()]
    centres = [list(bits[numbers[c * len(numbers) // clusters]]) for c in range(clusters)]

    def nearest(row):
        return min(
            range(clusters),
            key=lambda c: (sum(s != t for s, t in zip(row, centres[c], strict=True)), c),
        )

    for _ in range(iterations):
        found = {i: nearest(bits[i]) for i in numbers}
        for c in range(clusters):
            for t in range(len(planes)):
                votes = sum(bits[i][t] for i in numbers if found[i] == c)
                centres[c][t] = (votes > 0) - (votes < 0) or centres[c][t]
    return [nearest(row) for row in bits]


def by_cluster(p, x, heads, context, mask, clusters, iterations, planes, answer):
    """answer(query, its centroid, keys, values) for each query."""
    q, k, v = project(p, x, context, heads)
    out = torch.zeros_like(q)
    for a, keys in enumerate(real_keys(mask, *k.shape[:2])):
        numbers = keys if context is None else list(range(q.shape[1]))
        for h in range(heads):
            found = members(q[a, :, h], numbers, planes, clusters, iterations)
            for i in numbers:
                alike = [t for t in numbers if found[t] == found[i]]
                out[a, i, h] = answer(
                    q[a, i, h],
                    sum(q[a, t, h] for t in alike) / len(alike),
                    k[a, keys, h],
                    v[a, keys, h],
                )
    return linear_layer(p, "out", out.flatten(2))


def clustered(
    p,
    x,
    *,
    heads,
    causal=False,
    context=None,
    mask=None,
    global_attention_mask=None,
    clusters=100,
    bits=63,
    iterations=10,
    seed=0,
):
    """Vyas et al. 2020, equations 4 and 5: each query gets the answer of its centroid."""
    planes = torch.randn(
        bits, x.shape[2] // heads, generator=torch.Generator().manual_seed(seed)
    ).to(x.dtype)
    return by_cluster(
        p,
        x,
        heads,
        context,
        mask,
        clusters,
        iterations,
        planes,
        lambda q, centre, k, v: soft(centre, k, v),
    )


def clustered_improved(
    p,
    x,
    *,
    heads,
    causal=False,
    context=None,
    mask=None,
    global_attention_mask=None,
    clusters=100,
    top=32,
    bits=63,
    iterations=10,
    seed=0,
):
    """Vyas et al. 2020, equations 6 to 9: the mass of the top keys of a centroid is shared out by
    the query itself.
    """

    def answer(q, centre, k, v):
        weights = (k @ centre / len(q) ** 0.5).softmax(0)
        best = sorted(range(len(k)), key=lambda j: -weights[j].item())[:top]
        others = [j for j in range(len(k)) if j not in best]
        return weights[best].sum() * soft(q, k[best], v[best]) + weights[others] @ v[others]

    planes = torch.randn(
        bits, x.shape[2] // heads, generator=torch.Generator().manual_seed(seed)
    ).to(x.dtype)
    return by_cluster(p, x, heads, context, mask, clusters, iterations, planes, answer)


def prob_sparse(
    p,
    x,
    *,
    heads,
    causal=False,
    context=None,
    mask=None,
    global_attention_mask=None,
    factor=5,
    seed=0,
):
    """Zhou et al. 2021, equation 4 and algorithm 1: M(q) = max − mean of a few scores; the largest
    attend.
    """
    q, k, v = project(p, x, context, heads)
    n, out = q.shape[1], torch.zeros_like(q)
    for a, keys in enumerate(real_keys(mask, *k.shape[:2])):
        queries = keys if context is None else list(range(n))
        drawn, chosen = (
            min(len(t), max(1, factor * math.ceil(math.log(len(t))))) for t in (keys, queries)
        )
        generators = [torch.Generator().manual_seed(seed * 1_000_003 + s) for s in range(drawn)]
        table = torch.stack([torch.rand(n, dtype=torch.float64, generator=g) for g in generators])
        for h in range(heads):
            measure = {}
            for i in queries:
                sample = [keys[int(table[s, i] * len(keys))] for s in range(drawn)]
                scores = [(q[a, i, h] @ k[a, j, h]).item() / q.shape[-1] ** 0.5 for j in sample]
                measure[i] = max(scores) - sum(scores) / len(scores)
            best = sorted(queries, key=lambda i: -measure[i])[:chosen]
            for i in queries:
                out[a, i, h] = (
                    soft(q[a, i, h], k[a, keys, h], v[a, keys, h])
                    if i in best
                    else v[a, keys, h].mean(0)
                )
    return linear_layer(p, "out", out.flatten(2))


def funnel(
    p,
    x,
    *,
    heads,
    causal=False,
    context=None,
    mask=None,
    global_attention_mask=None,
    stride=2,
    cls=False,
):
    """Dai et al. 2020, section 2.2: pooled queries, keys and values of all tokens; each answer goes
    to all that were pooled.
    """
    b, n, source = x.shape[0], x.shape[1], x if context is None else context
    run = [0 if cls and i == 0 else (i - cls) // stride + cls for i in range(n)]
    real = real_keys(mask if context is None else None, b, n)
    short = torch.zeros(b, run[-1] + 1, x.shape[2], dtype=x.dtype)
    for a in range(b):
        for r in range(run[-1] + 1):
            inside = [i for i in real[a] if run[i] == r]
            short[a, r] = sum((x[a, i] for i in inside), torch.zeros_like(x[a, 0])) / max(
                1, len(inside)
            )
    q, k, v = project(p, short, source, heads, "attention.")
    y = linear_layer(p, "attention.out", rows(q, k, v, lambda i, j: True, mask))
    return torch.stack([y[:, r] for r in run], 1)
