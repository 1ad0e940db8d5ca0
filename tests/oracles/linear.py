"""Linear attention, term by term; recurrences, token by token."""

import math

import torch

from oracles.loop import linear_layer, project

MOST = 10  # queries

CASES = {
    "linear": [{}, {"chunk": 7}],
    "efficient": [{}],
    "performer": [
        {"features": 5},
        {},
        {"features": 6, "chunk": 7, "seed": 3, "redraw": 1000},
        {"features": 9, "kernel": "trigonometric"},
        {"features": 5, "kernel": "relu"},
    ],
    "rfa": [{"features": 12}, {"features": 40, "chunk": 7, "seed": 3}],
    "rfa_gated": [{"features": 12}, {"features": 40, "chunk": 7, "seed": 3}],
    "cosformer": [{}, {"chunk": 7}],
    "retnet": [{}, {"expand": 1, "chunk": 7}],
    "gated_linear": [{}, {"key": 3, "rank": 2, "chunk": 8}, {"chunk": 5}],
    "delta_rule": [
        {},
        {"convolution": 0, "chunk": 7},
        {"convolution": 1},
        {"convolution": 6, "chunk": 2},
    ],
}


def linear(p, x, *, heads, causal, context=None, mask=None, global_attention_mask=None, chunk=64):
    """Katharopoulos et al. 2020, equations 4 and 9: Σ φ(q_i)·φ(k_j) v_j / Σ φ(q_i)·φ(k_j), with
    φ = elu + 1.
    """
    q, k, v = project(p, x, context, heads)
    q, k = (torch.where(t > 0, t + 1, t.clamp(max=0).exp()) for t in (q, k))
    b, n, h, e = q.shape
    out = []
    for a in range(b):
        real = [j for j in range(k.shape[1]) if mask is None or bool(mask[a, j])]
        for i in range(n):
            seen = [j for j in real if j <= i or not causal]
            for head in range(h):
                top, bottom = q.new_zeros(e), q.new_zeros(())
                for j in seen if n <= MOST else []:
                    weight = q[a, i, head] @ k[a, j, head]
                    top, bottom = top + weight * v[a, j, head], bottom + weight
                if n > MOST:  # the same sums, by products of matrices, to save time
                    weights = k[a, seen, head] @ q[a, i, head]
                    top, bottom = weights @ v[a, seen, head], weights.sum()
                out.append(top / bottom if seen else top)
    return linear_layer(p, "out", torch.stack(out).reshape(b, n, h * e))


def held(sum, least):
    """Not nearer to zero than `least`, on its own side of it."""
    return sum if sum.abs() >= least else (-least if sum < 0 else least) + 0 * sum


def weighted(p, q, v, weigh, causal, mask, floor=None):
    """Σ_j w_j v_j / Σ_j w_j over the keys that a query sees, with their weights
    w = weigh(example, head, i, keys).
    """
    b, n, h, e = q.shape
    out = []
    for a in range(b):
        real = [j for j in range(v.shape[1]) if mask is None or bool(mask[a, j])]
        for i in range(n):
            seen = [j for j in real if j <= i or not causal]
            for head in range(h):
                weights = weigh(a, head, i, seen) if seen else q.new_zeros(0)
                bottom = weights.sum() if floor is None else held(weights.sum(), floor)
                nothing = not seen or (floor is None and bottom <= 0)
                out.append(q.new_zeros(e) if nothing else weights @ v[a, seen, head] / bottom)
    return linear_layer(p, "out", torch.stack(out).reshape(b, n, h * e))


def efficient(p, x, *, heads, causal, context=None, mask=None, global_attention_mask=None):
    """Shen et al. 2021, equation 8: ρ_q(Q) (ρ_k(K)ᵀ V), with softmax along each row of Q and each
    column of K.
    """
    q, k, v = project(p, x, context, heads)
    b, n, h, e = q.shape
    out = []
    for a in range(b):
        real = [j for j in range(k.shape[1]) if mask is None or bool(mask[a, j])]
        for head in range(h):
            share = [k[a, real, head, r].exp() / k[a, real, head, r].exp().sum() for r in range(e)]
            context = torch.stack([share[r] @ v[a, real, head] for r in range(e)])
            out.append(
                torch.stack(
                    [(q[a, i, head].exp() / q[a, i, head].exp().sum()) @ context for i in range(n)]
                )
            )
    return linear_layer(
        p, "out", torch.stack(out).reshape(b, h, n, e).transpose(1, 2).reshape(b, n, h * e)
    )


