"""Fewer keys and values than tokens, or narrower ones."""

import torch

from oracles.loop import by_rule, linear_layer, project, softmax_loop

CASES = {
    "linformer": [{"rank": 5, "share": share} for share in ("heads", "none", "kv")],
    "low_rank": [{"rank": 1}, {"rank": 3}],
    "low_rank_band": [{"rank": 1, "window": 2}, {"rank": 3, "window": 30}],
    "nystrom": [
        {"landmarks": 6},
        {"landmarks": 5, "kernel": 33},
        {"landmarks": 7, "iterations": 2, "kernel": 3},
    ],
    "memory_compressed": [{}, {"stride": 4}, {"layer": 0, "block": 7}],
    "pooling": [
        {"window": 2, "reach": 8, "kernel": 3, "stride": 2},
        {"window": 0, "reach": 60, "kernel": 5, "stride": 5},
    ],
}


def real_keys(mask, b, m):
    """For each example the numbers of its real tokens."""
    return [[j for j in range(m) if mask is None or bool(mask[a, j])] for a in range(b)]


def split(p, name, x, heads):
    return linear_layer(p, name, x).unflatten(-1, (heads, -1))


def soft(q, k, v):
    """One query (e), keys (m e), values (m f): softmax(k q / √e) v, zero where there is no key."""
    if not len(k):
        return v.new_zeros(v.shape[-1])
    scores = k @ q / q.shape[-1] ** 0.5
    weights = (scores - scores.max()).exp()
    return weights @ v / weights.sum()


def rows(q, k, v, see, mask):
    """Queries and keys (b n h r), values (b m h f), see(i, j): (b n h*f)."""
    real, out = real_keys(mask, *k.shape[:2]), []
    for a in range(q.shape[0]):
        for i in range(q.shape[1]):
            seen = [j for j in real[a] if see(i, j)]
            out += [soft(q[a, i, h], k[a, seen, h], v[a, seen, h]) for h in range(q.shape[2])]
    return torch.stack(out).reshape(*q.shape[:2], -1)


def linformer(
    p,
    x,
    *,
    heads,
    causal=False,
    context=None,
    mask=None,
    global_attention_mask=None,
    length,
    rank=256,
    share="heads",
):
    """Wang et al. 2020, equation 7: row r of the memory is Σ_j E[r, j] k_j, and likewise with F for
    the values.
    """
    q, k, v = project(p, x, context, heads)
    e_matrix = p["inner.compression.e"]
    f_matrix = p["inner.compression.f"] if share != "kv" else e_matrix
    b, m = k.shape[:2]
    real, short = real_keys(mask, b, m), []
    for t, matrix in ((k, e_matrix), (v, f_matrix)):
        total = torch.zeros(b, rank, heads, t.shape[-1], dtype=t.dtype)
        for a in range(b):
            for j in real[a]:
                for h in range(heads):
                    total[a, :, h] += matrix[h if share == "none" else 0, :, j, None] * t[a, j, h]
        short.append(total)
    return linear_layer(p, "out", softmax_loop(q, *short, lambda a, h, i, r: True))


def low_rank(p, x, *, heads, causal, context=None, mask=None, global_attention_mask=None, rank=8):
    """Guo et al. 2019: queries and keys with few columns."""
    source = x if context is None else context
    q, k, v = (split(p, name, t, heads) for name, t in (("q", x), ("k", source), ("v", source)))
    return linear_layer(p, "out", rows(q, k, v, lambda i, j: j <= i or not causal, mask))


def low_rank_band(p, x, *, heads, causal, mask=None, global_attention_mask=None, rank=8, window=8):
    """Guo et al. 2019: a matrix of low rank and a band matrix, added."""
    q, k, v, q2, k2 = (
        split(p, name, x, heads) for name in ("low.q", "low.k", "low.v", "band.q", "band.k")
    )
    everywhere = rows(q, k, v, lambda i, j: j <= i or not causal, mask)
    near = rows(q2, k2, v, lambda i, j: abs(i - j) <= window and (j <= i or not causal), mask)
    return linear_layer(p, "low.out", everywhere + near)


