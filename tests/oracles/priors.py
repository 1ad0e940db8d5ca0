"""Priors and heads: the weights of each paper, pair by pair."""

import math

import torch

from oracles.loop import by_rule, linear_layer, project

CASES = {
    "gaussian_prior": [
        {"sigma": 3.0},
        {"sigma": 1.5, "learn": False},
        {"sigma": None},
        {"sigma": None, "centre": "predicted"},
        {"sigma": None, "centre": "predicted", "window": "layer"},
        {"sigma": 2.5, "centre": "predicted"},
    ],
    "conditional_prior": [{"blocks": 4, "tasks": 3}, {"blocks": 1}],
    "realformer": [{}],
    "average": [{}, {"hidden": 5}],
    "hard_gaussian": [{}, {"offsets": (-2, 3), "sigma": 2.5}],
    "fixed_span": [{"spans": (2, 6)}, {"spans": (200, 0, 3)}],
    "adaptive_span": [
        {"longest": 13, "ramp": 4},
        {"longest": 70, "ramp": 3, "start": 0.97},
        {"longest": 9, "start": 0.05},
    ],
    "talking_heads": [{}, {"inner": 3}],
    "collaborative": [{"width": 5}, {}],
    "disagreement": [{"kind": kind} for kind in ("outputs", "positions", "subspace")],
    "multi_query": [{}],
    "grouped_query": [{"group_size": 2}],
    "top_k": [{"k": 4}, {"k": 1}, {"k": 1000}],
}


def weighted(p, x, heads, weight, *, causal, context=None, mask=None, qkv=None):
    """out_i = Σ_j w_ij v_j / Σ_j w_ij, with weight(a, h, i, seen) -> the w_ij of the keys that are
    seen.
    """
    q, k, v = project(p, x, context, heads) if qkv is None else qkv
    b, n, h, _ = q.shape
    m, rows = k.shape[1], []
    for a in range(b):
        for i in range(n):
            for head in range(h):
                seen = [
                    j for j in range(m) if (mask is None or mask[a, j]) and (j <= i or not causal)
                ]
                w = weight(a, head, i, seen) if seen else v.new_zeros(0)
                total = w.sum() if seen and w.sum() > 0 else 1
                rows.append(w @ v[a, seen, head] / total)
    return linear_layer(p, "out", torch.stack(rows).reshape(b, n, -1))


def gaussian_prior(
    p,
    x,
    *,
    heads,
    causal,
    mask=None,
    global_attention_mask=None,
    sigma=10.0,
    learn=True,
    centre="token",
    window="query",
):
    """Yang et al. 2018, equations 3 to 9."""
    q, k, _ = project(p, x, None, heads)

    def weight(a, h, i, seen):
        real = x.shape[1] if mask is None else int(mask[a].sum())
        keys = torch.stack([k[a, j, h] for j in range(x.shape[1]) if mask is None or mask[a, j]])
        at = torch.tensor(seen, dtype=x.dtype)
        hidden = torch.tanh(q[a, i, h] @ p["inner.w"][h]) if "inner.w" in p else None
        first = 0 if mask is None else mask[a].tolist().index(True)
        middle = (
            i
            if centre == "token"
            else first + real * torch.sigmoid(hidden @ p["inner.u_centre"][h])
        )
        if sigma is not None:
            wide = p["inner.prior.log_sigma"][h].exp() if centre == "token" else sigma
        else:
            of = hidden if window == "query" else torch.tanh(keys.mean(0) @ p["inner.w_keys"][h])
            wide = real * torch.sigmoid(of @ p["inner.u_window"][h]) / 2
        scores = k[a, seen, h] @ q[a, i, h] / math.sqrt(q.shape[-1])
        return (scores - (at - middle) ** 2 / (2 * wide**2)).exp()

    return weighted(p, x, heads, weight, causal=causal, mask=mask)