def performer(
    p,
    x,
    *,
    heads,
    causal,
    context=None,
    mask=None,
    global_attention_mask=None,
    features=None,
    kernel="positive",
    seed=0,
    chunk=64,
    redraw=None,
):
    """Choromanski et al. 2021, lemma 1 and equations 5 to 7.  Sines and cosines are divided by the
    greatest exp(|k|²/2) that is seen, since there the floor of the sum below counts.
    """
    q, k, v = project(p, x, context, heads)
    rows = p["inner.feature.rows"]
    q, k = (t / t.shape[-1] ** 0.25 for t in (q, k))

    def phi(t):
        turned, size = t @ rows.T, (t * t).sum(-1, keepdim=True) / 2
        if kernel == "trigonometric":
            return torch.cat((turned.sin(), turned.cos()), -1) / len(rows) ** 0.5
        return (
            torch.exp(turned - size) / len(rows) ** 0.5
            if kernel == "positive"
            else turned.relu() + 1e-3
        )

    def weigh(a, h, i, seen):
        size = (k[a, seen, h] ** 2).sum(-1) / 2
        factor = (
            (size - size.detach().max()).exp()
            if kernel == "trigonometric"
            else torch.ones_like(size)
        )
        return factor * (phi(k[a, seen, h]) @ phi(q[a, i, h]))

    return weighted(p, q, v, weigh, causal, mask, floor=1e-4 if kernel == "trigonometric" else None)


def fourier(x, rows, scale):
    """Peng et al. 2021, section 3.1: sines and cosines of w·x/|x|, with w = σ ∘ normal numbers; one
    head, x (n e).
    """
    turned = torch.stack([(scale * rows) @ (t / t.norm()) for t in x])
    return torch.cat((turned.sin(), turned.cos()), -1) / len(rows) ** 0.5


def rfa(
    p,
    x,
    *,
    heads,
    causal,
    context=None,
    mask=None,
    global_attention_mask=None,
    features=64,
    seed=0,
    chunk=64,
):
    """Peng et al. 2021, equation 5: as linear attention, with random Fourier features."""
    q, k, v = project(p, x, context, heads)
    rows, scale = p["inner.feature.rows"], p["inner.feature.scale"]
    real = torch.ones(k.shape[:2], dtype=torch.bool) if mask is None else mask
    k = torch.where(
        real[..., None, None], k, 1.0
    )  # what is left out has no direction, and is not looked at
    phi_q, phi_k = (
        [[fourier(t[a, :, h], rows[h], scale[h, 0]) for h in range(heads)] for a in range(len(x))]
        for t in (q, k)
    )
    return weighted(
        p, q, v, lambda a, h, i, seen: phi_k[a][h][seen] @ phi_q[a][h][i], causal, mask, floor=1e-2
    )


def rfa_gated(
    p,
    x,
    *,
    heads,
    causal,
    context=None,
    mask=None,
    global_attention_mask=None,
    features=64,
    seed=0,
    chunk=64,
):
    """Peng et al. 2021, equation 6: S = g S + (1 − g) φ(k) v and z = g z + (1 − g) φ(k)."""
    rows, scale = p["feature.rows"], p["feature.scale"]

    def head(t, q, k, v, h):
        gate = torch.sigmoid(t @ p["gate.weight"][h] + p["gate.bias"][h])
        state, z, out, mass = (
            x.new_zeros(2 * features, v.shape[1]),
            x.new_zeros(2 * features),
            [],
            0,
        )
        for g, query, key, value in zip(
            gate, fourier(q, rows[h], scale[h, 0]), fourier(k, rows[h], scale[h, 0]), v, strict=True
        ):
            state, z = g * state + (1 - g) * key[:, None] * value, g * z + (1 - g) * key
            mass = g * mass + (1 - g)
            out.append(query @ state / held(query @ z, 1e-2 * max(mass, 1e-6)))
        return torch.stack(out)

    return linear_layer(p, "out", by_head(p, x, mask, heads, head))


def by_head(p, x, mask, heads, run):
    """run(tokens, q, k, v, head) -> (n f), for each example without the tokens left out, whose rows
    are zero.
    """
    out = []
    for a in range(len(x)):
        real = [i for i in range(x.shape[1]) if mask is None or bool(mask[a, i])]
        t = x[a, real]
        parts = [linear_layer(p, name, t).unflatten(-1, (heads, -1)) for name in "qkv"]
        found = torch.cat([run(t, *(part[:, h] for part in parts), h) for h in range(heads)], -1)
        out.append(x.new_zeros(x.shape[1], found.shape[1]).index_copy(0, torch.tensor(real), found))
    return torch.stack(out)