def landmark_means(x, numbers, landmarks):
    """The real tokens, cut into runs, averaged."""
    runs = [
        [t for at, t in enumerate(numbers) if at * landmarks // len(numbers) == s]
        for s in range(landmarks)
    ]
    return torch.stack([sum(x[t] for t in run) / len(run) for run in runs])


def nystrom_head(q, k, v, queries, keys, landmarks, iterations):
    """Xiong et al. 2021, equations 13 to 15, for one head."""
    if len(q) <= landmarks or len(keys) <= landmarks:
        return torch.stack([soft(one, k[keys], v[keys]) for one in q])
    short_q, short_k = landmark_means(q, queries, landmarks), landmark_means(k, keys, landmarks)
    f, a, b = (
        (s @ t.T / q.shape[-1] ** 0.5).softmax(-1)
        for s, t in ((q, short_k), (short_q, short_k), (short_q, k[keys]))
    )
    z = a.T / (a.abs().sum(0).max() * a.abs().sum(1).max())
    one = torch.eye(landmarks, dtype=q.dtype)
    for _ in range(iterations):
        z = 0.25 * z @ (13 * one - a @ z @ (15 * one - a @ z @ (7 * one - a @ z)))
    return f @ z @ (b @ v[keys])


def nystrom(
    p,
    x,
    *,
    heads,
    causal=False,
    context=None,
    mask=None,
    global_attention_mask=None,
    landmarks=64,
    iterations=6,
    kernel=None,
):
    """Xiong et al. 2021, with the convolution over values of its figure 2."""
    q, k, v = project(p, x, context, heads)
    (b, n), m = q.shape[:2], k.shape[1]
    real, out = real_keys(mask, b, m), []
    for a in range(b):
        queries = real[a] if context is None else list(range(n))
        for h in range(heads):
            y = nystrom_head(
                q[a, :, h], k[a, :, h], v[a, :, h], queries, real[a], landmarks, iterations
            )
            for i in range(n) if kernel else ():
                taps = p["inner.conv.weight"][h, 0, :, 0]
                near = [j for j in real[a] if abs(i - j) <= kernel // 2]
                more = sum(
                    (taps[j - i + kernel // 2] * v[a, j, h] for j in near), torch.zeros_like(y[0])
                )
                y = torch.cat((y[:i], (y[i] + more)[None], y[i + 1 :]))
            out.append(y)
    return linear_layer(
        p, "out", torch.stack(out).unflatten(0, (b, heads)).transpose(1, 2).flatten(2)
    )


def convolved(p, name, t, numbers, stride, heads):
    """(m h e) -> (blocks h e): block j is Σ_s W_s t[j stride + s], head by head; what is not real
    counts as zero.
    """
    weight = p[f"inner.blocks.{name}.weight"].unflatten(0, (heads, -1))  # (h e e stride)
    bias = (
        p["inner.blocks.v.bias"].unflatten(0, (heads, -1)) if name == "v" else t.new_zeros(heads, 1)
    )
    blocks = []
    for first in range(0, len(t), stride):
        inside = [j for j in numbers if first <= j < first + stride]
        each = [[weight[h, :, :, j - first] @ t[j, h] for j in inside] for h in range(heads)]
        blocks.append(
            torch.stack([sum(each[h], t.new_zeros(t.shape[-1])) + bias[h] for h in range(heads)])
        )
    return torch.stack(blocks)


def memory_compressed(
    p,
    x,
    *,
    heads,
    causal,
    context=None,
    mask=None,
    global_attention_mask=None,
    stride=3,
    block=256,
    layer=1,
):
    """Liu et al. 2018, section 4.2.3: local blocks, or keys and values after a convolution with
    stride = kernel.

    Causal: of the blocks only those whose last token is not after the query, and a learned pair
    that all see.
    """
    if layer % 2 == 0:
        return by_rule(
            p,
            x,
            heads,
            lambda h, i, j: i // block == j // block and (j <= i or not causal),
            mask=mask,
        )
    q, k, v = project(p, x, context, heads)
    out = []
    for a, numbers in enumerate(real_keys(mask, *k.shape[:2])):
        short_k, short_v = (
            convolved(p, name, t[a], numbers, stride, heads) for name, t in (("k", k), ("v", v))
        )
        held = [j for j in range(len(short_k)) if any(t // stride == j for t in numbers)]
        for i in range(q.shape[1]):
            seen = [j for j in held if j * stride + stride - 1 <= i or not causal]
            for h in range(heads):
                keys, values = short_k[seen, h], short_v[seen, h]
                if causal:
                    keys, values = (
                        torch.cat((p["inner.null"][s, h], t)) for s, t in enumerate((keys, values))
                    )
                out.append(soft(q[a, i, h], keys, values))
    return linear_layer(p, "out", torch.stack(out).reshape(x.shape))


def pooling(
    p,
    x,
    *,
    heads,
    causal,
    mask=None,
    global_attention_mask=None,
    window=128,
    reach=512,
    kernel=5,
    stride=4,
):
    """Zhang et al. 2021, section 3: a window, then pooled keys and values of its result, then the
    sum.
    """
    y = softmax_loop(
        *project(p, x, None, heads, "near."),
        lambda a, h, i, j: abs(i - j) <= window and (j <= i or not causal),
        mask=mask,
    )
    q, k, v = project(p, y, None, heads, "far.")
    (b, n), blocks = x.shape[:2], range(0, x.shape[1], stride)
    held = torch.zeros(b, len(blocks), dtype=torch.bool)
    pooled = [torch.zeros(b, len(blocks), *k.shape[2:], dtype=k.dtype) for _ in range(2)]
    for a, numbers in enumerate(real_keys(mask, b, n)):
        for j, first in enumerate(blocks):
            inside = [t for t in numbers if first <= t < first + kernel]
            held[a, j] = bool(inside)
            for short, t in zip(pooled, (k, v), strict=True):
                short[a, j] = sum((t[a, s] for s in inside), torch.zeros_like(short[a, j])) / max(
                    1, len(inside)
                )

    def see(a, h, i, j):
        return i - reach <= blocks[j] and blocks[j] + kernel - 1 <= (i if causal else i + reach)

    return linear_layer(p, "near.out", y + softmax_loop(q, *pooled, see, mask=held))