def conditional_prior(
    p, x, *, heads, causal, mask=None, global_attention_mask=None, length, blocks=8, tasks=2, task=0
):
    """Pilault et al. 2021, equations 3 and 4."""
    inner = {name.removeprefix("heads."): t for name, t in p.items()}
    q, k, _ = project(inner, x, None, heads)
    size = math.ceil(length / blocks)

    z = p["vectors.weight"][task]
    gain, shift = linear_layer(p, "prior.gain", z), linear_layer(p, "prior.shift", z)

    def weight(a, h, i, seen):
        row = p["prior.blocks"][i // size, i % size] * gain + shift
        bias = torch.stack(
            [row[j % size] if i // size == j // size else x.new_zeros(()) for j in seen]
        )
        return (k[a, seen, h] @ q[a, i, h] / math.sqrt(q.shape[-1]) + bias).exp()

    return weighted(inner, x, heads, weight, causal=causal, mask=mask)


def realformer(p, x, *, heads, causal, context=None, mask=None, global_attention_mask=None):
    """He et al. 2021: the first layer is plain attention."""
    inner = {name.removeprefix("heads."): t for name, t in p.items()}
    return by_rule(
        inner, x, heads, lambda h, i, j: j <= i or not causal, context=context, mask=mask
    )


def average(
    p, x, *, heads, causal, context=None, mask=None, global_attention_mask=None, hidden=None
):
    """Zhang et al. 2018, equations 1 to 3."""
    source, rows = x if context is None else context, []
    for a in range(x.shape[0]):
        for i in range(x.shape[1]):
            seen = [
                j
                for j in range(source.shape[1])
                if (mask is None or mask[a, j]) and (j <= i or not causal)
            ]
            mean = source[a, seen].sum(0) / max(len(seen), 1)
            g = linear_layer(p, "ffn.2", linear_layer(p, "ffn.0", mean).clamp(min=0))
            keep, take = torch.sigmoid(linear_layer(p, "gate", torch.cat((x[a, i], g)))).split(
                x.shape[2]
            )
            rows.append(keep * x[a, i] + take * g)
    return torch.stack(rows).reshape(x.shape)


def hard_gaussian(
    p, x, *, heads, causal, mask=None, global_attention_mask=None, offsets=None, sigma=1.0
):
    """You et al. 2020: the density of a normal distribution, not normalised again."""
    offsets = offsets or ((-1, 0) if causal else (-1, 0, 1))
    v, rows = linear_layer(p, "v", x).unflatten(-1, (heads, -1)), []
    for a in range(x.shape[0]):
        for i in range(x.shape[1]):
            for h in range(heads):
                total = torch.zeros_like(v[a, i, h])
                for j in range(x.shape[1]):
                    if (mask is None or mask[a, j]) and (j <= i or not causal):
                        z = (j - i - offsets[h % len(offsets)]) / sigma
                        total = (
                            total
                            + math.exp(-z * z / 2) / (sigma * math.sqrt(2 * math.pi)) * v[a, j, h]
                        )
                rows.append(total)
    return linear_layer(p, "out", torch.stack(rows).reshape(x.shape))


def fixed_span(
    p, x, *, heads, causal, mask=None, global_attention_mask=None, spans=(16, 64, 256, 1024)
):
    """Each head its own window."""
    return by_rule(
        p,
        x,
        heads,
        lambda h, i, j: abs(i - j) <= spans[h % len(spans)] and (j <= i or not causal),
        mask=mask,
    )


def adaptive_span(
    p,
    x,
    *,
    heads,
    causal,
    mask=None,
    global_attention_mask=None,
    longest,
    ramp=32,
    start=0.5,
    penalty=2e-6,
):
    """Sukhbaatar et al. 2019, equations 3 to 5."""
    q, k, _ = project(p, x, None, heads)

    def weight(a, h, i, seen):
        gap = torch.tensor([abs(i - j) for j in seen], dtype=x.dtype)
        soft = ((ramp + p["inner.share"][h] * longest - gap) / ramp).clamp(0, 1)
        return soft * (k[a, seen, h] @ q[a, i, h] / math.sqrt(q.shape[-1])).exp()

    return weighted(p, x, heads, weight, causal=causal, mask=mask)


def talking_heads(
    p, x, *, heads, causal, context=None, mask=None, global_attention_mask=None, inner=None
):
    """Shazeer et al. 2020, section 3: mixed before the softmax and after it."""
    q, k, v = project(p, x, context, heads)
    rows = []
    for a in range(x.shape[0]):
        for i in range(x.shape[1]):
            seen = [
                j
                for j in range(k.shape[1])
                if (mask is None or mask[a, j]) and (j <= i or not causal)
            ]
            scores = torch.stack([k[a, seen, h] @ q[a, i, h] for h in range(heads)]) / math.sqrt(
                q.shape[-1]
            )
            weights = torch.softmax(p["inner.before.weight"] @ scores, -1) if seen else scores
            mixed = p["inner.after.weight"] @ weights if seen else scores
            rows.append(torch.cat([mixed[h] @ v[a, seen, h] for h in range(heads)]))
    return linear_layer(p, "out", torch.stack(rows).reshape(x.shape))


def collaborative(
    p, x, *, heads, causal, context=None, mask=None, global_attention_mask=None, width=None
):
    """Cordonnier et al. 2020, equation 6."""
    source = x if context is None else context
    q, k = linear_layer(p, "q.weight", x), linear_layer(p, "k.weight", source)
    v = linear_layer(p, "v", source).unflatten(-1, (heads, -1))
    every = torch.stack([q * p["q.mix"][h] for h in range(heads)], 2)

    def weight(a, h, i, seen):
        return (k[a, seen] @ every[a, i, h] / math.sqrt(x.shape[2] // heads)).exp()

    return weighted(p, x, heads, weight, causal=causal, mask=mask, qkv=(every, k, v))


def disagreement(
    p,
    x,
    *,
    heads,
    causal,
    context=None,
    mask=None,
    global_attention_mask=None,
    kind="outputs",
    penalty=1.0,
):
    """Li et al. 2018: the output is that of plain attention; the cost is tested by itself."""
    return by_rule(p, x, heads, lambda h, i, j: j <= i or not causal, context=context, mask=mask)


def multi_query(p, x, *, heads, causal, context=None, mask=None, global_attention_mask=None):
    """Shazeer 2019: one head of keys and values."""
    return by_rule(p, x, heads, lambda h, i, j: j <= i or not causal, context=context, mask=mask)


def grouped_query(
    p, x, *, heads, causal, context=None, mask=None, global_attention_mask=None, group_size=4
):
    """Ainslie et al. 2023: one for every `group_size` heads."""
    return by_rule(p, x, heads, lambda h, i, j: j <= i or not causal, context=context, mask=mask)


def top_k(p, x, *, heads, causal, context=None, mask=None, global_attention_mask=None, k=8):
    """Zhao et al. 2019, equations 4 to 6."""
    q, keys, _ = project(p, x, context, heads)

    def weight(a, h, i, seen):
        scores = keys[a, seen, h] @ q[a, i, h] / math.sqrt(q.shape[-1])
        least = sorted(scores.tolist())[-min(k, len(seen))]
        return torch.where(scores >= least, scores.exp(), 0)

    return weighted(p, x, heads, weight, causal=causal, context=context, mask=mask)
