"""Without attention."""

import math

import torch

from oracles.loop import linear_layer
from oracles.patches import gelu, neighbourhood, patches

CASES = {
    "fnet": [{}],
    "mlp_mixer": [{"hidden": 6}, {}],
    "gmlp": [{"hidden": 6}, {}],
    "amlp": [{"hidden": 6, "attention": 3}, {}],
    "xcit": [{"width": 5}, {"width": 1}, {"width": 200}],
    "dynamic_conv": [{"kernel": 3}, {}, {"kernel": 4}, {"kernel": 1}, {"kernel": 60}],
    "aft": [{"rank": 4}, {}, {"rank": 4, "window": 5}, {"rank": 3, "window": 90}],
    "average_pool": [{}, {"window": 7}, {"width": 6}, {"width": 9, "window": 5}, {"window": 1}],
}


def fnet(p, x, *, heads, causal=False, mask=None, global_attention_mask=None):
    """Lee-Thorp et al. 2021, equation 3: the real part of Σ_s Σ_c x[s, c] exp(-2πi
    (s t / n + c u / d)).
    """
    n, d = x.shape[1:]
    s, c = torch.arange(n, dtype=x.dtype)[:, None], torch.arange(d, dtype=x.dtype)
    out = torch.zeros_like(x)
    for t in range(n):
        for u in range(d):
            out[:, t, u] = (x * torch.cos(2 * math.pi * (s * t / n + c * u / d))).sum((1, 2))
    return out


def mlp_mixer(
    p, x, *, heads, causal=False, mask=None, global_attention_mask=None, length, hidden=None
):
    """Tolstikhin et al. 2021, equation 1: W₂ gelu(W₁ x + b₁) + b₂ over the tokens of one channel
    after the other.
    """
    b, n, d = x.shape
    up, up_bias, down, down_bias = (
        p[name] for name in ("up.weight", "up.bias", "down.weight", "down.bias")
    )
    out = torch.zeros_like(x)
    for a in range(b):
        for c in range(d):
            inner = torch.stack([up[r, :n] @ x[a, :, c] + up_bias[r] for r in range(len(up))])
            out[a, :, c] = (down @ gelu(inner) + down_bias)[:n]
    return out


def layer_norm(p, name, z, eps=1e-5):
    """One token, (d)."""
    z = z - z.mean()
    return z / ((z * z).mean() + eps).sqrt() * p[f"{name}.weight"] + p[f"{name}.bias"]


def gmlp(
    p, x, *, heads, causal, length, hidden=None, attention=0, mask=None, global_attention_mask=None
):
    """Liu et al. 2021, equations 1 to 4 and figure 6: u ⊙ (W norm(v) + b), to which aMLP adds a
    tiny attention of x.
    """
    b, n, _ = x.shape
    out = []
    for a in range(b):
        z = [gelu(linear_layer(p, "up", t)) for t in x[a]]
        half = len(z[0]) // 2
        gates = [layer_norm(p, "norm", t[half:]) for t in z]
        for i in range(n):
            seen = [j for j in range(n) if (mask is None or mask[a, j]) and (j <= i or not causal)]
            gate = p["bias"][i] + sum(
                (p["weight"][i, j] * gates[j] for j in seen), torch.zeros_like(gates[i])
            )
            if attention:
                gate = gate + tiny(p, x[a], i, seen)
            out.append(linear_layer(p, "down", z[i][:half] * gate))
    return torch.stack(out).view_as(x)


def tiny(p, x, i, seen):
    """Single-head attention of token i of x (n d)."""
    q, k, v = (linear_layer(p, f"attend.{name}", x) for name in "qkv")
    y = torch.zeros_like(v[i])
    if seen:
        weights = (k[seen] @ q[i] / q.shape[1] ** 0.5).softmax(0)
        y = weights @ v[seen]
    return linear_layer(p, "attend.out", y)


def amlp(p, x, *, attention=64, **more):
    """gMLP with the tiny attention."""
    return gmlp(p, x, attention=attention, **more)


