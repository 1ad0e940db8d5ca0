"""Sparse by content: tokens find each other one by one."""

import math

import torch

from oracles.loop import linear_layer

CASES = {
    "reformer": [
        {"buckets": 4, "chunk": 3, "rounds": 2},
        {"buckets": 8, "chunk": 5, "rounds": 3, "once": False, "seed": 2},
        {"buckets": 4, "chunk": 6, "rounds": 3, "same_bucket": False},
        {"buckets": 2, "chunk": 64, "rounds": 1},
    ],
    "routing": [
        {"clusters": 4, "heads": 2},
        {"clusters": 7, "shared": True, "heads": 2},
        {"clusters": 60, "seed": 3, "heads": 2},
        {"clusters": 4, "heads": 2, "local_heads": 1, "window": 3},
        {"clusters": 3, "heads": 2, "local_heads": 1, "window": 0, "shared": True},
    ],
    "sinkhorn": [
        {"block": 9},
        {"block": 13, "iterations": 2, "temperature": 0.4},
        {"block": 12, "cut": 2},
        {"block": 60},
    ],
}


def split(p, name, x, heads):
    return linear_layer(p, name, x).unflatten(-1, (heads, -1))  # (b n h e)


def real_tokens(mask, a, n):
    return [i for i in range(n) if mask is None or bool(mask[a, i])]


