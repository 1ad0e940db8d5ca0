"""A few learned vectors between the tokens, and blocks without order."""

import math

import torch

from oracles.compressed import rows, split
from oracles.loop import linear_layer, project

CASES = {
    "sab": [{}, {"norm": False}],
    "isab": [{"points": 3}, {"points": 40, "norm": False}],
    "luna": [{"packed": 3}, {"packed": 30}],
    "perceiver": [
        {"latents": 3},
        {"latents": 30, "depth": 1, "widening": 3},
        {"latents": 5, "depth": 0},
    ],
}


def everyone(i, j):
    return True


def norm(p, name, x):
    """Layer normalisation, token by token; none where there are no weights."""
    if f"{name}.weight" not in p:
        return x
    centred = x - x.mean(-1, keepdim=True)
    return (
        centred / ((centred**2).mean(-1, keepdim=True) + 1e-5).sqrt() * p[f"{name}.weight"]
        + p[f"{name}.bias"]
    )


def mab(p, name, x, y, heads, mask):
    """Lee et al. 2019, equations 6 and 7."""
    found = rows(*project(p, x, y, heads, f"{name}.attention."), everyone, mask)
    attended = linear_layer(p, f"{name}.attention.out", found)
    h = norm(p, f"{name}.norm_attention", x + attended)
    return norm(p, f"{name}.norm_rff", h + linear_layer(p, f"{name}.rff", h).clamp(min=0))


def sab(
    p, x, *, heads, causal=False, context=None, mask=None, global_attention_mask=None, norm=True
):
    """Lee et al. 2019, equation 8."""
    return mab(p, "block", x, x if context is None else context, heads, mask)


def isab(
    p,
    x,
    *,
    heads,
    causal=False,
    context=None,
    mask=None,
    global_attention_mask=None,
    points=16,
    norm=True,
):
    """Lee et al. 2019, equations 9 and 10."""
    inducing = torch.stack([p["points"]] * x.shape[0])
    held = mab(p, "gather", inducing, x if context is None else context, heads, mask)
    return mab(p, "spread", x, held, heads, None)


def luna(p, x, *, heads, causal, context=None, mask=None, global_attention_mask=None, packed=64):
    """Ma et al. 2021, equations 5 and 6; causal: see `luna_past`."""
    if causal:
        return luna_past(p, x, heads, mask)
    learned = torch.stack([p["p"]] * x.shape[0])
    short = rows(
        *project(p, learned, x if context is None else context, heads, "pack."), everyone, mask
    )
    return linear_layer(
        p, "unpack.out", rows(*project(p, x, short, heads, "unpack."), everyone, None)
    )


def softplus(score):
    """log2(1 + 2^score)"""
    return (1 + (math.log(2) * score).exp()).log() / math.log(2)


def luna_past(p, x, heads, mask, activation=softplus):
    """Ma et al. 2021, section 3.4: f(X, Y, Z)_i = x_i Σ_{j≤i} y_jᵀ z_j / i, nested, without a
    softmax over tokens.
    """
    q, k, v, c = (split(p, name, x, heads) for name in ("q", "k", "v", "pack_k"))
    learned, root, out = split(p, "pack_q", p["p"], heads), q.shape[-1] ** 0.5, []
    for a in range(x.shape[0]):
        for h in range(heads):
            by_key, by_value, count = 0, 0, 0
            for i in range(x.shape[1]):
                if mask is None or bool(mask[a, i]):
                    pack = activation(learned[:, h] @ c[a, i, h] / root)
                    by_key, by_value = (
                        by_key + torch.outer(k[a, i, h], pack),
                        by_value + torch.outer(pack, v[a, i, h]),
                    )
                    count += 1
                unpack = (q[a, i, h] @ by_key / count / root).softmax(-1) if count else None
                out.append(unpack @ by_value / count if count else torch.zeros_like(v[a, i, h]))
    heads_last = torch.stack(out).reshape(x.shape[0], heads, x.shape[1], -1).transpose(1, 2)
    return linear_layer(p, "out", heads_last.flatten(2))


def perceiver_layer(p, name, z, source, heads, mask, residual=True):
    """Jaegle et al. 2021, appendix: attention, then an MLP, each of what was normalised."""
    query = norm(p, f"{name}.norm", z)
    read = query if source is None else norm(p, f"{name}.norm_source", source)
    found = rows(*project(p, query, read, heads, f"{name}.attention."), everyone, mask)
    h = linear_layer(p, f"{name}.attention.out", found)
    h = z + h if residual else h
    inner = linear_layer(p, f"{name}.mlp.0", norm(p, f"{name}.norm_mlp", h))
    return h + linear_layer(p, f"{name}.mlp.2", inner * (1 + torch.erf(inner / math.sqrt(2))) / 2)


def perceiver(
    p,
    x,
    *,
    heads,
    causal=False,
    context=None,
    mask=None,
    global_attention_mask=None,
    latents=64,
    depth=2,
    widening=1,
):
    """Jaegle et al. 2021: latents read the tokens, attend to each other, and are read."""
    z = torch.stack([p["latents"]] * x.shape[0])
    z = perceiver_layer(p, "read", z, x if context is None else context, heads, mask)
    for layer in range(depth):
        z = perceiver_layer(p, f"process.{layer}", z, None, heads, None)
    return perceiver_layer(p, "write", x, z, heads, None, residual=False)