def xcit(
    p, x, *, heads, causal=False, width, norm="instance", mask=None, global_attention_mask=None
):
    """El-Nouby et al. 2021, equations 2 and 3, and the two convolutions: each half of the layer
    with its norm and residual.
    """
    e, out = x.shape[2] // heads, []
    for a, t in enumerate(x):
        real = [i for i in range(len(t)) if mask is None or mask[a, i]]
        normed = torch.stack([layer_norm(p, "before_covariance", token, 1e-6) for token in t])
        q, k, v = (linear_layer(p, f"covariance.{name}", normed) for name in "qkv")
        q, k = (z[real] / z[real].square().sum(0).sqrt() for z in (q, k))
        y = []
        for c in range(t.shape[1]):
            others = slice(c // e * e, c // e * e + e)  # the channels of the same head
            y.append(
                v[:, others]
                @ (q[:, c] @ k[:, others] * p["covariance.sharpness"][c // e]).softmax(0)
            )
        y = torch.stack(y, 1)
        y = linear_layer(p, "covariance.out", y)
        normed = torch.stack([layer_norm(p, "before_patches", token, 1e-6) for token in t + y])
        out.append(y + patches(p, normed, width, real))
    return torch.stack(out)


def dynamic_conv(p, x, *, heads, causal, kernel=7, mask=None, global_attention_mask=None):
    """Wu et al. 2019, equations 1, 3 and 4, between a GLU and a linear layer."""
    b, n, d = x.shape
    up = linear_layer(p, "up", x)
    z, out = up[..., :d] / (1 + torch.exp(-up[..., d:])), []
    for a in range(b):
        for i in range(n):
            kernels = (p["taps.weight"] @ z[a, i]).view(heads, kernel).softmax(1)
            y = torch.zeros_like(x[a, i])
            for j in range(1, kernel + 1):
                at = i + j - kernel if causal else i + j - math.ceil((kernel + 1) / 2)
                if 0 <= at < n and (mask is None or mask[a, at]):
                    y = y + kernels[:, j - 1].repeat_interleave(d // heads) * z[a, at]
            out.append(y)
    return linear_layer(p, "out", torch.stack(out).view_as(x))


def aft(
    p,
    x,
    *,
    heads,
    causal,
    length,
    rank=128,
    window=None,
    kernel=None,
    mask=None,
    global_attention_mask=None,
):
    """Zhai et al. 2021, section 3: channel by channel, with exp(k + w)."""
    q, k, v = (linear_layer(p, name, x) for name in "qkv")
    k = k.repeat_interleave(x.shape[2] // k.shape[2], -1)
    out = []
    for a in range(len(x)):
        for i in range(x.shape[1]):
            seen = [
                j
                for j in range(x.shape[1])
                if (mask is None or mask[a, j]) and (j <= i or not causal)
            ]
            bias = aft_bias(p, i, seen, causal, length, window, kernel)
            weights = (k[a, seen] + bias.repeat_interleave(x.shape[2] // bias.shape[1], 1)).exp()
            top, bottom = (weights * v[a, seen]).sum(0), weights.sum(0)
            out.append(top / bottom / (1 + torch.exp(-q[a, i])) if seen else top)
    return torch.stack(out).view_as(x)


def aft_bias(p, i, seen, causal, length, window, kernel):
    """w_ij (j h): from two tables, within the window; from a normalised kernel, in whose middle j
    is i; or none.
    """
    if length:
        near = [[window is None or abs(i - j) < window] for j in seen]
        return (p["bias.s"][seen] @ p["bias.u"][i])[:, None] * torch.tensor(near).view(-1, 1)
    if kernel is None:
        return p["q.weight"].new_zeros(len(seen), 1)
    t = p["bias.table"] - p["bias.table"].mean(1, keepdim=True)
    t = t / ((t * t).mean(1, keepdim=True) + 1e-5).sqrt() * p["bias.gain"] + p["bias.shift"]
    at = [i - j + (0 if causal else (kernel - 1) // 2) for j in seen]
    inside = torch.tensor([0 <= one < kernel for one in at]).view(-1, 1)
    return t.T[[min(max(one, 0), kernel - 1) for one in at]] * inside


def average_pool(
    p, x, *, heads, causal, window=3, width=None, mask=None, global_attention_mask=None
):
    """Yu et al. 2022, equation 4, where the mean is over cells that are there: in a line, or on a
    grid.
    """
    b, n, _ = x.shape
    out = []
    for a in range(b):
        for i in range(n):
            if width is None:
                near = (
                    range(max(0, i - window + 1), i + 1)
                    if causal
                    else range(max(0, i - window // 2), min(n, i + window // 2 + 1))
                )
            else:
                near = [
                    j for _, _, j in neighbourhood(i, n, width, window // 2) if j <= i or not causal
                ]
            near = [j for j in near if mask is None or mask[a, j]]
            out.append((x[a, near].sum(0) / len(near) if near else 0) - x[a, i])
    return torch.stack(out).view_as(x)