def cosformer(
    p, x, *, heads, causal, context=None, mask=None, global_attention_mask=None, length, chunk=64
):
    """Qin et al. 2022, equation 10: relu(q_i)·relu(k_j) cos(π/2 (i − j)/M)."""
    q, k, v = project(p, x, context, heads)

    def weigh(a, h, i, seen):
        near = torch.tensor([math.cos(math.pi / 2 * (i - j) / length) for j in seen], dtype=x.dtype)
        return near * (k[a, seen, h].relu() @ q[a, i, h].relu())

    return weighted(p, q, v, weigh, causal, mask)


def normed(p, y, heads, mean=True):
    """Each head of (b n h*f) with mean zero and variance one, then scale and shift."""
    y = y.unflatten(-1, (heads, -1))
    y = y - y.mean(-1, keepdim=True) if mean else y
    y = (y / ((y * y).mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(2)
    return y * p["norm.weight"] + p["norm.bias"] if mean else y * p["norm.weight"].repeat(heads)


def swish_gate(p, x, y):
    gate = linear_layer(p, "gate", x)
    return linear_layer(p, "out", gate * gate.sigmoid() * y)


def retnet(
    p, x, *, heads, causal, context=None, mask=None, global_attention_mask=None, expand=2, chunk=64
):
    """Sun et al. 2023, equations 5 and 8: the parallel form, with pairs as complex numbers."""

    def head(t, q, k, v, h):
        e, gamma = q.shape[1], 1 - 2.0 ** (-5 - h)
        q, k = (torch.complex(u[:, ::2], u[:, 1::2]) for u in (q, k))
        theta = torch.tensor([10000 ** (-2 * r / e) for r in range(e // 2)], dtype=x.dtype)
        out = []
        for i in range(len(t)):
            ago = i - torch.arange(i + 1, dtype=x.dtype)[:, None]
            scores = (q[i] * k[: i + 1].conj() * torch.polar(gamma**ago, ago * theta)).sum(
                -1
            ).real / e**0.5
            out.append(scores @ v[: i + 1])
        return torch.stack(out)

    return swish_gate(p, x, normed(p, by_head(p, x, mask, heads, head), heads))


def gated_linear(
    p,
    x,
    *,
    heads,
    causal,
    context=None,
    mask=None,
    global_attention_mask=None,
    key=None,
    rank=16,
    chunk=64,
):
    """Yang et al. 2024 (GLA), equation 3 and section 4.4: S = diag(α) S + k vᵀ."""

    def head(t, q, k, v, h):
        logits = linear_layer(p, "forget.1", linear_layer(p, "forget.0", t)).unflatten(
            -1, (heads, -1)
        )[:, h]
        alpha, state, out = (
            torch.sigmoid(logits) ** (1 / 16),
            x.new_zeros(k.shape[1], v.shape[1]),
            [],
        )
        for i in range(len(t)):
            state = alpha[i][:, None] * state + k[i][:, None] * v[i]
            out.append(q[i] @ state)
        return torch.stack(out)

    return swish_gate(p, x, normed(p, by_head(p, x, mask, heads, head), heads))


def delta_rule(
    p,
    x,
    *,
    heads,
    causal,
    context=None,
    mask=None,
    global_attention_mask=None,
    convolution=4,
    chunk=64,
):
    """Yang et al. 2024 (DeltaNet), equation 1 and section 3.4: S = S (I − β k kᵀ) + β v kᵀ."""
    d = x.shape[2]

    def head(t, q, k, v, h):
        e, parts = d // heads, []
        for which, u in enumerate((q, k, v)):
            at = which * d + h * e
            taps = p["convolution.weight"][:, at : at + e] if convolution else x.new_ones(1, e)
            u = torch.stack(
                [
                    sum(taps[s] * u[i - s] for s in range(min(i + 1, len(taps))))
                    for i in range(len(t))
                ]
            )
            parts.append(u * u.sigmoid())
        beta, state, out = torch.sigmoid(t @ p["rate.weight"][h]), x.new_zeros(e, e), []
        for i in range(len(t)):
            q, k = (part[i] / part[i].norm() for part in parts[:2])
            state = state @ (torch.eye(e, dtype=x.dtype) - beta[i] * torch.outer(k, k)) + beta[
                i
            ] * torch.outer(parts[2][i], k)
            out.append(state @ q)
        return torch.stack(out)

    return linear_layer(p, "out", normed(p, by_head(p, x, mask, heads, head), heads, mean=False))