def merge(p, heads_of_tokens, x):
    """A dict (example, head, token) -> vector, zero where there is none: merged and projected."""
    b, n, d = x.shape
    heads = 1 + max(h for _, h, _ in heads_of_tokens)
    zero = torch.zeros(d // heads, dtype=x.dtype)
    y = [
        heads_of_tokens.get((a, h, i), zero)
        for a in range(b)
        for i in range(n)
        for h in range(heads)
    ]
    return linear_layer(p, "out", torch.stack(y).reshape(b, n, d))


def met_in_round(rotation, q, real, chunk, causal, same_bucket):
    """For each real token the tokens of its bucket (or of any) in its chunk and the one before;
    causal, the earlier ones.

    Chunks are cut from the order by bucket and position; causal, from each bucket by itself.
    """
    bucket = {i: int(torch.cat((q[i] @ rotation, -(q[i] @ rotation))).argmax()) for i in real}
    order = sorted(real, key=lambda i: (bucket[i], i))
    if causal:
        place = {i: sum(bucket[j] == bucket[i] for j in real if j < i) // chunk for i in real}
    else:
        place = {i: order.index(i) // chunk for i in real}
    alike = {i: [j for j in real if bucket[j] == bucket[i] or not same_bucket] for i in real}
    return {
        i: [j for j in alike[i] if place[i] - place[j] in (0, 1) and (j <= i or not causal)]
        for i in real
    }


def reformer(
    p,
    x,
    *,
    heads,
    causal,
    mask=None,
    global_attention_mask=None,
    buckets,
    chunk,
    rounds,
    same_bucket=True,
    once=True,
    seed=0,
):
    """Kitaev et al. 2020, equations 4 to 6 and appendix A: Σ_r Σ_j exp(q_i·k_j) v_j / N_ij, with
    N_ij the number of rounds in which i meets j, and itself only if nobody else; k_j = q_j / |q_j|.
    """
    q, v, out = split(p, "q", x, heads), split(p, "v", x, heads), {}
    for a in range(x.shape[0]):
        real = real_tokens(mask, a, x.shape[1])
        for h in range(heads):
            mine, turns = q[a, :, h], p["inner.hashing.rotations"][h]
            met = [
                met_in_round(turns[r], mine.detach(), real, chunk, causal, same_bucket)
                for r in range(rounds)
            ]
            for i in range(x.shape[1]):
                found = [j for r in range(rounds) for j in met[r].get(i, []) if j != i]
                if not found:
                    out[a, h, i] = v[a, i, h]
                    continue
                n_ij = torch.tensor([found.count(j) if once else 1 for j in found])
                weights = (
                    mine[found]
                    / mine[found].norm(dim=-1, keepdim=True)
                    @ mine[i]
                    / mine.shape[1] ** 0.5
                ).exp() / n_ij
                out[a, h, i] = weights @ v[a, found, h] / weights.sum()
    return merge(p, out, x)


def routing(
    p,
    x,
    *,
    heads,
    causal=False,
    mask=None,
    global_attention_mask=None,
    clusters,
    shared=False,
    local_heads=0,
    window=0,
    seed=0,
):
    """Roy et al. 2020, algorithm 1: layer norms without scale, the w nearest queries and keys of
    each centroid, softmax. The first heads are local: a window, and no layer norm.
    """
    plain_q, plain_k, v = (split(p, name, x, heads) for name in ("q", "q" if shared else "k", "v"))
    q, k = (
        (t - t.mean(-1, keepdim=True)) / (t.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        for t in (plain_q, plain_k)
    )
    out = {(0, heads - 1, -1): None}
    for a in range(x.shape[0]):
        real = real_tokens(mask, a, x.shape[1])
        w = math.ceil(len(real) / clusters)
        for h in range(local_heads):
            for i in real:
                near = [j for j in real if abs(i - j) <= window]
                weights = (plain_k[a, near, h] @ plain_q[a, i, h] / q.shape[-1] ** 0.5).exp()
                out[a, h, i] = weights @ v[a, near, h] / weights.sum()
        for h in range(local_heads, heads):
            keys = {i: [] for i in real}
            for centroid in p["inner.route.centroids"][h - local_heads]:
                # nearness by direction: the layer norm has a little less than unit variance
                near_q, near_k = (
                    sorted(real, key=lambda i, t=t: -(t[a, i, h] / t[a, i, h].norm()) @ centroid)
                    for t in (q, k)
                )
                for i in near_q[:w]:
                    keys[i] += near_k[:w]
            for i, found in keys.items():
                if found:
                    weights = (k[a, found, h] @ q[a, i, h] / q.shape[-1] ** 0.5).exp()
                    out[a, h, i] = weights @ v[a, found, h] / weights.sum()
    return merge(p, out, x)


def sort_matrix(p, x, heads, h, real, block, causal, iterations, temperature):
    """Tay et al. 2020, section 3: S of one head and example, a dict (i, j) -> weight, over blocks
    that have a token.

    Causal: a block is summed up by all tokens to its first, only earlier blocks come, and columns
    count the rows so far.
    """
    blocks = sorted({i // block for i in real})
    logits, most = {}, len(p["sort.down.bias"]) // heads
    for i in blocks:
        tokens = (
            range(i * block + 1) if causal else range(i * block, min((i + 1) * block, x.shape[0]))
        )
        summary = sum(x[t] for t in tokens if t in real) + 0 * x[0]
        r = linear_layer(p, "sort.down", linear_layer(p, "sort.up", summary).relu()).relu()[
            h * most : (h + 1) * most
        ]
        logits |= {(i, j): r[j] / temperature for j in blocks if j < i or not causal}
    for _ in range(iterations):
        rows = {
            i: torch.stack([s for (r, _), s in logits.items() if r == i]).logsumexp(0)
            for i, _ in logits
        }
        logits = {(i, j): s - rows[i] for (i, j), s in logits.items()}
        to = {
            (i if causal else len(x), j) for i, j in logits
        }  # a column, and the last row that its sum counts
        columns = {
            (i, j): torch.stack([s for (r, c), s in logits.items() if c == j and r <= i]).logsumexp(
                0
            )
            for i, j in to
        }
        logits = {(i, j): s - columns[i if causal else len(x), j] for (i, j), s in logits.items()}
    return {ij: s.exp() for ij, s in logits.items()}


def sorted_block(s, i, real, block, k, v):
    """Slots Σ_j S_ij K_jt of position i with their values, and log of the share that is there;
    missing tokens left out.
    """
    slots, row = [(k[:0], v[:0], k[:0, 0])], {j: w for (r, j), w in s.items() if r == i}
    for t in range(block):
        there = [j for j in row if j * block + t in real]
        if there:
            weights, tokens = torch.stack([row[j] for j in there]), [j * block + t for j in there]
            share = weights.sum() / sum(row.values())
            slots.append(
                (
                    (weights @ k[tokens] / share)[None],
                    (weights @ v[tokens] / share)[None],
                    share.log()[None],
                )
            )
    return [torch.cat(parts) for parts in zip(*slots, strict=True)]


def sinkhorn(
    p,
    x,
    *,
    heads,
    causal,
    mask=None,
    global_attention_mask=None,
    length,
    block,
    cut=None,
    iterations=5,
    temperature=0.75,
    seed=0,
):
    """Tay et al. 2020: softmax over the own block and the sorted one, or over the first `cut`
    sorted ones.
    """
    q, k, v = (split(p, name, x, heads) for name in "qkv")
    out = {(0, heads - 1, -1): None}
    for a in range(x.shape[0]):
        real = real_tokens(mask, a, x.shape[1])
        for h in range(heads):
            mine_k, mine_v, blocks = k[a, :, h], v[a, :, h], range(math.ceil(x.shape[1] / block))
            s = sort_matrix(p, x[a], heads, h, real, block, causal, iterations, temperature)
            far = [sorted_block(s, i, real, block, mine_k, mine_v) for i in blocks]
            for i in real:
                near = [j for j in real if j // block == i // block and (j <= i or not causal)]
                own = (mine_k[near], mine_v[near], torch.zeros(len(near)))
                seen = (far[i // block], own) if cut is None else far[:cut]
                keys, values, logs = (torch.cat(parts) for parts in zip(*seen, strict=True))
                out[a, h, i] = (keys @ q[a, i, h] / q.shape[-1] ** 0.5 + logs).softmax(0) @ values
    return merge(p, out, x)
